"""The projections of q, k and v, and their gradients, one part after another.

A part is q, k or v of one head group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...schedule import Part
from .linear import Plain, product_of, without_hooks
from .products import autocast, by_rank
from .slices import Parts, Ranges, batched, cutter, mm_of_slices


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


class ProjectionOperands(NamedTuple):
    """Tensors that q, k and v are computed from, in a forward or in a backward.

    Attributes:
        x: [.., m]. The layer's input; None in a backward that reads it for no gradient.
        linear: Weight and bias of each linear layer, of the layer or cast by autocast; None in a
            backward that doesn't read them. A bias is read where q, k and v are made.
        tables: As in `Projections`; not read from there, since a node saves them in between.
        norm_parameters: In backward, the saved parameters of the norms. None in forward, where the
            norms are being called (`Projections.called`) and have their parameters in place.
        norm_inputs: For each part with a norm, the input of the norm. Filled where q and k are
            made; None if nobody needs them.
    """

    x: Any
    linear: Sequence[Any]
    tables: tuple[Tensor, ...]
    norm_parameters: Sequence[Tensor] | None
    norm_inputs: dict[Part, Tensor] | None


@dataclass
class Projections:
    """Makes q, k and v of all head groups from x.

    Each part is made by rows of a linear layer. A norm and a rotation follow for q and k.

    Attributes:
        modules: The linear layers.
        rows: For each part, the rows that make it.
        parts: For each linear layer, the rows of each of its parts.
        norms: The norms of q and k, over ``d`` of heads [.., h, d]. Backward recomputes them, so
            that nothing but their input is saved.
        rope: A `Rotary` that rotates q and k.
        tables: (cos, sin), [.., 1, d_rot] each, that q and k are rotated by. They need no gradient.
            Empty if nothing is rotated.
        norm_last: Whether the rotation comes before the norm.
        folded: The parts that are rotated by the kernels that pack them, and not by `shape`.
        head_dim: ``d``.
        plain: Known forwards of plain linear layers, see `linear`.
        recorded: Whether autograd records the call.
    """

    modules: list[nn.Linear]
    rows: dict[Part, Rows]
    parts: list[Parts]
    norms: dict[str, nn.Module]
    rope: Any
    tables: tuple[Tensor, ...]
    norm_last: bool
    folded: frozenset[Part]
    head_dim: int
    plain: Plain
    recorded: bool

    @property
    def called(self) -> list[nn.Module]:
        """The modules to call with `linear.call_through`, so that their weights are whole."""
        return list(dict.fromkeys((*self.modules, *self.norms.values())))

    @cached_property
    def norm_places(self) -> dict[str, slice]:
        """The places of the parameters of each norm in `parameters`."""
        places, start = {}, 2 * len(self.modules)
        for kind, norm in self.norms.items():
            places[kind] = slice(start, start := start + len(list(norm.parameters())))
        return places

    def parameters(self) -> list[Tensor | None]:
        """Return weight and bias of each linear layer, as autocast casts them, then the parameters
        of the norms.

        `InputGradients` and the nodes of autograd count on two places for each linear layer, see
        `product_of`.
        """
        parameters: list[Tensor | None] = []
        for module in self.modules:
            parameters += product_of(module, self.plain)
        parameters = list(autocast(*parameters))
        for norm in self.norms.values():
            parameters += norm.parameters()
        return parameters

    def projecting(
        self, x: Tensor, tokens: Sequence[int], parameters: Sequence[Any]
    ) -> Callable[[Part], Tensor]:
        """Return the function that projects x to a part.

        Args:
            x: [tokens, m].
            tokens: (s/P, b). The dimensions of the tokens in the result.
            parameters: Weight and bias of each linear layer in turn, of the layer or cast by
                autocast; what follows them is left out.

        Returns:
            A function from a part to [s/P, b, h_g, d]; or to [s/P, b, P, h_g/P, d] in the memory
            order in which the tensor is sent, where `Rows.ranks` is given.
        """
        pairs = list(zip(parameters[::2], parameters[1::2], self.parts))
        # Once for all parts: views cost the host time.
        weights = [cutter(weight.t(), 1, parts) for weight, _, parts in pairs]
        biases = [None if bias is None else cutter(bias, 0, parts) for _, bias, parts in pairs]

        def project(part: Part) -> Tensor:
            module, rows, ranks = self.rows[part]
            bias = biases[module]
            weight, added, _ = pairs[module]
            if ranks:
                # The product writes the send buffer.
                added = None if added is None else batched(added, 0, rows, ranks)
                y = by_rank(x, batched(weight, 0, rows, ranks), added)
                return y.view(*tokens, ranks, y.shape[-1] // self.head_dim, self.head_dim)
            if len(rows) > 1:
                # Rows in several slices, see Note [Slices of weights].
                y = mm_of_slices(x, weight.t(), rows, added)
            elif bias is None:
                y = torch.mm(x, weights[module](rows))
            else:
                y = torch.addmm(bias(rows), x, weights[module](rows))
            return y.view(*tokens, y.shape[-1] // self.head_dim, self.head_dim)

        return project

    def is_rotated(self, part: Part, tables: tuple[Tensor, ...]) -> bool:
        """Return whether `shape` rotates a part."""
        return bool(tables) and part[0] != "v" and part not in self.folded

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
            heads: What `projecting` made.
            tables: As the attribute; not read from there, since a node saves them in between.
            norm_parameters: In backward, the saved parameters of the norms. None in forward, where
                the norms are being called (`called`) and have their parameters in place.

        Returns:
            A tensor of the shape of ``heads``; ``heads`` itself where nothing is applied.
        """
        module, is_rotated = self.norms.get(part[0]), self.is_rotated(part, tables)
        if not (is_rotated or module):
            return heads
        # Not the call: hooks run around all parts, once.
        norm: Callable[..., Tensor] | None = None if module is None else module.forward
        if module is not None and norm_parameters is not None:
            norm = self._with(module, self.of_norm(part[0], norm_parameters))
        ranks = self.rows[part].ranks
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
