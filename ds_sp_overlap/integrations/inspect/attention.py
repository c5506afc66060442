"""transformers: what the forward of an attention layer computes, told from runs on labels
(`symbolic_trace`).

All that a forward does is accounted for, or the layer is not known. So a layer is known by what it
computes, however that is spelt, in whatever class and whichever version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .accounting import MISSING, Unknown, is_plain
from .probe import Probed
from .rotary_function import rotary_of
from .symbolic_trace import Out, Run, cases
from .tokenwise import TRANSFORMERS, held, own_call, try_out


@dataclass(frozen=True)
class Source:
    """Where q, k or v of a layer comes from.

    chain   names of the modules that the hidden states go through, a linear layer last; behind it
            maybe a norm over all heads
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
        return list(
            dict.fromkeys(
                [*(part for source in self.sources.values() for part in source.chain), self.output]
            )
        )

    def first_rows(self, fused: bool) -> dict[str, tuple[int, ...]] | None:
        """As `SelfAttention` takes it, with one projection for q, k and v, or one for each."""
        rows = [source.rows for source in self.sources.values()]
        each = [sum(rows, ())] if fused else rows
        in_order = all(
            one == tuple(range(0, len(one) * self.head_dim, self.head_dim)) for one in each
        )
        return None if in_order else {kind: source.rows for kind, source in self.sources.items()}


@dataclass(frozen=True)
class Read:
    """Keep what a layer's forward computes, and what it found where it looked.

    looked   attributes, by their names from the layer on
    names    globals
    norms    by name, what may not change in them
    """

    reading: Any
    looked: list[tuple[tuple[Any, ...], Any]]
    names: list[tuple[dict[str, Any], str, Any]]
    norms: dict[str, list[tuple]]

    def changed(self, module: Any) -> list[str]:
        """What it looked at that is something else now, or in ``module``."""
        looked = [
            ".".join(map(str, path)) for path, value in self.looked if changed(module, path, value)
        ]
        looked += [
            name for name, before in self.norms.items() if held(getattr(module, name)) != before
        ]
        return looked + [
            name for known, name, value in self.names if known.get(name, MISSING) is not value
        ]


class Reader:
    """Reads a layer, and again whenever something that its forward looked at has changed.

    known    readers of other layers, to which it is added; a layer that is like one of theirs is
             not read again
    probed   what came of it in the layers' first calls
    """

    def __init__(self, where: str, module: Any, known: list[Reader] | None = None):
        known = [] if known is None else known
        self.where, self._form, self.probed = where, _form(module), Probed()
        self.readings: dict[bool, Read]
        if like := next((reader for reader in known if reader._serves(module, self._form)), None):
            self.readings, self.probed = dict(like.readings), like.probed
            return
        self.readings = {training: self._run(module, training) for training in (True, False)}
        if self.readings[True].reading != self.readings[False].reading:
            raise Unknown("its forward is another one in evaluation")
        known.append(self)

    def _serves(self, module: Any, form: tuple) -> bool:
        """Whether ``module`` of this ``form`` is like the one that was read, in all that its
        forward looks at.
        """
        return self._form == form and not any(
            read.changed(module) for read in self.readings.values()
        )

    @property
    def reading(self) -> Any:
        return self.readings[True].reading

    def read(self, module: Any, training: bool) -> Read:
        """What a layer's forward computes in every case, and what it looked at. Raises Unknown."""
        return _read(module, training)

    def _run(self, module: Any, training: bool) -> Read:
        """Read a layer without a trace; whatever its code raises is Unknown."""
        if own_call(module):
            raise Unknown("it has a __call__ of its own")
        try:
            with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(()):
                return self.read(module, training)
        except Unknown:
            raise
        except Exception as error:  # of any kind: of code that was not made for labels
            what = f"{type(error).__name__}: {error}"
            raise Unknown(f"its forward computes what is not known here ({what})") from error

    def now(self, module: Any) -> Any:
        """The reading as of now. Raises RuntimeError if the layer computes something else than
        before.
        """
        read = self.readings[module.training]
        if seen := read.changed(module):  # guard: read again where something changed
            now, reason = None, ""
            try:
                now = self._run(module, module.training)
            except Unknown as error:
                reason = f" ({error})"
            if now is None or now.reading != read.reading:
                raise RuntimeError(
                    f"{self.where}: {type(module).__name__} computes something else since {', '.join(dict.fromkeys(seen))} "
                    f"changed{reason}; call ds_sp_overlap.enable again"
                )
            self.readings[module.training] = read = now
        return read.reading

    def options(self, module: Any) -> dict[str, Any]:
        """Keywords of the attention function, as of now. Raises RuntimeError as `now` does."""
        return self.now(module).options


