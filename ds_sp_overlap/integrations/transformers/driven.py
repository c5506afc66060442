"""Attention layers of transformers whose whole forward is replaced.

A layer whose forward is known (`inspect.attention`) needs none of its own code: `SelfAttention`
calls its projections and norms and rotates q and k, so that the projections hide the exchanges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ...attention.arguments import PerHead
from ...attention.runtime.linear import PURE
from ...attention.self_attention import SelfAttention
from ...rotary import Rotary
from ..inspect.attention import Reader
from ..inspect.library import CACHES
from ..inspect.probe import refuse_difference
from ..inspect.symbolic_trace import UNUSED
from ..inspect.tokenwise import is_library_code
from ..layers import OverlapSettings
from .attention_function import (
    Layer,
    attention_of,
    local_attention,
    with_queries_if_taken,
)
from .forward import Forwards
from .modules import by_name, off_in_eval
from .probe import difference


def _join(*modules: nn.Module) -> nn.Module:
    """Return one module that calls modules one after the other."""
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


def _attend(module, q, k, v, options, queries=None, **per_head):
    """Attend with the layer's attention function; ``options`` is one keyword (`Driven.forward`)."""
    return local_attention(module, q, k, v, queries=queries, **options, **per_head)


class Driven(Layer):
    """An attention layer whose forward `SelfAttention` replaces.

    `enable` makes it for a layer whose forward could be read, and rebinds the forward.

    Args:
        name: The layer's name.
        module: The layer.
        reader: The reading of its forward.
        forwards: The forwards of its model.
        overlap: The settings of the layer.

    Attributes:
        block: The `SelfAttention` that calls the layer's submodules.
        children: The names of these by keywords of the block (`Reading.children`).
        falls_back: Whether a window is left out (`Forwards.fallible`).
    """

    falls_back = False

    def __init__(
        self, name: str, module: Any, reader: Reader, forwards: Forwards, overlap: OverlapSettings
    ):
        super().__init__(name, module, forwards, overlap)
        self.reader, reading = reader, reader.reading
        self.children, self.heads = reading.children, (reading.heads["q"], reading.heads["k"])
        # Cached, so that the same modules are the same Sequential in every call.
        self._joined = functools.lru_cache(maxsize=16)(_join)
        # Functions of input and weight alone, which backward may compute again.
        pure = set(PURE)
        for source in reading.sources.values():
            if source.norm is not None and is_library_code(norm := getattr(module, source.norm)):
                pure.add(type(norm).forward)
        self.block = SelfAttention(
            local_attention=with_queries_if_taken(module, functools.partial(_attend, module)),
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=reading.head_dim,
            **self._children(),
            first_rows=reading.first_rows,
            norm_last=any(source.last for source in reading.sources.values()),
            rope=None if reading.rotary is None else Rotary(**reading.rotary),
            sequence_process_group=overlap.sp_group.group,
            config=overlap.config,
            name=name,
            policy=overlap.policy,
            heads_alike=True,
            pure=frozenset(pure),
        )
        self.shares = overlap.shares_for(*self.heads, attention_of(name, module))
        if self.block.may_window:
            forwards.fallible[name] = self

    def _children(self) -> dict[str, Any]:
        """Return the submodules as they are now, as keywords of `SelfAttention`.

        Somebody may have replaced some, for instance by adapters.
        """
        children = {}
        for name, chain in self.children.items():
            children[name] = self._joined(*[getattr(self.module, part) for part in chain])
        return children

    def use(self) -> None:
        """Let the block use the layer's submodules as they are now."""
        self.block.use(**self._children())

    def must_fall_back(self) -> bool:
        """Return whether the layer, as its modules are on this rank now, runs by no window."""
        self.use()
        self.block.falls_back = False
        return not self.block.can_window(self.block.split_projections())

    def _refuse_difference(self, own: Callable, arguments: dict[str, Any]) -> None:
        """Raise RuntimeError, on all ranks, if own forward and block differ on any. Collective."""
        module, reader = self.module, self.reader
        compare = functools.partial(difference, self, own, arguments, reader.options(module))
        refuse_difference(reader.probes, self.name, module, self.overlap.sp_group, compare)

    def forward(self, own: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run the block in place of the layer's own forward; return y [b, s/P, m] and no weights.

        Collective.

        Raises:
            ValueError: for a mask that can't be honoured (`Forwards.of`).
            RuntimeError: on all ranks, if the layer's own forward and the block differ on any rank.
        """
        module, reader, overlap = self.module, self.reader, self.overlap
        if off_in_eval(module):
            return own(*args, **kwargs)
        arguments = by_name(module, args, kwargs)
        # Empty ones: the model's forward refuses a cache that is in use.
        arguments |= dict.fromkeys(arguments.keys() & set(CACHES))
        rest = {key: value for key, value in arguments.items() if key not in UNUSED}
        x, tables = rest.pop("hidden_states"), rest.pop("position_embeddings", None)
        mask = rest.pop("attention_mask", None)
        self.use()
        self.block.falls_back = self.falls_back
        sequence, pattern = self.forwards.of(self.name, module, x, mask=mask, kwargs=rest)
        options: dict[str, Any] = {"sequence": sequence, "pattern": pattern}
        if reader.reading.passes_keywords:
            options |= rest
        # What the layer passes by itself goes before what its caller passes.
        options |= reader.options(module)
        self.refuse_unhonoured(options, sequence, pattern)
        if reader.probes.is_due(self.name, overlap.config.check, sequence.lengths):
            self._refuse_difference(own, arguments)
        per_head = {key: PerHead(options.pop(key)) for key in reader.reading.per_head}
        timed = self.has_baseline(x, self.heads, sequence, pattern=pattern, keywords=arguments)
        # The options are one keyword, a dict. As keywords of their own, a tensor such as the labels
        # [b, s/P] of Trainer could be taken for a tensor with a slice for each head.
        y = self.block(
            x,
            baseline=(lambda x: own(**{**arguments, "hidden_states": x})[0]) if timed else None,
            position_embeddings=tables,
            sequence_lengths=sequence.lengths,
            query_chunks=sequence.query_chunks(self.shares),
            options=options,
            **per_head,
        )
        return y, None
