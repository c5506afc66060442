"""Switch the overlap on and off in a model: find its attention layers, rebind their forward, undo it.

Nothing here knows a framework; the files beside this one each find the layers they know.
"""

from __future__ import annotations

import functools
import types
import weakref
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Callable

import torch
from tabulate import tabulate
from torch import nn

from .. import ops
from ..channel import Channel
from ..config import SpOverlapConfig
from ..policy import Policy
from ..say import say_once
from ..self_attention import SelfAttention
from ..timeline import Timeline

Undo = Callable[[nn.Module], None]  # is given the module rather than holding it, which would keep the model alive


@dataclass
class Layer:
    """An attention layer that was found.

    name     its name in the model
    module   the layer
    got      what is overlapped in it; empty if nothing
    lacks    why not more; empty if there is no more
    bind     rebinds the layer's forward and returns what undoes it, given the module; None where nothing can be done
    inside   modules in it that are no layers of their own
    around   modules around the layers, with what rebinds their forward
    """

    name: str
    module: nn.Module
    got: str
    lacks: str = ""
    bind: Callable[[], Undo] | None = None
    inside: tuple[nn.Module, ...] = ()
    around: tuple[tuple[nn.Module, Callable[[], Undo]], ...] = ()


@dataclass
class Report:
    """What `enable` did: each attention layer and what it got."""

    layers: list[Layer] = field(default_factory=list)
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
        return f"sp_overlap over sp size {self.sp_size}: {overlapped} of {len(self.layers)} layers overlapped\n{table}"


def groups_in_words(groups: int, policy: Policy | None) -> str:
    return f"G = {groups}" if policy is None else f"G by timing in the first {policy.warmup_steps} steps"


def driven(block: SelfAttention, linear: dict[str, nn.Module], groups: int, policy: Policy | None) -> tuple[str, str]:
    """What a layer that is driven whole gets, and what it doesn't; ``linear`` are its projections by name."""
    apart = block.taken_apart()
    whole = [f"{name} ({type(child).__name__})" for name, child in linear.items() if child not in apart]
    names = ", ".join(name for name, child in linear.items() if child in apart)
    got = f"all eight exchanges, {groups_in_words(groups, policy)}" + (f", {names} under them" if names else "")
    few = "one query head a rank" if groups == 1 and block.layer.config.head_groups == "auto" else ""
    return got, "; ".join(filter(None, (f"called whole: {', '.join(whole)}" if whole else "", few)))


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
    from . import deepspeed, megatron, transformers

    config = SpOverlapConfig.parse({} if config is None else config)
    disable(model)
    if not config.enabled:
        return Report(note="off (sp_overlap.enabled is false)")
    group = sequence_process_group
    if group is None:
        group = transformers.find_group(model) or deepspeed.find_group(model)
    if group is None:
        raise ValueError(
            "sp_overlap: no sequence-parallel group; give deepspeed.initialize the mpu that "
            "UlyssesSPAttentionHF.register_with_transformers returned, or pass sequence_process_group= to enable() "
            "(torch.distributed.group.WORLD for all ranks)"
        )
    channel = Channel(group, config.transport, kernels=config.kernels)
    if channel.size == 1:
        say_once("sp_overlap: the sequence-parallel size is 1; there is nothing to exchange, and nothing was changed")
        return Report(note="nothing to do at sp size 1")
    found: list[Layer] = []
    policy, timeline = Policy.of(config, channel, gradient_process_group), Timeline.of(config, channel)

    def describe() -> str:
        ops.implementation(config.kernels)  # refused here, on every rank, where this one lacks them
        if timeline is not None:
            timeline.check()
        found.extend(megatron.find_layers(model, channel, config, policy))
        found.extend(transformers.find_layers(model, channel, config, policy))
        inside = {module for layer in found for module in layer.inside}
        found.extend(layer for layer in deepspeed.find_layers(model, channel, config, policy) if layer.module not in inside)
        left = {module: layer for layer in found if layer.bind is None for module in layer.inside}
        for layer in found:
            if layer.bind is not None and layer.module in left:
                raise ValueError(f"{layer.name} is part of {left[layer.module].name}: {left[layer.module].lacks}; take one of the two")
        if not found:
            raise ValueError(
                f"no attention layer found in {type(model).__name__}; supported are transformers models, Megatron-DeepSpeed and "
                "deepspeed.sequence.layer.DistributedAttention. For others use ds_sp_overlap.SelfAttention"
            )
        meta = [layer.name for layer in found if any(p.is_meta for p in layer.module.parameters())]
        if meta:
            raise ValueError(f"{meta[0]} is on the meta device ({len(meta)} of {len(found)} layers); load the weights first")
        left = [layer for layer in found if layer.bind is None]
        if left and config.on_unsupported == "error":
            raise ValueError(f'{left[0].name}: {left[0].lacks}; sp_overlap.on_unsupported is "error"')
        return f"{config!r}; {[(layer.name, layer.got) for layer in found]}"

    try:
        channel.agree("sp_overlap", describe)
        channel.prepare()
    except ValueError:
        _close([policy, timeline])
        raise
    for layer in found:
        _undo.update((module, bind()) for module, bind in layer.around)
        if layer.bind is None:
            say_once(f"sp_overlap: {layer.name} is left as it is: {layer.lacks}")
        else:
            _undo[layer.module] = _and_close(layer.bind(), [policy, timeline])
    return Report(found, channel.size)


def _and_close(undo: Undo, counting: list[Policy | Timeline | None]) -> Undo:
    def both(module: nn.Module) -> None:
        undo(module)
        _close(counting)

    return both


def _close(counting: list[Policy | Timeline | None]) -> None:
    for what in filter(None, counting):
        what.close()


def disable(model: nn.Module) -> None:
    """Give every layer of ``model`` its own forward back."""
    for module in model.modules():
        if (undo := _undo.pop(module, None)) is not None:
            undo(module)
        elif _is_ours(module) or getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward  # of a layer that was copied, or loaded from a pickle, while it was overlapped


def _is_ours(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__sp_overlap__", False)


def rebind(module: nn.Module, forward: Callable, whole: bool = True) -> Undo:
    """Put ``forward`` in place of the module's; returns what takes it away again. A compiler steps over it, ``whole`` or not.

    A copy of the module (an EMA, a frozen reference model) gets its class's forward: ``forward`` drives the original.
    """
    original, active = weakref.ref(module), [True]
    before = vars(module).get("forward")

    @functools.partial(torch.compiler.disable, recursive=whole)
    def dispatch(self: nn.Module, *args: Any, **kwargs: Any):
        if self is not original():
            return type(self).forward(self, *args, **kwargs)
        if not active:
            return before(*args, **kwargs) if before else type(self).forward(self, *args, **kwargs)
        return forward(*args, **kwargs)

    def undo(module: nn.Module) -> None:
        active.clear()  # where somebody wrapped ours, theirs stays, and ours passes through
        if _is_ours(module):
            del module.forward
            if before is not None:
                module.forward = before

    dispatch.__name__ = "forward"  # a pickle names a method: what is loaded from it has its class's forward
    dispatch.__sp_overlap__ = True
    module.forward = types.MethodType(dispatch, module)
    return undo
