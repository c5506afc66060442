"""Compiles the steps of a schedule to operations on named values.

The names, for group g:

    "x"                   the layer's input, which autocast may cast
    "rows"                x as a matrix, with a row for each token
    "token"               an empty tensor that the previous piece returned (Note [Pieces] in `plan`)
    ("weight", i)         the weight of projection i of `InputModules`; for "o", that of o_proj
    ("bias", i)           the bias of this projection
    ("norm", "q", i)      parameter i of the norm of q
    ("table", i)          table i of RoPE: cos or sin
    ("heads", ("q", g))   q after its projection, before norm and RoPE
    ("q", g)              q, k, v or o: before its exchange, then after its exchange
    ("merged", g)         local o as a matrix, the input of the output projection
    "y"                   the layer's output
    ("learned", i)        entry i of `LocalAttention.learned`
    ("kept", g)           tensors that the backward of local attention needs beside q, k, v and o
    ("beside", g)         o that travels with do: before its exchange, then after its exchange
    ("d", name)           the gradient of the value called ``name``
    ("d", "y rows")       dy as a matrix, with a row for each token
    ("d", ("heads", ..))  the gradient of ("heads", ..), as a matrix with a row for each token
    ("pieces", name)      the gradient of the value ``name``, while its pieces are joined
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch

from ...exchange.in_flight import InFlight
from ...exchange.layout import total
from ...exchange.relayed import Relayed, legs_of
from ...profiling.ranges import is_profiled
from ...schedule import O, Part, Program, Step
from . import operations
from .execution import Call
from .flat import Name, Names, Operation, gradients
from .parts import Pieces
from .slices import Parts, Ranges, Run

# The shape and the dtype of a tensor.
Kind = tuple[torch.Size, torch.dtype]
# The weight of the output projection.
_WO: Name = ("weight", "o")


class Compiler:
    """Compiles the steps of one piece, in forward or in backward.

    Args:
        call: The call. Operations don't refer to it, and serve all calls of its form (`Call.form`).
        needs: For each input of a node so far, and each part exchanged so far: whether the gradient
            is needed.
        kinds: For each input of a node so far: shape and dtype; None for an input that is None.
    """

    def __init__(self, call: Call, needs: dict[Name, bool], kinds: dict[Name, Kind | None]):
        self.needs = needs
        self.shapes: dict[Name, torch.Size] = {}
        self.dtypes: dict[Name, torch.dtype] = {}
        for name, kind in kinds.items():
            if kind is not None:
                self.shapes[name], self.dtypes[name] = kind
        self.call, self.schedule, self.geometry = call, call.schedule, call.geometry
        self.projections = call.projections
        self.tokens = self.geometry.shape(self.geometry.seq_lens[self.geometry.sp_rank], 1, 1)[:2]

    def compile(self, program: Program, backward: bool = False) -> list[Operation]:
        """Return the operations of a program."""
        self.operations: list[Operation] = []
        self.is_backward = backward
        # The names of the values that the operations write, in order.
        self.written: dict[Name, None] = {}
        self.label = ""
        # Cast x inside of the node, so that dx is summed in the dtype of the uncast x. Only the
        # first piece takes x.
        takes_x = self.call.variant is None and "x" in self.shapes
        if takes_x and self.call.autocast["enabled"] and not backward:
            self.add(operations.cast, ["x"], ["x"])
        for step in program:
            # The profiler range of the operations that `add` adds; empty for no range.
            self.label = "" if step.on_wire else self.schedule.label(step)
            getattr(self, step.op.value)(step)
        self.label = ""
        if backward:
            self._end()
        return self.operations

    def add(self, function: Callable[..., Any], takes: Names, gives: Names, *first: Any) -> None:
        """Add an operation; if the steps are profiled, in the profiler range ``label``.

        The function gets ``first``, the call, then the values with the names ``takes``.
        """
        function = partial(function, *first)
        if self.label and is_profiled():
            function = partial(operations.in_range, self.label, function)
        self.operations.append(Operation(function, takes, gives))
        self.written.update(dict.fromkeys(self.operations[-1].writes))

    # Exchanges.

    def start(self, step: Step) -> None:
        """Start the exchange of values, or of the needed gradients; o may travel with do."""
        if sent := self._exchanged(step):
            rotates = ""
            if step.beside:
                merged, beside = ("merged", step.group), ("beside", step.group)
                heads = total(self.geometry.heads_of("q", step.group))
                shape = (*self.tokens, heads, self._head_dim(step.parts[0]))
                self.add(operations.reshape, [merged], [beside], shape)
            elif self.call.rope_tables is not None and step.tensors in (("q",), ("k",)):
                rotates = "rope_back" if step.grad else "rope"
            launch, name = self._transfer(step), f" {self.schedule.name(step)}"
            self.add(operations.start, [sent], [], step.exchange, launch, name, rotates)

    def finish(self, step: Step) -> None:
        """Finish the exchange of values, or of the needed gradients; o may travel with do."""
        if received := self._exchanged(step):
            self._transfer(step)
            name = f" {self.schedule.name(step)}"
            self.add(operations.finish, [], [received], step.exchange, name)
            self.label = ""
            if step.grad and step.tensors != O and self.projections is not None:
                for part in self._needed(step):
                    self._arrive(part)

    def _exchanged(self, step: Step) -> list[Name]:
        """Return the names of the values that a start sends or a finish receives."""
        if step.beside:
            return [("beside", step.group)] + gradients(step.parts)
        if not step.grad:
            return list(step.parts)
        needed = self._needed(step)  # guard: to those that need it
        return gradients(needed)

    def _needed(self, step: Step) -> list[Part]:
        """Return the parts of an exchange whose gradients are needed."""
        return list(filter(self.needs.get, step.parts))

    def _head_dim(self, part: Part) -> int:
        """Return the head dim of a part: from its shape if a node takes it, else as projected."""
        shape = self.shapes.get(part)
        return self.projections.head_dim if shape is None else shape[-1]

    def _transfer(self, step: Step) -> partial:
        """Return the constructor of the transfer that a step starts or finishes; set ``label``.

        The constructor takes the arguments of `InFlight`, without the layout.
        """
        kinds, geometry, group = step.tensors, self.geometry, step.group
        dims = tuple(map(self._head_dim, step.parts))
        if step.beside:
            # o and do travel as q does: to the ranks that attend, in the layout of q.
            kinds, dims = ("q", "q"), dims * 2
        is_by_rank = len(kinds) == 1 and kinds[0] in self.call.by_rank
        layout = geometry.exchange(kinds, group, dims, is_by_rank)
        # k and v may travel in two legs, see Note [Once per node] in `relayed`.
        legs = legs_of(geometry, kinds, group, dims)
        if step.grad and not step.beside:
            needed = [part in self._needed(step) for part in step.parts]
            layout = layout.only(needed).inverse
            legs = None if legs is None else legs.gradient(needed)
        if legs is not None:  # each leg opens its own profiler range
            return partial(Relayed, legs)
        self.label = f"{self.schedule.name(step)} {step.op.value}"
        return partial(InFlight, layout)

    # Projections of q, k and v.

    def project(self, step: Step) -> None:
        """Project a part of q, k or v, then apply its norm and RoPE."""
        (part,) = step.parts
        tables, norm = self._tables(part), self.projections.cuts.norms.get(part[0])
        is_shaped = tables or norm is not None
        heads = ("heads", part) if is_shaped else part
        module, rows, ranks = self.projections.cuts.rows[part]
        operands = [self._rows(), ("weight", module), ("bias", module)]
        self._multiply(operands, 0, rows, ranks, self.projections.head_dim, heads)
        if is_shaped:
            # In forward, a norm reads its own parameters. Backward passes the saved parameters.
            saved = norm or [] if self.is_backward else []
            self.add(operations.norm_and_rotate, [heads, tables, saved], [part], part)

    def _multiply(
        self, operands: list[Name], dim: int, part: Ranges, ranks: int, head_dim: int, heads: Name
    ) -> None:
        """Multiply a matrix by a part of a weight; the result has a dimension for the heads.

        Args:
            operands: The names of the matrix, of the weight, and of the bias if there is one.
            dim: The dimension of the weight that ``part`` cuts.
            part: The ranges of this dimension.
            ranks: The size of the result's dimension for ranks; 0 for no such dimension.
            head_dim: ``d``.
            heads: The name of the result.
        """
        count = total(part) // head_dim
        of_ranks = (ranks, count // ranks) if ranks else (count,)
        by_rank = Run.dealt(part, ranks) if ranks else None
        some, form = self._some(part, operands[1], dim), self.tokens + of_ranks + (head_dim,)
        self.add(operations.multiply, operands, [heads], dim, some, by_rank, form)

    def _some(self, ranges: Ranges, name: Name, dim: int = 0) -> Ranges | None:
        """Return the ranges of a weight along ``dim``; None if they cover all of ``dim``."""
        return None if ranges == ((0, self.shapes[name][dim]),) else ranges

    def _tables(self, part: Part) -> list[Name]:
        """Return the names of the tables to rotate a part; none for v, or if packing rotates."""
        if part[0] == "v" or part in self.call.folded:
            return []
        return [name for name in self.shapes if name[0] == "table"]

    def _rows(self) -> Name:
        """Return the name of x as a matrix."""
        return self._matrix("x", "rows", self.shapes["x"][-1])

    def _matrix(self, name: Name, rows: Name, width: int) -> Name:
        """Return ``rows``, the name of the value ``name`` as a matrix with a row for each token.

        A row has ``width`` elements. The first call for ``rows`` adds the operation that makes the
        matrix.
        """
        if rows not in self.written:
            self.add(operations.reshape, [name], [rows], (math.prod(self.tokens), width))
        return rows

    def _arrive(self, part: Part) -> None:
        """Compute the backward of a part's RoPE and norm."""
        cuts, tables = self.projections.cuts, self._tables(part)
        dy, heads = ("d", part), ("d", ("heads", part))
        if part[0] in cuts.norms:
            norm = cuts.norms[part[0]]
            sums = gradients(norm)
            takes = [dy, ("heads", part), tables, norm, sums]
            self.add(operations.norm_back, takes, [heads, sums], part)
        elif tables:
            # RoPE may compute in a wider dtype than the projection.
            dtype = self.dtypes["weight", cuts.rows[part].module]
            self.add(operations.rotate_back, [dy, tables], [heads], dtype)
        else:
            self._matrix(dy, heads, total(cuts.rows[part].rows))

    def dgrad(self, step: Step) -> None:
        """Compute do of a group; or for a part of q, k or v, add its term to dx."""
        (part,), dx = step.parts, ("d", "x")
        if not self.needs.get(part):
            return
        if step.tensors == O:
            columns, operands = self._columns[step.group], [self._dy(), _WO]
            ranks = self.geometry.parts if "o" in self.call.by_rank else 0
            self._multiply(operands, 1, columns, ranks, self._head_dim(part), ("d", part))
        elif self.needs["x"]:
            module, rows, _ = self.projections.cuts.rows[part]
            dy, weight = ("d", ("heads", part)), ("weight", module)
            how = self._some(rows, weight), self.dtypes["x"], self.geometry.groups == 1
            self.add(operations.add_to_dx, [dy, weight, dx], [dx], *how)

    def wgrad(self, step: Step) -> None:
        """Compute a group's columns of dWo; or, for a part of q, k or v, its rows of dW and db."""
        (part,) = step.parts
        if step.tensors == O:
            if self.needs[_WO]:
                own, operands = self._columns[step.group], [self._dy(), ("merged", step.group)]
                self._put(_WO, 1, self._columns, own, torch.mm, operands)
        elif self.needs.get(part):
            module, rows, _ = self.projections.cuts.rows[part]
            dy, parts = ("d", ("heads", part)), self.projections.cuts.parts[module]
            if self.needs["weight", module]:
                self._put(("weight", module), 0, parts, rows, torch.mm, [dy, self._rows()])
            if self.needs["bias", module]:
                self._put(("bias", module), 0, parts, rows, operations.sum_rows, [dy])

    def _put(
        self, name: Name, dim: int, parts: Parts, part: Ranges, compute: Any, operands: list[Name]
    ) -> None:
        """Compute ``part`` of the rows (``dim`` 0) or columns (``dim`` 1) of a parameter's gradient."""
        shape, pieces = self.shapes[name], ("pieces", name)
        if parts == (((0, shape[dim]),),):
            self.add(operations.gradient_of_whole, operands, [("d", name)], compute)
            return
        make = partial(Pieces, shape, dim, parts, self.schedule.is_windowed)
        self.add(operations.put, [pieces, *operands], [pieces], make, part, compute)

    # The output projection.

    def merge(self, step: Step) -> None:
        """Add a group's product o Wo to y, and keep o as a matrix for the wgrad."""
        columns = self._some(self._columns[step.group], _WO, dim=1)
        (o,) = step.parts
        if self.call.autocast["enabled"]:  # the weight was cast before the node
            self.add(operations.cast, [o], [o])
        takes = [o, _WO, ("bias", "o"), "y"]
        self.add(operations.merge, takes, ["y", ("merged", step.group)], columns)

    @cached_property
    def _columns(self) -> Parts:
        """Return the columns of Wo that belong to the heads of each head group."""
        geometry, head_dim = self.geometry, self.shapes[_WO][1] // self.geometry.heads
        return tuple([geometry.rows_of("o", g, 0, head_dim) for g in range(geometry.groups)])

    def _dy(self) -> Name:
        """Return the name of dy as a matrix."""
        return self._matrix(("d", "y"), ("d", "y rows"), self.shapes[_WO][0])

    # Local attention, in a window.

    def attend(self, step: Step) -> None:
        """Run the local attention of a group, or its backward."""
        group, pieces = step.group, self.geometry.kv_pieces(step.group, self.geometry.sp_rank)
        parts = [("q", group)]
        parts += [(kind, sent) for kind in "kv" for sent, *_ in pieces]
        (o,), kept = step.parts, ("kept", group)
        needs = {kind: self.needs[kind, 0] for kind in "qkv"}
        if self.is_backward:
            # The gradients to compute: of those parts of q, k and v that need one, then of
            # ``learned``.
            wanted = [part for part in parts if needs[part[0]]]
            learned = [name for name in self.shapes if name[0] == "learned"]
            sums = gradients(wanted + learned)
            takes: Names = [parts, kept, ("d", o), ("beside", group), sums]
            self.add(operations.attend_backward, takes, [sums], parts, wanted)
        elif any(self.needs.values()):
            self.add(operations.attend, [parts], [o, kept], parts, list(needs.values()))
        else:
            self.add(operations.attend_alone, [parts], [o], parts)

    def _end(self) -> None:
        """Add the operations that follow the last step of backward."""
        dx = ("d", "x")
        if dx in self.written:
            self.add(operations.reshape, [dx], [dx], self.shapes["x"])
        # Join one parameter at a time, and free its pieces before the next parameter is joined.
        for name in [name for name in self.written if name[0] == "pieces"]:
            self.add(operations.whole, [name], [("d", name[1])])
        if self.needs.get(("bias", "o")):
            db = ("d", ("bias", "o"))
            self.add(operations.gradient_of_whole, [self._dy()], [db], operations.sum_rows)
