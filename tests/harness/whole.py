"""A batch on the whole sequence, and on ranks that each have a part of it: losses, gradients, training."""

import functools

import deepspeed
import torch
import torch.distributed as dist

import ds_sp_overlap
from tests.harness.families import draw, tiny_config, tiny_model
from tests.harness.models import ds_config, engine_of
from tests.harness.sweep import Double

RATE = 1e-3


def tokens_of(seq, rows=2):
    return torch.randint(1, 64, (rows, seq), generator=torch.Generator().manual_seed(3))


def inputs_of(tokens, lengths, rank, positions=None, mask=None):
    """This rank's part of a batch, and its labels."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens) if positions is None else positions
    given = dict(input_ids=tokens, position_ids=positions, labels=tokens.roll(-1, 1))
    given |= {} if mask is None else dict(attention_mask=mask)
    mine = {name: x.split(lengths, 1)[rank].contiguous() for name, x in given.items()}
    return mine, mine.pop("labels")


def share(model, inputs, labels):
    logits = model(**inputs, use_cache=False).logits
    if "attention_mask" in inputs:
        labels = labels.where(inputs["attention_mask"] > 0, -100)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="sum")


def found(model, losses, group=None):
    """Loss and every gradient, summed over the group; zero where a rank has none, as of an expert without tokens."""
    model.zero_grad()
    loss = sum(losses)
    loss.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    result = {"loss": loss.detach().clone(), **gradients}
    for x in result.values() if group is not None else ():
        dist.all_reduce(x, group=group)
    return result


def each_alone(model, tokens, lengths_of_rows):
    """Losses of every document of the rows run alone, whose labels run on into the next."""
    labels = tokens.roll(-1, 1)
    for row, lengths in enumerate(lengths_of_rows):
        for piece, of in zip(tokens[row].split(lengths), labels[row].split(lengths)):
            yield share(model, dict(input_ids=piece[None]), of[None])


def again_in_double(checkpoint):
    """In backward PyTorch has no modes."""

    def in_both(run, *args):
        with Double():
            return run(*args)

    return lambda run, *args: checkpoint(functools.partial(in_both, run), *args)


def training(rank, kind, stage, section, steps=3, size=2, checkpoints=False):
    """Losses and gradients of each step, and parameters at the end; section None: of the whole sequence, without DeepSpeed.

    The steps are small, so that rounding isn't amplified.
    """
    config = tiny_config(kind)
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    torch.manual_seed(0)
    model = draw(type(tiny_model(kind))(config))
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    losses, gradients, batches = [], {}, [tokens_of(32) for _ in range(steps)]
    if section is None:
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for tokens in batches:
            inputs, labels = inputs_of(tokens, [32], 0)
            loss = share(model, inputs, labels) / labels.numel()
            model.zero_grad()
            loss.backward()
            gradients |= {f"{len(losses)} {name}": p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            losses.append(loss.item())
        return losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}
    given = ds_config(stage, 1, torch.float32, "SGD", sp_overlap=section)
    given["optimizer"]["params"]["lr"] = RATE
    given["gradient_clipping"] = 0.0
    with engine_of(model, given, size) as (engine, _):
        for tokens in batches:
            inputs, labels = inputs_of(tokens, [32 // size] * size, rank)
            loss = share(engine, inputs, labels) / (size * labels.numel())
            engine.backward(loss)
            for name, p in engine.module.named_parameters():
                gradients[f"{len(losses)} {name}"] = deepspeed.utils.safe_get_full_grad(p).clone()
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item())
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
            parameters = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return losses, gradients, parameters


def rounding(rank, model, reference, section, taps, factor=1.0, autocast=False):
    """Errors of all gradients on one rank, and overlapped by ``section``, where parameters named ``taps`` are off by ``factor``."""
    tokens = tokens_of(64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        alone = found(model, [share(model, *inputs_of(tokens, [64], 0))])
        ds_sp_overlap.enable(model, section, dist.group.WORLD)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.mul_(factor if any(tap in name for tap in taps) else 1.0)
        split = found(model, [share(model, *inputs_of(tokens, [32, 32], rank))], dist.group.WORLD)
    ds_sp_overlap.disable(model)
    norm = torch.stack([x.double().square().sum() for x in reference.values()]).sum()
    off = [torch.stack([(x[n].double() - reference[n]).square().sum() for n in reference]).sum() for x in (alone, split)]
    return [(x / norm).sqrt().item() for x in off]
