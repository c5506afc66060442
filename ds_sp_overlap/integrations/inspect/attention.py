"""Determines from symbolic traces what the forward of a transformers attention layer computes.

A `Reading` describes the computation completely, since a trace checks everything that the forward
does (`accounting`). So this package recognises a layer by its computation, whatever its source
code, its class and the version of transformers are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...attention.unobserved import unobserved
from ...rotary import Rotary
from .accounting import Code, LoadedGlobal, Unknown, is_plain
from .library import MISSING, Keywords, own_class, whole_shape
from .probe import ProbeSchedule
from .rotary_function import rotary_of
from .symbolic_trace import CASES, ROTATION, Case, Lookup, Trace, TracedOutput
from .tensor_parallel import out_features
from .tokenwise import has_own_call, probe_tokenwise


@dataclass(frozen=True)
class Source:
    """Describes how a layer computes q, k or v.

    Attributes:
        chain: The names of the modules through which the hidden states pass, in order. The last
            module is a linear layer, or a norm over all heads after a linear layer.
        rows: The index of the first feature of each head in the output of the chain.
        norm: The name of a norm over the d dims of each head; None if there is none.
        is_rotated: Whether RoPE rotates the heads.
        last: Whether the norm comes after the rotation; False without a norm or a rotation.
    """

    chain: tuple[str, ...]
    rows: tuple[int, ...]
    norm: str | None = None
    is_rotated: bool = field(default=False, compare=False)
    last: bool = False


@dataclass(frozen=True)
class Reading:
    """Describes a layer's forward: attention over q, k, v, then an output projection.

    `transformers.driven` makes a `SelfAttention` from a reading.

    Attributes:
        sources: How each of "q", "k" and "v" is computed.
        head_dim: d.
        rotary: The `Rotary` for q and k; None if they are not rotated.
        output: The name of the output projection.
        per_head: Names of parameters of the layer that have one slice for each query head, by the
            keyword with which the forward passes the parameter to the attention function.
        passes_keywords: Whether the forward passes further keywords on to the attention function.
        options: The constant keywords that the forward passes to the attention function, in
            training (True) and in evaluation (False).
        lookups: The attributes that the forward looked up.
        loaded_globals: The globals that the code of the forward names.
    """

    sources: dict[str, Source]
    head_dim: int
    rotary: Rotary | None
    output: str
    per_head: dict[str, str]
    passes_keywords: bool
    options: dict[bool, Keywords] = field(compare=False)
    lookups: Collection[Lookup] = field(compare=False)
    loaded_globals: Collection[LoadedGlobal] = field(compare=False)

    @property
    def heads(self) -> tuple[int, int]:
        """Return the numbers of query heads and KV heads."""
        return len(self.sources["q"].rows), len(self.sources["k"].rows)

    @property
    def children(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the modules to pass to `SelfAttention`, by keyword.

        If a keyword has several modules, they are called in this order.
        """
        children = {f"{kind}_proj": source.chain for kind, source in self.sources.items()}
        if len(set(children.values())) == 1:
            children = {"qkv_proj": children["q_proj"]}
        children["o_proj"] = (self.output,)
        for kind, source in self.sources.items():
            if source.norm is not None:
                children[f"{kind}_norm"] = (source.norm,)
        return children

    @property
    def first_rows(self) -> dict[str, tuple[int, ...]] | None:
        """Return the first row of each head in its projection, by kind ("q", "k", "v").

        None if the heads are adjacent and in order, the default of `SelfAttention`.
        """
        rows_by_kind = {kind: source.rows for kind, source in self.sources.items()}
        projections = list(rows_by_kind.values())
        # By default, a fused projection has the rows of q, then k, then v.
        if "qkv_proj" in self.children:
            projections = [sum(projections, ())]
        for rows in projections:
            if rows != tuple(range(0, len(rows) * self.head_dim, self.head_dim)):
                return rows_by_kind
        return None

    def changed(self, module: Any) -> list[str]:
        """Return the names of the attributes and globals that have other values for ``module``.

        `Reader.options` calls this method in each call of the layer. `Reader` also calls it to find
        out whether the reading of one layer describes another layer.
        """
        names = [".".join(path) for path, value in self.lookups if has_changed(module, path, value)]
        return names + [loaded.name for loaded in self.loaded_globals if loaded.has_changed()]


