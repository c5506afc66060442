"""Replaces the whole forward of attention layers of transformers.

If the forward of a layer is known (`inspect.attention`), none of the layer's own code runs.
`SelfAttention` calls the layer's projections and norms, and rotates q and k. So the projections
hide the exchanges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ...attention.arguments import PerHead
from ...attention.runtime.linear import PURE
from ...attention.self_attention import SelfAttention
from ..inspect.attention import Reader
from ..inspect.library import CACHES, Keywords
from ..inspect.symbolic_trace import UNUSED
from ..inspect.tokenwise import is_library_code
from ..layers import OverlapSettings
from .attention_function import Layer, attention_of, bound_attention
from .forward import Forwards
from .modules import by_name, off_in_eval
from .probe import refuse_difference


def _join(*modules: nn.Module) -> nn.Module:
    """Return a module that calls ``modules`` one after the other."""
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


class Driven(Layer):
    """Replaces the forward of an attention layer by a `SelfAttention`.

    If the layer's forward is known, `enable` makes this object, and rebinds the forward to it.

    Args:
        name: The layer's name.
        module: The layer.
        reader: The reader of the layer's forward.
        forwards: The forwards of the layer's model.
        overlap: The settings of the layer.

    Attributes:
        block: The `SelfAttention` that calls the layer's submodules.
        children: The names of the submodules, by keyword of the block (`Reading.children`).
        falls_back: Whether the layer runs without its window (`Forwards.fallible`).
    """

    falls_back = False

    def __init__(
        self, name: str, module: Any, reader: Reader, forwards: Forwards, overlap: OverlapSettings
    ):
        super().__init__(name, module, forwards, overlap)
        self.reader, reading = reader, reader.reading
        self.children, self.heads = reading.children, reading.heads
        # This is cached, so that the same modules give the same Sequential in every call.
        self._joined = functools.lru_cache(maxsize=16)(_join)
        # Backward may recompute these forwards, which depend on input and weight only.
        pure = set(PURE)
        for source in reading.sources.values():
            if source.norm is not None and is_library_code(norm := getattr(module, source.norm)):
                pure.add(type(norm).forward)
        self.block = SelfAttention(
            local_attention=bound_attention(module),
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=reading.head_dim,
            **self._children(),
            first_rows=reading.first_rows,
            norm_last=any(source.last for source in reading.sources.values()),
            rope=reading.rotary,
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

    def _children(self) -> Keywords:
        """Return the layer's current submodules, as keyword arguments of `SelfAttention`.

        The user may have replaced submodules since `enable`, for instance by adapters.
        """
        children = {}
        for name, chain in self.children.items():
            children[name] = self._joined(*[getattr(self.module, part) for part in chain])
        return children

    def use(self) -> None:
        """Let the block use the layer's current submodules."""
        self.block.use(**self._children())

    def must_fall_back(self) -> bool:
        """Return whether the layer's current modules on this rank prevent a window."""
        self.use()
        self.block.falls_back = False
        return not self.block.can_window()

    def forward(self, own: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run the block instead of the layer's own forward. Collective.

        Returns:
            y [b, s/P, m], and None for the attention weights.

        Raises:
            ValueError: for a mask that can't be honoured (`Forwards.of`).
            RuntimeError: on all ranks, if the results of the layer's own forward and of the block
                differ on any rank.
        """
        module, reader, overlap = self.module, self.reader, self.overlap
        if off_in_eval(module):
            return own(*args, **kwargs)
        arguments = by_name(module, args, kwargs)
        # Drop KV caches, which are empty, since the model's forward has refused caches in use.
        arguments |= dict.fromkeys(arguments.keys() & set(CACHES))
        rest = {key: value for key, value in arguments.items() if key not in UNUSED}
        x, tables = rest.pop("hidden_states"), rest.pop("position_embeddings", None)
        mask = rest.pop("attention_mask", None)
        self.use()
        self.block.falls_back = self.falls_back
        sequence, pattern = self.forwards.of(self.name, module, x, mask=mask, kwargs=rest)
        # Keywords that the layer itself passes have precedence over the caller's.
        constants = reader.options(module)
        options = (rest if reader.reading.passes_keywords else {}) | constants
        self.refuse_unhonoured(options, sequence, pattern)
        if reader.probes.is_due(self.name, overlap.config.check, sequence.lengths):
            refuse_difference(self, own, arguments, constants)
        per_head = {key: PerHead(options.pop(key)) for key in reader.reading.per_head}
        timed = self.has_baseline(x, self.heads, sequence, pattern=pattern, keywords=arguments)
        y = self.block(
            x,
            baseline=(lambda x: own(**{**arguments, "hidden_states": x})[0]) if timed else None,
            position_embeddings=tables,
            sequence_lengths=sequence.lengths,
            query_chunks=sequence.query_chunks(self.shares),
            sequence=sequence,
            pattern=pattern,
            options=options,
            **per_head,
        )
        return y, None
