"""Switches the overlap of a model on and off.

The adapters of the frameworks (`transformers.layers`, `megatron.layers`, `distributed_attention`)
find the attention layers that they support; `enable` rebinds the forward of these layers and
`disable` restores it.
"""

from __future__ import annotations

import contextlib
import functools
import textwrap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import nn

from ..attention.runtime import sharded
from ..autotune.policy import Policy
from ..config import SpOverlapConfig
from ..exchange.sp_group import SPGroup
from ..exchange.streams import one_queue
from ..profiling.timeline import Timeline
from ..relayout import ops
from ..warn import warn_once
from . import distributed_attention
from .inspect.tensor_parallel import refuse_shared_ranks
from .layers import Binds, FoundLayer, OverlapSettings
from .megatron import layers as megatron
from .rebinding import Undo, is_ours
from .tiles import find_tiles
from .transformers import layers as transformers

# Note [Errors before the first collective]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# If only one rank raises an error, the others wait forever in their next collective. So inside
# `SPGroup.agree`, `enable` does everything that may fail: it finds the layers, checks the kernels
# and the section, and compares the result over the ranks. `agree` raises the error of one rank on
# all ranks. Layers are rebound only after `agree` has returned, so that a refused model is
# unchanged.


@dataclass
class Report:
    """Holds the attention layers that `enable` found, each with its overlapped parts.

    Attributes:
        layers: The attention layers.
        sp_size: The size of the sp group.
        tiles: Lines about the norms and MLPs that run in tiles, and about those that run whole.
        note: Why there are no layers; empty if there are layers.
    """

    layers: list[FoundLayer] = field(default_factory=list)
    sp_size: int = 1
    note: str = ""
    tiles: str = ""

    def __str__(self) -> str:
        """Return the report as text; successive layers with equal descriptions share an entry."""
        if not self.layers:
            return f"sp_overlap: {self.note}"
        overlapped = sum(layer.bind is not None for layer in self.layers)
        lines = [
            f"sp_overlap over sp size {self.sp_size}: "
            f"{overlapped} of {len(self.layers)} layers overlapped"
        ]
        for (got, lacks), group in groupby(self.layers, key=lambda layer: (layer.got, layer.lacks)):
            first, *more = [layer.name for layer in group]
            others = f" ... {more[-1]} ({1 + len(more)} layers)" if more else ""
            lines += [f"  {first}{others}", *_wrapped(f"overlapped: {got or 'nothing'}")]
            if lacks:
                lines += _wrapped(f"why not more: {lacks}")
        for line in self.tiles.splitlines():
            lines += [text[2:] for text in _wrapped(line)]
        if overlapped and (warning := one_queue()):
            lines.append(warning)
        return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    """Break ``text`` into indented lines of the report."""
    wrapper = textwrap.TextWrapper(100, initial_indent="    ", subsequent_indent="      ")
    # Don't break the names of modules and options.
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text)


# The first words of the error of `enable` for a model without attention layers. In a pipeline
# stage, `deepspeed.initialize` ignores an error with these words.
NO_LAYERS = "no attention layer found in"
# For each module that `enable` rebound, the function that restores its forward.
_undo: weakref.WeakKeyDictionary[nn.Module, Undo] = weakref.WeakKeyDictionary()


