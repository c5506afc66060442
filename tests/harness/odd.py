"""Judges odd configs: changes one number or flag of a model's config at a time, and multiplies the weights by 8.

A clamp at 8, a softcap of 50 or a gate that is off has no effect on small numbers. If the package looked only at results, it would
miss such code. The oracle is transformers' model on the whole sequence, as in `tests.harness.sweep`.
"""

import logging
import re
import sys
import warnings
from dataclasses import dataclass, field
from unittest import mock

import torch
from transformers import PreTrainedConfig, masking_utils

from ds_sp_overlap.integrations.inspect import accounting
from ds_sp_overlap.integrations.transformers import probe
from tests.harness.families import MORE, SIZES, tiny_model
from tests.harness.sweep import FAILURES, Raised, attempt, batch_of, ends, in_double, more, overlaps, reasons, whole

OWN = ""  # stands for the unchanged config of a model type
SCALE = 8.0  # factor of the weights
# A single rounding (1e-16) of each weight changes gradients by up to 5e-10: in granite with attention_multiplier = 2, softmax
# saturates. The tolerance is twenty times as large.
FP64 = 1e-8
ELSEWHERE = "vision_config", "audio_config"  # configs of parts that don't run
NEITHER = "base_model_ output_ return_ token_id initializer num_hidden_layers max_position dtype problem_type".split()
RANDOM = "drop", "jitter"  # fields that are judged in evaluation


def reads(kind):
    """Return {path: value} of the config fields of ``kind`` that attention, decoder layers and masks read.

    Leaves out fields that are neither a number nor a flag nor None.
    """
    read, plain = set(), PreTrainedConfig.__getattribute__

    def get(config, name):
        if _is_of_attention(sys._getframe(1)):
            read.add((id(config), name))
        return plain(config, name)

    with mock.patch.object(PreTrainedConfig, "__getattribute__", get):
        model = tiny_model(kind)
        whole(model, batch_of("first"))
    found, configs = {}, {"": model.config}
    for name, inner in vars(model.config).items():
        if isinstance(inner, PreTrainedConfig) and name not in ELSEWHERE:
            configs[f"{name}."] = inner
    for where, config in configs.items():
        for name, value in vars(config).items():
            if (id(config), name) in read and not any(part in name for part in NEITHER):
                if value is None or isinstance(value, (bool, int, float)):
                    found[where + name] = value
    return found


def _is_of_attention(frame):
    """Return whether a frame runs code of masks or of a decoder layer, or runs within an attention or rotary module."""
    if frame.f_globals["__name__"] == masking_utils.__name__ or re.search("Layer|Block", _module(frame)):
        return True
    while frame is not None and not re.search("Attention|Rotary", _module(frame)):
        frame = frame.f_back
    return frame is not None


def _module(frame):
    """Return the class name of the module whose method the frame runs; "" for other code."""
    kind = type(frame.f_locals.get("self"))
    return kind.__name__ if issubclass(kind, torch.nn.Module) else ""


def moved(name, value):
    """Return other values of a field: two for a number, a larger one for a size, the opposite for a flag."""
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [2, 0.5, 2.0]  # configs that check types accept some of these
    if name.split(".")[-1] in SIZES and value:
        return [2 * value]
    if not value:
        return [1, 2] if isinstance(value, int) else [0.5, 1.0]
    if isinstance(value, int):
        return [value // 2 if value > 1 else 3, 2 * value]
    return [0.1, 1.0] if abs(value) < 1e-2 else [value / 2, 2 * value]  # large enough for an epsilon to have an effect


def odd_configs(kind):
    """Return the odd configs of ``kind``, as pairs of a field's name and its value."""
    return [(name, other) for name, value in reads(kind).items() for other in moved(name, value)]


@torch.no_grad()
def odd_model(kind, name, value):
    *inner, last = name.split(".")
    changes = {last: value} if last else {}
    for part in inner:
        changes = {part: {**MORE.get(kind, {}).get(part, {}), **changes}}
    model = tiny_model(kind, **changes)
    for parameter, p in model.named_parameters():
        # Kimi's A_log is an exponent: times 8, its gradient would change by 7e-9 with a single rounding of each weight.
        if p.dim() > 1 and not parameter.endswith("A_log"):
            p.mul_(SCALE)
    return model.eval() if any(part in name for part in RANDOM) else model


def judge_odd(rank, kind, odd=None):
    """Judge ``kind`` with its own config and with the ``odd`` configs (None for all odd configs).

    Returns {name of the config: `Trial`}, with `Raised` for a config that can't be run.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with in_double():
        odd = attempt(odd_configs, kind) if odd is None else odd
        if isinstance(odd, Raised):
            return {OWN: odd}
        trials = {OWN: more(rank, attempt(odd_model, kind, "", None), "first")}
        for name, value in odd:
            trials[f"{name} = {value}"] = more(rank, attempt(odd_model, kind, name, value), "first")
    return trials


def judge_misread(rank, kind, odd):
    """Judge as `judge_odd` does, with a planted fault: the code that reads forwards ignores in-place clamps.

    Judges twice, with the package's probe on random numbers and without. Names without the probe end in "unseen".
    """
    judge = accounting.Accounting.__torch_function__

    def clamp_for_nothing(account, function, types, args=(), kwargs=None):
        is_clamp = getattr(function, "__name__", "") == "clamp_"
        return args[0] if is_clamp else judge(account, function, types, args, kwargs)

    unseen = mock.patch.object(probe, "difference", return_value="")
    with mock.patch.object(accounting.Accounting, "__torch_function__", clamp_for_nothing):
        trials = judge_odd(rank, kind, odd)
        with unseen:
            trials.update((f"{name}, unseen", trial) for name, trial in judge_odd(rank, kind, odd).items())
    return trials


@dataclass
class Odd:
    """The verdicts on the odd configs of a type.

    right, refused, not_run   the number of configs with this verdict
    wrong                     {name: why} for configs that are wrong, that crash, or that only a probe notices
    otherwise                 {name: (what is overlapped, why not more)} for configs with which other parts are overlapped than with
                              the type's own config
    """

    right: int = 0
    refused: int = 0
    not_run: int = 0
    wrong: dict = field(default_factory=dict)
    otherwise: dict = field(default_factory=dict)


def odd_verdict(ranks):
    """Return the `Odd` of a type from the trials of all ranks, a list of the results of `judge_odd`."""
    found, own = Odd(), _overlapped(ranks[0][OWN])
    for name in ranks[0]:
        trials = [of_rank[name] for of_rank in ranks]
        if any(isinstance(trial, Raised) for trial in trials):
            found.not_run += 1
            continue
        ended = [end for trial in trials for end in ends(trial, FP64)]
        if faults := [why for word, why in ended if word in FAILURES]:
            found.wrong[name] = "; ".join(dict.fromkeys(faults))
        elif "refused" in dict(ended):
            found.refused += 1
        else:
            found.right += 1
        overlapped = _overlapped(trials[0])
        if overlapped[0] != own[0]:
            found.otherwise[name] = overlapped
    return found


def _overlapped(trial):
    if isinstance(trial, Raised):
        return "not run", trial.message
    if isinstance(whole := trial.ours["G = 2"], Raised):
        return "refused", whole.message
    return overlaps(trial), "; ".join(reasons(trial))
