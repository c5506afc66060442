"""Runs modules chunk by chunk, and computes their weight gradients once all chunks are done.

    Before:  y   = module(x)        dx = ...,  dw = dy^T x
    Now:     y_c = shadow(x_c)      dx_c = ... for each chunk, then dw = sum of dy_c^T x_c

A shadow is a copy of a module without its hooks, over the same parameters. The module itself is
called once, around all chunks (`linear.call_through`), and its hooks run there.

Note [Deferred wgrads]
~~~~~~~~~~~~~~~~~~~~~~
The weight gradients of all linear layers wait in one node of autograd (`_Weights`), which is made
before any chunk. Autograd runs nodes that are ready in the reverse order of their creation. So the
node runs behind the backward of everything that is made after the node: if it is made between an
attention and the chunks of its output, behind the backward of the chunks and in front of that of
the attention. The weights of experts wait in the same way, each in a node of its own, since a
forward may leave them out; see `stacks`.

All other parameters, for instance of a norm, pass through that node to the shadows. Autograd sums
their gradients over the chunks, and delivers them behind all chunks too, in one order. Otherwise it
would deliver each one when the last chunk that uses it is done; a rank whose first chunk is empty
may use a router one chunk less than other ranks, and ZeRO, which sums gradients in the order in
which they come, would add up those of different parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...exchange.exchange import Node, new_token
from ...relayout.ops import sum_dtype
from . import sharded
from .linear import Plain, can_split, product_of, returned_by, without_hooks
from .products import autocast
from .stacked_weight import StackedWeight
from .stacks import Stack, stacks_of
from .waiting import Operands, Product, Waiting


class _Slot(Waiting):
    """A linear layer in one call, with the operands of its weight gradients.

    Args:
        module: The linear layer.
        where: Name of the attention layer, for errors.
        at_once: As for `Wgrads`.
        plain: Known forwards of plain linear layers, that of ``module`` among them.
    """

    def __init__(self, module: Any, where: str, at_once: bool, plain: Plain):
        self.module, self.where, self.at_once, self.plain = module, where, at_once, plain
        # Weight and bias, until `Shadows.end`, where a parametrization computes any of them: it may
        # compute something else in each access.
        self.computed: tuple[Tensor, Tensor | None] | None = None
        if not {"weight", "bias"} <= module._parameters.keys():
            self.computed = self.parameters
        # Dtypes of the gradients of weight and bias; None for one that doesn't train.
        self.dtypes = [
            None if x is None or not x.requires_grad else x.dtype for x in self.parameters
        ]
        self.trains = [dtype is not None for dtype in self.dtypes]
        # Weight and bias, between `open` and `Shadows.end`; empty outside of that.
        self.operands: Sequence[Tensor | None] = ()
        super().__init__()

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the product, see `product_of`."""
        return self.computed or product_of(self.module, self.plain)

    @property
    def weight(self) -> Tensor | None:
        return self.operands[0]

    def open(self) -> None:
        """Take weight and bias, cast as by autocast; ZeRO-3 has gathered them by now."""
        operands: Sequence[Tensor | None] = self.parameters
        # Chunks take the weight as a constant: gradients go to the parametrization by `_Weights`.
        if self.computed is not None:
            operands = [x if x is None else x.detach() for x in operands]
        with torch.no_grad():
            self.operands = autocast(*operands)

    def forward(self, x: Tensor, token: Tensor | None) -> Any:
        """Run the forward of the linear layer for a chunk.

        Args:
            x: [.., m].
            token: Of the node `_Weights`.

        Returns:
            What the layer returns, see `returned_by`.
        """
        (x,) = autocast(x)
        y = Product.apply(self, x, *self.operands, None, None, True, token)
        return returned_by(self.module, self.plain, y)

    def start(self, backward: int) -> None:
        super().start(backward)
        # The gradients of weight and bias, so far.
        self.sums: list[Tensor | None] = [None, None]

    def add(self, chunk: Operands) -> None:
        super().add(chunk)
        if self.at_once:
            self._sum()

    def _sum(self) -> None:
        """Multiply the chunks that wait, add the products to the sums, and drop the chunks."""
        chunks, self.chunks = self.chunks, []
        is_half = bool(chunks) and sum_dtype(chunks[0].left.dtype) != chunks[0].left.dtype
        if len(chunks) > 1 and is_half:
            # One product, so that no sum over chunks is rounded.
            dys, xs, *_ = zip(*chunks)
            chunks = [Operands(torch.cat(dys), torch.cat(xs) if self.trains[0] else None)]
        dw, db = self.sums
        for dy, x, *_ in chunks:
            if x is not None and is_half and self.at_once:
                # Here one chunk comes at a time. The sum is in fp32, since half precision would
                # round it with each chunk.
                product = dy.t() @ x
                dw = product.float() if dw is None else dw.add_(product)
            elif x is not None and dw is not None:
                dw = dw.addmm_(dy.t(), x)
            elif x is not None:
                # Autocast that is on in backward alone casts this product, but none that is added.
                dw = (dy.t() @ x).to(dy.dtype)
            if self.trains[1]:
                chunk_db = dy.sum(0, dtype=torch.float32 if is_half else None)
                db = chunk_db if db is None else db.add_(chunk_db)
        self.sums = [dw, db]

    def summed(self) -> list[Tensor | None]:
        self._sum()
        return [x if x is None else x.to(dtype) for x, dtype in zip(self.sums, self.dtypes)]


