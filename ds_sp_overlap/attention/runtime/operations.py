"""Turns the steps of a schedule into operations on named values.

An operation is a function of this module, to which is bound whatever is known beforehand. It takes
the call, and then the values that it reads. Their names, for group g:

    ("x",)                the layer's input, then as autocast casts it
    ("rows",)             x as a matrix, with a row for each token
    ("parameter", i)      as in `Projections.parameters`
    ("table", i)          cos and sin
    ("heads", "q", g)     q as projected, in front of norm and rotation
    ("value", "q", g)     q, k, v or o: local, then received; or received, then local
    ("merged", g)         local o as the output projection reads it
    ("weight",)           of the output projection; ("bias",) its bias
    ("y",)                the layer's output
    ("learned", i)        as in `LocalAttention.learned`
    ("attended", g)       what the backward of local attention needs; ("kept", g) its tensors
    ("d", ..)             the gradient of what has this name
    ("d rows",)           dy as a matrix
    ("d heads", "q", g)   the gradient of q as projected, with a row for each token
    ("pieces", ..)        the gradient of what has this name, while its pieces are joined
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...exchange.exchange import never_started
from ...exchange.geometry import Geometry
from ...exchange.in_flight import InFlight
from ...exchange.legs import legs_of
from ...exchange.relayed import PartlyRelayed, Relayed
from ...profiling.ranges import named
from ...relayout.ops import sum_dtype
from ...schedule import Exchanged, O, Part, Program, Step
from ..memory.recompute import Attended, attend_once
from .execution import Call, attend_group, attend_in_pieces, with_kv
from .flat import Name, Operation
from .pieces import Pieces
from .products import autocast, by_rank, matrix
from .slices import Parts, Ranges, batched, cut_ranges, mm_of_slices, parts_of

# The shape and the dtype of a tensor.
Kind = tuple[torch.Size, torch.dtype]


class Operations:
    """Compiles the steps of one piece, in forward or in backward.

    Args:
        call: A call of the form that is compiled, of which nothing is kept.
        needs: By name, for each input of the node and each part that is exchanged, whether its
            gradient is needed.
        kinds: By name, the shape and the dtype of each input of the node; None for one that is None.
        head_dims: By name, the head dim of each part that was exchanged so far; those that are
            exchanged here are added.
    """

    def __init__(
        self,
        call: Call,
        needs: dict[Name, bool],
        kinds: dict[Name, Kind | None],
        head_dims: dict[Name, int],
    ):
        self.needs, self.head_dims = needs, head_dims
        self.shapes: dict[Name, Any] = {}
        for name, kind in kinds.items():
            self.shapes[name] = None if kind is None else kind[0]
        self.dtypes = [kind[1] for kind in kinds.values() if kind is not None]
        self.schedule, self.projections = call.schedule, call.projections
        self.geometry, self.by_rank, self.is_window = call.geometry, call.by_rank, call.is_windowed
        self.folds = call.rope_tables is not None
        self.is_autocast = call.autocast["enabled"]
        self.tokens = self.geometry.shape(self.geometry.seq_lens[self.geometry.sp_rank], 1, 1)[:2]

    def compile(self, program: Program, backward: bool, profiled: bool) -> list[Operation]:
        """Return the operations of a program, in profiler ranges if ``profiled``."""
        self.operations: list[Operation] = []
        self.is_backward, self.is_profiled = backward, profiled
        # How many operations of this list write each value.
        self.writers: dict[Name, int] = {}
        for step in program:
            first = len(self.operations)
            getattr(self, step.op.value)(step)
            if not step.on_wire:
                for place in range(first, len(self.operations)):
                    operation = self.operations[place]
                    ranged = self._ranged(self.schedule.label(step), operation.function)
                    self.operations[place] = operation._replace(function=ranged)
        if backward:
            self._end()
        return self.operations

    def add(
        self, function: Callable[..., Any], reads: Sequence[Name], writes: Sequence[Name] = ()
    ) -> None:
        """Add an operation."""
        self.operations.append(Operation(function, tuple(reads), tuple(writes)))
        for name in writes:
            self.writers[name] = self.writers.get(name, 0) + 1

    def _ranged(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs in a profiler range, if the list is profiled."""
        return partial(_in_range, label, function) if self.is_profiled else function

    # Exchanges.

    def start(self, step: Step) -> None:
        """Start the exchange of values, of o beside do, or of the gradients that are needed."""
        if sent := self._exchanged(step):
            launch, name = self._launch(step), self._name_of_exchange(step)
            of_step = step.exchange, launch, f" {name}"
            start: partial = partial(_start, *of_step)
            if step.beside:
                start, sent = partial(_start_beside, *of_step), [("merged", step.group), sent[-1]]
            elif self.folds and step.tensors in (("q",), ("k",)):
                start = partial(_start_rotated, step.grad, *of_step)
            self.add(self._on_wire(launch, f"{name} start", start), sent)

    def finish(self, step: Step) -> None:
        """Finish the exchange of values, of o beside do, or of gradients."""
        if received := self._exchanged(step):
            name = self._name_of_exchange(step)
            function: Callable[..., Any] = _finish if len(received) > 1 else _finish_one
            finish = partial(function, step.exchange, f" {name}")
            self.add(self._on_wire(self._launch(step), f"{name} finish", finish), (), received)
            if step.grad and step.tensors != O and self.projections is not None:
                for part in self._needed(step):
                    self._arrive(part)

    def _on_wire(self, launch: partial, label: str, function: partial) -> Callable[..., Any]:
        """Return the function of one end of an exchange, in a profiler range if it is profiled."""
        # Transfers in two legs open ranges of their own.
        return self._ranged(label, function) if launch.func is InFlight else function

    def _exchanged(self, step: Step) -> list[Name]:
        """Return the names of what a step sends or receives: o beside do, values, or gradients."""
        values = _values(step.parts)
        if step.beside:
            return [*values, *map(_gradient, values)]
        if not step.grad:
            return values
        needed = self._needed(step)  # guard: to those that need it
        return list(map(_gradient, _values(needed)))

    def _needed(self, step: Step) -> list[Part]:
        """Return the parts of an exchange whose gradients are needed."""
        return [part for part in step.parts if self.needs.get(("value", *part))]

    def _name_of_exchange(self, step: Step) -> str:
        """Return the name of an exchange, without the layer: "q", or "dq" for the gradient."""
        if step.beside:
            return self.schedule.name(step)
        return ("d" if step.grad else "") + self.schedule.names_of_values[step.exchange]

    def _launch(self, step: Step) -> partial:
        """Return what launches the transfer that a step starts or finishes.

        It takes the sp group and the arguments of `InFlight` behind that.
        """
        kinds, geometry, group = step.tensors, self.geometry, step.group
        for value in _values(step.parts):
            if value not in self.head_dims:
                shape = self.shapes.get(value)
                self.head_dims[value] = self._head_dim if shape is None else shape[-1]
        dims = tuple(map(self.head_dims.__getitem__, _values(step.parts)))
        if step.beside:
            # o and do are values that go to attention, as q does.
            kinds, dims = ("q", "q"), dims * 2
        is_by_rank = len(kinds) == 1 and kinds[0] in self.by_rank
        layout = geometry.exchange(kinds, group, dims, is_by_rank)
        legs = None
        if geometry.nodes is not None:
            # k and v may travel in two legs, once to each node.
            legs = legs_of(geometry, step.tensors, group, dims)
        if step.grad and not step.beside:
            needed = [part in self._needed(step) for part in step.parts]
            layout = layout.only(needed).inverse
            legs = None if legs is None else legs.gradient(needed[-len(legs.first.each) :])
        if legs is None:
            return partial(InFlight, layout)
        if len(legs.first.each) == len(layout.each):
            return partial(Relayed, legs)
        return partial(PartlyRelayed, layout, legs)

    @property
    def _head_dim(self) -> int:
        return self.projections.head_dim

    # Projections of q, k and v.

    def project(self, step: Step) -> None:
        """Make a part of q, k or v; what is in front of a norm is noted for backward."""
        (part,) = step.parts
        value = heads = ("value", *part)
        is_shaped = part[0] in self.projections.norms or self._is_rotated(part)
        if is_shaped:
            heads = ("heads", *part)
        module, rows, ranks = self.projections.cuts.rows[part]
        linear: list[Name] = [("parameter", 2 * module), ("parameter", 2 * module + 1)]
        linear = [name for name in linear if self.shapes[name] is not None]
        form = self._form(rows, ranks, self._head_dim)
        some = self._some(rows, linear[0])
        function = partial(_project_by_rank, rows, ranks) if ranks else partial(_project, some)
        self.add(partial(function, form), [self._rows(), *linear], [heads])
        if is_shaped:
            # In forward the norms are being called, and have their parameters in place.
            tables, norms = self._tables(), self._norms() if self.is_backward else []
            how = part, len(tables), self.is_backward
            self.add(partial(_shape, *how), [heads, *tables, *norms], [value])

    def _some(self, ranges: Ranges, name: Name, dim: int = 0) -> Ranges | None:
        """Return ranges of a weight along ``dim``; None if they are all of it."""
        return None if ranges == ((0, self.shapes[name][dim]),) else ranges

    def _form(self, rows: Ranges, ranks: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of the heads of some rows: with a dimension for ``ranks``, if not 0."""
        heads = sum(stop - start for start, stop in rows) // head_dim
        return (*self.tokens, *((ranks, heads // ranks) if ranks else (heads,)), head_dim)

    def _is_rotated(self, part: Part) -> bool:
        """Return whether a part is rotated here, and not by the kernel that packs it."""
        return ("table", 0) in self.shapes and self.projections.turns(part)

    def _tables(self) -> list[Name]:
        return [name for name in self.shapes if name[0] == "table"]

    def _norms(self) -> list[Name]:
        """Return the names of the parameters of all norms."""
        linear = 2 * len(self.projections.modules)
        return [name for name in self.shapes if name[0] == "parameter" and name[1] >= linear]

    def _rows(self) -> Name:
        """Return the name of x as a matrix."""
        if ("rows",) not in self.writers:
            # Here, so that dx is a sum in the dtype that x has outside.
            if not self.is_backward and self.is_autocast:
                self.add(_cast, [("x",)], [("x",)])
            self._as_rows(("x",), ("rows",), self.shapes["x",][-1])
        return ("rows",)

    def _as_rows(self, name: Name, rows: Name, width: int) -> None:
        """Make a matrix of a value, with a row of this width for each token."""
        self.add(partial(_reshape, (math.prod(self.tokens), width)), [name], [rows])

    def _arrive(self, part: Part) -> None:
        """Send the gradient of a part back through its rotation and its norm."""
        projections, tables = self.projections, self._tables()
        dy, heads = ("d", "value", *part), ("d heads", *part)
        if part[0] in projections.norms:
            learned = [
                index
                for index in projections.norm_places[part[0]]
                if self.needs["parameter", index]
            ]
            sums: list[Name] = [("d", "parameter", index) for index in learned]
            norms = self._norms()
            places = [norms.index(("parameter", index)) for index in learned]
            reads = [dy, ("heads", *part), *tables, *norms, *sums]
            function = partial(_norm_back, part, len(tables), len(norms), places)
            self.add(function, reads, [heads, *sums])
        elif self._is_rotated(part):
            dtype = self.dtypes[1]
            self.add(partial(_rotate_back, dtype), [dy, *tables], [heads])
        else:
            rows = projections.cuts.rows[part].rows
            self._as_rows(dy, heads, sum(stop - start for start, stop in rows))

    def dgrad(self, step: Step) -> None:
        """Compute do of a group, or add the share of a part of q, k and v to dx."""
        (part,), dx = step.parts, ("d", "x")
        if not self.needs.get(("value", *part)):
            return
        if step.tensors == O:
            columns, ranks = self._columns()[step.group], 0
            if "o" in self.by_rank:
                ranks = self.geometry.parts
            form = self._form(columns, ranks, self.shapes["weight",][1] // self.geometry.heads)
            some = columns if ranks else self._some(columns, ("weight",), dim=1)
            function = partial(_dgrad_of_output, some, ranks, form)
            self.add(function, [self._dy(), ("weight",)], [("d", "value", *part)])
        elif self.needs["x",]:
            module, rows, _ = self.projections.cuts.rows[part]
            weight: Name = ("parameter", 2 * module)
            some, reads = self._some(rows, weight), [("d heads", *part), weight]
            if dx not in self.writers:
                self.add(partial(_begin_dx, some, self.dtypes[0]), reads, [dx])
            else:
                rounds = self.geometry.groups == 1
                self.add(partial(_add_to_dx, some, rounds), [*reads, dx], [dx])

    def wgrad(self, step: Step) -> None:
        """Compute a group's columns of dWo, or a part's rows of weight and bias gradients."""
        (part,) = step.parts
        if step.tensors == O:
            if self.needs["weight",]:
                columns = self._columns()
                own, operands = columns[step.group], [self._dy(), ("merged", step.group)]
                self._put(("weight",), 1, columns, own, torch.mm, operands)
        elif self.needs.get(("value", *part)):
            module, rows, _ = self.projections.cuts.rows[part]
            dy, parts = ("d heads", *part), self.projections.cuts.parts[module]
            weight, bias = ("parameter", 2 * module), ("parameter", 2 * module + 1)
            if self.needs[weight]:
                self._put(weight, 0, parts, rows, torch.mm, [dy, self._rows()])
            if self.needs[bias]:
                self._put(bias, 0, parts, rows, _sum_rows, [dy])

    def _put(
        self, name: Name, dim: int, parts: Parts, part: Ranges, compute: Any, operands: list[Name]
    ) -> None:
        """Add the piece of a part to the gradient of a parameter, or make all of it."""
        shape, pieces = self.shapes[name], ("pieces", *name)
        if parts == (((0, shape[dim]),),):
            self.add(partial(_gradient_of_whole, compute), operands, [_gradient(name)])
            return
        if pieces not in self.writers:
            make = partial(Pieces, shape, dim, parts, late=self.is_window)
            self.add(partial(_begin_pieces, make), (), [pieces])
        self.add(partial(_put, part, compute), [pieces, *operands], [pieces])

    # The output projection.

    def merge(self, step: Step) -> None:
        """Add the product of a group to y, and note the o that was multiplied."""
        columns = self._some(self._columns()[step.group], ("weight",), dim=1)
        o, y = ("value", "o", step.group), ("y",)
        reads: list[Name] = [o, ("weight",)]
        if self.is_autocast:  # the weight is cast already, before the node
            self.add(_cast, [o], [o])
        function: Any = _merge
        if y in self.writers:
            reads.append(y)
        else:
            function = _begin_merge
            if self.shapes["bias",] is not None:
                reads.append(("bias",))
        self.add(partial(function, columns), reads, [y, ("merged", step.group)])

    def _columns(self) -> Parts:
        """Return for each head group the columns of the weight that its heads are multiplied with."""
        return _columns(self.geometry, self.shapes["weight",][1] // self.geometry.heads)

    def _dy(self) -> Name:
        """Return the name of dy as a matrix."""
        if ("d rows",) not in self.writers:
            self._as_rows(("d", "y"), ("d rows",), self.shapes["weight",][0])
        return ("d rows",)

    # Local attention, in a window.

    def attend(self, step: Step) -> None:
        """Attend with a group, or run the backward of that."""
        group, pieces = step.group, self.geometry.kv_pieces(step.group)
        keys = [(kind, sent) for kind in "kv" for sent, *_ in pieces]
        heads = _values([("q", group), *keys])
        o, attended, kept = ("value", "o", group), ("attended", group), ("kept", group)
        needs = [self.needs["value", kind, 0] for kind in "qkv"]
        if not self.is_backward:
            if any(self.needs.values()):
                self.add(partial(_attend, group, keys, needs), heads, [o, attended, kept])
            else:
                self.add(partial(_attend_alone, group, keys), heads, [o])
            return
        received = [o] if self.schedule.beside else []
        learned = [_gradient(name) for name in self.shapes if name[0] == "learned"]
        # q, k and v of each kind that needs a gradient, with how often theirs was added to so far.
        wanted = [part for part in (("q", group), *keys) if needs["qkv".index(part[0])]]
        sums = [_gradient(value) for value in _values(wanted)]
        counts = {part: self.writers.get(total, 0) for part, total in zip(wanted, sums)}
        function = partial(_attend_backward, group, keys, needs, counts, len(received))
        reads = [*heads, attended, kept, _gradient(o), *received, *sums, *learned]
        self.add(function, reads, [*sums, *learned])

    def _end(self) -> None:
        """Add what comes behind the last step of backward."""
        dx = ("d", "x")
        if dx in self.writers:
            self.add(partial(_view, self.shapes["x",]), [dx], [dx])
        # Those of the projections of q, k and v first, whose memory is larger.
        for name in [name for name in self.writers if name[0] == "pieces"]:
            self.add(_whole, [name], [("d", *name[1:])])
        if self.needs.get(("bias",)):
            self.add(_sum, [self._dy()], [("d", "bias")])


def _values(parts: Sequence[Part]) -> list[Name]:
    """Return the names of parts."""
    return [("value", *part) for part in parts]


def _gradient(name: Name) -> Name:
    """Return the name of the gradient of what has this name."""
    return ("d", *name)


@lru_cache(maxsize=4096)
def _columns(geometry: Geometry, head_dim: int) -> Parts:
    groups = range(geometry.groups)
    return parts_of(*(geometry.rows_of("o", group, 0, head_dim) for group in groups))


def _in_range(label: str, function: Callable[..., Any], call: Call, *values: Any) -> Any:
    with named(call.where, label):
        return function(call, *values)


# Exchanges.


def _start(key: Exchanged, launch: partial, name: str, call: Call, *xs: Tensor) -> tuple:
    call.in_flight[key] = launch(call.sp_group, call.where + name, xs, call.checked)
    return ()


def _start_beside(key: Exchanged, launch: partial, name: str, call: Call, *xs: Tensor) -> tuple:
    o, do = xs
    return _start(key, launch, name, call, o.view(*do.shape), do)


def _start_rotated(
    back: bool, key: Exchanged, launch: partial, name: str, call: Call, *xs: Tensor
) -> tuple:
    ropes = (None, call.rope_tables) if back else (call.rope_tables,)
    call.in_flight[key] = launch(call.sp_group, call.where + name, xs, call.checked, *ropes)
    return ()


def _finish(key: Exchanged, name: str, call: Call) -> Sequence[Tensor]:
    in_flight = call.in_flight.pop(key, None)  # guard: the transfer is let go
    if in_flight is None:
        raise never_started(call.where + name)
    return in_flight.finish()


def _finish_one(key: Exchanged, name: str, call: Call) -> Tensor:
    return _finish(key, name, call)[0]


def _one(values: Sequence[Any]) -> Any:
    """Return a single value itself, as operations do."""
    return values if len(values) != 1 else values[0]


# Projections of q, k and v.


def _cast(call: Call, x: Tensor) -> Tensor:
    return autocast(x)[0]


def _reshape(shape: tuple[int, ...], call: Call, x: Tensor) -> Tensor:
    # Sizes one by one: PyTorch reads them faster than a tuple, by a third of a view's time.
    return x.reshape(*shape)


def _project(
    rows: Ranges | None, form: tuple[int, ...], call: Call, x: Tensor, weight: Tensor, *bias: Tensor
) -> Tensor:
    if rows is not None and len(rows) > 1:
        # Rows in several slices, see Note [Slices of weights].
        return mm_of_slices(x, weight.t(), rows, *bias).view(*form)
    if rows is not None:
        ((start, stop),) = rows
        weight, bias = weight[start:stop], tuple([b[start:stop] for b in bias])
    return F.linear(x, weight, *bias).view(*form)


def _project_by_rank(
    rows: Ranges, ranks: int, form: tuple[int, ...], call: Call, x: Tensor, *parameters: Tensor
) -> Tensor:
    # The product writes the send buffer.
    return by_rank(x, *[batched(each, 0, rows, ranks) for each in parameters]).view(*form)


def _shape(
    part: Part, tables: int, again: bool, call: Call, heads: Tensor, *rest: Tensor
) -> Tensor:
    # In forward the norms have their parameters in place.
    norms = rest[tables:] if again else None
    return call.projections.shape(part, heads, rest[:tables], norms)


def _rotate_back(dtype: torch.dtype, call: Call, dy: Tensor, *tables: Tensor) -> Tensor:
    # A rotation needs nothing but its tables to go back.
    return matrix(call.projections.rope.rotate_back(dy.flatten(2, -2), *tables).to(dtype))


def _norm_back(
    part: Part,
    table_count: int,
    norm_count: int,
    learned: list[int],
    call: Call,
    dy: Tensor,
    heads: Tensor,
    *rest: Any,
) -> Any:
    """Send dq or dk back through rotation and norm.

    Args:
        part: The kind and the group.
        table_count: The number of tables, which ``rest`` begins with.
        norm_count: The number of parameters of all norms, which follow.
        learned: The places among them of those that learn. The sums of their gradients so far
            follow last; None for one that has none yet.
        call: The call.
        dy: The gradient of q or k.
        heads: The input of the norm.
        *rest: As said.

    Returns:
        The gradient of ``heads``, a row for each token; and the sums.
    """
    tables, norms = rest[:table_count], rest[table_count : table_count + norm_count]
    sums = list(rest[table_count + norm_count :])
    # The norm is computed again under autograd, since it may be any module.
    x = heads.detach().requires_grad_()
    with torch.enable_grad(), torch.autocast(**call.autocast):  # guard: as in forward
        y = call.projections.shape(part, x, tables, norms)
    # One that was frozen since forward is left out: nobody takes its gradient.
    wanted = [place for place, index in enumerate(learned) if norms[index].requires_grad]
    ends = [x, *(norms[learned[place]] for place in wanted)]
    dx, *gradients = torch.autograd.grad(y, ends, dy, allow_unused=True)
    for place, gradient in zip(wanted, gradients):
        if gradient is not None:
            # In half precision the sum would be rounded with each group. Autograd casts it.
            gradient = gradient.to(sum_dtype(gradient.dtype))
            sums[place] = gradient if sums[place] is None else sums[place] + gradient
    return _one((matrix(dx), *sums))


def _part_of(weight: Tensor, rows: Ranges | None) -> Tensor:
    """Return some rows of a weight; all, if ``rows`` is None."""
    return weight if rows is None else cut_ranges(weight, 0, rows)


def _begin_dx(
    rows: Ranges | None, dtype: torch.dtype, call: Call, dy: Tensor, weight: Tensor
) -> Tensor:
    product = dy @ _part_of(weight, rows)
    # Without autocast both are alike, and a cast that changes nothing costs the host time.
    return product if product.dtype == dtype else product.to(dtype)


def _add_to_dx(
    rows: Ranges | None, rounds: bool, call: Call, dy: Tensor, weight: Tensor, dx: Tensor
) -> Tensor:
    part = _part_of(weight, rows)
    if rounds or dx.dtype != dy.dtype:
        dx += dy @ part  # rounds each product, as the layer that is replaced does
        return dx
    # One kernel instead of two, and in half precision one rounding instead of two.
    return dx.addmm_(dy, part)


def _view(shape: tuple[int, ...], call: Call, x: Tensor) -> Tensor:
    return x.view(*shape)


# Gradients of parameters.


def _sum_rows(dy: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum the rows of ``dy``, which is given transposed."""
    return torch.sum(dy, 1) if out is None else torch.sum(dy, 1, out=out)


def _sum(call: Call, dy: Tensor) -> Tensor:
    return dy.sum(0)


def _gradient_of_whole(compute: Any, call: Call, dy: Tensor, *rest: Tensor) -> Tensor:
    return compute(dy.t(), *rest)


def _begin_pieces(make: Callable[[], Pieces], call: Call) -> Pieces:
    return make()


def _put(
    part: Ranges, compute: Any, call: Call, pieces: Pieces, dy: Tensor, *rest: Tensor
) -> Pieces:
    pieces.put(part, compute, dy.t(), *rest)
    return pieces


def _whole(call: Call, pieces: Pieces) -> Tensor | None:
    return pieces.whole()


# The output projection.


def _begin_merge(
    columns: Ranges | None, call: Call, o: Tensor, weight: Tensor, *bias: Tensor
) -> tuple[Tensor, Tensor]:
    part, rows = _part_of(weight.t(), columns), matrix(o)
    # The product is written into y, so that y is no view: autograd forbids to update in place a
    # view that a node returns.
    y = rows.new_empty(*o.shape[:2], part.shape[1])
    if bias:
        torch.addmm(bias[0], rows, part, out=matrix(y))
    else:
        torch.mm(rows, part, out=matrix(y))
    return y, rows


def _merge(
    columns: Ranges | None, call: Call, o: Tensor, weight: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    rows = matrix(o)
    matrix(y).addmm_(rows, _part_of(weight.t(), columns))
    return y, rows


def _dgrad_of_output(
    columns: Ranges | None,
    ranks: int,
    form: tuple[int, ...],
    call: Call,
    dy: Tensor,
    weight: Tensor,
) -> Tensor:
    # do = dy w_g, with the weight read as views. It may be the very tensor that is sent. Three
    # ways: into the send buffer, of several slices, of one slice.
    if columns is None:
        return torch.mm(dy, weight).view(*form)
    if ranks:
        return by_rank(dy, batched(weight, 1, columns, ranks)).view(*form)
    if len(columns) > 1:
        return mm_of_slices(dy, weight, columns).view(*form)
    return torch.mm(dy, cut_ranges(weight, 1, columns)).view(*form)


# Local attention, in a window.


def _heads(
    group: int, keys: list[Part], call: Call, q: Tensor, received: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a group, from q and the received k and v of groups (``keys``)."""
    values, geometry = dict(zip(keys, received)), call.geometry
    return q, with_kv(geometry, "k", group, values), with_kv(geometry, "v", group, values)


def _attend(
    group: int, keys: list[Part], needs: list[bool], call: Call, q: Tensor, *received: Tensor
) -> tuple[Tensor, Attended, list[Tensor]]:
    attend = partial(attend_in_pieces, call, call.local.attend, group)
    return attend_once(attend, _heads(group, keys, call, q, received), needs, call.local)


def _attend_alone(group: int, keys: list[Part], call: Call, q: Tensor, *received: Tensor) -> Tensor:
    return attend_group(call, call.local.attend, group, *_heads(group, keys, call, q, received))


def _attend_backward(
    group: int,
    keys: list[Part],
    needs: list[bool],
    counts: dict[Part, int],
    reads_o: int,
    call: Call,
    q: Tensor,
    *rest: Any,
) -> Any:
    """Run the backward of the attention of a group.

    Args:
        group: The head group.
        keys: The received k and v that it attends to, which ``rest`` begins with. What `_attend`
            returned behind o follows, then do, then o if ``reads_o``, the sums of the gradients of
            ``counts`` so far, and those of what attention learns.
        needs: For each of q, k and v, whether it needs a gradient.
        counts: For each part whose gradient is needed, how often it was added to so far.
        reads_o: As said; 0 or 1.
        call: The call.
        q: q of the group.
        *rest: As said.

    Returns:
        The sums.
    """
    received, (attended, kept, do, *more) = rest[: len(keys)], rest[len(keys) :]
    o, sums, learned = more[0] if reads_o else None, more[reads_o:][: len(counts)], []
    heads = _heads(group, keys, call, q, received)
    attend = partial(attend_in_pieces, call, call.local.attend, group)
    gradients = attended.backward(attend, heads, needs, o, do, kept, call.local)
    for so_far, gradient in zip(more[reads_o + len(counts) :], gradients[3:]):
        both = so_far is not None and gradient is not None
        learned.append(so_far + gradient if both else gradient if so_far is None else so_far)
    totals, values = dict(zip(counts, sums)), dict(zip(keys, received))
    for kind, dx, x in zip("qkv", gradients, heads):
        parts = [part for part in counts if part[0] == kind]
        if parts and dx is None:
            # Attention does not give it: zero, since the other ranks exchange theirs.
            dx = torch.zeros_like(x)  # guard: others may exchange one
        if kind == "q" and parts:
            totals["q", group] = dx
        elif parts:
            pieces = {part: values[part].detach().requires_grad_() for part in parts}
            for part, gradient in zip(parts, _of_pieces(kind, group, dx, pieces, call)):
                if counts[part] > 1:  # guard: others may read it
                    totals[part] += gradient
                else:
                    # The first gradient is attention's own, which may be a view of a larger one.
                    totals[part] = totals[part] + gradient if counts[part] else gradient
    return _one((*totals.values(), *learned))


def _of_pieces(
    kind: str, group: int, dx: Tensor, pieces: dict[Part, Tensor], call: Call
) -> Sequence[Tensor]:
    """Return the gradients of received pieces that made k or v of a group.

    Args:
        kind: "k" or "v".
        group: The head group that attended.
        dx: The gradient of what `with_kv` returns.
        pieces: The pieces, as leaves.
        call: The call.
    """
    # Heads may be cut, joined or repeated. Autograd derives how dx returns to the pieces.
    with torch.enable_grad():
        joined = with_kv(call.geometry, kind, group, pieces)
    # A leaf is the one piece itself.
    return [dx] if joined.is_leaf else torch.autograd.grad(joined, list(pieces.values()), dx)
