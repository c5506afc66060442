"""Decoder layers of transformers that may run in a chain (`chains`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint, noop_context_fn

from ...attention.memory.checkpoint_cache import keep_attention
from ...config import SpOverlapConfig
from ...schedule import Recompute
from ..chains import ChainedLayer, ForwardPass
from ..inspect.accounting import forward_of
from ..inspect.decoder_layer import CHECKPOINTING, BlockReader
from ..inspect.symbolic_trace import UNUSED
from .checkpoints import FUNCTION, is_checkpointed
from .driven import Driven
from .forward import Forwards

# Implementations of experts whose weight gradients are computed once for all chunks, see
# Note [Products with stacks] in `stacked_weight`.
_MADE_ONCE = {"eager", "grouped_mm"}


class DecoderLayer(ChainedLayer):
    """A decoder layer whose attention is driven whole (`driven`); made by `enable`.

    Args:
        name: The layer's name in the model.
        module: The layer.
        child: The name of the attention in the layer.
        attention: The attention.
        forwards: The forwards of the model.

    Raises:
        Unknown: if the layer can't run in a chain.
    """

    def __init__(self, name: str, module: Any, child: str, attention: Driven, forwards: Forwards):
        reader = BlockReader(module, child, known=forwards.known)
        super().__init__(name, module, reader, attention.block, forward_passes=forwards)
        self.attention = attention

    unused = UNUSED

    @property
    def own_forward(self) -> Callable[..., Any]:
        """The forward of the class without its gradient checkpointing; a comparison runs it."""
        return forward_of(type(self.module), beside=CHECKPOINTING)

    @property
    def lacks(self) -> str:
        """Remarks for the report: why training runs the layer alone, or what its experts cost."""
        remarks = _remarks_on_experts(self.module)
        if is_checkpointed(self.module):
            reason = _why_chain_cant_recompute(self.module, self.forward_passes.config)
            # Then training runs no chunks, so that its experts cost nothing more.
            if reason:
                remarks = [f"in training one by one: {reason}"]
        return "; ".join(remarks)

    @property
    def recompute(self) -> Recompute:
        """The part of the layer that the chain recomputes in place of the layer's checkpoint."""
        if not self._recomputes():
            return "none"
        return "all" if self.forward_passes.config.checkpointing == "recompute" else "but attention"

    def use(self) -> None:
        """Let the attention use the layer's submodules as they are now."""
        self.attention.use()

    def why_recomputed(self) -> str:
        """Explain why the chain must leave this call to the layer's own checkpoint; may be empty.

        The chain asks in each call. A checkpoint that the chain can do itself is no reason.
        """
        if not self._recomputes():
            return ""
        return _why_chain_cant_recompute(self.module, self.forward_passes.config)

    def _recomputes(self) -> bool:
        """Return whether gradient checkpointing would recompute a call of the layer now."""
        return self.module.training and is_checkpointed(self.module)

    def chain_arguments(
        self, forward_pass: ForwardPass, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the keywords that the attention takes, from its arguments by name.

        Collective at times, see `Driven.block_arguments`.
        """
        return self.attention.block_arguments(arguments).keywords()


def _remarks_on_experts(module: Any) -> list[str]:
    """Say what chunks of tokens cost a mixture of experts; empty for other layers."""
    # transformers' `use_experts_implementation` gives this method to experts.
    experts = [part for part in module.modules() if hasattr(part, "_apply_gate")]
    if not experts:
        return []
    remarks = []
    implementations = {part.config._experts_implementation for part in experts}
    if unknown := implementations - _MADE_ONCE:
        size = 0
        for part in experts:
            size += sum(weight.nbytes for weight in part.parameters())
        remarks.append(
            f"weight gradients of {'/'.join(map(str, sorted(unknown, key=str)))} experts are made by "
            f'chunk and summed ({size / 2**20:,.0f} MiB more; not so with "grouped_mm")'
        )
    if "eager" in implementations:
        remarks.append(
            'eager experts make the host wait in each chunk (experts_implementation="grouped_mm" '
            "does not)"
        )
    return remarks


def _why_chain_cant_recompute(module: Any, config: SpOverlapConfig) -> str:
    """Explain why a chain can't do the gradient checkpointing of a layer; empty if it can.

    For a layer whose checkpointing is on.
    """
    # transformers binds the options of a checkpoint to its function by ``functools.partial``.
    function = getattr(module, FUNCTION, None)
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    if config.checkpointing == "offload":
        return 'gradient checkpointing, with sp_overlap.checkpointing "offload"'
    if getattr(function, "func", None) is not checkpoint:
        return "gradient checkpointing that is not torch's"
    context_fn = keywords.get("context_fn", noop_context_fn)
    # During a forward of the model, `Checkpoints.keeping` has set `keep_attention`.
    if context_fn not in (noop_context_fn, keep_attention) or keywords.get("debug"):
        return "gradient checkpointing with a context_fn or debug"
    return ""
