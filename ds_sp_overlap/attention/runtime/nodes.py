"""Runs a piece of a layer as one node of autograd, see Note [Pieces] in `plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...exchange.exchange import Node, refuse_second_derivatives
from ...schedule import without_o
from ..memory.forward_state import Random
from .execution import Call
from .flat import Name
from .plan import OF_CHECKPOINT, Piece


class _Node(Node):
    """Runs a piece as a node of autograd; ``names`` are the names of the node's inputs."""

    @staticmethod
    def forward(ctx, piece: Piece, call: Call, names: tuple[Name, ...], *given):
        # If a gradient is missing on this rank, autograd passes zeros to backward. So this rank
        # makes the same exchanges as the others.
        variant = piece.variant(call, names, ctx.needs_input_grad[3:], given)
        ctx.call, ctx.variant, call.variant = call, variant, variant
        made, count = variant.forward(call, [*given]), len(piece.gives)
        ctx.save_for_backward(*made[count:])  # guard: unchanged
        if variant.undifferentiable:
            ctx.mark_non_differentiable(*[made[place] for place in variant.undifferentiable])
        if piece.gives[0] == "y":
            return made[:count]
        # If a node returns its input, autograd makes a view, which takes the host more time.
        return call.empty.detach(), *made[1:count]

    @staticmethod
    def backward(ctx, *gradients):
        call = ctx.call
        refuse_second_derivatives(call.where)
        given = [*ctx.saved_tensors, *gradients]
        ctx.maybe_clear_saved_tensors()
        del gradients
        device = call.autocast["device_type"]
        if torch.is_autocast_enabled(device):
            # Backward was called in autocast. Disable it: forward has cast the products' operands.
            with torch.autocast(device, enabled=False):
                results = ctx.variant.backward(call, given)
        else:
            results = ctx.variant.backward(call, given)
        if results[0] is None:
            # The gradient of the token. For None, autograd would make zeros, which takes time.
            results = call.empty, *results[1:]
        return None, None, None, *results


def run_piece(
    piece: Piece, call: Call, names: tuple[Name, ...], given: Sequence[Any]
) -> tuple[Any, ...]:
    """Run a piece and return its outputs; a node of autograd runs it if gradients are recorded."""
    # In forward-mode AD, gradients may not be recorded. The node refuses such a call, so use it.
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        node = _Window if call.schedule.is_windowed else _Node
        return node.apply(piece, call, names, *given)
    call.variant = piece.variant(call, names, (False,) * len(given), given)
    return call.variant.forward(call, [*given])[: len(piece.gives)]


class _Window(Node):
    """Runs a layer that has a window as one node of autograd.

    Backward runs the backward program of a windowed schedule, which recomputes q, k and v. In
    forward, ``names`` are the names of the node's inputs.
    """

    @staticmethod
    def forward(ctx, piece, call, names, *given):
        """Run the forward program, or only its merges in a recompute if attention was saved."""
        needs = ctx.needs_input_grad[3:]
        # Drop the call's reference to the checkpoint. The graph may stay alive after its backward,
        # but must not keep alive the tensors that the checkpoint saves.
        checkpoint, call.checkpoint = call.checkpoint, None
        device, is_recompute = given[0].device, checkpoint is not None and checkpoint.is_recompute
        if is_recompute:
            kept, call.attended, after, call.schedule = checkpoint.take(call.where)
        variant = piece.variant(call, names, needs, given)
        if is_recompute:
            # The checkpoint has saved o, so only the merges run again. torch gives the tensors that
            # this node saves to the node of the first forward, and runs the backward of the first
            # node. This node's own backward runs only if the checkpointed function calls backward.
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
                # Collective in the first call of a kind (`LayerRuntime.agree_on_o`).
                kind = given[0].dtype, call.autocast["enabled"]
                if not call.agree(kind, reads_o, foreign):
                    call.schedule = without_o(call.schedule)
                    variant = piece.variant(call, names, needs, given)
            if checkpoint is not None:
                after = Random.now(device)
                moved = None if after == before else after
                kept = {name: x for name, x in values.items() if name[0] in OF_CHECKPOINT}
                # The checkpoint must not save graphs, which may refer to the checkpoint. Backward
                # uses the graphs in this node.
                records = {  # guard: nothing circular
                    group: replace(record, edges=None) for group, record in call.attended.items()
                }
                saved = kept, records, moved, call.schedule
                checkpoint.put(call.where, saved, call.offloads, call.local.tensors)
        ctx.call, ctx.variant = call, variant
        tensors, ctx.spec = tree_flatten([values[name] for name in variant.saved])
        ctx.save_for_backward(*tensors)
        return (y,)

    @staticmethod
    def backward(ctx, dy):
        """Run the backward program in the autocast state of forward."""
        call = ctx.call
        refuse_second_derivatives(call.where)
        given = [*tree_unflatten(ctx.saved_tensors, ctx.spec), dy]
        ctx.maybe_clear_saved_tensors()
        del dy
        with torch.autocast(**call.autocast):  # guard: q, k and v are made as before
            results = ctx.variant.backward(call, given)
        return None, None, None, *results


@dataclass
class End:
    """Describes projections that one node computes part by part.

    These are the projections at one end of a layer (of q, k and v, or of o), or at both ends.

    Attributes:
        modules: The modules to call with `linear.call_through`, so that their weights are gathered.
        names: The names of the node's inputs. The first is x, or the token for the output
            projection alone.
        tensors: Returns the node's other inputs: weights, biases and others. Called when the
            weights are gathered.
    """

    modules: list[nn.Module]
    names: tuple[Name, ...]
    tensors: Callable[[], list[Any]]

    def run(self, piece: Piece, call: Call, first: Any) -> tuple[Any, ...]:
        """Run a piece inside the calls of ``modules``; ``first`` is the node's first input."""
        return run_piece(piece, call, self.names, [first, *self.tensors()])
