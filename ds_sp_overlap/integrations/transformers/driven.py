"""Attention layers of transformers whose whole forward is replaced.

A layer whose forward is known (`inspect.attention`) needs none of its own code: `SelfAttention`
calls its projections and norms and rotates q and k, so that the projections hide the exchanges.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn

from ...attention.arguments import PerHead
from ...attention.runtime.linear import PURE
from ...attention.self_attention import SelfAttention
from ...rotary import Rotary
from ..inspect.attention import Reader, Reading
from ..inspect.library import CACHES, is_library_function, own_class
from ..inspect.probe import refuse_difference
from ..inspect.symbolic_trace import UNUSED
from ..layers import OverlapSettings
from .attention_function import (
    attention_of,
    baseline_applies,
    function_of,
    local_attention,
    refuse_unhonoured,
    why_no_share,
)
from .forward import Forwards
from .modules import off_in_eval
from .probe import difference


class _Children:
    """The submodules of a layer under the names that `SelfAttention` gives them.

    Args:
        module: The layer.
        reading: The reading of its forward.

    Attributes:
        fused: Whether one projection makes q, k and v.
        projections: The names of the submodules that each projection calls one after the other.
        norms: The submodules that norm q, k or v by head.
    """

    def __init__(self, module: Any, reading: Reading):
        self.module, self.output, sources = module, reading.output, reading.sources
        self.fused = len({source.chain for source in sources.values()}) == 1
        if self.fused:
            self.projections = {"qkv_proj": sources["q"].chain}
        else:
            self.projections = {f"{kind}_proj": sources[kind].chain for kind in "qkv"}
        self.norms: dict[str, str] = {}
        for kind, source in sources.items():
            if source.norm is not None:
                self.norms[f"{kind}_norm"] = source.norm
        # Cached, so that the same modules are the same Sequential in every call.
        self._joined = functools.lru_cache(maxsize=4)(_join)

    def current(self) -> dict[str, Any]:
        """Return the submodules as they are now, as keywords of `SelfAttention`."""
        # Somebody may have replaced some, for instance by adapters.
        children = {"o_proj": getattr(self.module, self.output)}
        for name, chain in self.projections.items():
            parts = [getattr(self.module, part) for part in chain]
            children[name] = self._joined(*parts)
        for name, norm in self.norms.items():
            children[name] = getattr(self.module, norm)
        return children


def _join(*modules: nn.Module) -> nn.Module:
    """Return one module that calls modules one after the other."""
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


class Driven:
    """An attention layer whose forward `SelfAttention` replaces; made by `enable`.

    Args:
        where: The layer's name.
        module: The layer.
        reader: The reading of its forward.
        children: Its submodules.
        block: The `SelfAttention` that calls the submodules.
        forwards: The forwards of its model.
        settings: The settings of the model's layers.
    """

    def __init__(
        self,
        where: str,
        module: Any,
        reader: Reader,
        *,
        children: _Children,
        block: SelfAttention,
        forwards: Forwards,
        settings: OverlapSettings,
    ):
        self.where, self.module, self.reader, self.children = where, module, reader, children
        self.block, self.forwards, self.settings = block, forwards, settings
        self.shares = settings.shares_for(block.heads, block.kv_heads, attention_of(where, module))
        self.known = function_of(module)[1]
        self._original = module.forward
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        self._names = [parameter.name for parameter in parameters]
        self._takes_keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if block.may_window:
            forwards.fallible[where] = self

    def use(self) -> None:
        """Let the block use the layer's submodules as they are now."""
        self.block.use(**self.children.current())

    def why_fallback(self) -> str:
        """Explain why the layer, as its modules are on this rank now, runs by no window."""
        self.use()
        self.falls_back = False
        if self.block.can_window(self.block.split_projections()):
            return ""
        return f"{self.where}: projections that can't be computed part by part"

    @property
    def falls_back(self) -> bool:
        """Return whether a window is left out, since it is on some rank."""
        return self.block.falls_back

    @falls_back.setter
    def falls_back(self, is_so: bool) -> None:
        self.block.falls_back = is_so

    def _refuse_difference(self, arguments: dict[str, Any]) -> None:
        """Raise RuntimeError, on all ranks, if own forward and block differ on any. Collective."""
        # The layer's own forward may lack tables or a mask, which are among the arguments here.
        if not self._takes_keywords:
            arguments = {key: value for key, value in arguments.items() if key in self._names}
        compare = functools.partial(
            difference,
            self.module,
            self.block,
            getattr(self.module, self.reader.reading.output),
            self._original,
            arguments,
            self.reader.options(self.module),
        )
        refuse_difference(
            self.reader.probes,
            self.where,
            self.module,
            sp_group=self.settings.sp_group,
            compare=compare,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block in place of the layer's own forward; return y [b, s/P, m] and no weights.

        Collective.

        Raises:
            ValueError: for a mask that can't be honoured (`Forwards.of`).
            RuntimeError: on all ranks, if the layer's own forward and the block differ on any rank.
        """
        if off_in_eval(self.module):
            return self._original(*args, **kwargs)
        arguments = {**dict(zip(self._names, args)), **kwargs}
        # Empty ones: the model's forward refuses a cache that is in use.
        for cache in CACHES:
            if cache in arguments:
                arguments[cache] = None
        rest = {key: value for key, value in arguments.items() if key not in UNUSED}
        x, tables = rest.pop("hidden_states"), rest.pop("position_embeddings", None)
        mask, config = rest.pop("attention_mask", None), self.settings.config
        self.use()
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

        def baseline_attention(x: Tensor) -> Tensor:
            """Run the layer's own forward, in which stock Ulysses exchanges."""
            return self._original(**{**arguments, "hidden_states": x})[0]

        baseline = None
        if self.settings.policy and baseline_applies(
            self.module,
            x,
            sequence,
            pattern=pattern,
            sp_group=self.settings.sp_group,
            keywords=arguments,
        ):
            baseline = baseline_attention
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


def drive(
    name: str, module: Any, reader: Reader, forwards: Forwards, settings: OverlapSettings
) -> Driven:
    """Make the `Driven` of a layer and its `SelfAttention`; the caller rebinds the forward.

    Runs in `enable`, for a layer whose forward could be read.

    Args:
        name: The layer's name.
        module: The layer.
        reader: The reading of its forward.
        forwards: The forwards of its model.
        settings: The settings of the model's layers.
    """
    reading = reader.reading
    heads, sources, children = reading.heads, reading.sources, _Children(module, reading)

    def attend_with_all(q, k, v, options, **per_head):
        return local_attention(module, q, k, v, **options, **per_head)

    # `shares_of` lets ranks share query heads if the attention has a parameter ``queries``.
    def attend(q, k, v, options, queries=None, **per_head):
        return local_attention(module, q, k, v, queries=queries, **options, **per_head)

    norms = [getattr(module, norm) for norm in children.norms.values()]
    block = SelfAttention(
        local_attention=attend_with_all if why_no_share(module) else attend,
        num_heads=heads["q"],
        num_kv_heads=heads["k"],
        head_dim=reading.head_dim,
        **children.current(),
        first_rows=reading.first_rows(children.fused),
        norm_last=any(source.last for source in sources.values()),
        rope=None if reading.rotary is None else Rotary(**reading.rotary),
        sequence_process_group=settings.sp_group.group,
        config=settings.config,
        name=name,
        policy=settings.policy,
        heads_alike=True,
        # Functions of input and weight alone, which backward may compute again.
        pure=PURE | {type(norm).forward for norm in norms if _is_transformers_norm(norm)},
    )
    return Driven(
        name, module, reader, children=children, block=block, forwards=forwards, settings=settings
    )


def _is_transformers_norm(norm: nn.Module) -> bool:
    """Return whether a norm is transformers', hence a function of input and weight alone."""
    is_class = own_class(type(norm)).__module__.startswith("transformers.")
    return is_class and is_library_function(type(norm).forward)
