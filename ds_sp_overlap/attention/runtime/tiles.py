"""Runs a norm or an MLP tile by tile, so that only one tile's temporaries are alive at a time.

Note [Tiles]
~~~~~~~~~~~~
The temporaries of a norm in bf16 take up to 14 times the memory of its input. An MLP has several
temporaries of its inner width. Both modules compute each token by itself. So forward runs one tile
of tokens after the other, and backward recomputes and differentiates each tile::

    x ──► _Saved ──► _Tiles ──► y       forward:  y[tile] = f(x[tile]), without a graph
          saves x                       backward: dx[tile], dw += of f(x[tile]), with a graph
          and weights

A non-reentrant checkpoint stops its recompute as soon as it has all saved tensors. So `_Saved`
comes before `_Tiles`: if the tiled module is the last in a checkpoint, the recompute runs no tile.

The modules with weights are called once, around the nodes (`call_through`), so that ZeRO-3 and
FSDP2 gather the weights as usual. The tiles run on copies of the modules, which have no hooks and
have detached weights. `_Tiles` sums a weight's gradient over the tiles, so autograd passes the
gradient to the weight once.

In half precision, a gradient that is rounded in each tile has a larger error than the untiled
gradient, which is rounded once. So each tile computes the weight gradient of a `nn.Linear` as an
fp32 product (`_Linear`), and in backward the tiles of a norm run in fp32. Other kinds of linear
layers (transformers' Conv1D, Megatron's) round in each tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...exchange.exchange import Node
from ..memory.forward_state import autocast_of
from .linear import call_through, without_hooks


def run_in_tiles(module: nn.Module, x: Tensor, tokens: int) -> Tensor:
    """Run the forward of ``module`` tile by tile.

    Args:
        module: A module that computes each token by itself. This function runs inside of the
            module's call, after the module's own pre-hooks.
        x: [.., m]. The tokens.
        tokens: The most tokens in a tile.

    Returns:
        [.., width]. The output of the module. In autocast, the dtype may differ from that of ``x``.
    """
    with_weights = [part for part in module.modules() if part._parameters and part is not module]

    def run(x: Tensor) -> Tensor:
        # Only here, inside the modules' calls, has ZeRO-3 gathered the weights.
        weights = list(module.parameters())
        hidden = _Saved.apply(x, *weights)
        # The node of `_Saved` holds the saved tensors.
        return _Tiles.apply(module, tokens, hidden.grad_fn, hidden, *weights)

    return call_through(with_weights, run, x)


def _over(
    module: nn.Module, weights: Mapping[nn.Parameter, Tensor], add: _Add | None = None
) -> Any:
    """Return a copy of a module and its children, with the given weights and without hooks.

    If ``add`` is given, linear layers in the copy pass their weights' gradients to ``add`` instead
    of autograd.
    """
    copy = without_hooks(module)
    own, children = {}, {}
    for name, parameter in module._parameters.items():
        own[name] = parameter if parameter is None else weights[parameter]
    for name, child in module._modules.items():
        children[name] = child if child is None else _over(child, weights, add)
    vars(copy).update(_parameters=own, _modules=children)
    if add is not None and type(module).forward is nn.Linear.forward:
        vars(copy)["forward"] = partial(_Linear.apply, add, own["weight"], own["bias"])
    return copy


# A function that adds a term to the gradient of a weight: (weight, term).
_Add = Callable[[Tensor, Tensor], None]


class _Linear(torch.autograd.Function):
    """Runs a linear layer in half precision; passes its weights' gradients to ``add`` in fp32.

    forward: y = x w^T + b
    backward: dx = dy w; add dw = dy^T x and db = sum of dy, in fp32
    """

    @staticmethod
    def forward(ctx: Any, add: _Add, w: Tensor, b: Tensor | None, x: Tensor) -> Tensor:
        ctx.save_for_backward(w, b, x)
        ctx.add = add
        return nn.functional.linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        (w, b, x), rows = ctx.saved_tensors, dy.flatten(0, -2)
        if w.requires_grad:
            ctx.add(w, _product(rows.t(), x.flatten(0, -2)))
        if b is not None and b.requires_grad:
            ctx.add(b, rows.sum(0, dtype=torch.float32))
        return None, None, None, dy @ w if ctx.needs_input_grad[3] else None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices of half precision to a product in fp32."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class _Saved(torch.autograd.Function):
    """Saves the input and the weights for the backward of `_Tiles`; see Note [Tiles]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple:
        return dx, *(None for _ in ctx.needs_input_grad[1:])


