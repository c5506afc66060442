"""Attention layers of transformers whose whole forward is replaced.

A layer whose forward is known (`inspect.attention`) needs none of its own code: `SelfAttention`
calls its projections and norms and rotates q and k, so that the projections hide the exchanges.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

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
    attention_of,
    baseline_applies,
    for_all_queries,
    function_of,
    local_attention,
    refuse_unhonoured,
    why_no_share,
)
from .forward import Forwards
from .modules import off_in_eval
from .probe import difference


def _join(*modules: nn.Module) -> nn.Module:
    """Return one module that calls modules one after the other."""
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


def _attend(module, q, k, v, options, queries=None, **per_head):
    """Attend with the layer's attention function; ``options`` is one keyword (`Driven.forward`)."""
    return local_attention(module, q, k, v, queries=queries, **options, **per_head)


class Driven:
    """An attention layer whose forward `SelfAttention` replaces.

    `enable` makes it for a layer whose forward could be read, and rebinds the forward.

    Args:
        where: The layer's name.
        module: The layer.
        reader: The reading of its forward.
        forwards: The forwards of its model.
        settings: The settings of the model's layers.

    Attributes:
        original: The layer's own forward.
        block: The `SelfAttention` that calls the layer's submodules.
        children: The names of these by keywords of the block (`Reading.children`).
        falls_back: Whether a window is left out (`Forwards.fallible`).
    """

    falls_back = False

    def __init__(
        self, where: str, module: Any, reader: Reader, forwards: Forwards, settings: OverlapSettings
    ):
        self.where, self.module, self.reader = where, module, reader
        self.forwards, self.settings = forwards, settings
        reading = reader.reading
        heads, self.children = reading.heads, reading.children
        # Cached, so that the same modules are the same Sequential in every call.
        self._joined = functools.lru_cache(maxsize=16)(_join)
        # Functions of input and weight alone, which backward may compute again.
        pure = set(PURE)
        for source in reading.sources.values():
            if source.norm is not None and is_library_code(norm := getattr(module, source.norm)):
                pure.add(type(norm).forward)
        attend: Callable = functools.partial(_attend, module)
        self.block = SelfAttention(
            local_attention=for_all_queries(attend) if why_no_share(module) else attend,
            num_heads=heads["q"],
            num_kv_heads=heads["k"],
            head_dim=reading.head_dim,
            **self._children(),
            first_rows=reading.first_rows,
            norm_last=any(source.last for source in reading.sources.values()),
            rope=None if reading.rotary is None else Rotary(**reading.rotary),
            sequence_process_group=settings.sp_group.group,
            config=settings.config,
            name=where,
            policy=settings.policy,
            heads_alike=True,
            pure=frozenset(pure),
        )
        self.shares = settings.shares_for(heads["q"], heads["k"], attention_of(where, module))
        self.known = function_of(module)[1]
        self.original = module.forward
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        self._names = [parameter.name for parameter in parameters]
        self._takes_keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if self.block.may_window:
            forwards.fallible[where] = self

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

    def _own(self, arguments: dict[str, Any], x: Tensor) -> Tensor:
        """Run the layer's own forward, in which stock Ulysses exchanges."""
        return self.original(**{**arguments, "hidden_states": x})[0]

    def _refuse_difference(self, arguments: dict[str, Any]) -> None:
        """Raise RuntimeError, on all ranks, if own forward and block differ on any. Collective."""
        module, reader = self.module, self.reader
        # The layer's own forward may lack tables or a mask, which are among the arguments here.
        if not self._takes_keywords:
            arguments = {key: value for key, value in arguments.items() if key in self._names}
        compare = functools.partial(difference, self, arguments, reader.options(module))
        refuse_difference(reader.probes, self.where, module, self.settings.sp_group, compare)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block in place of the layer's own forward; return y [b, s/P, m] and no weights.

        Collective.

        Raises:
            ValueError: for a mask that can't be honoured (`Forwards.of`).
            RuntimeError: on all ranks, if the layer's own forward and the block differ on any rank.
        """
        if off_in_eval(self.module):
            return self.original(*args, **kwargs)
        arguments = {**dict(zip(self._names, args)), **kwargs}
        # Empty ones: the model's forward refuses a cache that is in use.
        arguments |= dict.fromkeys(arguments.keys() & set(CACHES))
        rest = {key: value for key, value in arguments.items() if key not in UNUSED}
        x, tables = rest.pop("hidden_states"), rest.pop("position_embeddings", None)
        mask, config = rest.pop("attention_mask", None), self.settings.config
        self.use()
        self.block.falls_back = self.falls_back
        sequence, pattern = self.forwards.of(self.where, self.module, x, mask=mask, kwargs=rest)
        reading, read_options = self.reader.reading, self.reader.options(self.module)
        options: dict[str, Any] = {"sequence": sequence, "pattern": pattern}
        if reading.passes_keywords:
            options |= rest
        # What the layer passes by itself goes before what its caller passes.
        options |= read_options
        refuse_unhonoured(self.where, self.module, self.known, options, sequence, pattern)
        if self.reader.probes.is_due(self.where, config.check, sequence.lengths):
            tensors = {"hidden_states": x, "position_embeddings": tables, "attention_mask": mask}
            self._refuse_difference({**arguments, **tensors})
        per_head = {key: PerHead(options.pop(key)) for key in reading.per_head}
        baseline, sp_group = None, self.settings.sp_group
        if self.settings.policy and baseline_applies(
            self.module, x, sequence, pattern=pattern, sp_group=sp_group, keywords=arguments
        ):
            baseline = functools.partial(self._own, arguments)
        # The options are one keyword, a dict. As keywords of their own, a tensor such as the labels
        # [b, s/P] of Trainer could be taken for a tensor with a slice for each head.
        y = self.block(
            x,
            baseline=baseline,
            position_embeddings=tables,
            sequence_lengths=sequence.lengths,
            query_chunks=sequence.query_chunks(self.shares),
            options=options,
            **per_head,
        )
        return y, None