def changed(module: Any, path: tuple[Any, ...], value: Any) -> bool:
    """Whether something else than ``value`` is found now at ``path``: of names, and of places as
    tuples of one.
    """
    for name in path:
        if isinstance(name, tuple):
            try:
                module = module[name[0]]
            except (LookupError, TypeError):
                module = MISSING
        else:
            module = getattr(module, name, MISSING)
    return module is not value and (isinstance(value, Tensor) or module != value)


def _form(module: Any) -> tuple:
    """What a reading goes by beside what it looks at: the modules, and the shapes of what they
    learn.
    """
    shapes = {name: _shape(parameter) for name, parameter in module.named_parameters()}
    return [
        (name, type(part), getattr(part, "out_features", None))
        for name, part in module.named_modules()
    ], shapes


def _shape(parameter: Tensor) -> tuple[int, ...]:
    """Of the whole parameter, which ZeRO-3 may have taken into parts."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _read(module: Any, training: bool) -> Read:
    keywords: set[str] = set()
    readings: list[Reading] = []
    looked: dict[Any, Any] = {}
    names: dict[Any, Any] = {}
    for case in cases(training):
        run = Run(module, case, keywords if case.told else set())
        readings.append(_Interpreter(run).reading())
        looked.update(((path, type(value)), (path, value)) for path, value in run.looked)
        names.update(((id(known), name), (known, name, value)) for known, name, value in run.names)
        keywords |= run.constants
    first = readings[0]
    if any(
        reading != first or not _same(reading.options, first.options) for reading in readings
    ):  # guard: in every case
        raise Unknown(
            "its forward is another one without a mask, for other tokens or in another dtype"
        )
    norms = {
        source.norm: held(getattr(module, source.norm))
        for source in first.sources.values()
        if source.norm is not None
    }
    return Read(first, list(looked.values()), list(names.values()), norms)


def _same(options: dict[str, Any], others: dict[str, Any]) -> bool:
    alike = options.keys() == others.keys()
    return alike and all(
        x is others[name] or not isinstance(x, Tensor) and x == others[name]
        for name, x in options.items()
    )


class _Interpreter:
    """Follows labels back from where they turned up to where they came from.

    used   names of the children that are accounted for
    """

    def __init__(self, run: Run):
        self.run, self.used = run, set[str]()

    def reading(self) -> Reading:
        run, output = self.run, self._output()
        found = {
            kind: self._source(x.transpose(1, 2))
            for kind, x in (("q", run.q), ("k", run.k), ("v", run.v))
        }
        sources = {kind: source for kind, (source, _) in found.items()}
        turned = {kind for kind, (_, rotated) in found.items() if rotated}
        alike = (
            turned in (set(), {"q", "k"}) and len({x.shape[-1] for x in (run.q, run.k, run.v)}) == 1
        )
        alike = (
            alike
            and len({source.last for source in sources.values() if source.norm is not None}) < 2
        )
        if not alike or sources["v"].norm is not None:
            raise Unknown("q and k are not alike, or v is like them")
        self._check_calls({source.chain for source in sources.values()})
        told = (None, run.position_ids)  # which attention finds by itself
        options = {
            name: x
            for name, x in run.options.items()
            if not (name == "position_ids" and any(x is each for each in told))
        }
        passed = [options.pop(name, None) is x for name, x in run.more.items()]
        if any(passed) and not all(passed):  # guard: keywords are passed on
            raise Unknown(f"its forward uses the keyword {[*run.more][passed.index(False)]}")
        own = [
            parameter
            for parameter in run.module.parameters(recurse=False)
            if _shape(parameter)[:1] == (run.q.shape[1],)
        ]
        per_head = tuple(
            name for name, x in options.items() if any(x is parameter for parameter in own)
        )
        if not all(is_plain(x) for name, x in options.items() if name not in per_head):
            raise Unknown("its attention takes more than q, k and v")
        self._check_learned(own, options)
        return Reading(
            sources,
            run.q.shape[-1],
            self._rotary() if turned else None,
            output,
            options,
            per_head,
            any(passed),
        )

    def _check_learned(self, own: list[Tensor], options: dict[str, Any]) -> None:
        """Raises Unknown for a parameter or a buffer that the forward does nothing with: it might,
        one day or by another way.
        """
        passed = [x for x in options.values() if isinstance(x, Tensor)]
        for name, x in (*self.run.module.named_parameters(), *self.run.module.named_buffers()):
            if name.split(".")[0] not in self.used and not any(
                x is each for each in passed
            ):  # guard: all that learns is known
                raise Unknown(f"its forward does nothing that is known here with {name}")

    def _check_calls(self, chains: set[tuple[str, ...]]) -> None:
        """Raises Unknown for a child that is not accounted for, or would be called more often than
        it was, or less.
        """
        names = [out.name for out in self.run.outs]
        if not self.used.issuperset(names):
            raise Unknown("its forward calls more than projections and norms")
        parts = [part for chain in chains for part in chain]
        if again := next((part for part in parts if names.count(part) > 1), None):
            raise Unknown(f"its forward calls {again} more than once")
        if len(parts) > len(set(parts)):
            raise Unknown("q, k and v share some of what is in front of their projections")

    def _rotary(self) -> dict[str, Any]:
        """Keywords of the layer's `Rotary`."""
        try:
            first, *others = (rotary_of(*call) for call in self.run.rotations)
        except (LookupError, Unknown) as error:
            reason = f" ({error})" if isinstance(error, Unknown) else ""
            raise Unknown(
                f"{self.run.rotations[0][0].__name__} is no rotary embedding that is known here{reason}"
            ) from None
        if any(other != first for other in others):
            raise Unknown("q and k are not alike")
        narrow = any(out.labels.shape[-1] < self.run.q.shape[-1] for out in self.run.rotated)
        return {**first, "partial": first["partial"] or narrow}

    def _output(self) -> str:
        """Name of the output projection."""
        last, returned = self.run.outs[-1], self.run.returned
        self.used.add(last.name)
        if (
            not isinstance(returned, tuple)
            or len(returned) != 2
            or returned[1] is not self.run.weights
        ):
            raise Unknown("its forward doesn't return (output, attention weights)")
        if not torch.equal(returned[0], last.labels):
            raise Unknown(f"{last.name} is not the last that is computed")
        if not torch.equal(last.given, self.run.o.flatten(2)):
            raise Unknown(f"{last.name} is not given the output of attention as it is")
        return last.name

    def _source(self, heads: Tensor) -> tuple[Source, bool]:
        """Where ``heads`` [b, s, h, d] come from, and whether they are rotated."""
        norm, behind = self._unnormed(heads)
        heads = heads if norm is None else behind
        unrotated = self._unrotated(heads)
        rotated, last, heads = (
            unrotated is not None,
            norm is not None,
            heads if unrotated is None else unrotated,
        )
        if norm is None:
            norm, before = self._unnormed(heads)
            heads = heads if norm is None else before
        out = self._out_of(heads)
        at = out.find(heads)
        rows = at % out.labels.shape[-1]
        token = at // out.labels.shape[-1]
        first = rows[0, 0, :, 0]
        in_place = token == torch.arange(self.run.batch * self.run.seq).view(
            self.run.batch, self.run.seq, 1, 1
        )
        if (
            (at < 0).any()
            or not in_place.all()
            or (rows != first[:, None] + torch.arange(heads.shape[-1])).any()
        ):
            raise Unknown("heads are not rows of a projection")
        chain = [out]
        while not torch.equal(given := chain[0].given, self.run.x):
            earlier = [other for other in self.run.outs if torch.equal(other.labels, given)]
            if not earlier:
                raise Unknown(f"{chain[0].name} is not given the hidden states as they are")
            chain[:0] = earlier
        names = tuple(link.name for link in chain)
        self.used.update(names)
        return Source(names, tuple(first.tolist()), norm, last and rotated), rotated

    def _out_of(self, heads: Tensor) -> Out:
        for out in self.run.outs:
            if (out.find(heads[:1, :1, :1, :1]) >= 0).all():
                return out
        raise Unknown("its forward computes with q, k or v what is not known here")

    def _unnormed(self, heads: Tensor) -> tuple[str | None, Tensor]:
        """Name of a norm over each of ``heads`` [b, s, h, d], and what was given to it; None if
        there is none.
        """
        for out in self.run.outs:
            if (before := out.rows(heads)) is None:
                continue
            norm, size = getattr(self.run.module, out.name), heads.shape[-1:]
            alike = not any(norm.children()) and all(
                _shape(parameter) == size for parameter in norm.parameters()
            )
            if not alike or "norm" not in type(norm).__name__.lower():
                raise Unknown(f"{out.name} is no norm that is alike for all heads")
            if out.name not in self.used:
                self.run.names += try_out(
                    out.name, norm, size[0], TRANSFORMERS, norm=True
                )  # guard: a norm of each head by itself
            self.used.add(out.name)
            return out.name, before
        return None, heads

    def _unrotated(self, heads: Tensor) -> Tensor | None:
        """``heads`` [b, s, h, d] as they were before their first dims were rotated; None if they
        were not.
        """
        for out in self.run.rotated:
            at, width = out.find(heads), out.labels.shape[-1]
            if (at < 0).all():
                continue
            shape = out.labels.shape[:-1]
            batch, *places = torch.unravel_index(at[..., :width] // width, shape)
            place = places[0 if shape[1] == self.run.seq else 1]
            turned = (at[..., :width] >= 0).all() and (
                at[..., :width] % width == torch.arange(width)
            ).all()
            in_place = (place == torch.arange(self.run.seq).view(1, -1, 1, 1)).all() and (
                batch == batch[..., :1]
            ).all()
            if not turned or not in_place or (at[..., width:] >= 0).any():
                raise Unknown("its forward rotates other dims than the first")
            return torch.cat((out.given.flatten()[at[..., :width]], heads[..., width:]), -1)
        return None
