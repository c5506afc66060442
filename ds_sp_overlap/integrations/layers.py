"""What is found in a model, and what each layer gets, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ..attention.self_attention import SelfAttention
from ..autotune.policy import Policy
from ..config import SpOverlapConfig
from ..exchange.channel import Channel
from ..exchange.geometry import Geometry
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


class Overlap(NamedTuple):
    """What the layers of a model have in common: the sp group, the section, and who chooses G (None: the section does)."""

    channel: Channel
    config: SpOverlapConfig
    policy: Policy | None

    def groups_for(self, heads: int, kv_heads: int) -> int:
        """Head groups of a layer. Raises ValueError where ``head_groups`` is out of range, or a rank would have no head."""
        size, groups = self.channel.size, self.config.groups_for(heads, self.channel.size)
        Geometry(size, self.channel.rank, (0,) * size, 0, heads, kv_heads, groups)  # refuses
        return groups

    def in_words(self, groups: int, windowed: bool = False) -> str:
        """The head groups of a layer, and what is held and kept of them if it is ``windowed``."""
        config = self.config
        words = [f"G = {groups}" if self.policy is None else f"G by timing in the first {self.policy.warmup_steps} steps"]
        if windowed:
            few = None if config.window is None else config.window if self.policy else min(config.window, groups)
            words.append(f"{few or 'all'} at a time, made again in backward")
            words += {"keep": ["kept over checkpoints"], "offload": ["kept over checkpoints in host memory"]}.get(
                config.checkpointing, []
            )
        return ", ".join(words)

    def why_not_more(self, reason: str, groups: int = 0, windowed: bool = False) -> str:
        """The ``reason``, if any, and the lack of heads, if any; with what the section asks for in vain if it isn't ``windowed``."""
        changed = self.config.model_dump(exclude_defaults=True)
        asked = [] if windowed else [f"sp_overlap.{key}" for key in ("window", "checkpointing") if key in changed]
        vain = f"so {' and '.join(asked)} can't be had" if asked else ""
        few = "one query head a rank" if groups == 1 and self.config.head_groups == "auto" else ""
        return "; ".join(filter(None, (reason, vain, few)))

    def of_block(self, alone: str, block: SelfAttention, layers: int) -> str:
        """What a layer gets that runs in a chain of so many; ``alone`` it gets that."""
        many = f"block of {layers} layer{'s' if layers > 1 else ''}, C = {self.config.chunks_for()}"
        if self.config.scope == "auto":
            return f"{alone}; or {many}, by timing"
        return f"all eight exchanges, G = {self.groups_for(block.heads, block.kv_heads)}, {many}"

    def of_driven(self, block: SelfAttention, linear: dict[str, nn.Module], groups: int) -> tuple[str, str]:
        """What a layer that is driven whole gets, and what it doesn't; ``linear`` are its projections by name."""
        split = block.split_projections()
        windowed = block.window_of(groups, split) is not None
        names = ", ".join(name for name, child in linear.items() if child in split)
        whole = ", ".join(f"{name} ({type(child).__name__})" for name, child in linear.items() if child not in split)
        got = f"all eight exchanges, {self.in_words(groups, windowed)}" + (f", {names} under them" if names else "")
        return got, self.why_not_more(f"called whole: {whole}" if whole else "", groups, windowed)
