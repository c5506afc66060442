"""transformers: what the forward of an attention layer computes, found out by running it on labels.

Every number that goes in, and every number that a projection, a norm, a rotation or the attention function would return, is a
label: a random number that occurs once. Whatever moves numbers (views, transposes, splits) is followed by where its labels turn
up. Whatever computes with them leaves numbers that are no labels, and then the layer is not known. So a layer is known by what
it computes, however that is spelt, in whatever class and whichever version; no weight is read and no module is called.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .transformers_rotary import Table, rotary_of

BATCH = 2
CACHES = "past_key_values", "past_key_value", "layer_past"
UNUSED = (*CACHES, "cache_position", "use_cache", "output_attentions")  # arguments that change nothing in training


class Unknown(Exception):
    """Why a forward is not known."""


@dataclass(frozen=True)
class Source:
    """Where q, k or v of a layer comes from.

    chain   names of the modules that the hidden states go through, a linear layer last; behind it maybe a norm over all heads
    rows    first row of each head in what the chain returns
    norm    name of a norm over d of each head; None if there is none
    last    whether it comes behind the rotation
    """

    chain: tuple[str, ...]
    rows: tuple[int, ...]
    norm: str | None = None
    last: bool = False


@dataclass(frozen=True)
class Reading:
    """What a layer's forward computes: o of attention over q, k, v, through a linear layer.

    sources    of q, k and v
    head_dim   d
    rotary     keywords of a `Rotary` that turns q and k; None if nothing is rotated
    output     name of the output projection
    options    keywords of the attention function
    per_head   which of them are parameters of the layer with a slice for each query head
    passes     whether keywords of the forward are passed on to the attention function
    """

    sources: dict[str, Source]
    head_dim: int
    rotary: dict[str, Any] | None
    output: str
    options: dict[str, Any] = field(compare=False)
    per_head: tuple[str, ...]
    passes: bool

    @property
    def heads(self) -> dict[str, int]:
        return {kind: len(source.rows) for kind, source in self.sources.items()}

    @property
    def linear(self) -> list[str]:
        """Names of the projections."""
        return list(dict.fromkeys([*(part for source in self.sources.values() for part in source.chain), self.output]))

    def first_rows(self, fused: bool) -> dict[str, tuple[int, ...]] | None:
        """As `SelfAttention` takes it, with one projection for q, k and v, or one for each."""
        rows = [source.rows for source in self.sources.values()]
        each = [sum(rows, ())] if fused else rows
        in_order = all(one == tuple(range(0, len(one) * self.head_dim, self.head_dim)) for one in each)
        return None if in_order else {kind: source.rows for kind, source in self.sources.items()}


class Reader:
    """Reads a layer, and again whenever something that its forward looked at has changed."""

    def __init__(self, where: str, module: Any):
        self.where = where
        self.readings: dict[bool, tuple[Reading, list]] = {training: _Run(module, training).reading() for training in (True, False)}
        if self.readings[True][0] != self.readings[False][0]:
            raise Unknown("its forward is another one in evaluation")

    @property
    def reading(self) -> Reading:
        return self.readings[True][0]

    def options(self, module: Any) -> dict[str, Any]:
        """Keywords of the attention function, as of now. Raises RuntimeError if the layer computes something else than before."""
        reading, looked = self.readings[module.training]
        if any(_changed(module, *look) for look in looked):
            now, reason = None, ""
            try:
                now, looked = _Run(module, module.training).reading()
            except Unknown as error:
                reason = f" ({error})"
            if now is None or now != reading:
                changed = dict.fromkeys(".".join(look[0]) for look in self.readings[module.training][1] if _changed(module, *look))
                raise RuntimeError(
                    f"{self.where}: {type(module).__name__} computes something else since {', '.join(changed)} changed{reason}; "
                    "call ds_sp_overlap.enable again"
                )
            self.readings[module.training] = reading, looked = now, looked
        return reading.options


def _changed(module: Any, path: tuple[str, ...], value: Any) -> bool:
    for name in path:
        module = getattr(module, name, None)
    return module is not value and (isinstance(value, Tensor) or module != value)


def _shape(parameter: Tensor) -> tuple[int, ...]:
    """Of the whole parameter, which ZeRO-3 may have taken into parts."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


# Labels.


