"""Backward of the projections of q, k and v, one part after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...relayout.ops import sum_dtype
from ...schedule import Part
from ..memory.forward_state import autocast_of
from .execution import Call
from .pieces import Pieces
from .products import matrix
from .projections import ProjectionOperands, Projections
from .slices import Ranges, cutter


class InputGradients:
    """Computes the gradients of x and of the parameters of `Projections`, one part after another.

    Forward and backward of a node share this object. Each backward calls `begin`; for each part
    `arrived`, `dgrad` and `wgrad`, as the schedule orders them; and `end`.

    Args:
        call: The call.
        projections: The projections.
        x: [.., m]. The layer's input, of which only shape, dtype and device are read. Under
            autocast it is not cast yet: dx is a sum in its dtype, as the sum of what each
            projection would give back by itself.
        parameters: As `Projections.parameters` returns them.
        needs_grad: Whether x needs a gradient, then whether each of the parameters does.

    Attributes:
        linear_count: How many of the parameters are those of linear layers.
    """

    def __init__(
        self,
        call: Call,
        projections: Projections,
        x: Tensor,
        parameters: Sequence[Tensor | None],
        needs_grad: Sequence[bool],
    ):
        self.call, self.projections, self.shape, self.dtype = call, projections, x.shape, x.dtype
        assert parameters[0] is not None
        self.product_dtype = parameters[0].dtype
        self.x_needs_grad, *self.parameters_need_grad = needs_grad
        self.linear_count = 2 * len(projections.modules)
        self.shapes = [None if p is None else p.shape for p in parameters]
        self.autocast: dict[str, Any] = (  # guard: as in forward
            autocast_of(x.device) if projections.norms else {}
        )

    def is_needed(self, part: Part) -> bool:
        """Return whether dq, dk or dv of a group is needed: by x, its projection, or its norm."""
        projections, needs_grad = self.projections, self.parameters_need_grad
        weight = 2 * projections.rows[part].module
        of_norm = projections.norm_places.get(part[0], slice(0))
        return self.x_needs_grad or any(needs_grad[weight : weight + 2]) or any(needs_grad[of_norm])

    def begin(
        self,
        operands: ProjectionOperands,
        some_missing: bool = False,
        late: bool = False,
    ) -> None:
        """Begin a backward; `end` ends it.

        Args:
            operands: Those of this backward.
            some_missing: Whether some parts may have no gradient.
            late: As in `Pieces`.
        """
        self.operands, self.x = operands, None if operands.x is None else matrix(operands.x)
        parts = self.projections.parts
        # By the index of the weight or bias among the parameters; only those that need a gradient.
        self.linear_gradients: dict[int, Pieces] = {}
        for index, shape in enumerate(self.shapes[: self.linear_count]):
            if shape is not None and self.parameters_need_grad[index]:
                pieces = Pieces(shape, 0, parts[index // 2], some_missing, late)
                self.linear_gradients[index] = pieces
        self.cut_weights: list[Callable[[Ranges], Tensor]] = []
        if self.x_needs_grad:
            for weight, rows in zip(operands.linear[::2], parts):
                self.cut_weights.append(cutter(weight, 0, rows))
        self.norm_gradients: list[Tensor | None] = [None] * (len(self.shapes) - self.linear_count)
        self.dx: Tensor | None = None
        # The gradients of the projections' outputs. Dgrad and wgrad come in either order, and each
        # takes out its own reference, so that the second of them frees the gradient.
        self._for_dgrad: dict[Part, Tensor] = {}
        self._for_wgrad: dict[Part, Tensor] = {}

    def arrived(self, part: Part, dy: Tensor) -> None:
        """Take the gradient of a part, and send it back through the part's rotation and norm.

        Leaves the gradient of the projection's output to `dgrad` and `wgrad`, and adds to the
        gradients of the norm's parameters.

        Args:
            part: The kind and the group.
            dy: The gradient, of the shape in which the part was sent: [s/P, b, h_g, d], or
                [s/P, b, P, h_g/P, d].
        """
        projections = self.projections
        _, _, tables, norm_parameters, norm_inputs = self.operands
        if not norm_inputs or part not in norm_inputs:
            if projections.is_rotated(part, tables):
                # A rotation needs nothing but its tables to go back.
                dy = projections.rope.rotate_back(dy.flatten(2, -2), *tables)
                dy = dy.to(self.product_dtype)
            self._for_dgrad[part] = self._for_wgrad[part] = matrix(dy)
            return
        # The norm is computed again under autograd, since it may be any module.
        leaf = norm_inputs.pop(part).detach().requires_grad_()
        parameters = projections.of_norm(part[0], norm_parameters or ())
        with torch.enable_grad(), torch.autocast(**self.autocast):
            y = projections.shape(part, leaf, tables, norm_parameters)
        # One that was frozen since forward is left out: nobody takes its gradient.
        needed = {
            index: parameter
            for index, parameter in enumerate(parameters, projections.norm_places[part[0]].start)
            if self.parameters_need_grad[index] and parameter.requires_grad
        }
        ends = [leaf, *needed.values()]
        dy, *gradients = torch.autograd.grad(y, ends, dy, allow_unused=True)
        for index, gradient in zip(needed, gradients):
            if gradient is not None:
                # In half precision the sum would be rounded with each group. Autograd casts it.
                gradient = gradient.to(sum_dtype(gradient.dtype))
                so_far = self.norm_gradients[index - self.linear_count]
                gradient = gradient if so_far is None else so_far + gradient
                self.norm_gradients[index - self.linear_count] = gradient
        self._for_dgrad[part] = self._for_wgrad[part] = matrix(dy)

    def dgrad(self, part: Part) -> None:
        """Add the share of a part to dx; do nothing where no gradient of the part arrived."""
        dy = self._for_dgrad.pop(part, None)
        if dy is not None and self.x_needs_grad:
            module, rows, _ = self.projections.rows[part]
            weight, dx = self.cut_weights[module](rows), self.dx
            if dx is None:
                product = dy @ weight
                # Without autocast both are alike, and a cast that changes nothing costs the host
                # time.
                self.dx = product if product.dtype == self.dtype else product.to(self.dtype)
            elif len(self.call.groups) == 1 or dx.dtype != dy.dtype:
                dx += dy @ weight  # rounds each product, as the layer that is replaced does
            else:
                # One kernel instead of two, and in half precision one rounding instead of two.
                dx.addmm_(dy, weight)

    def wgrad(self, part: Part) -> None:
        """Add the share of a part to the gradients of weight and bias, where one arrived."""
        dy = self._for_wgrad.pop(part, None)
        if dy is None:
            return
        module, rows, _ = self.projections.rows[part]
        weight, bias = 2 * module, 2 * module + 1
        if self.parameters_need_grad[weight]:
            self.linear_gradients[weight].put(rows, torch.mm, dy.t(), self.x)
        if self.parameters_need_grad[bias]:
            self.linear_gradients[bias].put(rows, torch.sum, dy, 0)

    def end(self) -> tuple[Tensor | None, ...]:
        """End a backward.

        Returns:
            dx, then the gradient of each of the parameters; None for each that has none.
        """
        linear_gradients = {index: x.whole() for index, x in self.linear_gradients.items()}
        dx = None if self.dx is None else self.dx.view(self.shape)
        of_linear = map(linear_gradients.get, range(self.linear_count))
        gradients = dx, *of_linear, *self.norm_gradients
        # This object outlives the backward; the tensors of the backward must not.
        del self.operands, self.x, self.cut_weights
        del self.linear_gradients, self.norm_gradients, self.dx
        return gradients