def enable(
    model: nn.Module,
    config: SpOverlapConfig | dict | None = None,
    sequence_process_group: Any = None,
    *,
    gradient_process_group: Any = None,
) -> Report:
    """Overlap the attention layers of ``model``.

    Sets the attribute ``forward`` of modules, and adds or renames no parameter, buffer or
    submodule. Undoes an earlier overlap of the model first. Collective over the sp group, unless
    the section is disabled or the sp size is 1: then nothing is rebound.

    Args:
        model: A transformers or Megatron-DeepSpeed model, or any model that contains
            ``deepspeed.sequence.layer.DistributedAttention`` or our class of that name.
        config: The ``sp_overlap`` section.
        sequence_process_group: The sp group; None for the group of transformers or DeepSpeed
            (`find_group`).
        gradient_process_group: The ranks that reduce gradients together. These ranks choose the
            same number of head groups, as data parallelism requires.

    Returns:
        The attention layers, each with its overlapped parts.

    Raises:
        ValueError: on all ranks, before any layer is rebound, if the model can't satisfy the
            section, has no attention layer, or has a layer on the meta device. On this rank only,
            before any communication, if the section is not valid, there is no sp group, or this
            rank is not in the sp group.
    """
    config = SpOverlapConfig.parse({} if config is None else config)
    disable(model)
    if not config.enabled:
        return Report(note="off (sp_overlap.enabled is false)")
    group = find_group(model) if sequence_process_group is None else sequence_process_group
    if group is None:
        raise ValueError(_no_group(model))
    sp_group = SPGroup(group, config.transport, **config.of_sp_group)
    if sp_group.size == 1:
        warn_once(
            "sp_overlap: the sequence-parallel size is 1; there is nothing to exchange, "
            "and nothing was changed"
        )
        return Report(note="nothing to do at sp size 1")
    policy = Policy.of(config, sp_group, gradient_process_group)
    overlap = OverlapSettings(sp_group, config, policy)
    # ``closing`` ends the trials of the policy, and the recording of the timeline.
    closing = contextlib.ExitStack()
    if policy is not None:
        closing.callback(policy.close)
    report, binds = Report(sp_size=sp_group.size), Binds()

    def find_and_describe() -> str:
        """Fill ``report`` and ``binds``; return the text that must be the same on all ranks."""
        ops.check_usable(config.kernels)
        if (timeline := Timeline.of(config, sp_group)) is not None:
            closing.callback(timeline.close)
        refuse_shared_ranks(model, sp_group.ranks)
        sharded.look_for_units(model)
        report.layers = _find_layers(model, overlap, binds)
        _refuse_unusable(model, report.layers, config)
        if config.tiles is not None:
            report.tiles = find_tiles(model, report.layers, config.tiles, binds)
        described = [(layer.name, layer.got) for layer in report.layers]
        return f"{config!r}; {described}; {report.tiles}"

    try:
        # See Note [Errors before the first collective].
        sp_group.agree("sp_overlap", find_and_describe)
        sp_group.prepare()
    except ValueError:
        # The policy already listens to optimizer steps, and so may the timeline: end both.
        closing.close()
        raise
    for layer in report.layers:
        if layer.bind is None:
            warn_once(f"sp_overlap: {layer.name} is left as it is: {layer.lacks}")
        else:
            binds[layer.module] = layer.bind
    for module, bind in binds.items():
        _undo[module] = functools.partial(_undo_and_close, bind(), closing)
    return report


def find_group(model: nn.Module) -> Any:
    """Return the sp group that transformers or DeepSpeed have for ``model``; None if neither has.

    `enable` calls this if the caller passes no group; the wrapped constructor of DeepSpeed's engine
    calls it, too.
    """
    return transformers.find_group(model) or distributed_attention.find_group(model)


def _no_group(model: nn.Module) -> str:
    """Return the error message for a model without an sp group."""
    by_hand = (
        "pass sequence_process_group= to enable() (torch.distributed.group.WORLD for all ranks)"
    )
    if transformers.is_pretrained(model):
        return (
            "sp_overlap: no sequence-parallel group; give deepspeed.initialize the mpu that "
            "UlyssesSPAttentionHF.register_with_transformers returned (Accelerate does with "
            f"sp_size, not with cp_size), or {by_hand}"
        )
    return (
        f"sp_overlap: no sequence-parallel group, and no DistributedAttention in "
        f"{type(model).__name__} that was made with one; give its DistributedAttention the group, "
        f"or {by_hand}. ds_sp_overlap.SelfAttention takes group and config itself: "
        "it needs no section"
    )


