"""transformers: decoder layers that may run in a chain (`chains`)."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import checkpoint, noop_context_fn

from ..attention.block import Rerun
from ..attention.kept import keep_attention
from ..config import SpOverlapConfig
from .accounting import forward_of
from .chains import Course, Link
from .transformers_blocks import CHECKPOINTING, BlockReader
from .transformers_driven import Driven
from .transformers_forward import Forwards
from .transformers_probe import difference_of_block, refuse_difference


class DecoderLayer(Link):
    """A decoder layer around ``attention``, its child ``child``, which is driven whole. Raises Unknown."""

    def __init__(self, name: str, module: Any, child: str, attention: Driven, forwards: Forwards):
        super().__init__(name, module, BlockReader(module, child, known=forwards.known), attention.block, forwards)
        self.attention = attention

    @property
    def lacks(self) -> str:
        reason = _no_rerun(self.module, self.courses.config) if _is_checkpointed(self.module) else ""
        return reason and f"in training one by one: {reason}"

    @property
    def rerun(self) -> Rerun:
        if not (self.module.training and _is_checkpointed(self.module)):
            return "none"
        return "all" if self.courses.config.checkpointing == "recompute" else "but attention"

    def use(self) -> None:
        self.attention.use()

    def computed_again(self) -> str:
        return _no_rerun(self.module, self.courses.config) if self.module.training and _is_checkpointed(self.module) else ""

    def probe(self, course: Course, given: dict[str, Any], asked: dict[str, Any]) -> None:
        channel, attention = self.layer.attention.layer.channel, self.reader.reading.attention
        if self.reader.probed.is_due(self.name, self.courses.config.check, course.lengths):
            own = forward_of(type(self.module), beside=CHECKPOINTING)
            compare = functools.partial(difference_of_block, self.module, own, self.layer, attention, given, asked, course.lengths)
            refuse_difference(self.reader.probed, self.name, self.module, channel, compare)

    def asked(self, course: Course, given: dict[str, Any]) -> dict[str, Any]:
        return self.attention.asked(given).keywords()


def _is_checkpointed(module: Any) -> bool:
    return getattr(module, "gradient_checkpointing", False)


def _no_rerun(module: Any, config: SpOverlapConfig) -> str:
    """Why a layer's gradient checkpointing is left to the layer; empty where a chain can do the same."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    given = function.keywords if isinstance(function, functools.partial) else {}
    if config.checkpointing == "offload":
        return 'gradient checkpointing, with sp_overlap.checkpointing "offload"'
    if getattr(function, "func", None) is not checkpoint:
        return "gradient checkpointing that is not torch's"
    if given.get("context_fn", noop_context_fn) not in (noop_context_fn, keep_attention) or given.get("debug"):
        return "gradient checkpointing with a context_fn or debug"
    return ""
