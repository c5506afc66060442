"""Describes the attention layers that were found in a model, for `enable` and for its report.

Each framework's adapter finds its own kinds of layers, and describes each by a `FoundLayer`, so
that `enable` can rebind and report the layers of all adapters in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ..attention.call_geometry import shares_of
from ..attention.declared import in_one_group
from ..attention.layer import LayerRuntime
from ..attention.self_attention import SelfAttention
from ..autotune.policy import Policy
from ..config import SpOverlapConfig
from ..exchange.geometry import Geometry
from ..exchange.sp_group import SPGroup
from .rebinding import Undo


@dataclass
class FoundLayer:
    """Describes an attention layer of a model.

    Attributes:
        name: The layer's qualified name in the model.
        module: The layer.
        got: The overlapped parts, in words; empty if nothing is overlapped. ``got`` and ``lacks``
            are only for reports and errors: ``bind`` decides whether the layer is overlapped.
        lacks: The reason why no more is overlapped; empty if everything is overlapped.
        bind: Rebinds the layer's forward and returns the function that undoes the rebinding.
            `enable` calls ``bind`` after all ranks have agreed. None if the layer can't be
            overlapped.
        inside: Submodules that must not be overlapped as separate layers, such as the
            ``dist_attn`` of a layer whose whole forward is replaced.
    """

    name: str
    module: nn.Module
    got: str = ""
    lacks: str = ""
    bind: Callable[[], Undo] | None = None
    inside: tuple[nn.Module, ...] = ()


def kind_of(module: nn.Module) -> str:
    """Return the class name of a module for the report.

    The class of a PEFT adapter has the name of the wrapped class. For an adapter, return the name
    of PEFT's method instead, such as "LoRA".
    """
    package, _, place = type(module).__module__.partition(".tuners.")
    method = place.partition(".")[0]
    return {"lora": "LoRA"}.get(method, method) if package == "peft" else type(module).__name__


# Modules whose forward must be rebound, each with the function that rebinds the module: attention
# layers, and for example the model, which gathers positions for its layers.
Binds = dict[nn.Module, Callable[[], Undo]]


class OverlapSettings(NamedTuple):
    """Holds the settings that all layers of a model share.

    Attributes:
        sp_group: The sp group with its transport.
        config: The ``sp_overlap`` section.
        policy: Chooses the number of head groups G by timing; None if the section gives G.
        one_group: The reason, in words, why a layer must have one head group; empty if it may have
            several.
    """

    sp_group: SPGroup
    config: SpOverlapConfig
    policy: Policy | None
    one_group: str = ""

    def in_one_group(self, reason: str) -> OverlapSettings:
        """Return these settings with one head group, for ``reason``."""
        config = in_one_group(self.config)
        return self._replace(config=config, policy=None, one_group=reason)

    def runtime(self, name: str) -> LayerRuntime:
        """Make the runtime of the layer ``name``."""
        return LayerRuntime(self.sp_group, self.config, name, self.policy)

    def shares_for(self, heads: int, kv_heads: int, attend: Callable | str) -> int:
        """Return r, the number of ranks that share the query heads of a layer; 1 for no sharing.

        See `shares_of` for arguments and errors. ``attend`` is the local attention; or the reason,
        in words, why local attention needs all queries at once.
        """
        return shares_of(self.config, self.sp_group, heads, kv_heads, attend)

    def groups_for(
        self, heads: int, kv_heads: int, attend: Callable | str, windowed: bool = False
    ) -> int:
        """Return the number of head groups G of a layer; with a policy, the G to begin with.

        See `shares_for` for ``attend``, and `SpOverlapConfig.groups_for` for ``windowed``.

        Raises:
            ValueError: if ``head_groups`` or ``shares`` is out of range, or a rank would have no
                head.
        """
        size, shares = self.sp_group.size, self.shares_for(heads, kv_heads, attend)
        groups = self.config.groups_for(heads, max(1, size // shares), windowed)
        # Make a geometry without tokens, for the checks in its constructor.
        rank, none = self.sp_group.rank, (0,) * size
        Geometry(
            size, rank, none, batch=0, heads=heads, kv_heads=kv_heads, groups=groups, shares=shares
        )
        return groups

    def describe(
        self,
        heads: tuple[int, int],
        attend: Callable | str,
        reason: str = "",
        block: SelfAttention | None = None,
    ) -> tuple[str, str]:
        """Describe, for the report, the head groups of a layer, and why no more is overlapped.

        Args:
            heads: The numbers of query heads and KV heads.
            attend: The local attention, or a reason, see `shares_for`.
            reason: The adapter's reason why no more is overlapped; may be empty.
            block: The `SelfAttention` that replaces the layer's forward, and may run with a window;
                None for a layer that is overlapped in another way.

        Returns:
            The groups, for example ``G = 4, 2 at a time, recomputed in backward``; and the result
            of `why_not_more`.

        Raises:
            ValueError: if ``head_groups`` or ``shares`` is out of range, or a rank would have no
                head.
        """
        config, shares = self.config, self.shares_for(*heads, attend)
        groups = self.groups_for(*heads, attend, block is not None and block.layer.windowed)
        words = [f"G = {groups}"]
        if self.policy is not None:
            words = [f"G by timing in the first {self.policy.warmup_steps} steps"]
        if shares > 1:
            words.append(f"r = {shares} ranks share query heads")
        live = config.window_of(groups)
        windowed = block is not None and live is not None and block.can_window()
        if windowed:
            # With a policy, G is not known yet.
            live = config.window if self.policy else live
            words.append(f"{live or 'half'} at a time, recomputed in backward")
            if config.keeps_where_possible:
                words.append("kept over checkpoints that can")
            elif config.checkpointing == "keep":
                words.append("kept over checkpoints")
            elif config.checkpointing == "offload":
                words.append("kept over checkpoints in host memory")
        return ", ".join(words), self.why_not_more(reason, groups, windowed)

    def why_not_more(self, reason: str, groups: int = 0, windowed: bool = False) -> str:
        """Explain why no more of a layer is overlapped.

        Args:
            reason: The adapter's reason; may be empty.
            groups: The number of head groups; 0 omits the remark that a rank has too few heads.
            windowed: Whether the layer honours ``window`` and ``checkpointing`` of the section.

        Returns:
            The reasons that apply: the adapter's, the need for one head group, options of the
            section that have no effect, and too few heads on a rank. Empty if none applies.
        """
        reasons = [text for text in (reason, self.one_group) if text]
        if not windowed:
            # Report only options that the section has changed.
            changed = self.config.model_dump(exclude_defaults=True)
            ignored = [f"sp_overlap.{key}" for key in ("window", "checkpointing") if key in changed]
            if ignored:
                reasons.append(f"so {' and '.join(ignored)} can't be had")
        # "auto" takes one group only if a rank has one query head.
        if groups == 1 and self.config.head_groups == "auto":
            reasons.append("one query head a rank")
        return "; ".join(reasons)

    def of_driven(
        self, block: SelfAttention, linear: dict[str, nn.Module], attend: Callable | str
    ) -> tuple[str, str]:
        """Describe what is overlapped in a layer whose forward is replaced, and why no more is.

        Args:
            block: The `SelfAttention` that replaces the layer's forward.
            linear: The layer's projections by name.
            attend: The local attention, or a reason, see `shares_for`.

        Returns:
            ``got`` and ``lacks`` of the layer's `FoundLayer`.

        Raises:
            ValueError: if ``head_groups`` or ``shares`` is out of range, or a rank would have no
                head.
        """
        split, overlapped, whole = block.split_projections(), [], []
        for name, child in linear.items():
            if child in split:
                overlapped.append(name)
            else:
                whole.append(f"{name} ({kind_of(child)})")
        reason = f"called whole: {', '.join(whole)}" if whole else ""
        groups, lacks = self.describe((block.heads, block.kv_heads), attend, reason, block=block)
        under = f", {', '.join(overlapped)} under them" if overlapped else ""
        return f"all eight exchanges, {groups}{under}", lacks
