"""Cuts the projections of q, k and v into parts; a part is q, k or v of one head group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from ...exchange.geometry import Geometry
from ...schedule import Part, Schedule
from .flat import Name
from .slices import Parts, Ranges

# For each of q, k and v: the index of its projection; and the first row, in this projection, of
# head 0 (an int), or of each head (a tuple).
OfKinds = tuple[tuple[str, tuple[int, int | tuple[int, ...]]], ...]


class Rows(NamedTuple):
    """Names the rows of a linear layer that project q, k or v of a head group.

    Attributes:
        module: Index of the linear layer in `InputModules.projections`.
        rows: These rows of the layer's weight.
        ranks: `Geometry.parts` if the projected heads lie by rank in memory, as in the send buffer;
            else 0.
    """

    module: int
    rows: Ranges
    ranks: int = 0


@dataclass(frozen=True, eq=False)
class Cuts:
    """Holds which rows of the projections make each part.

    Operations are compiled once for each object of this class.

    Attributes:
        rows: For each part, the rows that project it.
        parts: For each linear layer, the rows of every part that it projects.
        norms: The names of a norm's parameters, by kind: "q", "k", both or none.
    """

    rows: dict[Part, Rows]
    parts: list[Parts]
    norms: dict[str, list[Name]]

    @lru_cache(maxsize=4096)
    def names(self, tables: int) -> tuple[Name, ...]:
        """Return the names of x, `InputModules.parameters`, so many tables, and the token."""
        names: list[Name] = ["x"]
        for module in range(len(self.parts)):
            names += [("weight", module), ("bias", module)]
        names += chain(*self.norms.values(), (("table", index) for index in range(tables)))
        return *names, "token"


@lru_cache(maxsize=1024)
def cuts_of(
    geometry: Geometry,
    schedule: Schedule,
    by_rank: frozenset[str],
    of_kinds: OfKinds,
    head_dim: int,
    norms: tuple[tuple[str, int], ...],
) -> Cuts:
    """Return which rows of the projections make each part; cached, so that layers share an object.

    Args:
        geometry: The geometry of the call.
        schedule: The schedule of the call.
        by_rank: Those of "q", "k" and "v" that lie by rank in memory if exchanged alone.
        of_kinds: The projection and the first rows of each of q, k and v, see `OfKinds`.
        head_dim: ``d``.
        norms: For each norm, its kind ("q" or "k") and the number of its parameters.
    """
    rows, modules = {}, dict(of_kinds)
    of_modules: dict[int, list[Ranges]] = {module: [] for module, _ in modules.values()}
    for part in schedule.parts:
        kind, group = part
        module, first = modules[kind]
        elements = geometry.rows_of(kind, group, first, head_dim)
        is_by_rank = kind in by_rank and part in schedule.alone
        rows[part] = Rows(module, elements, ranks=geometry.parts if is_by_rank else 0)
        of_modules[module].append(elements)
    parameters: dict[str, list[Name]] = {}
    for kind, count in norms:
        parameters[kind] = [("norm", kind, index) for index in range(count)]
    return Cuts(rows, list(map(tuple, of_modules.values())), parameters)
