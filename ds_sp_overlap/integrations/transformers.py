"""transformers: attention layers of the families we know, and the attention function of the others.

Stock Ulysses (``UlyssesSPAttentionHF``) sits behind ``ALL_ATTENTION_FUNCTIONS``, after the projections, and gathers
``position_ids`` in every layer. Here the layer itself is driven, and they are gathered once in each forward of the model
(`host`), with its attention mask: packed documents, padding, windows and chunks are those of the whole sequence, where
stock drops them. What can't be honoured is refused on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import ProjectedAttention
from ..channel import Channel
from ..config import SpOverlapConfig
from ..layout import Geometry
from ..policy import Policy
from ..rotary import Rotary
from ..self_attention import SelfAttention
from . import Layer, driven, groups_in_words, rebind
from .masks import Masks, Pattern
from .positions import Positions, Step

# Families whose attention layer is driven whole: where each finds its sliding window.
FAMILIES: dict[str, Callable[[nn.Module], int | None]] = {
    "LlamaAttention": lambda layer: None,
    "MistralAttention": lambda layer: layer.config.sliding_window,
    "Qwen2Attention": lambda layer: layer.sliding_window,
    "Qwen3Attention": lambda layer: layer.sliding_window,
    "Phi3Attention": lambda layer: layer.config.sliding_window,
}


def _library():
    """transformers' attention functions, if the process uses transformers at all."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return None if modeling is None else modeling.ALL_ATTENTION_FUNCTIONS


def _stock(function: Any) -> nn.Module | None:
    """The ``UlyssesSPAttentionHF`` behind an attention function that ``register_with_transformers`` put in place."""
    function = function.before if isinstance(function, _Dispatch) else function
    cells = getattr(function, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in cells]
    return next((x for x in inside if type(x).__name__ == "UlyssesSPAttentionHF"), None)


def find_group(model: nn.Module) -> Any:
    """The sp group that stock Ulysses was registered with for this model; None if it was not."""
    functions, config = _library(), getattr(model, "config", None)
    if functions is None or config is None:
        return None
    stock = _stock(functions.get(getattr(config, "_attn_implementation", None)))
    return None if stock is None else stock.process_group


# Attention over the whole sequence with this rank's heads.


def _core(module: nn.Module) -> tuple[str, Callable]:
    """Name and function of the attention that the model was configured for, without sequence parallelism around it."""
    name = module.config._attn_implementation
    if (reason := _unfit(name)) is not None:  # it was switched after `enable`
        raise ValueError(f"sp_overlap: {type(module).__name__}: {reason}")
    function = _library()[name]
    stock = _stock(function)
    if stock is not None:
        return name, stock.attn
    return name, function.before if isinstance(function, _Dispatch) else function


def _heads_alike(module: nn.Module) -> bool:
    """Whether a layer's attention is the library's own, which keeps nothing for each head, rather than one registered by others."""
    return getattr(_core(module)[1], "__module__", "").startswith("transformers.")


class Sequence:
    """What the layers of a model know of the whole sequence: in the model's forward, in a checkpoint's, in a call of their own."""

    def __init__(self, channel: Channel, config: SpOverlapConfig):
        self.positions, self.masks = Positions(channel, config.documents), Masks()
        self.attended: set[str] = set()  # layers whose attention function was called

    def of(self, where: str, module: nn.Module, x: Tensor, mask: Any, kwargs: dict[str, Any]) -> tuple[Step, Pattern]:
        """What a layer's call with ``x`` [b, s/P, ..] belongs to. Collective if the layer is called by itself.

        Takes out of ``kwargs`` what describes this rank's tokens.
        """
        for of_slice in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
            kwargs.pop(of_slice, None)
        position_ids, step = kwargs.pop("position_ids", None), self.positions.current
        if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise ValueError(f"{where}: {type(module).__name__} is told that its attention is not causal; not supported here")
        if (found := self.masks.find(mask)) is not None:
            return found
        if mask is not None or (step is not None and step.padded):
            raise ValueError(
                f"{where}: {type(module).__name__} is given a mask that is not as transformers' mask functions made it (for this "
                "rank's tokens, or changed on the way); it can't be honoured on a sequence that is split over ranks"
            )
        return (step or self.positions.gather(where, x, position_ids)), Pattern()


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, step: Step, pattern: Pattern, **options: Any) -> Tensor:
    """q, k, v [b, s, h/P, d] -> o [b, s, h/P, d], through transformers' own attention function.

    As on one rank, sdpa goes by what the mask says, and a flash attention by its own arguments.
    """
    name, function = _core(module)
    told = vars(module).get("num_key_value_groups")
    heads_per_kv = q.shape[2] // k.shape[2]
    module.num_key_value_groups = heads_per_kv  # of this rank, where ranks share KV heads

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Tensor:
        return function(module, *(x.transpose(1, 2) for x in (q, k, v)), mask, **options, **more)[0]

    def document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, window = q.shape[1], pattern.window
        return attention(q, k, v, step.window_mask(length, window) if window is not None and window < length else None)

    def alone(v: Tensor) -> Tensor:
        kept = F.dropout(v.new_ones(len(v), v.shape[1] * heads_per_kv, 1), options.get("dropout", 0.0))
        return v.repeat_interleave(heads_per_kv, 1) * kept

    try:
        if name == "sdpa":
            pieces = step.pieces(pattern.chunk)
            return document(q, k, v) if pieces is None else pieces.attend(document, alone, q, k, v)
        if pattern.chunk is not None and pattern.chunk < q.shape[1]:
            raise ValueError(f'{type(module).__name__}: "{name}" has no attention in chunks of {pattern.chunk}; use "sdpa"')
        if step.documents is None or q.shape[0] == 1:  # it finds documents in position_ids, of one row
            return attention(q, k, v, None, position_ids=step.position_ids)
        rows = [slice(row, row + 1) for row in range(q.shape[0])]
        return torch.cat([attention(q[row], k[row], v[row], None, position_ids=step.position_ids[row]) for row in rows])
    finally:
        if told is not None:
            module.num_key_value_groups = told
        else:
            del module.num_key_value_groups