class _Out:
    """Labels that something returned, and what it was given."""

    def __init__(self, name: str, given: Tensor | None, shape: tuple[int, ...], run: _Run):
        self.name, self.given, self.run = name, given, run
        self.labels = run.labels(*shape)
        self._sorted, self._at = self.labels.flatten().sort()

    def find(self, x: Tensor) -> Tensor:
        """Where each number of ``x`` is among the labels, flat; -1 where it is none of them."""
        at = torch.searchsorted(self._sorted, x.contiguous()).clamp_(max=len(self._sorted) - 1)
        return torch.where(self._sorted[at] == x, self._at[at], -1)

    def rows(self, x: Tensor, inner: int) -> Tensor | None:
        """``x`` with what was given in place of its labels; None unless its last ``inner`` dims are rows of it, in their order."""
        assert self.given is not None
        width, at = self.given.shape[-1], self.find(x)
        flat = at.flatten(-inner)
        if (at < 0).any() or flat.shape[-1] != width or (flat % width != torch.arange(width)).any():
            return None
        return self.given.flatten()[at] if (flat // width == flat[..., :1] // width).all() else None


class _Opaque:
    """An argument that may be handed on, and nothing else."""


class _Tables(tuple):
    """(cos, sin) or complex tables: may be taken apart and moved, not computed with."""

    def to(self, *args: Any, **kwargs: Any) -> _Tables:
        return self


class _Looked:
    """The layer, or its config, as its forward sees it: what it looks at is noted, its children return labels."""

    def __init__(self, value: Any, path: tuple[str, ...], run: _Run):
        vars(self).update(_value=value, _path=path, _run=run)

    def __getattr__(self, name: str) -> Any:
        run, value = self._run, getattr(self._value, name)
        if not self._path and name == "training":
            return run.training
        if isinstance(value, nn.Module):
            return _Child(name, value, run)
        if inspect.ismethod(value) and value.__self__ is self._value:
            return types.MethodType(run.rewired(value.__func__), self) if not self._path else value
        run.looked.append(((*self._path, name), value))
        return _Looked(value, (*self._path, name), run) if name == "config" else value

    def __setattr__(self, name: str, value: Any) -> None:
        raise Unknown(f"its forward sets {name}")


class _Child:
    def __init__(self, name: str, module: nn.Module, run: _Run):
        self._name, self._module, self._run = name, module, run

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not isinstance(x, Tensor):
            raise Unknown(f"{self._name} takes more than one tensor")
        width = getattr(self._module, "out_features", None)
        shape = tuple(x.shape) if width is None else (*x.shape[:-1], width)
        out = _Out(self._name, x, shape, self._run)
        self._run.outs.append(out)
        return out.labels

    def __getattr__(self, name: str) -> Any:
        raise Unknown(f"its forward reads {self._name}.{name}")


class _Functions:
    """In place of transformers' attention functions."""

    def __init__(self, attend: Callable):
        self._attend = attend

    def get_interface(self, *_: Any) -> Callable:
        return self._attend

    def __getitem__(self, _: str) -> Callable:
        return self._attend


class _Run:
    """One run of a layer's forward on labels."""

    def __init__(self, module: Any, training: bool):
        self.module, self.training = module, training
        self.generator = torch.Generator().manual_seed(0)
        self.outs: list[_Out] = []  # of children, in the order of their calls
        self.rotations: list[tuple[Callable, tuple, tuple]] = []  # functions, and what they were called with
        self.rotated: list[_Out] = []
        self.attended: list[tuple[tuple, dict]] = []
        self.looked: list[tuple[tuple[str, ...], Any]] = []

    def labels(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def rewired(self, function: Any) -> Callable:
        """``function`` with rotations and attention functions that return labels."""
        function = inspect.unwrap(function)
        known = function.__globals__
        new: dict[str, Any] = {
            name: self._rotary(known[name]) for name in function.__code__.co_names if "rotary" in name and callable(known.get(name))
        }
        new["ALL_ATTENTION_FUNCTIONS"] = _Functions(self._attend)
        copy = types.FunctionType(
            function.__code__, {**known, **new}, function.__name__, function.__defaults__, function.__closure__
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy

    def _rotary(self, function: Callable) -> Callable:
        def rotary(*args: Any, **kwargs: Any) -> Any:
            tables = dict(zip(Table, (self.tables, *self.tables)))
            said = [next((table for table, x in tables.items() if x is given), given) for given in args]
            moving = [x for x in said if isinstance(x, Tensor)]
            outs = [_Out(function.__name__, x, tuple(x.shape), self) for x in moving]
            shapes = tuple(x.shape if isinstance(x, Tensor) else x for x in said)
            self.rotations.append((function, shapes, tuple(kwargs.items())))
            self.rotated += outs
            return outs[0].labels if len(outs) == 1 else tuple(out.labels for out in outs)

        return rotary

    def _attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **options: Any) -> tuple:
        if self.attended or module is not self.layer or attention_mask is not self.mask:
            raise Unknown("its attention is not called once, with the mask as it is given")
        self.attended.append(((q, k, v), options))
        self.o = self.labels(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        return self.o, self.weights

    def reading(self) -> tuple[Reading, list]:
        """Raises Unknown."""
        try:
            with torch.no_grad(), torch.device("cpu"):
                return self._reading(), self.looked
        except Unknown:
            raise
        except Exception as error:  # of any kind: of code that was not made for labels
            raise Unknown(f"its forward computes what is not known here ({type(error).__name__}: {error})") from error

    def _reading(self) -> Reading:
        config = self.module.config
        counts = {getattr(config, name, 0) for name in ("num_attention_heads", "num_key_value_heads")}
        self.seq = next(seq for seq in (5, 7, 11) if seq not in counts)  # unlike the heads, whose dim is told by its size
        self.mask, self.weights, position_ids, more = _Opaque(), _Opaque(), _Opaque(), _Opaque()
        self.x = self.labels(BATCH, self.seq, config.hidden_size)
        self.tables = _Tables((self.labels(BATCH, self.seq, 2), self.labels(BATCH, self.seq, 2)))
        given = dict(hidden_states=self.x, attention_mask=self.mask, position_embeddings=self.tables, position_ids=position_ids)
        self.layer = _Looked(self.module, (), self)
        forward = self.rewired(type(self.module).forward)
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if unknown := next((name for name in names if name not in given and name not in UNUSED), None):
            raise Unknown(f"its forward takes {unknown}")
        passed = {name: given.get(name) for name in names}
        returned = forward(self.layer, **passed, **(dict(sp_overlap=more) if takes_more else {}))
        if not self.attended:
            raise Unknown("its forward calls no attention function")
        ((q, k, v), options), output = self.attended[0], self._output(returned)
        found = {kind: self._source(x.transpose(1, 2)) for kind, x in (("q", q), ("k", k), ("v", v))}
        turned = {kind for kind, (_, rotated) in found.items() if rotated}
        if found["v"][0].norm is not None or turned not in (set(), {"q", "k"}) or len({x.shape[-1] for x in (q, k, v)}) > 1:
            raise Unknown("q and k are not alike, or v is like them")
        names = [out.name for out in self.outs]
        if not self.used.issuperset(names):
            raise Unknown("its forward calls more than projections and norms")
        chains = {source.chain for source, _ in found.values()}
        if again := next((part for chain in chains for part in chain if names.count(part) > 1), None):
            raise Unknown(f"its forward calls {again} more than once")
        if len(shared := [part for chain in chains for part in chain]) > len(set(shared)):
            raise Unknown("q, k and v share some of what is in front of their projections")
        options = {name: x for name, x in options.items() if x is not position_ids}
        passes = options.pop("sp_overlap", None) is more
        own = [parameter for parameter in self.module.parameters(recurse=False) if _shape(parameter)[:1] == (q.shape[1],)]
        per_head = tuple(name for name, x in options.items() if any(x is parameter for parameter in own))
        if any(isinstance(x, (Tensor, _Opaque, _Looked, _Child)) for name, x in options.items() if name not in per_head):
            raise Unknown("its attention takes more than q, k and v")
        sources = {kind: source for kind, (source, _) in found.items()}
        if len({source.last for source in sources.values() if source.norm is not None}) > 1:
            raise Unknown("q and k are not alike")
        return Reading(sources, q.shape[-1], self._turning(q.shape[-1]) if turned else None, output, options, per_head, passes)

    def _turning(self, head_dim: int) -> dict[str, Any]:
        """Keywords of the layer's `Rotary`."""
        try:
            first, *others = (rotary_of(*call, self.seq) for call in self.rotations)
        except LookupError:
            raise Unknown(f"{self.rotations[0][0].__name__} is no rotary embedding that is known here") from None
        if any(other != first for other in others):
            raise Unknown("q and k are not alike")
        return {**first, "partial": first["partial"] or any(out.labels.shape[-1] < head_dim for out in self.rotated)}

    def _output(self, returned: Any) -> str:
        """Name of the output projection."""
        last = self.outs[-1]
        self.used = {last.name}
        if not isinstance(returned, tuple) or len(returned) != 2 or returned[1] is not self.weights:
            raise Unknown("its forward doesn't return (output, attention weights)")
        if not torch.equal(returned[0], last.labels):
            raise Unknown(f"{last.name} is not the last that is computed")
        if last.given is None or not torch.equal(last.given, self.o.flatten(2)):
            raise Unknown(f"{last.name} is not given the output of attention as it is")
        return last.name

    def _source(self, heads: Tensor) -> tuple[Source, bool]:
        """Where ``heads`` [b, s, h, d] come from, and whether they are rotated."""
        norm, behind = self._unnormed(heads)
        heads = heads if norm is None else behind
        unrotated = self._unrotated(heads)
        rotated, last, heads = unrotated is not None, norm is not None, heads if unrotated is None else unrotated
        if norm is None:
            norm, before = self._unnormed(heads)
            heads = heads if norm is None else before
        out = self._out_of(heads)
        at = out.find(heads)
        rows = at % out.labels.shape[-1]
        token = at // out.labels.shape[-1]
        first = rows[0, 0, :, 0]
        in_place = token == torch.arange(BATCH * self.seq).view(BATCH, self.seq, 1, 1)
        if (at < 0).any() or not in_place.all() or (rows != first[:, None] + torch.arange(heads.shape[-1])).any():
            raise Unknown("heads are not rows of a projection")
        chain = [out]
        while chain[0].given is not self.x:
            earlier = [other for other in self.outs if other.labels is chain[0].given]
            if not earlier:
                raise Unknown(f"{chain[0].name} is not given the hidden states as they are")
            chain[:0] = earlier
        names = tuple(link.name for link in chain)
        self.used.update(names)
        return Source(names, tuple(first.tolist()), norm, last and rotated), rotated

    def _out_of(self, heads: Tensor) -> _Out:
        for out in self.outs:
            if (out.find(heads[:1, :1, :1, :1]) >= 0).all():
                return out
        raise Unknown("its forward computes with q, k or v what is not known here")

    def _unnormed(self, heads: Tensor) -> tuple[str | None, Tensor]:
        """Name of a norm over each of ``heads`` [b, s, h, d], and what was given to it; None if there is none."""
        for out in self.outs:
            if out.given is None or out.given.shape[-1] != heads.shape[-1] or (before := out.rows(heads, 1)) is None:
                continue
            norm, size = getattr(self.module, out.name), heads.shape[-1:]
            alike = not any(norm.children()) and all(_shape(parameter) == size for parameter in norm.parameters())
            if not alike or "norm" not in type(norm).__name__.lower():
                raise Unknown(f"{out.name} is no norm that is alike for all heads")
            self.used.add(out.name)
            return out.name, before
        return None, heads

    def _unrotated(self, heads: Tensor) -> Tensor | None:
        """``heads`` [b, s, h, d] as they were before their first dims were rotated; None if they were not."""
        for out in self.rotated:
            at, width = out.find(heads), out.labels.shape[-1]
            if (at < 0).all():
                continue
            shape = out.labels.shape[:-1]
            batch, *places = torch.unravel_index(at[..., :width] // width, shape)
            place = places[0 if shape[1] == self.seq else 1]
            turned = (at[..., :width] >= 0).all() and (at[..., :width] % width == torch.arange(width)).all()
            in_place = (place == torch.arange(self.seq).view(1, -1, 1, 1)).all() and (batch == batch[..., :1]).all()
            if not turned or not in_place or (at[..., width:] >= 0).any():
                raise Unknown("its forward rotates other dims than the first")
            assert out.given is not None
            return torch.cat((out.given.flatten()[at[..., :width]], heads[..., width:]), -1)
        return None
