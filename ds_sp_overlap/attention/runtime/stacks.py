"""Weight gradients of experts, which are made once for all chunks of tokens.

A mixture of experts holds the weights of all its experts in one parameter, a *stack* [experts, ..,
..]. Autograd would make a whole gradient of the stack for each chunk of tokens, and for each expert
where a forward takes the experts one by one; and add all of these up.

    Before:  y_c = grouped_mm(x_c, w^T)         dw = sum over c of grouped_mm(dy_c^T, x_c)
    Now:     the same y_c                       dw = grouped_mm(dy^T, x), tokens of all chunks

The operands of all chunks wait as long as they are smaller than the stack. So where experts have
few tokens, the gradient is made once; and no more memory is held than autograd would need, which
holds the sum and the gradient of a chunk. Where experts have many tokens, gradients are made by
chunk, and are small next to the rest of the work. Their sum is in fp32, which in half precision
takes the size of a stack more, since half precision would round the sum with each chunk.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...relayout.ops import sum_dtype
from .waiting import Operands, Waiting


class Stack(Waiting):
    """The weights of all experts in one call, with the operands of their gradients.

    Args:
        parameter: [experts, .., ..].
        where: Name of the attention layer, for errors.

    Attributes:
        sum: The gradient so far; None before the first product.
        held_bytes: The size of the operands that wait.
    """

    trains = (True,)

    def __init__(self, parameter: Tensor, where: str):
        super().__init__()
        self.parameter, self.where = parameter, where
        # Of the whole parameter, which ZeRO-3 may have partitioned again.
        self.shape, self.dtype, self.n_bytes = parameter.shape, parameter.dtype, parameter.nbytes

    @property
    def weight(self) -> Tensor:
        return self.parameter

    def start(self, backward: int) -> None:
        super().start(backward)
        self.held_bytes = 0
        self.sum: Tensor | None = None

    def add(self, chunk: Operands) -> None:
        super().add(chunk)
        self.held_bytes += chunk.left.nbytes + chunk.right.nbytes
        # Operands wait up to the size of the stack, see the top of this file.
        if self.held_bytes > self.n_bytes:
            self._sum(sum_dtype(self.dtype))

    def _sum(self, dtype: torch.dtype) -> None:
        """Multiply what waits, and add the products to the sum, which begins in ``dtype``."""
        chunks, self.chunks, self.held_bytes = self.chunks, [], 0
        grouped = [chunk for chunk in chunks if chunk.expert is None]
        if grouped:
            left, right, offs = _in_order_of_experts(grouped)
            dw = F.grouped_mm(left.t(), right, offs=offs)
            self.sum = dw.to(dtype) if self.sum is None else self.sum.add_(dw)
        of_experts: dict[int, list[Operands]] = defaultdict(list)
        for chunk in chunks:
            if chunk.expert is not None:
                of_experts[chunk.expert].append(chunk)
        for expert, of_expert in of_experts.items():
            # One product, so that no sum over chunks is rounded.
            left = torch.cat([chunk.left for chunk in of_expert])
            if self.sum is None:
                self.sum = left.new_zeros(self.shape, dtype=dtype)
            self.sum[expert].add_(left.t() @ torch.cat([chunk.right for chunk in of_expert]))

    def summed(self) -> list[Tensor | None]:
        self._sum(self.dtype)
        return [None if self.sum is None else self.sum.to(self.dtype)]


def stacks_of(module: nn.Module, where: str) -> dict[str, Stack]:
    """Return the stacks that a module holds itself and that train, by the names of parameters.

    Any parameter with three dims counts as a stack. Empty where autograd does not record.
    """
    if not torch.is_grad_enabled():
        return {}
    stacks = {}
    for name, weight in module._parameters.items():
        if weight is None or type(weight) is not nn.Parameter:  # quantised, or distributed
            continue
        if weight.dim() == 3 and weight.numel() and weight.requires_grad:
            stacks[name] = Stack(weight, where)
    return stacks


def _in_order_of_experts(chunks: list[Operands]) -> tuple[Tensor, Tensor, Tensor]:
    """Join the tokens of chunks, so that those of an expert lie together; the host need not wait.

    Args:
        chunks: One or more, each of all experts.

    Returns:
        Left and right operand of all tokens, and the ``offs`` of all tokens.
    """
    if len(chunks) == 1:
        left, right, _, offs = chunks[0]
        assert offs is not None
        return left, right, offs
    experts: list[Tensor] = []
    ends = [chunk.offs for chunk in chunks if chunk.offs is not None]
    for chunk, offs in zip(chunks, ends):
        tokens = torch.arange(len(chunk.left), device=offs.device, dtype=offs.dtype)
        # Tokens behind the last expert belong to none, and stay behind the last one.
        experts.append(torch.searchsorted(offs, tokens, right=True))
    # The second argsort inverts the first: for each token, its place in the order of experts.
    places = torch.cat(experts).argsort(stable=True).argsort()
    of_chunks = places.split([len(chunk.left) for chunk in chunks])
    left = chunks[0].left.new_empty(len(places), chunks[0].left.shape[1])
    right = chunks[0].right.new_empty(len(places), chunks[0].right.shape[1])
    for chunk, place in zip(chunks, of_chunks):
        left.index_copy_(0, place, chunk.left)
        right.index_copy_(0, place, chunk.right)
    return left, right, torch.stack(ends).sum(0, dtype=torch.int32)