# Layers.


def _stock_does_the_same(
    module: nn.Module, x: Tensor, step: Step, pattern: Pattern, channel: Channel, given: dict[str, Any]
) -> bool:
    """Whether stock Ulysses is registered for a call with ``x`` [b, s/P, ..] and would compute what we do."""
    stock = _stock(_library().get(module.config._attn_implementation))
    if stock is None or dist.get_process_group_ranks(stock.process_group) != dist.get_process_group_ranks(channel.group):
        return False
    fits = x.shape[0] == stock.batch_size and (stock.seq_length_is_variable or x.shape[1] == stock.local_seq_length)
    whole = step.documents is None and all(size is None or size >= sum(step.lengths) for size in (pattern.window, pattern.chunk))
    return fits and len(set(step.lengths)) == 1 and whole and given.get("position_ids") is not None


def _drive(
    name: str, module: nn.Module, sequence: Sequence, channel: Channel, config: SpOverlapConfig, policy: Policy | None
):
    """The block over a layer of a known family, and a forward for the layer that calls it."""
    names = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm")

    def parts() -> dict[str, nn.Module]:
        return {part: child for part in names if (child := getattr(module, part, None)) is not None}

    block = SelfAttention(
        local_attention=lambda q, k, v, **options: _attend(module, q, k, v, **options),
        num_heads=module.config.num_attention_heads,
        num_kv_heads=module.config.num_key_value_heads,
        head_dim=module.head_dim,
        **parts(),
        rope=Rotary(
            lambda tables: tuple(table.unsqueeze(2) for table in tables),
            partial=(getattr(module.config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) != 1.0,
        ),
        sequence_process_group=channel.group,
        config=config,
        name=name,
        policy=policy,
        heads_alike=True,
    )
    original = module.forward

    def forward(hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        if _off_in_eval(module):
            return original(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        block.use(**parts())
        given = dict(kwargs)
        step, pattern = sequence.of(name, module, hidden_states, attention_mask, kwargs)
        kwargs["dropout"] = module.attention_dropout if module.training else 0.0
        kwargs["scaling"] = module.scaling
        kwargs["sliding_window"] = FAMILIES[type(module).__name__](module)

        def stock(x):
            return original(x, position_embeddings, attention_mask, None, **given)[0]

        alike = policy and _stock_does_the_same(module, hidden_states, step, pattern, channel, given)
        o = block(
            hidden_states, position_embeddings=position_embeddings, sequence_lengths=step.lengths,
            instead=stock if alike else None, step=step, pattern=pattern, **kwargs,
        )  # fmt: skip
        return o, None

    return block, forward


def _off_in_eval(module: nn.Module) -> bool:
    """Whether stock Ulysses was told to leave evaluation alone (``disable_in_eval``)."""
    stock = _stock(_library().get(module.config._attn_implementation))
    return stock is not None and stock.disable_in_eval and not module.training


class _Dispatch:
    """An attention function that overlaps the modules it was given, and passes on all others."""

    def __init__(self, before: Callable):
        self.before = before
        self.attend: weakref.WeakKeyDictionary[nn.Module, tuple] = weakref.WeakKeyDictionary()

    @torch.compiler.disable
    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        if module not in self.attend or _off_in_eval(module):
            return self.before(module, query, key, value, attention_mask, **kwargs)
        attend, sequence, where = self.attend[module]
        sequence.attended.add(where)
        for argument in ("s_aux", "position_bias"):
            if kwargs.get(argument) is not None:
                raise ValueError(f"{where}: attention with {argument} (one value per head) can't be split over ranks here")
        given = dict(kwargs)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        step, pattern = sequence.of(where, module, q, attention_mask, kwargs)
        channel = attend.layer.channel
        q = _scaled_by_position(module, q, step, channel.rank)
        local = functools.partial(_attend, module, step=step, pattern=pattern, **kwargs)

        def stock(*qkv):
            o = self.before(module, *(x.transpose(1, 2) for x in qkv), attention_mask, **given)[0]
            return o.unflatten(-1, (q.shape[2], -1)) if o.dim() == 3 else o

        alike = attend.layer.policy and _stock_does_the_same(module, q, step, pattern, channel, given)
        ulysses = _stock(self)
        alike = alike and (q.shape[2], k.shape[2]) == (ulysses.attn_head_count, ulysses.global_kv_head_count)
        instead = stock if alike else None
        o = attend(local, q, k, v, batch_first=True, sequence_lengths=step.lengths, instead=instead)
        return o, None


def _scaled_by_position(module: nn.Module, q: Tensor, step: Step, rank: int) -> Tensor:
    """Llama 4 scales q [b, s/P, h, d] of layers without RoPE by position, which it counts from this rank's first token."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return q
    local = torch.arange(q.shape[1], device=q.device, dtype=torch.float32)

    def scale(position: Tensor) -> Tensor:
        return torch.log1p(torch.floor((position + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    right = scale(local + sum(step.lengths[:rank])).to(q.dtype) / scale(local).to(q.dtype)
    return q * right[:, None, None]


def _bind_function(
    name: str, module: nn.Module, sequence: Sequence, channel: Channel, config: SpOverlapConfig, policy: Policy | None
):
    """Overlap the attention function of a layer of an unknown family; its projections stay its own."""
    functions, implementation = _library(), module.config._attn_implementation
    if not isinstance(functions[implementation], _Dispatch):
        functions[implementation] = _Dispatch(functions[implementation])
    dispatch = functions[implementation]
    dispatch.attend[module] = ProjectedAttention(channel, config, name, policy, heads_alike=True), sequence, name

    def undo(module: nn.Module) -> None:
        del dispatch.attend[module]
        if not dispatch.attend and functions[implementation] is dispatch:
            functions[implementation] = dispatch.before

    return undo


# The model around the layers.


def _host(
    name: str, model: nn.Module, sequence: Sequence, layers: dict[str, nn.Module], witnessed: set[str], configs: list[Any]
):
    """A forward for a model that holds ``layers``: what the ranks must know is gathered in it, once for all of them."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    original, positions, first = model.forward, sequence.positions, next(iter(layers.values()))
    unseen = {name: module for name, module in layers.items() if name in witnessed}  # to call their attention function

    @torch.compiler.disable(recursive=False)
    def forward(*args, **kwargs):
        if positions.current is not None or _off_in_eval(first):
            return original(*args, **kwargs)
        with positions.forward(name, {**dict(zip(names, args)), **kwargs}) as step, _witnessed(sequence, unseen):
            with sequence.masks.asked(name, step, first.config._attn_implementation, configs):
                return original(*args, **kwargs)

    return forward, False


@contextlib.contextmanager
def _witnessed(sequence: Sequence, unseen: dict[str, nn.Module]):
    """Refuse, behind the body, layers that ran in it without a call of their attention function."""
    if not unseen:
        yield
        return
    ran: set[str] = set()
    sequence.attended.clear()
    hooks = [module.register_forward_pre_hook(lambda *_, name=name: ran.add(name)) for name, module in unseen.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    local = sorted(ran - sequence.attended)
    if local:
        raise RuntimeError(
            f"{_first_of(local[0], unseen[local[0]], len(local))} attends without transformers' attention functions, so that each "
            "rank attended to its own tokens alone; not supported with sequence parallelism"
        )
    for name in ran:
        del unseen[name]


def _stretched(module: nn.Module, sequence: Sequence):
    """A forward for a rotary embedding that goes by the largest position: it is shown that of the whole sequence."""
    original = module.forward

    def forward(x, position_ids, *args, **kwargs):
        step = sequence.positions.current
        if step is None and not _off_in_eval(module):
            raise RuntimeError(
                f"{type(module).__name__}: RoPE of type {module.rope_type} depends on the length of the whole sequence, which is "
                "known in the model's forward only; call the model"
            )
        if step is None:
            return original(x, position_ids, *args, **kwargs)
        longest = step.longest.to(position_ids.dtype).expand_as(position_ids[..., :1])
        tables = original(x, torch.cat([position_ids, longest], -1), *args, **kwargs)
        cut = [table[..., :-1, :].contiguous() for table in (tables if isinstance(tables, tuple) else (tables,))]
        return tuple(cut) if isinstance(tables, tuple) else cut[0]

    return (forward,)


# What is found.

_OF_SEQUENCE = {"past_key_values", "past_key_value", "cache_params", "layer_past", "cache", "state", "use_cache"}
_OF_SEQUENCE |= {"attention_mask", "padding_mask", "conv_mask", "alibi"}


def _unfit(implementation: str) -> str | None:
    """Why an attention implementation can't be overlapped; None if it can."""
    if implementation == "sdpa" or "flash" in implementation:
        return None
    return f'attention "{implementation}" needs a mask of the whole sequence; use "sdpa" or a flash attention'


@functools.cache
def _arguments(kind: type) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


@functools.cache
def _functions(kind: type) -> list[types.FunctionType]:
    """The functions of a module's class, without their decorators."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    unwrapped = (inspect.unwrap(f) for base in bases for f in vars(base).values() if callable(f))
    return [f for f in unwrapped if isinstance(f, types.FunctionType)]


def _calls_with(kind: type, keyword: str) -> bool:
    consts = (const for f in _functions(kind) for const in f.__code__.co_consts)
    return any(isinstance(const, tuple) and keyword in const for const in consts)


def _is_attention(module: nn.Module) -> bool:
    """Whether a module's code uses transformers' attention functions; some have a collection of their own under the name."""
    name, library = "ALL_ATTENTION_FUNCTIONS", _library()
    uses = (f for f in _functions(type(module)) if name in f.__code__.co_names)
    return not isinstance(module, _pretrained()) and any(f.__globals__.get(name, library) is library for f in uses)


def _mixes(module: nn.Module) -> bool:
    """Whether a module takes what only concerns a sequence: it looks at more than one token."""
    return not _OF_SEQUENCE.isdisjoint(_arguments(type(module))) and not isinstance(module, nn.Embedding)


def _pretrained() -> type:
    return sys.modules["transformers.modeling_utils"].PreTrainedModel


def _around(name: str, modules: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """The transformers models that a module is in, the innermost first."""
    outer = [name[:at] for at in range(len(name)) if name[at] == "."][::-1] + [""]
    return [(at, modules[at]) for at in outer if isinstance(modules[at], _pretrained())]


def _takes_tokens(model: nn.Module) -> bool:
    """Whether it is a model of the sequence that is split, rather than of images or sound, which every rank has whole."""
    return not _arguments(type(model)).isdisjoint(("input_ids", "inputs_embeds"))


def _goes_by_length(module: nn.Module) -> bool:
    """Whether a rotary embedding chooses its frequencies by the largest position."""
    kinds = getattr(module, "rope_type", None)
    return any("dynamic" in kind or kind == "longrope" for kind in (kinds.values() if isinstance(kinds, dict) else [kinds or ""]))


def _refuse_unexchanged(modules: dict[str, nn.Module]) -> None:
    """Refuse a model in which tokens meet where no exchange covers it. Raises ValueError."""
    block = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", ())  # of layers, or of an MLP
    attention = {name for name, module in modules.items() if _is_attention(module)}
    decoders = {_around(name, modules)[0][1] for name in attention if _around(name, modules)}
    mixing: dict[str, nn.Module] = {}
    for name, module in reversed(modules.items()):  # the inner ones first
        convolution = isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1
        if not convolution and (name in attention or not _mixes(module) or isinstance(module, (block, _pretrained()))):
            continue
        models = _around(name, modules)
        if not models or not _takes_tokens(models[0][1]) or (convolution and models[0][1] not in decoders):
            continue
        name = name.rpartition(".")[0] if convolution else name
        if not any(inner.startswith(name + ".") for inner in (*attention, *mixing)):
            mixing[name] = modules[name]
    if mixing:
        name, module = next(reversed(mixing.items()))
        raise ValueError(
            f"{_first_of(name, module, len(mixing))} mixes tokens without transformers' attention functions, and each rank would see "
            "its own tokens alone; not supported with sequence parallelism"
        )


def _first_of(name: str, module: nn.Module, count: int) -> str:
    return f"{name} ({type(module).__name__}{f', and {count - 1} more' if count > 1 else ''})"


def _why_not(name: str, module: nn.Module, models: list[tuple[str, nn.Module]]) -> str | None:
    """Why a layer can't be exchanged by anybody; None if it can."""
    inner = module.config
    if (reason := _unfit(inner._attn_implementation)) is not None:
        stock = inner._attn_implementation == "flex_attention" and _stock(_library().get("flex_attention"))
        return None if stock else reason
    if getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower() or name.endswith("encoder_attn"):
        return "cross-attention"
    if not getattr(module, "is_causal", True):
        return "its attention is not causal"
    if _calls_with(type(module), "s_aux") and next(module.parameters(recurse=False), None) is not None:
        return "attention with sinks (one value per head)"
    if models and "position_ids" not in _arguments(type(models[0][1])):
        return f"{type(models[0][1]).__name__} takes no position_ids and counts each rank's tokens from 0"
    return None


def find_layers(model: nn.Module, channel: Channel, config: SpOverlapConfig, policy: Policy | None = None) -> list[Layer]:
    """The attention layers of a transformers model.

    Raises ValueError where ``head_groups`` is out of range, or tokens meet where no exchange covers it.
    """
    if _library() is None:
        return []
    sequence, modules, found = Sequence(channel, config), dict(model.named_modules()), []
    _refuse_unexchanged(modules)
    hosts: dict[str, dict[str, nn.Module]] = {}  # the layers that are bound by the models that they are in
    witnessed: set[str] = set()  # they count on the layer to call its attention function
    for name, module in modules.items():
        inner = getattr(module, "config", None)
        if not _is_attention(module) or not hasattr(inner, "_attn_implementation"):
            continue
        models = _around(name, modules)
        if models and not _takes_tokens(models[0][1]):
            found.append(Layer(name, module, got="", lacks="not of the sequence that is split"))
            continue
        if (reason := _why_not(name, module, models)) is not None:
            raise ValueError(f"{name} ({type(module).__name__}): {reason}; not supported with sequence parallelism")
        if (reason := _unfit(inner._attn_implementation)) is not None:
            found.append(Layer(name, module, got="", lacks=f"{reason}; DeepSpeed's exchanges stay"))
            continue
        heads = inner.num_attention_heads
        kv_heads = getattr(inner, "num_key_value_heads", None) or heads
        groups = config.groups_for(heads, channel.size)
        Geometry(channel.size, channel.rank, (0,) * channel.size, 0, heads, kv_heads, groups)  # refuses what can't work
        if _is_known(module):
            block, forward = _drive(name, module, sequence, channel, config, policy)
            linear = {name: child for name, child in module.named_children() if name.endswith("_proj")}
            got, lacks = driven(block, linear, groups, policy)
            bind = functools.partial(rebind, module, forward)
        else:
            got = f"attention function, {groups_in_words(groups, policy)}"
            lacks = f"{type(module).__name__}: unknown family, projections stay its own"
            lacks += "; one query head a rank" if groups == 1 and config.head_groups == "auto" else ""
            bind = functools.partial(_bind_function, name, module, sequence, channel, config, policy)
            witnessed.add(name)
        found.append(Layer(name, module, got, lacks, bind))
        for at, outer in models:
            if _takes_tokens(outer):
                hosts.setdefault(at, {})[name] = module
    configs = [config for at in hosts for config in (modules[at].config, modules[at].config.get_text_config())]
    around = [
        (modules[at], _host(at or type(model).__name__, modules[at], sequence, layers, witnessed, configs))
        for at, layers in hosts.items()
    ]
    around += [(module, _stretched(module, sequence)) for module in modules.values() if _goes_by_length(module)]
    if found:
        found[0].around = tuple((module, functools.partial(rebind, module, *forward)) for module, forward in around)
    return found


def _is_known(module: nn.Module) -> bool:
    return (
        type(module).__name__ in FAMILIES
        and type(module).__module__.startswith("transformers.models.")
        and "forward" not in vars(module)
    )


def layer_shape(model: str) -> dict[str, int | None]:
    """Sizes of a layer by the config that ``model`` names (a name, a folder or a file); None for those it doesn't give.

    Raises OSError or ValueError where there is no config.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    names = {
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate": "intermediate_size",
    }
    return {key: getattr(config, name, None) for key, name in names.items()}