class Wgrads:
    """A node of autograd in which the weight gradients of linear layers wait.

    See Note [Deferred wgrads].

    Args:
        roots: The linear layers and experts, or modules that contain them.
        where: Name of the attention layer, for errors.
        plain: Forwards of linear layers, see `linear.Plain`.
        at_once: Whether to compute a chunk's gradients right behind the chunk, where the waits
            between chunks are longer than the wait behind all of them.
        besides: Modules to leave out, since their gradients wait elsewhere.
        here: Whether this is made before the roots are called. Left out then are linear layers
            whose weights a hook of the call gathers or computes; and the modules of FSDP's units in
            ``roots``, whose gradients FSDP reduces when backward is through the chunks, which is
            before this node runs.

    Attributes:
        slots: For each linear layer, where the operands of its gradients wait.
        stacks: For each module that holds weights of experts, by name: the weight, and the token of
            its node.
        others: For each module with other parameters that train, by name: the tensor that takes the
            place of the parameter.
        token: Makes the node of the linear layers wait for all to which it is passed. None if there
            is nothing to wait for.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        where: str,
        plain: Plain,
        at_once: bool = False,
        besides: Iterable[nn.Module] = (),
        here: bool = False,
    ):
        self.slots: dict[nn.Module, _Slot] = {}
        self.stacks: dict[nn.Module, dict[str, tuple[Stack, Tensor]]] = {}
        self.others: dict[nn.Module, dict[str, Tensor]] = {}
        modules: list[nn.Module] = []
        for root in roots:
            modules += root.modules()
        left_out = set(besides)
        if here:
            for unit in filter(sharded.is_unit, modules):
                left_out.update(unit.modules())  # guard: gradients before FSDP reduces
        for module in modules:
            if module in left_out:
                continue
            if stacks := stacks_of(module, where):
                self.stacks[module] = {
                    name: (stack, _Weights.apply([stack], stack.parameter))
                    for name, stack in stacks.items()
                }
            if can_split(module, plain):
                if not (here and _is_away(module)):
                    self.slots[module] = _Slot(module, where, at_once, plain=plain)
            elif others := _others_of(module, stacks):
                self.others[module] = others
        parameters: list[Tensor | None] = []
        for slot in self.slots.values():
            parameters += slot.parameters
        to_pass = [x for of_module in self.others.values() for x in of_module.values()]
        self.token = None
        if parameters or to_pass:
            slots = list(self.slots.values())
            outputs = _Weights.apply(slots, *parameters, *to_pass)
            self.token, *passed = outputs if to_pass else (outputs,)
            given_out: Iterator[Tensor] = iter(passed)
            for module, of_module in self.others.items():
                self.others[module] = {name: next(given_out) for name in of_module}


def _others_of(module: nn.Module, stacks: Collection[str]) -> dict[str, Tensor]:
    """Return the parameters of a module itself that train, by name, but for ``stacks``.

    Empty where autograd does not record. Quantised and distributed parameters are left out.
    """
    others: dict[str, Tensor] = {}
    if torch.is_grad_enabled():
        for name, parameter in module._parameters.items():
            if parameter is None or type(parameter) is not nn.Parameter or name in stacks:
                continue
            if parameter.requires_grad and parameter.numel():
                others[name] = parameter
    return others


def _is_away(module: Any) -> bool:
    """Return whether the weight of a linear layer is partitioned (ZeRO-3), or no parameter."""
    return module._parameters.get("weight") is None or not module.weight.numel()


class Shadows:
    """Makes the shadows of modules, which run in place of the modules for each chunk.

    Made and used inside the modules' own calls (`linear.call_through`).

    Args:
        wgrads: Where weight gradients wait.
    """

    def __init__(self, *wgrads: Wgrads):
        # For each linear layer, its slot and the token of the node that the slot belongs to.
        self.slots: dict[nn.Module, tuple[_Slot, Tensor | None]] = {}
        self.stacks: dict[nn.Module, dict[str, tuple[Stack, Tensor]]] = {}
        self.others: dict[nn.Module, dict[str, Tensor]] = {}
        for node in wgrads:
            self.slots.update((module, (slot, node.token)) for module, slot in node.slots.items())
            self.stacks.update(node.stacks)
            self.others.update(node.others)
        self._shadows: dict[nn.Module, nn.Module] = {}

    def of(self, module: nn.Module) -> nn.Module:
        """Return the shadow of a module, made once; its children are shadows as well."""
        if module not in self._shadows:
            copy = self._shadows[module] = without_hooks(module)
            if module in self.slots:
                slot, token = self.slots[module]
                slot.open()
                vars(copy)["forward"] = partial(slot.forward, token=token)
            else:
                children = {
                    name: child if child is None else self.of(child)
                    for name, child in module._modules.items()
                }
                vars(copy)["_modules"] = children
            replaced = dict(self.others.get(module, {}))
            for name, (stack, token) in self.stacks.get(module, {}).items():
                replaced[name] = StackedWeight.of(stack.parameter, stack, token, None, False)
            if replaced:
                vars(copy)["_parameters"] = {**module._parameters, **replaced}
        return self._shadows[module]

    def tied(self, y: Tensor, *roots: nn.Module) -> Tensor:
        """Return y, made to depend on all parameters in ``roots`` that train.

        Experts without tokens take no part in the graph of y. But the exchanges behind y must run
        in backward on this rank if they do on others, whose experts have tokens; and ZeRO waits for
        a gradient of each parameter, which is zero here.
        """
        modules: list[nn.Module] = []
        for root in roots:
            modules += root.modules()
        for module in modules:
            _, token = self.slots.get(module, (None, None))
            if token is not None:
                y = y + token.sum()  # a sum of nothing, 0
            for x in self.others.get(module, {}).values():
                y = y + x.flatten()[:0].sum()
            for stack, of_stack in self.stacks.get(module, {}).values():
                weight = stack.parameter.detach()[0]
                no_tokens = weight.new_empty(0, weight.shape[1])
                y = y + Product.apply(stack, no_tokens, weight, None, 0, None, True, of_stack).sum()
        return y

    def end(self) -> None:
        """Release the weights; for backward, ZeRO-3 gathers them again."""
        for slot, _ in self.slots.values():
            slot.operands, slot.computed = (), None


class _Weights(Node):
    """Gives out a token, and in backward delivers the weight gradients that waited in slots.

    Backward runs when all nodes that were given the token have run. ``slots`` are `_Slot`s or a
    `Stack`; ``parameters`` are all of theirs in turn, passed so that autograd takes the gradients
    to them. Those behind them are given out beside the token, and their gradients passed back.
    """

    @staticmethod
    def forward(ctx, slots, *parameters):
        ctx.set_materialize_grads(False)
        ctx.slots = slots
        others = parameters[sum(len(slot.trains) for slot in slots) :]
        token = new_token(next(x for x in parameters if x is not None))
        return (token, *(x.detach() for x in others)) if others else token

    @staticmethod
    def backward(ctx, _, *others):
        gradients: list[Tensor | None] = []
        for slot in ctx.slots:
            gradients += slot.gradients()
        return None, *gradients, *others