class _Tiles(Node):
    """Runs a module tile by tile; see Note [Tiles].

    forward: y[tile] = f(x[tile], w)
    backward: dx[tile], dw[tile] = vjp of f at x[tile]; dw = sum over tiles, in fp32 at least
    """

    @staticmethod
    def forward(
        ctx: Any,
        module: nn.Module,
        tokens: int,
        saved: Any,
        x: Tensor,
        *weights: nn.Parameter,
    ) -> Tensor:
        # For backward, the copy keeps the modes and active adapters that the module has now.
        ctx.copy = _over(module, dict(zip(weights, weights)))
        ctx.tokens, ctx.saved, ctx.autocast = tokens, saved, autocast_of(x.device)
        # Autocast caches the casts of weights that need a gradient. Here a cast has no graph, so a
        # cached cast would later lose the weight's gradient. Detached weights need no gradient, so
        # their casts are not cached.
        detached = {weight: weight.detach() for weight in weights}
        copy, rows = _over(module, detached), x.flatten(0, -2)
        y: Any = None
        for start in range(0, max(len(rows), 1), tokens):
            tile = _call(copy, rows[start : start + tokens])
            if y is None:
                y = tile.new_empty(len(rows), tile.shape[-1])
            y[start : start + tokens] = tile
            del tile
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"sp_overlap.tiles: {type(ctx.copy).__name__} has no second derivative in tiles, "
                'and create_graph is True; take "tiles" out of the section'
            )
        (x, *weights), wants_dx = ctx.saved.saved_tensors, ctx.saved.needs_input_grad[0]
        sums = {}

        def add(leaf: Tensor, term: Tensor) -> None:
            if leaf not in sums:
                wide = torch.promote_types(leaf.dtype, torch.float32)
                sums[leaf] = torch.zeros_like(leaf, dtype=wide)
            sums[leaf] += term

        dtype = torch.promote_types(x.dtype, torch.float32)
        rounds = dtype != x.dtype and not ctx.autocast["enabled"]
        # A module whose weights are all vectors is a norm.
        widens = rounds and all(weight.dim() < 2 for weight in weights)
        leaves = []
        for weight, wanted in zip(weights, ctx.needs_input_grad[4:]):
            leaf = weight.detach().to(dtype) if widens else weight.detach()
            leaves.append(leaf.requires_grad_(wanted))
        over = dict(zip(ctx.copy.parameters(), leaves))
        copy = _over(ctx.copy, over, add if rounds else None)
        sources = [leaf for leaf in leaves if leaf.requires_grad]
        rows, dy = x.flatten(0, -2), dy.flatten(0, -2)
        dx = torch.empty_like(rows) if wants_dx else None
        for start in range(0, max(len(rows), 1), ctx.tokens):
            tile = slice(start, start + ctx.tokens)
            inputs = rows[tile].detach()
            inputs = inputs.to(dtype) if widens else inputs
            inputs.requires_grad_(wants_dx)
            with torch.enable_grad(), torch.autocast(**ctx.autocast, cache_enabled=False):
                y = _call(copy, inputs)
            wanted = [*sources, inputs] if wants_dx else sources
            gradients = list(
                torch.autograd.grad(y, wanted, dy[tile].to(y.dtype), allow_unused=True)
            )
            del y
            if dx is not None:
                dx[tile] = gradients.pop()
            for leaf, gradient in zip(sources, gradients):
                if gradient is not None:  # None if `_Linear` added it, or f does not use the leaf
                    add(leaf, gradient)
            del gradients
        dws = []
        for weight, leaf in zip(weights, leaves):
            dws.append(sums[leaf].to(weight.dtype) if leaf in sums else None)
        return None, None, None, None if dx is None else dx.view_as(x), *dws


def _call(copy: nn.Module, rows: Tensor) -> Tensor:
    """Run the forward of a copied module on some tokens, [tokens, m]."""
    return type(copy).forward(copy, rows[None])[0]
