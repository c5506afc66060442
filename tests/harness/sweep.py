"""Judges a model type on two ranks: under stock Ulysses, overlapped, and overlapped with a planted fault.

The oracle is transformers' own model on the whole sequence, in fp64. The weights are such that all of them affect the results.
"""

import contextlib
import inspect
import logging
import math
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import ModelOutput

import ds_sp_overlap
import ds_sp_overlap.exchange.sp_group
from ds_sp_overlap.attention.input_modules import InputModules
from ds_sp_overlap.integrations.inspect import attention
from ds_sp_overlap.integrations.transformers.layers import OWN
from ds_sp_overlap.rotary import Rotary
from tests.harness.families import configs, tiny_model
from tests.harness.models import forgetting, of_all_ranks, sequence_parallel
from tests.harness.transports import FAULT, Corrupting

SEQ, SIZE = 32, 2
PACKAGE = str(Path(ds_sp_overlap.__file__).parent)


FP64 = 1e-10  # tolerance; rounding (1e-16), over a few layers and with sums in another order, stays below 1e-13


class Double(TorchFunctionMode):
    """Replaces fp32 by fp64 where a model casts to fp32, as in norms, routers and rotary tables.

    Rounding to fp32 would hide small errors, or would look like an error.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        return function(*args, **{key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()})


@contextlib.contextmanager
def in_double():
    shape, rotate, rotary_of = InputModules.shape, Rotary.rotate, attention.rotary_of

    def read(*args):  # the package reads the rotary function without this mode, so without the changed rounding
        with mock.patch.object(Rotary, "rotate", rotate):
            return rotary_of(*args)

    def in_backward_too(function):  # backward recomputes norms and rotates back, without PyTorch's modes
        def run(*args, **kwargs):
            with Double():
                return function(*args, **kwargs)

        return run

    torch.set_default_dtype(torch.float64)
    try:
        with (
            Double(),
            mock.patch.object(InputModules, "shape", in_backward_too(shape)),
            mock.patch.object(Rotary, "rotate", in_backward_too(rotate)),
            mock.patch.object(attention, "rotary_of", read),
        ):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def transport(made):
    """Make every sp group use the transport ``made``."""
    made.prepare = lambda sp_group: None
    return mock.patch.object(ds_sp_overlap.exchange.sp_group, "by_name", lambda *_: made)


# Batches besides "first", which has two rows of one document each. In "packed", the second of three documents spans both ranks.
BATCHES = ("packed", "mask of ones", "right padding", "left padding", "left padding, by the mask alone")


def batch_of(kind):
    """Return input_ids, labels, position_ids and attention_mask, each [b, s], of the whole sequence.

    The mask is None for the batches without one, "first" and "packed".
    """
    tokens = torch.randint(1, 64, (1 if kind == "packed" else 2, SEQ), generator=torch.Generator().manual_seed(3))
    positions, mask = torch.arange(SEQ).repeat(len(tokens), 1), torch.ones_like(tokens)
    if kind == "packed":
        positions = torch.cat([torch.arange(n) for n in (7, 18, 7)])[None]
    elif kind == "right padding":
        mask[1, -5:] = 0
    elif kind.startswith("left padding"):
        mask[1, :5] = 0
        if kind == "left padding":
            positions = (mask.cumsum(1) - 1).clamp_min(0)
    tokens = tokens * mask
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[(mask == 0) | (mask.roll(-1, 1) == 0)] = -100
    if kind == "packed":
        labels[positions.roll(-1, 1) == 0] = -100
    return tokens, labels, positions, mask if kind in BATCHES[1:] else None


def forward(model, tokens, labels, positions, mask):
    """Return logits, and the sum of the losses of all tokens with a label."""
    known = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    given = dict(position_ids=positions, attention_mask=mask, use_cache=False)
    given = {name: x for name, x in given.items() if (name in known or takes_any) and x is not None}
    out = model(input_ids=tokens, **given)
    logits = out.logits if isinstance(out, ModelOutput) else out[0]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), ignore_index=-100, reduction="sum")
    return logits, loss


def gradients(model):
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def alone(positions, mask):
    """Yield for each document its row and its range of tokens, as slices; leave out padding."""
    real = torch.ones_like(positions) if mask is None else mask
    begins = (positions.diff(prepend=positions[:, :1] - 2) != 1) | (real.diff(prepend=1 - real[:, :1]) != 0)
    for row, starts in enumerate(begins):
        starts = [*starts.nonzero().flatten().tolist(), SEQ]
        for start, stop in zip(starts, starts[1:]):
            if real[row, start]:
                yield slice(row, row + 1), slice(start, stop)


def whole(model, batch, apart=False):
    """Return the logits of the tokens with a label, and every gradient, on the whole sequence.

    apart   whether to run each document alone
    """
    model.zero_grad()
    logits = []
    for piece in alone(*batch[2:]) if apart else [(slice(None), slice(None))]:
        part = [None if x is None else x[piece] for x in batch]
        one, loss = forward(model, *part)
        loss.backward()
        logits.append(one.detach()[part[1] != -100])
    return {"logits": torch.cat(logits), **gradients(model)}


def split(model, batch, rank, group):
    """Return the results of `whole`, computed by ranks that split the sequence; gather logits, and sum gradients."""
    model.zero_grad()
    logits, loss = forward(
        model, *(None if x is None else x.chunk(dist.get_world_size(group), 1)[rank].contiguous() for x in batch)
    )
    loss.backward()
    found = of_all_ranks({"logits": logits.detach()}, gradients(model), dist.get_world_size(group), group)
    return {**found, "logits": found["logits"][batch[1] != -100]}


def errors(found, expected):
    """Return the error of the logits, and the largest error of a gradient.

    An error is relative to the largest magnitude in the tensor. Some gradients are only rounding, such
    as that of a key bias. So the error of a gradient is relative to at least a thousandth of the
    largest magnitude in all gradients.
    """
    least = max(x.abs().max().item() for name, x in expected.items() if name != "logits") / 1e3
    off = {
        name: ((found[name] - x).abs().max() / max(x.abs().max().item(), 0 if name == "logits" else least)).item()
        for name, x in expected.items()
        if x.numel()
    }
    off = {name: math.inf if math.isnan(x) else x for name, x in off.items()}
    return off.pop("logits"), max(off.values())


@dataclass(frozen=True)
class Raised:
    """An error that was raised.

    refusal   whether the package refused the model, with an error for the user; False for the error of a probe, which asks for a
              report
    """

    message: str
    refusal: bool


def attempt(function, *args):
    """Return the result of ``function(*args)``, or `Raised` if it raises."""
    try:
        return function(*args)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        refusal = frame.filename.startswith(PACKAGE) and isinstance(error, (ValueError, RuntimeError))
        refusal = refusal and "please report" not in str(error)
        where = "" if refusal else f" ({Path(frame.filename).name}:{frame.lineno})"
        said = str(error).split("\n")[0] if refusal else f"{type(error).__name__}: {str(error).strip()}".split("\n")[0] + where
        return Raised(said, refusal)


@dataclass
class Trial:
    """The results of one rank for one model and batch.

    stock        the errors of stock Ulysses (logits, worst gradient), or `Raised`
    ours         {"G = number of head groups": the errors with the overlap, or `Raised`}
    got, lacks   for each attention layer: what is overlapped, and why not more
    faults       {tensor with a planted fault: (error that the fault caused, number of changed exchanges)}
    """

    stock: tuple | Raised | None = None
    ours: dict = field(default_factory=dict)
    got: list = field(default_factory=list)
    lacks: list = field(default_factory=list)
    faults: dict = field(default_factory=dict)


def overlapped(model, batch, rank, groups, *expected, trial=None):
    """Return the errors of the overlapped model against the closest of the results ``expected``, or `Raised`.

    Also fills ``got`` and ``lacks`` of ``trial``.
    """
    group = dist.group.WORLD
    report = attempt(ds_sp_overlap.enable, model, {"head_groups": groups}, group)
    try:
        if isinstance(report, Raised):
            return report
        if trial is not None:
            trial.got = [layer.got.split(",")[0] for layer in report.layers]
            trial.lacks = [layer.lacks for layer in report.layers]
        found = attempt(split, model, batch, rank, group)
        return found if isinstance(found, Raised) else min((errors(found, x) for x in expected), key=max)
    finally:
        ds_sp_overlap.disable(model)


def judge(rank, kind, small=False):
    """Judge ``kind`` with all its configs and batches; return {name of the config or batch: `Trial`}.

    A trial is `Raised` if the model can't be built, or can't run on the whole sequence.

    small   judge only the first config and batch, and packed documents
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with in_double():
        first = attempt(tiny_model, kind)
        if isinstance(first, Raised):
            return {"first": first}
        trials = {"first": _first(rank, first)}
        if not isinstance(trials["first"], Trial) or any(isinstance(x, Raised) for x in trials["first"].ours.values()):
            return trials  # all other trials would end in the same way
        for batch in BATCHES[: 1 if small else None]:
            trials[batch] = more(rank, first, batch)
        for name, changes in {} if small else configs(kind).items():
            trials[name] = more(rank, attempt(lambda: tiny_model(kind, **changes)), "first")
    return trials


