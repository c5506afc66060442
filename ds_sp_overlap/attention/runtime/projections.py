"""Projections of q, k and v, part by part, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...schedule import Part
from .execution import Call
from .linear import Plain, autocast_of, by_rank, matrix, parameter_of, without_hooks
from .slices import Parts, Pieces, Ranges, batched, cutter


class Rows(NamedTuple):
    """Where q, k or v of a group comes from: rows of one of the linear layers; those of each of
    ``ranks`` together in memory, if not 0.
    """

    module: int
    rows: Ranges
    ranks: int = 0


@dataclass
class Projections:
    """q, k and v of all groups from x: rows of linear layers, then for q and k a norm and a
    rotation.

    modules   the linear layers
    rows      of each part
    parts     of each linear layer, the rows that its parts are made of
    norms     of q and k, over d of heads [.., h, d]; computed again in backward, so that nothing
              but their input is kept
    rope      a `Rotary` that rotates q and k
    tables    (cos, sin) [.., 1, d_rot] by which, without a gradient; empty if nothing is rotated
    norm_last rotate before the norm instead of behind it
    folded    what the kernels rotate that pack it, so that `shape` does not
    head_dim  d
    plain     see `linear`
    recorded  whether there will be a backward
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
        """Modules whose weights must be there while it is made and run."""
        return list(dict.fromkeys((*self.modules, *self.norms.values())))

    @cached_property
    def learned(self) -> dict[str, slice]:
        """Places of what is learned in each norm among the `parameters`, behind those of the linear
        layers.
        """
        places, at = {}, 2 * len(self.modules)
        for kind, norm in self.norms.items():
            places[kind] = slice(at, at := at + len(list(norm.parameters())))
        return places

    def parameters(self) -> list[Tensor | None]:
        """Weight and bias of each linear layer, then what is learned in the norms."""
        linear = [
            p
            for m in self.modules
            for p in (
                parameter_of(m, "weight"),
                None if self.plain[type(m).forward](m) else parameter_of(m, "bias"),
            )
        ]
        return linear + [p for norm in self.norms.values() for p in norm.parameters()]

    def projecting(
        self, x: Tensor, tokens: Sequence[int], parameters: Sequence[Any]
    ) -> Callable[[Part], Tensor]:
        """What projects x [s/P b, m] to a part: [*tokens, h, d], or [*tokens, P, h, d] in the
        memory order of the wire.

        parameters   as `parameters` gives them, or what autocast made of them
        """
        pairs = list(zip(parameters[::2], parameters[1::2], self.parts))
        weights = [cutter(weight.t(), 1, parts) for weight, _, parts in pairs]
        biases = [None if bias is None else cutter(bias, 0, parts) for _, bias, parts in pairs]

        def project(part: Part) -> Tensor:
            module, rows, ranks = self.rows[part]
            bias = biases[module]
            if ranks:
                weight, bias, _ = pairs[module]
                y = by_rank(
                    x,
                    batched(weight, 0, rows, ranks),
                    None if bias is None else batched(bias, 0, rows, ranks),
                )
                return y.view(*tokens, ranks, y.shape[-1] // self.head_dim, self.head_dim)
            y = (
                torch.mm(x, weights[module](rows))
                if bias is None
                else torch.addmm(bias(rows), x, weights[module](rows))
            )
            return y.view(*tokens, y.shape[-1] // self.head_dim, self.head_dim)

        return project

    def is_rotated(self, part: Part, tables: tuple[Tensor, ...]) -> bool:
        return bool(tables) and part[0] != "v" and part not in self.folded

    def shape(
        self,
        part: Part,
        heads: Tensor,
        tables: tuple[Tensor, ...],
        saved: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Norm and rotation of what was projected, in the order of memory, which stays as it is.

        saved   in backward, what the norms learn as it was in forward, where they were called
                already (`called`)
        """
        module, rotated = self.norms.get(part[0]), self.is_rotated(part, tables)
        if not (rotated or module):
            return heads
        norm: Callable[..., Tensor] | None = module
        if module is not None:
            norm = (
                module.forward
                if saved is None
                else self._with(module, self.of_norm(part[0], saved))
            )
        ranks = self.rows[part].ranks
        heads = heads.movedim(2, 0) if ranks else heads
        heads = heads if norm is None or self.norm_last else norm(heads)
        heads = self.rope.rotate(heads, *tables) if rotated else heads
        heads = norm(heads) if norm is not None and self.norm_last else heads
        return heads.movedim(0, 2) if ranks else heads

    def of_norm(self, kind: str, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """What is learned in the norm of q or k, of what is ``saved`` of all norms."""
        at, linear = self.learned[kind], 2 * len(self.modules)
        return saved[at.start - linear : at.stop - linear]

    def _with(self, norm: nn.Module, learned: Sequence[Tensor]) -> Callable[..., Tensor]:
        """``norm`` with ``learned`` for its parameters: `functional_call` replaces them, and so does
        an activation checkpoint, which saves tensors of its own.
        """
        own = dict(norm.named_parameters())
        if all(mine is theirs for mine, theirs in zip(own.values(), learned)):
            return norm
        norm = without_hooks(norm)  # ZeRO-3's look for parameters of its own
        return lambda heads: functional_call(norm, dict(zip(own, learned)), (heads,))


class InputGradients:
    """Gradients of x and of what q, k and v are projected with, one part after another; shared by
    forward and backward of a node.

    needs   whether x has a gradient, then each of the ``parameters``
    """

    def __init__(
        self,
        call: Call,
        made: Projections,
        x: Tensor,
        parameters: Sequence[Tensor | None],
        needs: Sequence[bool],
    ):
        self.call, self.made, self.shape, self.dtype = call, made, x.shape, x.dtype
        self.of_x, *self.of_parameters = needs
        self.linear = 2 * len(made.modules)
        self.shapes = [None if p is None else p.shape for p in parameters]
        self.autocast: dict[str, Any] = {}
        if made.norms:
            self.autocast = autocast_of(x.device)  # guard: as in forward

    def is_needed(self, part: Part) -> bool:
        """Whether there will be a gradient of q, k or v of a group."""
        at, of = 2 * self.made.rows[part].module, self.of_parameters
        return (
            self.of_x or any(of[at : at + 2]) or any(of[self.made.learned.get(part[0], slice(0))])
        )

    def begin(
        self,
        x: Tensor | None,
        weights: Sequence[Any],
        tables: tuple[Tensor, ...],
        of_norms: Sequence[Tensor],
        normed: dict[Part, Tensor],
        some: bool,
        late: bool = False,
    ) -> None:
        """Of a backward, in which ``some`` parts may have no gradient; ``late`` as in `Pieces`.

        weights    of each linear layer at its place among the parameters
        of_norms   what is learned in the norms
        normed     inputs of the norms
        """
        self.x, self.tables, self.of_norms, self.normed = (
            None if x is None else matrix(x),
            tables,
            of_norms,
            normed,
        )
        self.found = {
            at: Pieces(shape, 0, self.made.parts[at // 2], some, late)
            for at, shape in enumerate(self.shapes[: self.linear])
            if shape is not None and self.of_parameters[at]
        }
        self.cut = (
            [cutter(weight, 0, parts) for weight, parts in zip(weights[::2], self.made.parts)]
            if self.of_x
            else []
        )
        self.learned: list[Tensor | None] = [None] * (len(self.shapes) - self.linear)
        self.dx: Tensor | None = None
        self.gradients: dict[Part, Tensor] = {}
        self._halved: set[Part] = set()  # either dgrad or wgrad is done

    def arrived(self, part: Part, dy: Tensor) -> None:
        """Take the gradient of what was sent, and turn it into that of what was projected, [tokens,
        n].
        """
        made = self.made
        if part not in self.normed:
            if made.is_rotated(part, self.tables):
                dy = made.rope.rotate_back(dy.flatten(2, -2), *self.tables).to(self.dtype)
            self.gradients[part] = matrix(dy)
            return
        leaf, of_norm = (
            self.normed.pop(part).detach().requires_grad_(),
            made.of_norm(part[0], self.of_norms),
        )
        with torch.enable_grad(), torch.autocast(**self.autocast):
            y = made.shape(part, leaf, self.tables, self.of_norms)
        places = made.learned[part[0]]
        wanted = [at for at in range(places.start, places.stop) if self.of_parameters[at]]
        dy, *found = torch.autograd.grad(
            y, [leaf, *(of_norm[at - places.start] for at in wanted)], dy, allow_unused=True
        )
        for at, gradient in zip(wanted, found):
            if gradient is not None:
                so_far = self.learned[at - self.linear]
                self.learned[at - self.linear] = gradient if so_far is None else so_far + gradient
        self.gradients[part] = matrix(dy)

    def dgrad(self, part: Part) -> None:
        """Add a part's share to dx; nothing, where no gradient of it arrived."""
        if (dy := self.gradients.get(part)) is None:
            return
        module, rows, _ = self.made.rows[part]
        if self.of_x:
            weight, dx = self.cut[module](rows), self.dx
            if dx is None:
                self.dx = dy @ weight
            elif len(self.call.groups) == 1 or dx.dtype != dy.dtype:
                dx += dy @ weight  # rounds as the layer that it replaces does
            else:
                dx.addmm_(dy, weight)
        del dy  # before the next one is unpacked
        self._is_half_done(part)

    def wgrad(self, part: Part) -> None:
        """Add a part's share to the gradients of weight and bias; nothing, where none arrived."""
        if (dy := self.gradients.get(part)) is None:
            return
        module, rows, _ = self.made.rows[part]
        at = 2 * module
        if self.of_parameters[at]:
            self.found[at].put(rows, torch.mm, dy.t(), self.x)
        if self.of_parameters[at + 1]:
            self.found[at + 1].put(rows, torch.sum, dy, 0)
        del dy  # before the next one is unpacked
        self._is_half_done(part)

    def _is_half_done(self, part: Part) -> None:
        if part in self._halved:
            del self.gradients[part]
        else:
            self._halved.add(part)

    def end(self) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the parameters."""
        of_linear = [
            self.found[at].whole() if at in self.found else None for at in range(self.linear)
        ]
        found = None if self.dx is None else self.dx.view(self.shape), *of_linear, *self.learned
        del (
            self.x,
            self.cut,
            self.tables,
            self.of_norms,
            self.found,
            self.learned,
            self.dx,
        )  # of this backward
        return found
