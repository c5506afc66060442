"""transformers: an attention layer whose forward is known, driven whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..attention.heads import PerHead
from ..attention.linear import PURE
from ..attention.self_attention import SelfAttention
from ..profiling.steps import in_backward
from ..rotary import Rotary
from .layers import Overlap
from .masks import Pattern
from .positions import GlobalSequence
from .transformers_attention import local_attention, stock_does_the_same
from .transformers_forward import Forwards
from .transformers_labels import CACHES, UNUSED
from .transformers_modules import off_in_eval
from .transformers_probe import difference, refuse_difference
from .transformers_reading import Reader


class Asked(NamedTuple):
    """What a call of a layer asks of its block.

    x          [b, s/P, m]   hidden states
    tables     position embeddings
    options    for `local_attention`, beside ``sequence`` and ``pattern``, which are among them
    per_head   those of them that have a slice for each query head
    """

    x: Tensor
    tables: Any
    sequence: GlobalSequence
    pattern: Pattern
    options: dict[str, Any]
    per_head: dict[str, PerHead]

    def keywords(self) -> dict[str, Any]:
        """Of the block's call. Options go in a dict, where no labels [b, s/P] of Trainer's are taken for something per head."""
        lengths = self.sequence.lengths
        return dict(position_embeddings=self.tables, sequence_lengths=lengths, options=self.options, **self.per_head)


class Driven(NamedTuple):
    """A layer that is driven whole.

    where     its name
    forward   takes the place of the layer's
    use       have the block drive the layer's modules as they are now
    asked     arguments of the layer by name -> what they ask of the block. Collective if the layer is called by itself
    """

    where: str
    block: SelfAttention
    forward: Callable
    use: Callable[[], None]
    asked: Callable[[dict[str, Any]], Asked]


def drive(name: str, module: Any, reader: Reader, forwards: Forwards, overlap: Overlap) -> Driven:
    """The block over a layer whose forward is known, and a forward for the layer that calls it."""
    reading, original = reader.reading, module.forward
    heads, sources, rotary = reading.heads, reading.sources, reading.rotary
    fused = len({source.chain for source in sources.values()}) == 1
    kinds = {"qkv_proj": "q"} if fused else {f"{kind}_proj": kind for kind in "qkv"}
    norms = {f"{kind}_norm": norm for kind, source in sources.items() if (norm := source.norm) is not None}

    @functools.lru_cache(maxsize=4)
    def through(*modules: nn.Module) -> nn.Module:
        return modules[0] if len(modules) == 1 else nn.Sequential(*modules)

    def children() -> dict[str, Any]:
        projections = {what: through(*(getattr(module, part) for part in sources[kind].chain)) for what, kind in kinds.items()}
        return {
            **projections,
            **{what: getattr(module, norm) for what, norm in norms.items()},
            "o_proj": getattr(module, reading.output),
        }

    def attend(q, k, v, options, **per_head):
        return local_attention(module, q, k, v, **options, **per_head)

    block = SelfAttention(
        local_attention=attend,
        num_heads=heads["q"],
        num_kv_heads=heads["k"],
        head_dim=reading.head_dim,
        **children(),
        first_rows=reading.first_rows(fused),
        norm_last=any(source.last for source in sources.values()),
        rope=None if rotary is None else Rotary(**rotary),
        sequence_process_group=overlap.channel.group,
        config=overlap.config,
        name=name,
        policy=overlap.policy,
        heads_alike=True,
        pure=PURE | {type(norm).forward for part in norms.values() if _is_theirs(norm := getattr(module, part))},
    )
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names, passes = [p.name for p in parameters], any(p.kind is p.VAR_KEYWORD for p in parameters)

    def use() -> None:
        block.use(**children())

    def asked(given: dict[str, Any]) -> Asked:
        given.update((cache, None) for cache in CACHES if cache in given)
        more = {key: x for key, x in given.items() if key not in UNUSED}
        x, tables, mask = more.pop("hidden_states"), more.pop("position_embeddings", None), more.pop("attention_mask", None)
        use()
        sequence, pattern = forwards.of(name, module, x, mask, more)
        options = {"sequence": sequence, "pattern": pattern, **(more if reading.passes else {}), **reader.options(module)}
        if reader.probed.is_due(name, overlap.config.check, sequence.lengths) and not in_backward():
            own = {**given, "hidden_states": x, "position_embeddings": tables, "attention_mask": mask}
            own = {key: value for key, value in own.items() if passes or key in names}
            output, read = getattr(module, reading.output), reader.options(module)
            compare = functools.partial(difference, module, block, output, original, own, read)
            refuse_difference(reader.probed, name, module, overlap.channel, compare)
        per_head = {key: PerHead(options.pop(key)) for key in reading.per_head}
        return Asked(x, tables, sequence, pattern, options, per_head)

    def forward(*args, **kwargs):
        if off_in_eval(module):
            return original(*args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        call = asked(given)

        def stock(x):
            return original(**{**given, "hidden_states": x})[0]

        alike = overlap.policy and stock_does_the_same(module, call.x, call.sequence, call.pattern, overlap.channel, given)
        o = block(call.x, baseline=stock if alike else None, **call.keywords())
        return o, None

    return Driven(name, block, forward, use, asked)


def _is_theirs(norm: nn.Module) -> bool:
    """Whether a norm is one of transformers', which are functions of their input and weight alone."""
    return type(norm).__module__.startswith("transformers.")
