"""Runs the pieces of one call of a layer, and what is foreign between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ...exchange.layout import Range
from ...profiling.ranges import named
from ...schedule import Op, Part, Step
from .execution import Attend, Call, attend_group, with_kv
from .linear import call_through
from .nodes import End, run_end, run_piece
from .plan import Piece, pieces_of

# Changes q, k or v on arrival, given the kind, the tensor, and the ranges of tokens that q holds:
# none, where q holds the whole sequence.
Arrive = Callable[[str, Tensor, tuple[Range, ...]], Tensor]


class Walk:
    """Runs the pieces of one call, and what is foreign between them.

    Args:
        call: The call.
        attend: The local attention.
        project: Gives q, k or v of a group where projections are called whole; None where they are
            computed part by part, or q, k and v are there from the begin.
        arrive: Changes q, k and v on arrival; None for no change.
        ends: By section, the ends that are computed part by part; of a window, all as "".

    Attributes:
        values: Parts in the graph outside: q, k, v and o of head groups.
    """

    def __init__(
        self,
        call: Call,
        attend: Attend,
        project: Callable[[str, int], Tensor] | None = None,
        arrive: Arrive | None = None,
        ends: dict[str, End] | None = None,
    ):
        self.call, self.attend = call, attend
        self.project, self.arrive, self.ends = project, arrive, ends or {}
        self.pieces = pieces_of(
            call.schedule,
            "inputs" in self.ends,
            "output" in self.ends,
            given=project is None,
            arrives=arrive is not None,
        )
        self.values: dict[Part, Tensor] = {}
        self._token: Tensor | None = None

    def run(self, *sections: str, x: Tensor | None = None) -> Any:
        """Run the pieces of these sections.

        Args:
            *sections: The sections, in their order; "" for a layer that has a window.
            x: The layer's input, for the inputs or a window.

        Returns:
            y, if the last piece returns it.
        """
        y = None
        for piece in self.pieces:
            if piece.section in sections:
                for step in piece.foreign:
                    self._foreign(step)
                y = self._piece(piece, x)
        return y

    def _piece(self, piece: Piece, x: Tensor | None) -> Any:
        """Run a piece; return y, or keep the token and what the piece gives."""
        end = self.ends.get(piece.section)
        if end is not None:
            first = self._token if piece.section == "output" else x
            assert first is not None
            y = call_through(end.modules, partial(run_end, piece, self.call, end), first)
        else:
            given = [self.values.pop(part) for part in piece.takes]
            y = run_piece(piece, self.call, piece.names, self._token, given)
        if piece.returns_y:
            return y
        self._token, *received = y  # guard: leads to each of them
        self.values.update(zip(piece.gives, received))

    def _foreign(self, step: Step) -> None:
        """Run a step in the graph outside."""
        call, values = self.call, self.values
        if step.op is Op.PROJECT:
            assert self.project is not None
            (part,) = step.parts
            values[part] = self.project(*part)
        elif step.op is Op.ATTEND:
            # Only q is taken out: later groups may attend to the same k and v.
            group, q = step.group, values.pop(("q", step.group))
            k = with_kv(call.geometry, "k", group, values)
            v = with_kv(call.geometry, "v", group, values)
            with named(call.where, call.schedule.label(step)):
                values["o", group] = attend_group(call, self.attend, group, q, k, v)
        else:
            assert self.arrive is not None
            geometry = call.geometry
            queries = geometry.own_queries if geometry.shares > 1 else ()
            for part in step.parts:
                values[part] = self.arrive(part[0], values[part], queries)