def _find_layers(model: nn.Module, overlap: OverlapSettings, binds: Binds) -> list[FoundLayer]:
    """Find the attention layers of ``model`` with all adapters.

    Adds to ``binds`` the other modules whose forward must be rebound.

    Raises:
        ValueError: if an adapter refuses the model.
    """
    layers = megatron.find_layers(model, overlap) + transformers.find_layers(model, overlap, binds)
    # Skip a ``DistributedAttention`` inside a layer of a framework's adapter, even if that layer
    # can't be overlapped.
    inside = set[nn.Module]().union(*[layer.inside for layer in layers])
    drop_ins = distributed_attention.find_layers(model, overlap)
    return layers + [layer for layer in drop_ins if layer.module not in inside]


def _refuse_unusable(
    model: nn.Module, layers: Sequence[FoundLayer], config: SpOverlapConfig
) -> None:
    """Raise ValueError if ``model`` can't be overlapped.

    ``model`` can't be overlapped if it has no layers; if an overlapped layer lies inside a layer
    that can't be overlapped; if weights are on the meta device; or if some layer can't be
    overlapped and ``on_unsupported`` is "error". For "warn", `enable` logs a warning.
    """
    left = [layer for layer in layers if layer.bind is None]
    # A layer that can't be overlapped may already exchange, such as a vision tower that DeepSpeed's
    # AutoSP has wrapped. The layers inside the tower must not exchange once more.
    left_around = {}
    for layer in left:
        left_around.update(dict.fromkeys(layer.inside, layer))
    for layer in layers:
        if layer.bind is not None and layer.module in left_around:
            outer = left_around[layer.module]
            raise ValueError(
                f"{layer.name} is part of {outer.name}: {outer.lacks}; take one of the two"
            )
    if not layers:
        raise ValueError(
            f"{NO_LAYERS} {type(model).__name__}; supported are transformers "
            "models, Megatron-DeepSpeed and deepspeed.sequence.layer.DistributedAttention. "
            "For others use ds_sp_overlap.SelfAttention, which needs no section"
        )
    meta = [x.name for x in layers if any(p.is_meta for p in x.module.parameters())]
    if meta:
        raise ValueError(
            f"{meta[0]} is on the meta device ({len(meta)} of {len(layers)} layers); "
            "load the weights first"
        )
    if left and config.on_unsupported == "error":
        raise ValueError(
            f'{left[0].name}: {left[0].lacks}; sp_overlap.on_unsupported is "error", '
            '"warn" leaves it as it is'
        )


def _undo_and_close(undo: Undo, closing: contextlib.ExitStack, module: nn.Module) -> None:
    """Restore a module's forward, and end the trials and the timeline of the whole model.

    Restoring the first module of a model ends both; further calls of ``close`` do nothing.
    """
    undo(module)
    closing.close()


def disable(model: nn.Module, *, stock_too: bool = False) -> None:
    """Restore the forward of every overlapped layer of ``model``.

    Not collective. Call this function on every rank of the sp group, since a rank that still
    exchanges would wait for the others. Call it after backward: a layer that an activation
    checkpoint recomputes later would attend only to this rank's tokens. If another overlapped
    transformers model shares layers with this model, the next forward of the other model raises an
    error, unless DeepSpeed's own Ulysses exchanges for these layers.

    Args:
        model: The model that was given to `enable`, or a copy of it.
        stock_too: Whether to remove DeepSpeed's ``UlyssesSPAttentionHF`` as well, in the whole
            process, from the attention function that ``model`` is configured for. Each rank then
            attends to its own tokens, as ``generate`` needs. To train again, call `enable` with
            ``sequence_process_group=``.
    """
    for module in model.modules():
        if (undo := _undo.pop(module, None)) is not None:
            undo(module)
        # The module may be a copy that was made while the original was overlapped: the copy has the
        # attribute that `rebind` set. After a pickle, the attribute is a method of the class, and
        # `enable` would take it for a forward that the user has set.
        elif is_ours(module) or (
            getattr(vars(module).get("forward"), "__func__", None) is type(module).forward
        ):
            del module.forward
    if stock_too:
        transformers.unregister(model)


def is_overlapped(model: nn.Module) -> bool:
    """Return whether `enable` has overlapped a layer of ``model``."""
    return any(module in _undo for module in model.modules())
