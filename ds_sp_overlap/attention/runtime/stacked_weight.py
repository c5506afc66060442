"""Watches what a forward does with the weights of experts, so that their gradients can wait.

Note [Products with stacks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
The forward of the experts is not known, and need not be. In a shadow of the experts (see
`deferred`) the parameter is a tensor of the class `StackedWeight`, which torch tells of each
function that is called with it. A product whose weight gradient can wait runs as a `Product`:

    F.linear(x, w[expert]), x @ w[expert]       experts one by one
    grouped_mm(x, w, offs)                      tokens in the order of their experts

Every other function gets the parameter itself, and autograd sums that gradient as ever. Both may
happen in one forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .products import autocast
from .stacks import Stack
from .waiting import Product


class StackedWeight(Tensor):
    """A stack in a forward, or a view of it; see Note [Products with stacks].

    Attributes:
        stack: The stack.
        token: Of the node `deferred._Weights`.
        expert: The expert whose weight this is; None for all.
        is_transposed: Whether the two last dims are swapped.
    """

    stack: Stack
    token: Tensor
    expert: int | None
    is_transposed: bool

    @staticmethod
    def of(
        x: Tensor, stack: Stack, token: Tensor, expert: int | None, is_transposed: bool
    ) -> StackedWeight:
        """Return ``x`` as such a tensor."""
        made = x.as_subclass(StackedWeight)
        made.stack, made.token = stack, token
        made.expert, made.is_transposed = expert, is_transposed
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch that was called with such a tensor; torch calls this instead."""
        with torch._C.DisableTorchFunctionSubclass():
            return _call(func, args, kwargs or {})


def _call(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function that a forward calls with a `StackedWeight`.

    An expert's weight, and a transpose, stay a `StackedWeight`. A known product runs as a
    `Product`. Every other call runs as it is, and autograd records it.
    """
    if len(args) > 1 and isinstance(args[0], StackedWeight):
        weight = args[0]
        if func is Tensor.__getitem__ and weight.dim() == 3:
            if (expert := _number(args[1])) is not None and not weight.is_transposed:
                return StackedWeight.of(weight[expert], weight.stack, weight.token, expert, False)
        elif func in (Tensor.transpose, torch.transpose):
            y = func(*args, **kwargs)
            # Only a swap of the two last dims.
            if {dim % y.dim() for dim in args[1:]} == {y.dim() - 2, y.dim() - 1}:
                of_weight = weight.stack, weight.token, weight.expert
                return StackedWeight.of(y, *of_weight, not weight.is_transposed)
            return y
    elif len(args) > 1 and isinstance(args[1], StackedWeight):
        x, weight = args[:2]
        if func is F.linear and weight.dim() == 2:
            is_known = len(args) == 2 and not kwargs  # a bias is rounded with the product
            if is_known and (y := _multiplied(x, weight, None, swap=True)) is not None:
                return y
        elif func in (Tensor.__matmul__, Tensor.matmul, torch.matmul) and weight.dim() == 2:
            if (y := _multiplied(x, weight, None)) is not None:
                return y
        elif func is torch._grouped_mm and weight.dim() == 3 and x.dim() == 2:
            more = {name: value for name, value in kwargs.items() if value is not None}
            is_known = len(args) == 2 and list(more) == ["offs"]
            if is_known and (y := _multiplied(x, weight, more["offs"])) is not None:
                return y
    return func(*args, **kwargs)


def _number(index: Any) -> int | None:
    """Return the index of one expert as a number; None for an index of any other kind."""
    if isinstance(index, Tensor) and index.dim() == 0 and not index.dtype.is_floating_point:
        return None if index.dtype is torch.bool else int(index)
    return index if type(index) is int else None


def _multiplied(
    x: Tensor, weight: StackedWeight, offs: Tensor | None, swap: bool = False
) -> Tensor | None:
    """Return the product of ``x`` and a stacked weight, as a `Product`.

    None where ``x`` has another dtype or is stacked itself; the function then runs as it is.

    Args:
        x: [.., k].
        weight: [k, n], or [experts, k, n] with ``offs``.
        offs: [experts], see `Operands`.
        swap: Whether the weight is [n, k].
    """
    w = weight.detach().as_subclass(Tensor)
    if offs is None:  # grouped products know no autocast
        x, w = autocast(x, w)
    if isinstance(x, StackedWeight) or x.dtype != w.dtype:
        return None
    # As the stack holds it.
    w = w.transpose(-2, -1) if weight.is_transposed else w
    how = weight.expert, offs, weight.is_transposed != swap, weight.token
    return Product.apply(weight.stack, x, w, None, *how)