def _first(rank, model):
    """Try the first config and batch: with stock Ulysses, with one and two head groups, and with planted faults."""
    trial, batch = Trial(), batch_of("first")
    expected = attempt(whole, model, batch)
    if isinstance(expected, Raised):
        return expected
    with forgetting():
        registered = attempt(sequence_parallel, model, SIZE, model.config._attn_implementation)
        found = registered if isinstance(registered, Raised) else attempt(split, model, batch, rank, dist.group.WORLD)
        trial.stock = found if isinstance(found, Raised) else errors(found, expected)
        for groups in (1, 2):
            trial.ours[f"G = {groups}"] = overlapped(model, batch, rank, groups, expected, trial=trial)
        if not any(isinstance(x, Raised) for x in trial.ours.values()):
            alone = not any("attention" in what or "eight" in what for what in trial.got)  # the model has mixers, but no attention
            for what in ("x",) if alone else ("q", "dk"):
                with transport(fault := Corrupting(what)):
                    trial.faults[what] = max(overlapped(model, batch, rank, 2, expected)), fault.times
    return trial


def more(rank, model, name):
    """Try another config or batch, with two head groups and without stock Ulysses.

    For packed or padded documents, two results are right: that of documents run one by one, and transformers' result for the row.
    They may differ: Llama 4's temperature counts tokens of a row, and RecurrentGemma's convolution sees padding before a document.
    """
    batch = batch_of(name)
    expected = model if isinstance(model, Raised) else attempt(whole, model, batch)
    if isinstance(expected, Raised):
        return expected
    expected = [expected, whole(model, batch, apart=True)] if name in BATCHES else [expected]
    trial = Trial()
    trial.ours["G = 2"] = overlapped(model, batch, rank, 2, *expected, trial=trial)
    return trial


