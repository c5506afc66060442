"""Compares losses, gradients and training on ranks, each with a part of the sequence, with those on the whole sequence."""

import contextlib
import functools
import re

import deepspeed
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

import ds_sp_overlap
from tests.harness.families import draw, tiny_config, tiny_model
from tests.harness.models import ds_config, engine_of, packed, worst
from tests.harness.ranks import on_ranks
from tests.harness.sweep import Double, gradients, in_double, transport

RATE = 1e-3
FP32 = 1e-3  # tolerance of training: some gradients sum a thousand terms with fp32 rounding (6e-8), and the terms nearly cancel


def tokens_of(seq, rows=2):
    return torch.randint(1, 64, (rows, seq), generator=torch.Generator().manual_seed(3))


def inputs_of(tokens, lengths, rank, positions=None, mask=None):
    """Return this rank's part of a batch, and its labels."""
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
    """Return the sum of ``losses`` and every gradient, both summed over the group.

    A rank may lack a gradient, such as that of an expert without tokens. It then adds zero.
    """
    model.zero_grad()
    loss = sum(losses)
    loss.backward()
    result = {"loss": loss.detach().clone(), **gradients(model)}
    for x in result.values() if group is not None else ():
        dist.all_reduce(x, group=group)
    return result


def on_one_rank(model, seq=32):
    return found(model, [share(model, *inputs_of(tokens_of(seq), [seq], 0))])


def on_all_ranks(rank, model, lengths=(16, 16)):
    return found(model, [share(model, *inputs_of(tokens_of(sum(lengths)), lengths, rank))], dist.group.WORLD)


def each_alone(model, tokens, lengths_of_rows):
    """Yield the loss of each document, run alone.

    As in a packed batch, the label of a document's last token is the first token of the next document.
    """
    labels = tokens.roll(-1, 1)
    for row, lengths in enumerate(lengths_of_rows):
        for piece, of in zip(tokens[row].split(lengths), labels[row].split(lengths)):
            yield share(model, dict(input_ids=piece[None]), of[None])


def again_in_double(checkpoint):
    """Wrap a checkpoint function so that recomputation is in fp64, too: backward runs without the mode `Double`."""

    def in_both(run, *args):
        with Double():
            return run(*args)

    return lambda run, *args: checkpoint(functools.partial(in_both, run), *args)


