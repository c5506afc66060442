"""Switch the overlap on and off in a model: find its attention layers, rebind their forward, undo it.

Nothing here knows a framework; the files beside this one each find the layers they know.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tabulate import tabulate
from torch import nn

from ..autotune.policy import Policy
from ..config import SpOverlapConfig
from ..exchange.channel import Channel, one_queue
from ..profiling.timeline import Timeline
from ..relayout import kernels, ops
from ..say import say_once
from . import distributed_attention, megatron, transformers
from .layers import Around, Found, Overlap
from .rebinding import Undo, is_ours


@dataclass
class Report:
    """What `enable` did: each attention layer and what it got."""

    layers: list[Found] = field(default_factory=list)
    sp_size: int = 1
    note: str = ""

    def __str__(self) -> str:
        if not self.layers:
            return f"sp_overlap: {self.note}"
        rows = []
        for (got, lacks), same in groupby(self.layers, key=lambda layer: (layer.got, layer.lacks)):
            names = [layer.name for layer in same]
            name = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} layers)"
            rows.append((name, got or "nothing", lacks or "-"))
        table = tabulate(rows, headers=("attention layer", "overlapped", "why not more"), tablefmt="simple")
        overlapped = sum(layer.bind is not None for layer in self.layers)
        notes = [note for note in (one_queue(), self.note) if note and overlapped]
        return "\n".join(
            (f"sp_overlap over sp size {self.sp_size}: {overlapped} of {len(self.layers)} layers overlapped", table, *notes)
        )


_undo: weakref.WeakKeyDictionary[nn.Module, Undo] = weakref.WeakKeyDictionary()


def enable(
    model: nn.Module,
    config: SpOverlapConfig | dict | None = None,
    sequence_process_group: Any = None,
    *,
    gradient_process_group: Any = None,
) -> Report:
    """Overlap the attention layers of ``model``; no parameter, buffer or submodule is added or renamed.

    config                   the ``sp_overlap`` section
    sequence_process_group   the sp group; found where transformers or DeepSpeed keep theirs if None
    gradient_process_group   the ranks that reduce gradients together, which choose G together; needed beside data parallelism

    Collective over the sp group. Raises ValueError, on all of its ranks and with no layer overlapped, for a config that the
    model can't satisfy, a model without attention layers, or layers on the meta device.
    """
    config = SpOverlapConfig.parse({} if config is None else config)
    disable(model)
    if not config.enabled:
        return Report(note="off (sp_overlap.enabled is false)")
    group = sequence_process_group
    if group is None:
        group = find_group(model)
    if group is None:
        raise ValueError(
            "sp_overlap: no sequence-parallel group; give deepspeed.initialize the mpu that "
            "UlyssesSPAttentionHF.register_with_transformers returned (Accelerate does with sp_size, not with cp_size), or pass sequence_process_group= to enable() "
            "(torch.distributed.group.WORLD for all ranks)"
        )
    channel = Channel(group, config.transport, kernels=config.kernels)
    if channel.size == 1:
        say_once("sp_overlap: the sequence-parallel size is 1; there is nothing to exchange, and nothing was changed")
        return Report(note="nothing to do at sp size 1")
    found: list[Found] = []
    around: list[Around] = []
    policy, timeline = Policy.of(config, channel, gradient_process_group), Timeline.of(config, channel)
    overlap = Overlap(channel, config, policy)

    def describe() -> str:
        ops.check_usable(config.kernels)  # refused here, on every rank, where this one can't
        if timeline is not None:
            timeline.check()
        for framework in (megatron, transformers):
            layers, hosts = framework.find_layers(model, overlap)
            found.extend(layers)
            around.extend(hosts)
        inside = {module for layer in found for module in layer.inside}
        found.extend(layer for layer in distributed_attention.find_layers(model, overlap) if layer.module not in inside)
        left = {module: layer for layer in found if layer.bind is None for module in layer.inside}
        for layer in found:
            if layer.bind is not None and layer.module in left:
                raise ValueError(
                    f"{layer.name} is part of {left[layer.module].name}: {left[layer.module].lacks}; take one of the two"
                )
        if not found:
            raise ValueError(
                f"no attention layer found in {type(model).__name__}; supported are transformers models, Megatron-DeepSpeed and "
                "deepspeed.sequence.layer.DistributedAttention. For others use ds_sp_overlap.SelfAttention"
            )
        meta = [layer.name for layer in found if any(p.is_meta for p in layer.module.parameters())]
        if meta:
            raise ValueError(f"{meta[0]} is on the meta device ({len(meta)} of {len(found)} layers); load the weights first")
        bare = [layer for layer in found if layer.bind is None]
        if bare and config.on_unsupported == "error":
            raise ValueError(f'{bare[0].name}: {bare[0].lacks}; sp_overlap.on_unsupported is "error", "warn" leaves it as it is')
        return f"{config!r}; {[(layer.name, layer.got) for layer in found]}"

    try:
        channel.agree("sp_overlap", describe)
        channel.prepare()
    except ValueError:
        _close([policy, timeline])
        raise
    _undo.update((module, bind()) for module, bind in around)
    for layer in found:
        if layer.bind is None:
            say_once(f"sp_overlap: {layer.name} is left as it is: {layer.lacks}")
        else:
            _undo[layer.module] = _and_close(layer.bind(), [policy, timeline])
    return Report(found, channel.size, kernels.absent(config.kernels))


def find_group(model: nn.Module) -> Any:
    """The sp group that transformers or DeepSpeed keep for a model; None if there is none."""
    return transformers.find_group(model) or distributed_attention.find_group(model)


def _and_close(undo: Undo, counting: list[Policy | Timeline | None]) -> Undo:
    def both(module: nn.Module) -> None:
        undo(module)
        _close(counting)

    return both


def _close(counting: list[Policy | Timeline | None]) -> None:
    for what in counting:
        if what is not None:
            what.close()


def disable(model: nn.Module, *, stock_too: bool = False) -> None:
    """Give every layer of ``model`` its own forward back.

    stock_too   also take DeepSpeed's ``UlyssesSPAttentionHF`` out of the attention function that ``model`` is configured for, in the
                whole process: each rank attends by itself to what it is given, as in ``generate``. ``enable`` with
                ``sequence_process_group=`` goes back to training.
    """
    for module in model.modules():
        if (undo := _undo.pop(module, None)) is not None:
            undo(module)
        elif is_ours(module) or getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward  # of a layer that was copied, or loaded from a pickle, while it was overlapped
    if stock_too:
        transformers.unregister(model)