# Verdicts.


@dataclass
class Verdict:
    """The verdict on a model type.

    word          "refused", "not built" or one of `FAILURES`; for a type with right results, the overlapped parts: "whole", "latent
                  attention" or others of `GOT`
    why           the reason for the word, empty for "whole"; then the configs and batches that are refused
    ours, stock   largest errors of logits and gradients, as text
    """

    word: str
    why: str = ""
    ours: str = "-"
    stock: str = "-"


FAILURES = ("wrong", "blind", "crashes", "hangs")


def _text(pairs):
    return " / ".join(f"{max(column):.0e}" for column in zip(*pairs))


def ends(trial, limit):
    """Yield for each run of a trial how it ended: ("right", errors), or another word and a message."""
    for how, found in trial.ours.items():
        if isinstance(found, Raised):
            yield "refused" if found.refusal else "crashes", found.message
        elif max(found) > limit:
            yield "wrong", f"off by {_text([found])} with {how}"
        else:
            yield "right", found


def verdict(ranks):
    """Return the verdict on a model type from the trials of all ranks, a list of the results of `judge`."""
    first = [trials["first"] for trials in ranks]
    for other in first:
        if isinstance(other, Raised):
            return Verdict("not built", other.message)
    raised = [trial.stock for trial in first if isinstance(trial.stock, Raised)]
    stock = raised[0].message if raised else _text([trial.stock for trial in first])
    # Leave out configs that can't run on the whole sequence.
    tried = [(name, trial) for trials in ranks for name, trial in trials.items() if isinstance(trial, Trial)]
    ended = [(name, *end) for name, trial in tried for end in ends(trial, FP64)]
    faults = [(word, f"{name}: {why}") for name, word, why in ended if word in FAILURES]
    for what in first[0].faults:
        seen, times = zip(*(trial.faults[what] for trial in first))
        if not sum(times) or min(seen) <= FP64:
            faults.append(("blind", f"{what} off by {FAULT:.0e} on {sum(times)} occasions makes {min(seen):.0e}"))
    right = _text([errors for _, word, errors in ended if word == "right"]) or "-"
    if faults:
        word = next(word for word in FAILURES if word in dict(faults))
        return Verdict(word, "; ".join(dict.fromkeys(why for w, why in faults if w == word)), right, stock)
    refused = {name: why for name, word, why in ended if word == "refused"}
    if "first" in refused:
        return Verdict("refused", refused["first"], stock=stock)
    return Verdict(overlaps(first[0]), "; ".join([*reasons(first[0]), *(f"{name} refused" for name in refused)]), right, stock)


GOT = "all eight exchanges", "latent attention", "attention function", "delta rule", "selective scan", "states", "tokens before"


def overlaps(trial):
    """Return the names of the parts that are overlapped in the model's layers, joined by "and"."""
    return " and ".join(sorted(set(filter(None, trial.got)), key=GOT.index)).replace(GOT[0], "whole")


def reasons(trial):
    """Return for layers with only their attention function overlapped the reasons why not more is overlapped."""
    own = [lacks for what, lacks in zip(trial.got, trial.lacks) if what == "attention function"]
    return list(dict.fromkeys(lacks.replace(f"; {OWN}", "") for lacks in own))
