"""Attends over the global sequence by transformers' attention functions.

`local_attention` calls an attention function of transformers between the exchanges. `Dispatch`
overlaps layers whose forward is not known. A `Dispatch` replaces an attention function in
transformers' table, and receives q, k and v that the layer itself has projected and rotated.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from ...attention.arguments import LocalAttention, PerHead
from ...attention.call_geometry import Tokens
from ...attention.declared import UNKNOWN, AttentionFunction, declared
from ...attention.mixer_heads import in_documents
from ...attention.projected import ProjectedAttention
from ...attention.runtime.linear import autocast
from ...exchange.layout import Range
from ..inspect.library import Keywords, attention_functions, defined_in, replaced
from ..layers import OverlapSettings
from ..rebinding import Undo, rebind
from ..sequence.masks import Pattern
from ..sequence.positions import GlobalSequence
from .forward import Forwards
from .modules import core_of, off_in_eval, refuse_copy, stock_for, unfit
from .registration import refusal_of

# Note [Documents in flash attention]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# transformers' own flash attention separates documents by their edges (``cu_seq_lens_q``) or by
# position_ids. With position_ids, the host would wait for the device in every call, to learn the
# number of documents. So this package passes the edges, which the host knows. A third-party flash
# attention may accept only position_ids, and may read these only if a batch has one row. For such a
# function, a batch with several rows and documents becomes one call for each row.

# Note [Queries of a share]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# If ranks share heads, a call has the queries of only a range of tokens, and the keys end where the
# queries end. Without a mask, transformers' sdpa would align the first query with the first key,
# and give a wrong result without an error. So sdpa gets a mask that aligns the last query with the
# last key: ``causal_lower_right``, which holds no values, but makes CUDA's fused kernels use this
# alignment. Flash attention uses this alignment by default, from flash-attn 2.1 on.


_FLASH = AttentionFunction(
    "is_causal", documents="edges", heads_alike=True, takes_sinks=True, takes_queries=True
)
_SDPA = AttentionFunction("is_causal", heads_alike=True, takes_queries=True, takes_masks=True)
# transformers' own attention functions, by the module that defines them.
_LIBRARY = {
    "transformers.integrations.sdpa_attention": _SDPA,
    "transformers.integrations.flash_attention": _FLASH,
}


def function_of(module: Any) -> tuple[Callable, AttentionFunction]:
    """Return the attention function of a layer, and its known properties.

    Raises:
        ValueError: if the layer's current implementation can't be overlapped.
    """
    name = module.config._attn_implementation
    # The implementation may have changed since `enable`.
    if (reason := unfit(name)) is not None:
        raise ValueError(f"sp_overlap: {type(module).__name__}: {reason}")
    function = runs = core_of(name)
    # transformers before 5.0 binds a kernel from the hub in this way.
    if isinstance(function, functools.partial) and {*function.keywords} == {"implementation"}:
        runs = function.func
    home = defined_in(runs)
    # A third party's function may have the globals of transformers' module.
    is_own = getattr(sys.modules.get(home), getattr(runs, "__name__", ""), None) is runs
    known = _LIBRARY.get(home) if is_own else None  # guard: by what runs, not by its name
    return function, declared(function) or known or UNKNOWN


def why_no_share(module: Any) -> str:
    """Explain why a layer's attention can't attend with a range of the queries; empty if it can.

    Only if ranks share heads does attention get a range of the queries. See Note [Queries of a
    share].
    """
    name, (_, known) = module.config._attn_implementation, function_of(module)
    if not known.takes_queries:
        return (
            f'"{name}" is not known to take the last queries alone; if it does, declare it with '
            "ds_sp_overlap.attention_function(.., takes_queries=True)"
        )
    if known is _FLASH and _aligns_top_left():
        return f'"{name}" aligns queries with the first keys here; flash-attn >= 2.1 does not'
    return ""


def attention_of(name: str, module: Any) -> Callable | str:
    """Return `local_attention`, or the reason why the layer needs all queries at once.

    The result is the argument ``attend`` of `shares_of`, which decides whether ranks share heads.
    """
    why = why_no_share(module)
    return f"{name}: {why}" if why else local_attention


def bound_attention(module: Any, **bound: Any) -> Callable[..., Tensor]:
    """Return `local_attention` with the layer and the keywords ``bound`` as arguments.

    If the layer needs all queries at once, the result has no parameter ``queries``, for which
    `shares_of` looks.
    """
    attend = functools.partial(local_attention, module, **bound)
    return (lambda *args, **kwargs: attend(*args, **kwargs)) if why_no_share(module) else attend


@functools.cache
def _aligns_top_left() -> bool:
    """Return whether transformers' flash attention aligns the first query with the first key."""
    library = sys.modules["transformers.modeling_flash_attention_utils"]
    # If transformers lacks this function, it supports no such flash-attn. ``bool()`` is False.
    return getattr(library, "flash_attn_supports_top_left_mask", bool)()


