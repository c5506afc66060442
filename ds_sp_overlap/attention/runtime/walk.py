"""Runs the pieces of one call of a layer, and the foreign code between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from ...exchange.layout import Range
from ...profiling.ranges import named
from ...schedule import Op, Step
from .execution import Attend, Call, attend_group, with_kv
from .linear import call_through
from .nodes import End, run_piece
from .plan import Piece, pieces_of

# A function that changes q, k or v after its exchange. Takes the kind, the tensor, and the ranges
# of tokens in q (empty if q has the whole sequence); returns the changed tensor.
Arrive = Callable[[str, Tensor, tuple[Range, ...]], Tensor]


@dataclass(eq=False)
class Walk:
    """Runs the pieces of one call, and the foreign code between them.

    Args:
        call: The call.
        attend: The local attention.
        project: If projections are called whole: returns q, k or v of a group. None if projections
            are computed part by part, or if the caller puts q, k and v into ``values``.
        arrive: Changes q, k and v after their exchange; None for no change.
        ends: The ends of the layer that are computed part by part, by section. A layer that has a
            window has one end, with the key "".

    Attributes:
        values: The current values outside of nodes: q, k, v and o of head groups, and the token. If
            there are ends, the caller sets "x" before `run`. If the output projection is an end,
            "y" is the layer's output after `run`.
    """

    call: Call
    attend: Attend
    project: Callable[[str, int], Tensor] | None = None
    arrive: Arrive | None = None
    ends: dict[str, End] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given, arrives = self.project is None, self.arrive is not None
        self.pieces = pieces_of(self.call.schedule, tuple(self.ends), given, arrives)
        self.values: dict[Any, Tensor] = {"token": self.call.empty}

    def run(self, *sections: str) -> None:
        """Run the pieces of these sections, or all pieces if none are given."""
        for piece in self.pieces:
            if not sections or piece.section in sections:
                for step in piece.foreign:
                    self._foreign(step)
                made = self._piece(piece)
                self.values.update(zip(piece.gives, made))  # guard: leads to each of them

    def _piece(self, piece: Piece) -> tuple[Tensor, ...]:
        """Run a piece with inputs from ``values``; return the outputs of its node."""
        end = self.ends.get(piece.section)
        if end is None:
            given = [self.values.pop(name) for name in piece.takes]
            return run_piece(piece, self.call, piece.takes, given)
        first = self.values.pop(end.names[0])
        return call_through(end.modules, partial(end.run, piece, self.call), first)

    def _foreign(self, step: Step) -> None:
        """Run a foreign step: a projection, local attention, or ``arrive``."""
        call, values = self.call, self.values
        if step.op is Op.PROJECT:
            assert self.project is not None
            (part,) = step.parts
            values[part] = self.project(*part)
        elif step.op is Op.ATTEND:
            # k and v stay in ``values``, since later groups may attend to them.
            group, q = step.group, values.pop(("q", step.group))
            k, v = with_kv(call.geometry, group, values)
            with named(call.where, call.schedule.label(step)):
                values["o", group] = attend_group(call, self.attend, group, q, k, v)
        else:
            assert self.arrive is not None
            geometry = call.geometry
            queries = geometry.own_queries if geometry.shares > 1 else ()
            for part in step.parts:
                values[part] = self.arrive(part[0], values[part], queries)
