"""What is found in a model, and what each layer gets, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ..attention.self_attention import SelfAttention
from ..autotune.policy import Policy
from .rebinding import Undo


@dataclass
class Found:
    """An attention layer that was found.

    name     its name in the model
    module   the layer
    got      what is overlapped in it; empty if nothing
    lacks    why not more; empty if there is no more
    bind     rebinds the layer's forward and returns what undoes it, given the module; None where nothing can be done
    inside   modules in it that are no layers of their own
    """

    name: str
    module: nn.Module
    got: str
    lacks: str = ""
    bind: Callable[[], Undo] | None = None
    inside: tuple[nn.Module, ...] = ()


class Around(NamedTuple):
    """A module around the layers, whose forward tells them what they need, and what rebinds it."""

    module: nn.Module
    bind: Callable[[], Undo]


def groups_in_words(groups: int, policy: Policy | None) -> str:
    return f"G = {groups}" if policy is None else f"G by timing in the first {policy.warmup_steps} steps"


def driven(block: SelfAttention, linear: dict[str, nn.Module], groups: int, policy: Policy | None) -> tuple[str, str]:
    """What a layer that is driven whole gets, and what it doesn't; ``linear`` are its projections by name."""
    apart = block.split_projections()
    whole = [f"{name} ({type(child).__name__})" for name, child in linear.items() if child not in apart]
    names = ", ".join(name for name, child in linear.items() if child in apart)
    got = f"all eight exchanges, {groups_in_words(groups, policy)}" + (f", {names} under them" if names else "")
    few = "one query head a rank" if groups == 1 and block.layer.config.head_groups == "auto" else ""
    return got, "; ".join(filter(None, (f"called whole: {', '.join(whole)}" if whole else "", few)))