def _joined(x: Tensor, first: list[int]) -> Tensor:
    """Join the rows of ``x`` [b, s, h, d] into one row [1, n, h, d].

    From each row, take the tokens from ``first[row]`` on.
    """
    return torch.cat([row[start:] for row, start in zip(x, first)])[None]


def local_attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sequence: GlobalSequence,
    pattern: Pattern,
    options: Keywords,
    queries: Range | None = None,
    **per_head: Tensor,
) -> Tensor:
    """Attend over the whole sequence with one head group, by the layer's own attention function.

    This runs between the exchanges, and is not collective. As on one rank, sdpa takes the sliding
    window from the mask (``pattern``), and any other function takes the window from ``options``.

    Args:
        module: The layer.
        q: [b, n, h', d]. The queries of one head group on this rank: of all s tokens or a range.
        k: [b, s, h_kv', d]. The KV heads that the query heads need.
        v: [b, s, h_kv', d].
        sequence: The global sequence.
        pattern: The pattern of the layer's mask.
        options: Further keywords of the attention function. Passed as a dict, so that a tensor such
            as Trainer's labels [b, s/P] is not mistaken for one of ``per_head``.
        queries: The range of tokens whose queries are in ``q``; None for all tokens.
        **per_head: Keywords whose tensors have a slice for each head: here, the slices for the
            heads of q.

    Returns:
        o [b, n, h', d].

    Raises:
        ValueError: if the attention function can't attend in the pattern's chunks, or with a range
            of queries.
    """
    function, known = function_of(module)
    if queries is not None:
        if reason := why_no_share(module):
            raise ValueError(f"{type(module).__name__}: {reason}, and ranks share query heads")
        k, v = k[:, : queries[1]], v[:, : queries[1]]
    attention = functools.partial(_call, function, module, **options, **per_head)
    # The attention function reads this attribute. If ranks share KV heads, this rank's number of
    # query heads per KV head differs from the layer's.
    with replaced(vars(module), "num_key_value_groups", q.shape[2] // k.shape[2]):
        if known.documents is None:
            if known.takes_masks:
                attention = functools.partial(_with_mask, attention, sequence, pattern.window)
            return in_documents(sequence.documents(pattern.chunk, queries), attention, q, k, v)
        if pattern.chunk is not None:
            raise ValueError(
                f'{type(module).__name__}: "{module.config._attn_implementation}" has no attention '
                f'in chunks of {pattern.chunk}; use "sdpa"'
            )
        # See Note [Documents in flash attention].
        if known.documents == "edges":
            first, edges = sequence.for_flash(queries or (0, q.shape[1]))
            # If the first keys of the rows differ, the rows have different lengths, so join them.
            if len(set(first)) == 1:
                k, v = k[:, first[0] :], v[:, first[0] :]
                return attention(q, k, v, **edges)  # guard: edges, no positions
            q_row = q.flatten(0, 1)[None]
            o = attention(q_row, _joined(k, first), _joined(v, first), **edges)
            return o[0].unflatten(0, (len(q), -1))
        if sequence.one_document or q.shape[0] == 1:
            return attention(q, k, v, position_ids=sequence.position_ids)
        rows = zip(*(x.split(1) for x in (q, k, v, sequence.position_ids)))
        return torch.cat([attention(q, k, v, position_ids=at) for q, k, v, at in rows])


def _call(
    function: Callable, module: Any, /, *qkv: Tensor, attention_mask: Any = None, **options: Any
) -> Tensor:
    """Call a layer's attention function, which takes [b, h, n, d], on q, k and v [b, n, h, d]."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    return function(module, q, k, v, attention_mask, **options)[0]


def _with_mask(
    attention: Callable[..., Tensor],
    sequence: GlobalSequence,
    window: int | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Attend within documents [n, length, h, d], with a mask if the attention function needs one.

    The queries belong to the last tokens of each document.
    """
    length, keys, mask = q.shape[1], k.shape[1], None
    if window is not None and window < keys:
        # Drop the keys before the window of the first query, to which no query attends.
        first = max(keys - (length + window - 1), 0)
        keys, k, v = keys - first, k[:, first:], v[:, first:]
        mask = sequence.window_mask(length, keys, window) if window < keys else None
    if length == keys:
        return attention(q, k, v, attention_mask=mask)
    # See Note [Queries of a share]. A single query attends to all keys, without a mask.
    if mask is None and length > 1:
        # torch can't make this mask while a dispatch mode, such as a FLOP counter, is active.
        with _disable_current_modes():
            mask = causal_lower_right(length, keys)  # guard: the last query sees the last key
        # sdpa bypasses autocast for a mask of this class.
        q, k, v = autocast(q, k, v)  # guard: one dtype under autocast
    return attention(q, k, v, attention_mask=mask, is_causal=False)


def _by_stock(stock: Callable, module: Any, mask: Any, keywords: Keywords, *qkv: Tensor) -> Tensor:
    """Attend with stock Ulysses to q, k, v [b, s/P, h, d]; return o [b, s/P, h, d]."""
    o = stock(module, *[x.transpose(1, 2) for x in qkv], mask, **keywords)[0]
    return o.unflatten(-1, (qkv[0].shape[2], -1)) if o.dim() == 3 else o


def _named(function: Callable, options: tuple) -> Keywords:
    """Return, by name, an attention function's positional arguments after the mask.

    Raises:
        ValueError: for more options than the function has parameters.
    """
    parameters = list(inspect.signature(function).parameters.values())[5:]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(options) > len(names):
        raise ValueError(
            f"sp_overlap: {function} is given {len(options)} options by position and takes "
            f"{len(names)} ({', '.join(names)}); give them by name"
        )
    return dict(zip(names, options))


def _scaled_by_position(module: Any, q: Tensor, sequence: GlobalSequence, rank: int) -> Tensor:
    """Correct q [b, s/P, h, d] for Llama 4's ``attn_temperature_tuning``.

    In a layer without RoPE, `Llama4TextAttention.forward` multiplies q by a factor that depends on
    the position, which it counts from the first token of this rank. This function replaces the
    factors by those for the positions in the global sequence. q of other layers stays as it is.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return q
    local = torch.arange(q.shape[1], device=q.device, dtype=torch.float32)
    positions = torch.stack([local + sum(sequence.lengths[:rank]), local])
    steps = torch.floor((positions + 1.0) / module.floor_scale)
    factors = torch.log1p(steps) * module.attn_scale + 1.0
    # Use no half precision, which would round the factors too coarsely.
    correct, wrong = factors.to(torch.promote_types(q.dtype, torch.float32))
    return (q * (correct / wrong)[:, None, None]).to(q.dtype)


class Layer:
    """Overlaps an attention layer: replaces its whole forward, or only its attention.

    Args:
        name: The layer's name.
        module: The layer. Held by a weak reference, since transformers' table holds this object.
        forwards: The forwards of the layer's model.
        overlap: The settings of the layer.

    Attributes:
        known: The known properties of the layer's attention function.
    """

    def __init__(self, name: str, module: Any, forwards: Forwards, overlap: OverlapSettings):
        self.name, self.forwards, self.overlap = name, forwards, overlap
        self._reference, self.known = weakref.ref(module), function_of(module)[1]

    @property
    def module(self) -> Any:
        """The layer."""
        return self._reference()

    def refuse_unhonoured(
        self, options: Keywords, sequence: GlobalSequence, pattern: Pattern
    ) -> None:
        """Raise an error if the attention function would not compute the same as on one rank.

        Args:
            options: The keywords of the attention function.
            sequence: The global sequence.
            pattern: The pattern of the layer's mask.

        Raises:
            RuntimeError: if the attention function is not the one of `enable`.
            ValueError: for an option or a mask that the overlapped attention does not support.
        """
        known, kind = self.known, type(self.module).__name__
        attention = f'attention "{self.module.config._attn_implementation}"'
        if function_of(self.module)[1] != known:
            raise RuntimeError(
                f"{self.name}: {attention} is another function since ds_sp_overlap.enable; call "
                "ds_sp_overlap.enable again"
            )
        option = known.causal if isinstance(known.causal, str) else ""
        told = getattr(self.module, "is_causal", True), options.get(option)
        if False in told:  # guard: causal whatever a layer asks
            raise ValueError(
                f"{self.name}: {kind} is told that its attention is not causal "
                f"({option or 'is_causal'}=False); not supported here"
            )
        if options.get("s_aux") is not None and not known.takes_sinks:
            raise ValueError(
                f"{self.name}: {kind} has attention sinks (s_aux), which {attention} does not "
                "honour; use a flash attention"
            )
        limited = not sequence.one_document or pattern != Pattern()
        if known is UNKNOWN and sequence.mask_made and limited:
            raise ValueError(
                f"{self.name}: {attention} is given no mask here, and nothing is known of how it "
                "keeps packed documents and padding apart, or a window; declare it with "
                "ds_sp_overlap.attention_function"
            )

    def has_baseline(
        self,
        x: Tensor,
        heads: tuple[int, int],
        sequence: GlobalSequence,
        pattern: Pattern,
        keywords: Keywords,
    ) -> bool:
        """Return whether stock Ulysses computes this call correctly, so that a policy may time it.

        Called in each call of the layer. Stock Ulysses must be registered for the same ranks and
        this shape, and must get position_ids. Stock Ulysses does not support packed documents,
        windows or uneven local lengths.

        Args:
            x: [b, s/P, ..]. The layer's hidden states or queries.
            heads: The query and KV heads.
            sequence: The global sequence.
            pattern: The pattern of the layer's mask.
            keywords: The keywords of the layer's call.
        """
        stock = stock_for(self.module) if self.overlap.policy else None
        if stock is None or refusal_of(stock) is not None:
            return False
        lengths = {*sequence.lengths}
        if not stock.seq_length_is_variable:
            lengths.add(stock.local_seq_length)
        if len(lengths) > 1 or not sequence.one_document or pattern != Pattern():
            return False
        counts = stock.batch_size, stock.attn_head_count, stock.global_kv_head_count
        same_ranks = dist.get_process_group_ranks(stock.process_group)
        fits = same_ranks == self.overlap.sp_group.ranks and counts == (x.shape[0], *heads)
        return fits and keywords.get("position_ids") is not None


class FunctionLayer(Layer):
    """Overlaps the attention function of a layer that runs its own forward."""

    def make_attention(self) -> ProjectedAttention:
        """Make the overlapped attention."""
        return ProjectedAttention(self.overlap.runtime(self.name))

    @torch._disable_dynamo(recursive=False)
    def forward(self, own: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, and record the call.

        If the layer does not call the attention function, the model's forward raises an error.
        """
        running = self.forwards.running
        if running is not None and not off_in_eval(self.module):
            running.note(self.name, self.module)
        return own(*args, **kwargs)

    def attend(self, stock: Callable, mask: Any, options: Keywords, *qkv: Tensor) -> Tensor:
        """Attend over the global sequence. Collective.

        Args:
            stock: The attention function that the `Dispatch` replaced, perhaps stock Ulysses.
            mask: The attention mask that was passed to the layer.
            options: The keywords of the attention function.
            *qkv: q [b, h, s/P, d], k and v [b, h_kv, s/P, d]. If latents are exchanged, k has the
                latents and v the rotated key.

        Returns:
            o [b, s/P, h, d].
        """
        module, overlap, options_of_stock = self.module, self.overlap, dict(options)
        # In autocast, norms and rotations may return fp32, so cast to the dtype of autocast.
        q, k, v = autocast(*[x.transpose(1, 2) for x in qkv])
        sequence, pattern = self.forwards.of(self.name, module, q, mask=mask, kwargs=options)
        self.refuse_unhonoured(options, sequence, pattern)
        per_head = {}
        if options.get("s_aux") is not None:
            per_head["s_aux"] = PerHead(options.pop("s_aux"))
        q = _scaled_by_position(module, q, sequence, rank=overlap.sp_group.rank)
        attention = bound_attention(module, sequence=sequence, pattern=pattern, options=options)
        heads, baseline = (q.shape[2], k.shape[2]), None
        if self.has_baseline(q, heads, sequence, pattern=pattern, keywords=options_of_stock):
            baseline = functools.partial(_by_stock, stock, module, mask, options_of_stock)
        chunks = sequence.query_chunks(overlap.shares_for(*heads, attention))
        tokens = Tokens(True, sequence.lengths, chunks)
        bound = LocalAttention(attention, (), per_head)
        return self.attention(bound, q, k, v, tokens=tokens, baseline=baseline)

    def bind(self) -> Undo:
        """Overlap the attention function; `enable` calls this once the ranks have agreed.

        Returns:
            A function that undoes the overlap, for `disable`.
        """
        functions, implementation = attention_functions(), self.module.config._attn_implementation
        dispatch, self.attention = functions[implementation], self.make_attention()
        if not isinstance(dispatch, Dispatch):
            dispatch = functions[implementation] = Dispatch(dispatch)
        dispatch.layers[self.module] = self
        undo_forward = rebind(self.module, self.forward, whole=False, of_copy=refuse_copy)

        def undo(module: nn.Module) -> None:
            undo_forward(module)
            del dispatch.layers[module]
            # Leave the table alone if the `Dispatch` in it was replaced or wrapped.
            if not dispatch.layers and functions[implementation] is dispatch:
                functions[implementation] = dispatch.before

        return undo


class Dispatch:
    """Replaces an attention function: overlaps some layers, and passes on the calls of all others.

    transformers calls this object in every forward of every layer with an attention implementation,
    in all models of the process. The object is in transformers' table from `FunctionLayer.bind`
    until the last of its layers is restored.

    Args:
        before: The attention function that this object replaces.

    Attributes:
        layers: The overlapped layers. A weak dictionary, which keeps no model alive.
    """

    def __init__(self, before: Callable):
        self.before = before
        self.layers = weakref.WeakKeyDictionary[nn.Module, FunctionLayer]()

    @torch._disable_dynamo
    def __call__(self, module, query, key, value, attention_mask, *args, **kwargs):
        """Attend to q, k, v [b, h, s/P, d]; return o [b, s/P, h, d], and None for the weights.

        Collective for the layers in ``layers``.
        """
        if module not in self.layers or off_in_eval(module):
            return self.before(module, query, key, value, attention_mask, *args, **kwargs)
        if args:
            kwargs |= _named(function_of(module)[0], args)
        layer = self.layers[module]
        return layer.attend(self.before, attention_mask, kwargs, query, key, value), None