class Reader:
    """Determines the `Reading` of a layer; if the layer changes later, determines it again.

    In `enable`, `transformers.layers` makes one `Reader` for each attention layer.

    Args:
        where: The layer's name.
        module: The layer.
        known: The readers of other layers. If the reading of one also describes this layer, the new
            reader shares that reading. Otherwise, the new reader is added to the list.

    Attributes:
        reading: What the layer's forward computes.
        probes: The schedule of probes, which layers with the same reading share.

    Raises:
        Unknown: if it can't be determined what the layer's forward computes.
    """

    def __init__(self, where: str, module: Any, known: list[Reader]):
        self.where, self._form, self.probes = where, _form(module), ProbeSchedule()
        self.reading: Reading
        # Layers that are alike are traced and probed only once.
        for reader in known:
            if reader._form == self._form and not reader.reading.changed(module):
                self.reading, self.probes = reader.reading, reader.probes
                return
        self.reading = _read(module)
        known.append(self)

    def options(self, module: Any) -> Keywords:
        """Return the attention function's keywords for this call; each call of the layer calls it.

        Raises:
            RuntimeError: on this rank, if the layer's computation has changed since `enable`.
        """
        if changes := self.reading.changed(module):  # guard: read again where something changed
            now, reason = None, ""
            try:
                now = _read(module)
            except Unknown as error:
                reason = f" ({error})"
            if now is None or now != self.reading:
                names = ", ".join(dict.fromkeys(changes))
                raise RuntimeError(
                    f"{self.where}: {type(module).__name__} computes something else since {names} "
                    f"changed{reason}; call ds_sp_overlap.enable again"
                )
            self.reading = now
        parameters = {key: getattr(module, name) for key, name in self.reading.per_head.items()}
        return {**self.reading.options[module.training], **parameters}


def has_changed(module: Any, path: tuple[str, ...], value: Any) -> bool:
    """Return whether the attribute at ``path`` of ``module`` now has another value than ``value``.

    Path and value are those of a `Lookup`.
    """
    for step in path:
        if step == "__class__":
            module = own_class(type(module))
        else:
            module = getattr(module, step, MISSING)
    if module is value:
        return False
    # A different tensor is a change, whatever its values are. So is a parameter in place of a
    # constant, since training changes a parameter. (``!=`` with a tensor would return a tensor.)
    return isinstance(module, Tensor) or isinstance(value, Tensor) or module != value


def _form(module: Any) -> tuple:
    """Return the classes and output widths of a layer's modules, and the shapes of its parameters.

    Layers may share a reading only if all of these are equal.
    """
    parts = []
    for name, part in module.named_modules():
        parts.append((name, own_class(type(part)), out_features(part)))
    return parts, {name: whole_shape(parameter) for name, parameter in module.named_parameters()}


def _read(module: Any) -> Reading:
    """Determine the `Reading` of a layer on the CPU; raise Unknown for any error.

    torch's random state stays as it was.
    """
    if has_own_call(module):
        raise Unknown("it has a __call__ of its own")
    try:
        with unobserved(torch.device("cpu"), backward=True), torch.device("cpu"):
            return _read_cases(module)
    except Unknown:
        raise
    except Exception as error:  # Code that is not written for labels may raise any error.
        message = f"{type(error).__name__}: {error}"
        raise Unknown(f"its forward computes what is not known here ({message})") from error


def _read_cases(module: Any) -> Reading:
    """Determine the `Reading` of a layer, the same in all `CASES`, with the lookups of all cases.

    Raises:
        Unknown: if two cases give different readings.
    """
    code, keywords = Code(own_class(type(module))), set[str]()
    lookups = {}
    rotary = functools.cache(rotary_of)  # cached, since all cases pass the same arguments
    first, options, is_optional = None, dict[bool, Keywords](), False
    # The last case has no tables of RoPE, so the forward may omit the rotation (`is_optional`).
    # This case has position_ids, so that Unknown is raised for a forward that computes tables from
    # position_ids.
    for case in [*CASES, Case(True, True, True, gives_tables=False)]:
        try:
            given = keywords if case.gives_optional else set()
            trace = _Interpreted(module, case, code, given)
        except Unknown:
            raise
        except Exception:
            if case.gives_tables:
                raise
            break  # This forward always rotates: it fails to unpack None into cos and sin.
        reading = trace.reading(rotary)
        of_case = reading.options[case.training]
        first = first or reading
        is_optional = not case.gives_tables and reading.rotary is None
        if is_optional:
            reading = dataclasses.replace(reading, rotary=first.rotary)
        same = reading == first and of_case == options.setdefault(case.training, of_case)
        if not same:  # guard: in every case
            raise Unknown(
                "its forward is another one in evaluation, without a mask or for other tokens"
            )
        for path, value in trace.lookups:
            lookups[path, type(value)] = path, value
        # Later cases also pass a keyword for each identifier among the strings in the code.
        keywords |= code.words - trace.options.keys()
    assert first is not None
    first = dataclasses.replace(first, options=options, lookups=lookups.values())
    if is_optional and first.rotary is not None:
        optional = dataclasses.replace(first.rotary, optional=True)
        first = dataclasses.replace(first, rotary=optional)
    for name in sorted({source.norm for source in first.sources.values() if source.norm}):
        probe_tokenwise(name, getattr(module, name), first.head_dim)
    return first


