"""A transformer layer around an attention that is driven whole, as `block` runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ..attention.runtime import linear
from ..attention.self_attention import SelfAttention
from ..exchange.shares import QueryChunks
from ..rotary import Rotary


@dataclass
class BlockLayer:
    """One pre-norm transformer layer: r = h + attention(norm_in(h)), y = r + mlp(norm_mid(r)).

    MLP and projections return ``y``, or ``(y, bias)``, where the bias is yet to be added or None.
    Norms, MLP and projections are called once, with hooks, around all chunks; for each chunk their
    class's forward runs on a copy without hooks. `integrations.chains` makes one of each layer that
    was read, and `integrations.inspect.probe` computes the same by itself, to compare.

    Attributes:
        attention: Drives q, k, v and the output projection.
        norm_in: In front of attention.
        norm_mid: In front of the MLP.
        mlp: Works token by token; its forward is that of its class.
        idle: Tells of a hook on a module whether it does nothing for now; such hooks are allowed.
        unit: The layer's module if it is a unit of FSDP2, which gathers its parameters when it is
            called; else None.
        is_attention_alone: There are no norms, no MLP and no residuals: y = attention(h).
    """

    attention: SelfAttention
    norm_in: nn.Module
    norm_mid: nn.Module
    mlp: nn.Module
    idle: linear.Idle = linear._never
    unit: nn.Module | None = None
    is_attention_alone: bool = False

    @property
    def ends(self) -> list[nn.Module]:
        """Modules behind attention."""
        behind = [] if self.is_attention_alone else [self.norm_mid, self.mlp]
        return [self.attention.o_proj, *behind]

    @property
    def begins(self) -> list[nn.Module]:
        """Modules in front of attention."""
        return [self.norm_in, *self.attention.inputs.modules]

    def in_the_way(self) -> str:
        """Return why the layer can't run in a chain, as its modules are now; empty if it can."""
        if not (
            self.attention.inputs.rope is None or isinstance(self.attention.inputs.rope, Rotary)
        ):
            return "its rotary embedding is not known to be one that goes token by token"
        for root in (*self.begins, *self.ends):
            if not isinstance(root, nn.Module):
                return f"{type(root).__name__} is no module"
            for module in root.modules():
                if not linear.can_call_through(module, self.idle):
                    return f"{type(module).__name__} has a forward or a hook of its own"
        return ""


class Options(NamedTuple):
    """Arguments of a layer's attention, see `SelfAttention.__call__`."""

    position_embeddings: Any
    sequence_lengths: list[int] | None
    query_chunks: QueryChunks | None
    args: tuple
    kwargs: dict[str, Any]

    def is_same(self, other: Options) -> bool:
        """Return whether both lead to the same q, k and v; arguments of attention don't count."""
        return _leaves_are_same(self.position_embeddings, other.position_embeddings) and (
            self.sequence_lengths == other.sequence_lengths
            and self.query_chunks == other.query_chunks
        )


def _leaves_are_same(one: Any, other: Any) -> bool:
    """Return whether nested tuples and lists have the same form and the very same objects."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_leaves_are_same, one, other))
    return one is other
