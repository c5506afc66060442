"""Provides a stack of transformer layers, with attention and a gated MLP, which `nodes.py` times.

stock    DeepSpeed's class between whole projections
ours     ds_sp_overlap.SelfAttention in each layer
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.variants import Layer, Shape

LAYERS = 3


class MLP(nn.Module):
    def __init__(self, width: int, intermediate: int, **options):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, intermediate, bias=False, **options) for _ in range(2))
        self.down = nn.Linear(intermediate, width, bias=False, **options)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Stack(Layer):
    """The layers of one rank, sequence first, with the interface of `variants.Layer`."""

    def __init__(self, shape: Shape, rank: int, size: int, group=None):
        super().__init__(shape, rank, size, group)
        options = dict(dtype=shape.dtype, device=shape.device)
        self.layers = [Layer(shape, rank, size, group) for _ in range(LAYERS)]
        torch.manual_seed(10)
        self.rest = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    norm_in=nn.RMSNorm(shape.width, **options),
                    norm_mid=nn.RMSNorm(shape.width, **options),
                    mlp=MLP(shape.width, shape.width * 11 // 4, **options),
                )
            )
            for _ in self.layers
        )
        self.projections = nn.ModuleList([*(layer.projections for layer in self.layers), *self.rest])

    def _run(self, attends: list[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
        def run(x):
            for attend, rest in zip(attends, self.rest):
                x = x + attend(rest["norm_in"](x))
                x = x + rest["mlp"](rest["norm_mid"](x))
            return x

        return run

    def stock(self):
        return self._run([layer.stock() for layer in self.layers])

    def ours(self, transport=None, **config):
        return self._run([layer.ours(transport, **config) for layer in self.layers])
