"""The result of the search for attention layers, and the words that describe it in a report.

Each framework's adapter finds its own kinds of layers. `enable` binds and reports the layers of all
adapters in the same way, so that every adapter describes a layer by a `FoundLayer`.
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
    """An attention layer of a model.

    Attributes:
        name: Its qualified name in the model.
        module: The layer.
        got: The overlapped parts, in words; empty if nothing is overlapped. Like ``lacks`` it is
            for reports and errors: ``bind`` decides whether the layer is overlapped.
        lacks: The reason why no more is overlapped; empty if everything is.
        bind: Rebinds the layer's forward and returns the function that undoes the rebinding.
            `enable` calls it once all ranks have agreed. None if the layer can't be overlapped.
        inside: Submodules that must not be overlapped as layers of their own, such as the
            ``dist_attn`` of a layer that is driven whole.
    """

    name: str
    module: nn.Module
    got: str = ""
    lacks: str = ""
    bind: Callable[[], Undo] | None = None
    inside: tuple[nn.Module, ...] = ()


def kind_of(module: nn.Module) -> str:
    """Return the class name of a module for the report; LoRA, or the method, of an adapter of PEFT.

    The classes of PEFT have the names of the classes that they replace.
    """
    package, _, place = type(module).__module__.partition(".tuners.")
    method = place.partition(".")[0]
    return {"lora": "LoRA"}.get(method, method) if package == "peft" else type(module).__name__


# Modules beside attention layers whose forward must be rebound, too, for example the model that
# gathers positions for its layers; each with the function that rebinds it.
Binds = dict[nn.Module, Callable[[], Undo]]


class OverlapSettings(NamedTuple):
    """The settings that all layers of a model share.

    Attributes:
        sp_group: The sp group with its transport.
        config: The ``sp_overlap`` section.
        policy: Chooses the number of head groups G by timing; None if the section gives G.
        one_group: Why a layer gets all of a rank's heads at once, in words; empty if it needn't.
    """

    sp_group: SPGroup
    config: SpOverlapConfig
    policy: Policy | None
    one_group: str = ""

    def in_one_group(self, reason: str) -> OverlapSettings:
        """Return the settings of a layer that gets all of a rank's heads at once."""
        config = in_one_group(self.config)
        return self._replace(config=config, policy=None, one_group=reason)

    def runtime(self, name: str) -> LayerRuntime:
        """Make the runtime of the layer ``name``."""
        return LayerRuntime(self.sp_group, self.config, name, self.policy)

    def shares_for(self, heads: int, kv_heads: int, attend: Callable | str) -> int:
        """Return r, how many ranks share the query heads of a layer; 1 where none do.

        Arguments and errors are those of `shares_of`. ``attend`` may be the reason, in words, why
        the local attention needs all queries at once.
        """
        return shares_of(self.config, self.sp_group.size, heads, kv_heads, attend)

    def groups_for(
        self, heads: int, kv_heads: int, attend: Callable | str, windowed: bool = False
    ) -> int:
        """Return G of a layer, or where a policy times candidates, the G that it begins with.

        The arguments are those of `shares_of`, and of the config's ``groups_for``.

        Raises:
            ValueError: if ``head_groups`` or ``shares`` is out of range, or a rank would have no
                head.
        """
        size, shares = self.sp_group.size, self.shares_for(heads, kv_heads, attend)
        groups = self.config.groups_for(heads, max(1, size // shares), windowed)
        # Thrown away: only the checks in its constructor are wanted, which need no tokens.
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
        """Describe the head groups of a layer for the report, and why no more is overlapped.

        Args:
            heads: The query and KV heads.
            attend: As for `shares_for`.
            reason: As for `why_not_more`.
            block: The attention that takes the place of the layer's forward, and may compute a few
                groups at a time; None for a layer with another one.

        Returns:
            The groups, for example ``G = 4, 2 at a time, recomputed in backward``; and the words of
            `why_not_more`.

        Raises:
            ValueError: as `groups_for` does.
        """
        config, shares = self.config, self.shares_for(*heads, attend)
        groups = self.groups_for(*heads, attend, block is not None and block.layer.windowed)
        words = [f"G = {groups}"]
        if self.policy is not None:
            words = [f"G by timing in the first {self.policy.warmup_steps} steps"]
        if shares > 1:
            words.append(f"r = {shares} ranks share query heads")
        windowed = False
        if block is not None and config.window_of(groups) is not None:
            windowed = block.can_window(block.split_projections())
        if windowed:
            # With a policy, G is not known yet.
            live = config.window if self.policy else config.window_of(groups)
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
            groups: The number of head groups; 0 leaves out the remark on the lack of heads.
            windowed: Whether the layer honours ``window`` and ``checkpointing`` of the section.

        Returns:
            The reason, the options of the section that have no effect, and the lack of heads, as
            far as each of them applies; empty if none does.
        """
        reasons = [text for text in (reason, self.one_group) if text]
        if not windowed:
            # Options at their defaults ask for nothing that this layer lacks.
            changed = self.config.model_dump(exclude_defaults=True)
            ignored = [f"sp_overlap.{key}" for key in ("window", "checkpointing") if key in changed]
            if ignored:
                reasons.append(f"so {' and '.join(ignored)} can't be had")
        # "auto" begins with more than one group wherever a rank has the heads for it.
        if groups == 1 and self.config.head_groups == "auto":
            reasons.append("one query head a rank")
        return "; ".join(reasons)

    def of_driven(
        self, block: SelfAttention, linear: dict[str, nn.Module], attend: Callable | str
    ) -> tuple[str, str]:
        """Describe a layer whose whole forward is replaced: what is overlapped, and what is not.

        Args:
            block: The attention that takes the place of the layer's forward.
            linear: The layer's projections by name.
            attend: As for `shares_for`.

        Returns:
            ``got`` and ``lacks`` of its `FoundLayer`.

        Raises:
            ValueError: as `groups_for` does.
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