class _Interpreted(Trace):
    """Follows the labels of a trace backwards, from the results to the inputs.

    `reading` returns what the forward computes. All other methods are helpers of `reading`. They
    raise Unknown for anything that a `Reading` can't express.

    Attributes:
        used: The names of the layer's children whose role in the computation is known.
        covered: The rows of each projection that belong to a head of q, k or v.
    """

    def reading(self, rotary_of: Callable) -> Reading:
        """Return the reading of the forward, with the options of this case.

        Args:
            rotary_of: The function `rotary_function.rotary_of`, or a cached version.

        Raises:
            Unknown: if a `Reading` can't express the computation.
        """
        self.used, self.covered = {ROTATION}, dict[str, set[int]]()
        output, heads = self._output(), {"q": self.q, "k": self.k, "v": self.v}
        sources = {kind: self._source(x.transpose(1, 2)) for kind, x in heads.items()}
        rotated = [kind for kind, source in sources.items() if source.is_rotated]
        head_dims = {x.shape[-1] for x in heads.values()}
        norms_last = {source.last for source in sources.values() if source.norm}
        # `SelfAttention` rotates either both q and k or neither, applies both norms before or both
        # after the rotation, and does neither to v.
        alike = rotated in ([], ["q", "k"]) and len(head_dims) == 1 and len(norms_last) < 2
        if not alike or sources["v"].norm:
            raise Unknown("q and k are not alike, or v is like them")
        self._check_calls({source.chain for source in sources.values()})
        options = dict(self.options)
        # The overlapped attention ignores position_ids, so the layer may pass them.
        if options.get("position_ids") is None or options["position_ids"] is self.position_ids:
            options.pop("position_ids", None)
        passed = [options.pop(name, None) is x for name, x in self.further_keywords.items()]
        if any(passed) and not all(passed):  # guard: keywords are passed on
            keyword = [*self.further_keywords][passed.index(False)]
            raise Unknown(f"its forward uses the keyword {keyword}")
        per_head = {}
        for name, parameter in self.module.named_parameters(recurse=False):
            for keyword, option in options.items():
                # The option is a parameter of the layer itself, with an entry for each query head.
                if option is parameter and whole_shape(option)[:1] == (self.q.shape[1],):
                    per_head[keyword] = name
        constants = {key: value for key, value in options.items() if key not in per_head}
        if not all(map(is_plain, constants.values())):
            raise Unknown("its attention takes more than q, k and v")
        self.used.update(per_head.values())
        for name, _ in (*self.module.named_parameters(), *self.module.named_buffers()):
            # The forward might use an unused parameter or buffer in another call.
            if name.split(".")[0] not in self.used:  # guard: all that learns is known
                raise Unknown(f"its forward does nothing that is known here with {name}")
        return Reading(
            sources,
            self.q.shape[-1],
            self._rotary(rotary_of) if rotated else None,
            output=output,
            per_head=per_head,
            passes_keywords=any(passed),
            options={self.training: constants},
            lookups=self.lookups,
            loaded_globals=self.code.loaded_globals.values(),
        )

    def _check_calls(self, chains: set[tuple[str, ...]]) -> None:
        """Raise Unknown if the forward calls its children in another way than `SelfAttention`.

        `SelfAttention` calls each projection and norm once, and uses all rows of a projection.

        Args:
            chains: The different chains of q, k and v (`Source.chain`).
        """
        called = [output.name for output in self.outputs]
        if not self.used.issuperset(called):
            raise Unknown("its forward calls more than projections and norms")
        names = [name for chain in chains for name in chain]
        for name in names:
            if called.count(name) > 1:
                raise Unknown(f"its forward calls {name} more than once")
        if len(names) > len(set(names)):
            raise Unknown("q, k and v share some of what is in front of their projections")
        for output in self.outputs:
            rows = self.covered.get(output.name)
            if rows is not None and len(rows) < output.labels.shape[-1]:
                raise Unknown(f"its forward leaves out rows of {output.name}")

    def _rotary(self, rotary_of: Callable) -> Rotary:
        """Return the layer's `Rotary`; raise Unknown if rotary calls differ."""
        found = []
        for call in self.rotations:
            try:
                found.append(rotary_of(*call))
            except (LookupError, Unknown) as error:
                reason = f" ({error})" if isinstance(error, Unknown) else ""
                name = getattr(call[0], "__name__", type(call[0]).__name__)
                raise Unknown(f"{name} is no rotary embedding that is known here{reason}") from None
        first = found[0]
        if any(other != first for other in found):
            raise Unknown("q and k are not alike")
        # To rotate only some dims of a head, the forward may pass only these dims to the function.
        widths = [x.labels.shape[-1] for x in self.outputs if x.name == ROTATION]
        narrow = min(widths) < self.q.shape[-1]
        return dataclasses.replace(first, partial=first.partial or narrow)

    def _output(self) -> str:
        """Return the name of the output projection, the child that was called last.

        Raises:
            Unknown: if the child's input is not o [b, s, h * d], or the forward doesn't return
                (the child's output, attention weights).
        """
        last = [output for output in self.outputs if output.name != ROTATION][-1]
        returned = self.returned
        self.used.add(last.name)
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        if not is_pair or returned[1] is not self.weights:
            raise Unknown("its forward doesn't return (output, attention weights)")
        if not torch.equal(returned[0], last.labels):
            raise Unknown(f"{last.name} is not the last that is computed")
        if not torch.equal(last.input, self.o.flatten(2)):
            raise Unknown(f"{last.name} is not given the output of attention as it is")
        return last.name

    def _source(self, heads: Tensor) -> Source:
        """Return how ``heads`` [b, s, h, d] are computed."""
        # Backwards from attention, find a norm, the rotation, or both in either order.
        steps, size = list[str](), heads.shape[-1]
        while True:
            first = heads[0, 0, 0, 0]
            output = next((x for x in self.outputs if (x.labels == first).any()), None)
            if output is None:
                raise Unknown("its forward computes with q, k or v what is not known here")
            rows = output.rows_of(heads)
            if rows is None:
                break
            self._check_step(output, rows, size)
            steps.append(output.name)
            heads = output.before(heads, rows)
        norms, is_rotated = [name for name in steps if name != ROTATION], ROTATION in steps
        if len(norms) > 1 or steps.count(ROTATION) > 1:
            raise Unknown("its forward rotates or normalises q or k more than once")
        # The projection.
        labels = output.labels.view(self.batch, self.seq, -1)
        first_rows = heads[0, 0, :, 0] - labels[0, 0, 0]
        # All runs of d successive rows. A head that would go past the last row equals none of them.
        runs = labels.unfold(-1, size, 1)
        if not torch.equal(runs[:, :, first_rows % runs.shape[2]], heads):
            raise Unknown("a head is not d successive rows of one projection, at its own token")
        rows = first_rows[:, None] + torch.arange(size)
        self.covered.setdefault(output.name, set()).update(rows.flatten().tolist())
        # Add the modules between the hidden states and the projection.
        chain = [output]
        while not torch.equal(chain[0].input, self.x):
            earlier = [x for x in self.outputs if torch.equal(x.labels, chain[0].input)]
            if not earlier:
                raise Unknown(f"{chain[0].name} is not given the hidden states as they are")
            chain[:0] = earlier
        names = tuple(part.name for part in chain)
        if ROTATION in names:
            raise Unknown("its forward rotates more than heads of q and k")
        self.used.update(names, norms)
        is_last, norm = is_rotated and steps[:1] == norms, norms[0] if norms else None
        return Source(names, tuple(first_rows.tolist()), norm, is_rotated, is_last)

    def _check_step(self, output: TracedOutput, rows: Tensor, size: int) -> None:
        """Check that an output is that of a rotation, or of a norm over each head.

        Args:
            output: The output, which has the shape of its input.
            rows: [b, s, h]. For each head, its row of ``output`` (`TracedOutput.rows_of`).
            size: The head dim.

        Raises:
            Unknown: if the output is neither, or if the rotated heads are those of other tokens.
        """
        if output.name == ROTATION:
            # The dims before the last are the batch, then heads and sequence in either order.
            shape, seq = output.labels.shape[:-1], self.seq
            token = torch.unravel_index(rows, shape)[1 if shape[1] == seq else 2]
            if (token != torch.arange(seq).view(1, -1, 1)).any():
                raise Unknown("its forward rotates heads of other tokens")
            return
        norm = getattr(self.module, output.name)
        alike = all(whole_shape(parameter) == (size,) for parameter in norm.parameters())
        is_norm = "norm" in type(norm).__name__.lower() and not any(norm.children())
        if not alike or not is_norm or output.labels.shape[-1] != size:
            raise Unknown(f"{output.name} is no norm that is alike for all heads")