def training(rank, kind, stage, section, steps=3, size=2, checkpoints=False):
    """Train; return the losses and gradients of each step, and the parameters at the end.

    With ``section`` None, train on the whole sequence, without DeepSpeed. The learning rate is small, so that training does not
    amplify rounding.
    """
    config = tiny_config(kind)
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    torch.manual_seed(0)
    model = draw(type(tiny_model(kind))(config))
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    losses, every, is_whole = [], {}, section is None
    given = ds_config(stage, 1, torch.float32, "SGD", sp_overlap=section)
    given["optimizer"]["params"]["lr"], given["gradient_clipping"] = RATE, 0.0
    optimizer, size = torch.optim.SGD(model.parameters(), RATE), 1 if is_whole else size
    inputs, labels = inputs_of(tokens_of(32), [32 // size] * size, 0 if is_whole else rank)
    with contextlib.nullcontext((model, None)) if is_whole else engine_of(model, given, size) as (engine, _):
        for _ in range(steps):
            loss = share(engine, inputs, labels) / (size * labels.numel())
            loss.backward() if is_whole else engine.backward(loss)
            for name, p in model.named_parameters():
                every[f"{len(losses)} {name}"] = deepspeed.utils.safe_get_full_grad(p).clone()
            if is_whole:
                optimizer.step()
                optimizer.zero_grad()
            else:
                engine.step()
                dist.all_reduce(loss := loss.detach().clone())
            losses.append(loss.item())
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, every, parameters


def trained(rank, kind, stages, section, steps=3):
    """Return {(stage, checkpoints): largest relative difference from training on the whole sequence}.

    Compares losses, gradients and parameters. ``stages`` lists the pairs: ZeRO stage, and whether layers are checkpointed.
    """
    off, expected = {}, training(rank, kind, 0, None, steps)
    for stage, checkpoints in stages:
        losses, *tensors = training(rank, kind, stage, section, steps, checkpoints=checkpoints)
        of_losses = max(abs(a - b) / abs(b) for a, b in zip(losses, expected[0], strict=True))
        off[stage, checkpoints] = max(of_losses, *map(worst, tensors, expected[1:]))
    return off


# Checks of models in fp64. ``make(kind)`` makes the model; ``kind`` is a model type, and ``section`` the sp_overlap section.


def split_error(rank, model, expected, section, lengths, positions=None, mask=None, says="", evaluated=False):
    """Return the error of an overlapped model's loss and gradients.

    expected    loss and gradients of the whole sequence
    says        a pattern that the report of `enable` must match
    evaluated   whether the model first runs once in inference mode
    """
    report = ds_sp_overlap.enable(model, {"on_unsupported": "error", **section}, dist.group.WORLD)
    assert re.search(says, " ".join(str(report).split())), report
    inputs = inputs_of(tokens_of(sum(lengths)), lengths, rank, positions, mask)
    if evaluated:
        with torch.inference_mode():
            share(model, *inputs)
    error = worst(found(model, [share(model, *inputs)], dist.group.WORLD), expected)
    ds_sp_overlap.disable(model)
    return error


def against_whole(rank, make, cases, says, evaluated=False):
    """Return {(kind, options, section): error against the whole sequence}.

    A case is (kind, options of ``make``, local lengths of the ranks, sections).
    """
    errors = {}
    with in_double():
        for kind, options, lengths, sections in cases:
            model = make(kind, **options)
            whole = on_one_rank(model, sum(lengths))
            for section in sections:
                case = kind, str(options), str(section)
                errors[case] = split_error(rank, model, whole, section, lengths, says=says, evaluated=evaluated)
    return errors


def documents(rank, make, kind, lengths, rows, section):
    """Return {lengths of packed documents: error against each document run alone} for each of ``rows``."""
    errors = {}
    with in_double():
        model = make(kind)
        for row in rows:
            alone = found(model, each_alone(model, tokens_of(32), row))
            errors[str(row)] = split_error(rank, model, alone, section, lengths, packed(row))
    return errors


def padding(rank, make, kind, lengths, section):
    """Return the errors of rows with padding at the left or right, against the rows run alone without padding."""
    errors, tokens = [], tokens_of(32)
    labels = tokens.roll(-1, 1)
    with in_double():
        model = make(kind)
        for of_row in ([3, 0], [0, 0], [-4, 2], [17, 30]):
            mask = torch.stack([torch.arange(32) >= n if n >= 0 else torch.arange(32) < 32 + n for n in of_row]).long()
            real = [row > 0 for row in mask]
            losses = (share(model, dict(input_ids=tokens[i : i + 1, r]), labels[i : i + 1, r]) for i, r in enumerate(real))
            positions = (mask.cumsum(1) - 1).clamp_min(0)
            errors.append(split_error(rank, model, found(model, losses), section, lengths, positions, mask))
    return errors


def checkpointed(rank, make, kind, reentrant, section):
    """Return the error of one backward after two checkpointed forwards with different documents."""
    tokens, layouts = tokens_of(32), ([[10, 6, 16], [10, 6, 16]], [[2, 29, 1], [13, 19]])
    with in_double():
        model = make(kind)
        alone = found(model, (loss for lengths in layouts for loss in each_alone(model, tokens, lengths)))
        ds_sp_overlap.enable(model, section, dist.group.WORLD)
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        for layer in getattr(model, "backbone", model.base_model).layers:
            layer._gradient_checkpointing_func = again_in_double(layer._gradient_checkpointing_func)
        losses = [share(model, *inputs_of(tokens, [16, 16], rank, packed(lengths))) for lengths in layouts]
        error = worst(found(model, losses, dist.group.WORLD), alone)
        ds_sp_overlap.disable(model)
    return error


def against_itself(rank, model):
    """Return the error of an overlapped model's gradients against the same model without overlap, on the whole sequence.

    Compares the gradients of trainable parameters. Afterwards the overlap is disabled.
    """
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning
    mine = on_all_ranks(rank, model)
    ds_sp_overlap.disable(model)
    whole = on_one_rank(model)
    return worst({name: mine[name] for name in learning}, {name: whole[name] for name in learning})


def partly_trained(rank, make, kind, words, section):
    """Return the error of the gradients if only the parameters with one of ``words`` in their names are trained."""
    with in_double():
        model = make(kind)
        for name, p in model.named_parameters():
            p.requires_grad = any(word in name for word in words)
        ds_sp_overlap.enable(model, section, dist.group.WORLD)
        return against_itself(rank, model)


def adapted(model, *targets):
    """Return the model with nonzero adapters on the projections named ``targets``."""
    return get_peft_model(model, LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False)).double()


def adapters_trained(rank, make, kind, targets, section):
    """Return the error of the gradients of adapters on the projections ``targets``."""
    with in_double():
        model = adapted(make(kind), *targets)
        ds_sp_overlap.enable(model, section, dist.group.WORLD)
        return against_itself(rank, model)


def on_and_off(rank, model, section, meanwhile):
    """Enable and disable the overlap of a model; return four results:

    - the report of `enable`, as text;
    - the errors of the logits, with gradients, without, and in inference mode, each in training and in evaluation;
    - the result of ``meanwhile(model, inputs)``, called while the overlap is enabled;
    - whether `disable` restored every forward and parameter.
    """
    tokens = tokens_of(32)
    forwards = {name: module.forward for name, module in model.named_modules()}
    state = {name: x.clone() for name, x in model.state_dict().items()}
    whole = model(input_ids=tokens, use_cache=False).logits.split(16, 1)[rank].detach()
    report = ds_sp_overlap.enable(model, section, dist.group.WORLD)
    inputs, _ = inputs_of(tokens, [16, 16], rank)
    off = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for is_training in (True, False):
            with mode():
                logits = model.train(is_training)(**inputs, use_cache=is_training).logits
            off.append((logits.detach() - whole).abs().max().item())
    found = meanwhile(model, inputs)
    ds_sp_overlap.disable(model)
    same = all(module.forward == forwards[name] for name, module in model.named_modules())
    same = same and all(torch.equal(x, state.pop(name)) for name, x in model.state_dict().items()) and not state
    return " ".join(str(report).split()), off, found, same


def recorded(rank, model, section, layer, mover, watching=contextlib.nullcontext(), given=lambda x, positions: ()):  # noqa: B008
    """Return the log of a layer's exchanges in forward, and the log in backward.

    mover      the transport that logs, such as `Recording`
    watching   a context manager around forward, which may add lines to the log
    given      ``given(x, positions)`` returns further arguments of the layer
    """
    with transport(mover):
        ds_sp_overlap.enable(model, section, dist.group.WORLD)
    x = torch.randn(2, 16, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(16).expand(2, 16) + 16 * rank
    mover.log.clear()
    with watching:
        y = layer(x, *given(x, positions), position_ids=positions)
    forward = list(mover.log)
    mover.log.clear()
    (y[0] if isinstance(y, tuple) else y).sum().backward()
    ds_sp_overlap.disable(model)
    return forward, mover.log


def rounding(rank, make, kind, section, taps, factor, autocast):
    """Return the errors of all bf16 gradients against fp64: on one rank, and of the overlapped model.

    In the overlapped model, parameters with one of ``taps`` in their names are first multiplied by ``factor``.
    """
    with in_double():
        exact = on_one_rank(make(kind), 64)
    model = make(kind).to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        alone = on_one_rank(model, 64)
        ds_sp_overlap.enable(model, section, dist.group.WORLD)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.mul_(factor if any(tap in name for tap in taps) else 1.0)
        split = on_all_ranks(rank, model, [32, 32])
    ds_sp_overlap.disable(model)
    norm = torch.stack([x.double().square().sum() for x in exact.values()]).sum()
    off = [torch.stack([(x[n].double() - exact[n]).square().sum() for n in exact]).sum() for x in (alone, split)]
    return [(x / norm).sqrt().item() for x in off]


def assert_rounds_as_one_rank(make, kinds, section, taps, factor, autocasts=(False,)):
    """Assert that the bf16 errors of two ranks are at most 1.5 times those of one rank.

    As a control, multiply the parameters ``taps`` by ``factor``: then the errors of at least one kind must exceed this limit.
    """
    seen = []
    for kind in kinds:
        for autocast in autocasts:
            for alone, split in on_ranks(2, rounding, make, kind, section, taps, 1.0, autocast):
                assert 0 < split < 1.5 * alone, f"{kind}, autocast {autocast}: off by {split}, one rank by {alone}"
            seen += on_ranks(2, rounding, make, kind, section, taps, factor, autocast)
    assert any(split > 1.5 * alone for alone, split in seen), f"a fault of {factor} goes unseen: {seen}"
