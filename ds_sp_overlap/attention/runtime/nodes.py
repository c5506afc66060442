"""Runs a piece of a layer as one node of autograd, see Note [Pieces] in `plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...exchange.exchange import Node, refuse_second_derivatives
from ...schedule import without_o
from ..memory.forward_state import Random
from .execution import Call
from .flat import Name
from .plan import OF_CHECKPOINT, Piece


class _Node(Node):
    """The node of a piece: its token, and the inputs that ``names`` names."""

    @staticmethod
    def forward(ctx, piece: Piece, call: Call, names: tuple[Name, ...], token, *given):
        # A gradient that one rank lacks is zero, as autograd makes it: other ranks exchange theirs.
        variant = piece.variant(call, names, ctx.needs_input_grad[3:], given)
        ctx.call, ctx.variant, call.variant = call, variant, variant
        made, count = variant.forward(call, [*given]), variant.outputs
        ctx.save_for_backward(*made[count:])  # guard: unchanged
        if variant.undifferentiable:
            ctx.mark_non_differentiable(*[made[place] for place in variant.undifferentiable])
        if piece.returns_y:
            return made[0]
        return call.empty.detach(), *made[:count]

    @staticmethod
    def backward(ctx, *gradients):
        call = ctx.call
        refuse_second_derivatives(call.where)
        given = [*ctx.saved_tensors, *gradients]
        ctx.maybe_clear_saved_tensors()
        del gradients
        device = call.autocast["device_type"]
        if torch.is_autocast_enabled(device):
            # That of backward alone: the operands of products were cast in forward.
            with torch.autocast(device, enabled=False):
                results = ctx.variant.backward(call, given)
        else:
            results = ctx.variant.backward(call, given)
        # Empty: it only makes autograd run the piece before.
        return None, None, None, call.empty if ctx.needs_input_grad[3] else None, *results


def run_piece(
    piece: Piece, call: Call, names: tuple[Name, ...], token: Any, given: Sequence[Any]
) -> Any:
    """Run a piece, as a node where autograd records; return as the node does."""
    # Forward-mode differentiation, which may run without gradients, is refused by the node.
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return _Node.apply(piece, call, names, token, *given)
    call.variant = piece.variant(call, names, (False,) * (1 + len(given)), given)
    made = call.variant.forward(call, [*given])
    return made[0] if piece.returns_y else (call.empty, *made)


class _Window(Node):
    """The one node of a layer that has a window; its inputs are those that ``names`` names.

    Backward walks the program of a windowed schedule: it computes q, k and v again.
    """

    @staticmethod
    def forward(ctx, piece, call, names, recorded, *given):
        """Walk the forward program, or only its merges where a checkpoint has saved attention."""
        needs = (False, *(recorded and needed for needed in ctx.needs_input_grad[4:]))
        # Taken out: the graph may outlive its backward, and what a checkpoint keeps must not.
        checkpoint, call.checkpoint = call.checkpoint, None
        device, is_recompute = given[0].device, checkpoint is not None and checkpoint.is_recompute
        if is_recompute:
            kept, call.attended, after, call.schedule = checkpoint.take(call.where)
        variant = piece.variant(call, names, needs, given)
        if is_recompute:
            # The checkpoint has saved what attention made: only the merges run again. The checkpoint
            # hands the tensors that this node saves to the node of the first run, whose backward
            # runs. This node has a backward only inside of the checkpoint's function.
            merged = [kept["merged", group] for group in call.groups]
            attended = [o.view(*given[0].shape[:2], o.shape[-1]) for o in merged]
            y, *made = variant.again(call, [*given, *attended])
            values = dict(zip(variant.held, made)) | kept
            if after is not None:
                after.set()  # guard: what is drawn behind attention is as before
        else:
            before = Random.now(device) if checkpoint is not None else None
            y, *made = variant.forward(call, [*given])
            values = dict(zip(variant.held, made))
            if attended := call.attended.values():
                reads_o = any(record.reads_o for record in attended)
                foreign = next((record.foreign for record in attended if record.foreign), "")
                # Collective in the first call of a kind.
                if not call.local.agree(reads_o, foreign):
                    call.schedule = without_o(call.schedule)
                    variant = piece.variant(call, names, needs, given)
            if checkpoint is not None:
                after = Random.now(device)
                moved = None if after == before else after
                kept = {name: x for name, x in values.items() if name[0] in OF_CHECKPOINT}
                records = dict(call.attended)
                for group, record in records.items():
                    # The checkpoint saves no graphs, which may lead to the checkpoint itself.
                    # Backward uses the graphs of this node.
                    records[group] = replace(record, edges=None)  # guard: nothing circular
                saved = kept, records, moved, call.schedule
                checkpoint.put(call.where, saved, call.offloads, call.local.tensors)
        ctx.call, ctx.variant = call, variant
        tensors, ctx.spec = tree_flatten([values[name] for name in variant.saved])
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    def backward(ctx, dy):
        """Walk the backward program in the autocast state of forward."""
        call = ctx.call
        refuse_second_derivatives(call.where)
        given = [*tree_unflatten(ctx.saved_tensors, ctx.spec), dy]
        ctx.maybe_clear_saved_tensors()
        del dy
        with torch.autocast(**call.autocast):  # guard: q, k and v are made as before
            results = ctx.variant.backward(call, given)
        return None, None, None, None, *results


@dataclass
class End:
    """Projections of a layer that are computed part by part: those of q, k and v, that of o, or all.

    Attributes:
        modules: The modules to call with `linear.call_through`, so that their weights are whole.
        names: The names of ``tensors``.
        tensors: Gives weights and biases, and what else the end reads; called inside of the call.
    """

    modules: list[nn.Module]
    names: tuple[Name, ...]
    tensors: Callable[[], list[Any]]


def run_end(piece: Piece, call: Call, end: End, first: Tensor) -> Any:
    """Run the piece of an end, inside of the call of its modules, which hand on ``first``.

    That is the token for the output projection, else x.
    """
    if piece.section == "output":
        return run_piece(piece, call, end.names, first, end.tensors())
    given = [first, *end.tensors()]
    if piece.section == "inputs":
        return run_piece(piece, call, end.names, None, given)
    return _Window.apply(piece, call, end.names, torch.is_grad_enabled(), *given)
