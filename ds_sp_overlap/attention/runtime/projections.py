"""The projections of q, k and v, and their gradients, one part after another.

A part is q, k or v of one head group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from ...schedule import Part
from .flat import Name
from .linear import Plain, products_of, without_hooks
from .slices import Parts, Ranges


class Rows(NamedTuple):
    """The rows of a linear layer that project q, k or v of a head group.

    Attributes:
        module: Index of the linear layer.
        rows: The rows of its weight.
        ranks: The parts that heads are dealt to (`Geometry.parts`), if the heads of each are to lie
            together in memory; else 0.
    """

    module: int
    rows: Ranges
    ranks: int = 0


@dataclass(frozen=True, eq=False)
class Cuts:
    """Tells how projections are cut into parts; operations are compiled once for each object.

    Attributes:
        rows: For each part, the rows that make it.
        parts: For each linear layer, the rows of each of its parts.
        norms: The kind of each norm, and how many parameters it has.
    """

    rows: dict[Part, Rows]
    parts: list[Parts]
    norms: tuple[tuple[str, int], ...]

    @lru_cache(maxsize=4096)
    def names(self, tables: int) -> tuple[Name, ...]:
        """Return the names of x, `Projections.parameters` and ``tables`` tables."""
        count = 2 * len(self.parts) + sum(count for _, count in self.norms)
        parameters = [("parameter", index) for index in range(count)]
        return ("x",), *parameters, *(("table", index) for index in range(tables))


@dataclass
class Projections:
    """Makes q, k and v of all head groups from x.

    Each part is made by rows of a linear layer. A norm and a rotation follow for q and k.

    Attributes:
        modules: The linear layers.
        cuts: How they are cut into parts.
        norms: The norms of q and k, over ``d`` of heads [.., h, d]. Backward recomputes them, so
            that nothing but their input is saved.
        rope: A `Rotary` that rotates q and k.
        norm_last: Whether the rotation comes before the norm.
        folded: The parts that are rotated by the kernels that pack them, and not by `shape`.
        head_dim: ``d``.
        plain: Known forwards of plain linear layers, see `linear`.
        cast: The autocast state, see `linear.products_of`.
    """

    modules: list[nn.Linear]
    cuts: Cuts
    norms: dict[str, nn.Module]
    rope: Any
    norm_last: bool
    folded: frozenset[Part]
    head_dim: int
    plain: Plain
    cast: dict[str, Any]

    @property
    def called(self) -> list[nn.Module]:
        """The modules to call with `linear.call_through`, so that their weights are whole."""
        return list(dict.fromkeys((*self.modules, *self.norms.values())))

    @cached_property
    def norm_places(self) -> dict[str, range]:
        """The places of the parameters of each norm in `parameters`."""
        places, start = {}, 2 * len(self.modules)
        for kind, count in self.cuts.norms:
            places[kind] = range(start, start := start + count)
        return places

    def parameters(self) -> list[Tensor | None]:
        """Return weight and bias of each linear layer, as autocast casts them, then the parameters
        of the norms.

        `operations` counts on two places for each linear layer, see `products_of`.
        """
        parameters = products_of(self.modules, self.plain, self.cast)
        for norm in self.norms.values():
            parameters += norm.parameters()
        return parameters

    def is_needed(self, part: Part, needs: dict[tuple[Any, ...], bool]) -> bool:
        """Return whether dq, dk or dv of a group is needed: by x, its projection, or its norm.

        Args:
            part: The kind and the group.
            needs: By name of register, whether x and each of the parameters need a gradient.
        """
        linear = 2 * self.cuts.rows[part].module
        places = (linear, linear + 1, *self.norm_places.get(part[0], ()))
        return needs["x",] or any(needs["parameter", index] for index in places)

    def turns(self, part: Part) -> bool:
        """Return whether `shape` rotates a part, if there are tables."""
        return part[0] != "v" and part not in self.folded

    def shape(
        self,
        part: Part,
        heads: Tensor,
        tables: tuple[Tensor, ...],
        norm_parameters: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Apply the norm and the rotation to a projected part; its memory order stays as it is.

        Args:
            part: The kind and the group.
            heads: What the linear layer made.
            tables: (cos, sin), [.., 1, d_rot] each, that q and k are rotated by; they need no
                gradient. Empty if nothing is rotated.
            norm_parameters: In backward, the saved parameters of the norms. None in forward, where
                the norms are being called (`called`) and have their parameters in place.

        Returns:
            A tensor of the shape of ``heads``; ``heads`` itself where nothing is applied.
        """
        module, is_rotated = self.norms.get(part[0]), bool(tables) and self.turns(part)
        if not (is_rotated or module):
            return heads
        # Not the call: hooks run around all parts, once.
        norm: Callable[..., Tensor] | None = None if module is None else module.forward
        if module is not None and norm_parameters is not None:
            norm = self._with(module, self.of_norm(part[0], norm_parameters))
        ranks = self.cuts.rows[part].ranks
        # The ranks are the first dimension in memory: moved there, heads and result are contiguous.
        heads = heads.movedim(2, 0) if ranks else heads
        heads = heads if norm is None or self.norm_last else norm(heads)
        heads = self.rope.rotate(heads, *tables) if is_rotated else heads
        heads = norm(heads) if norm is not None and self.norm_last else heads
        return heads.movedim(0, 2) if ranks else heads

    def of_norm(self, kind: str, norm_parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return those of the parameters of all norms that belong to the norm of q or k."""
        place, linear = self.norm_places[kind], 2 * len(self.modules)
        return norm_parameters[place.start - linear : place.stop - linear]

    def _with(self, norm: nn.Module, saved: Sequence[Tensor]) -> Callable[..., Tensor]:
        """Return ``norm`` with the saved tensors in the place of its parameters."""
        own = dict(norm.named_parameters())
        # Mostly they are the norm's own, and the call below would only cost the host time.
        if all(parameter is tensor for parameter, tensor in zip(own.values(), saved)):
            return norm
        # They differ where a caller's `functional_call` replaced the parameters in forward, and in
        # an activation checkpoint, which saves tensors of its own.
        norm = without_hooks(norm)  # hooks of ZeRO-3 expect parameters of its own
        return lambda heads: functional_call(norm, dict(zip(own, saved)), (heads,))
