"""A layer that holds few head groups at a time: one node of autograd, whose backward recomputes q,
k and v.

Forward and backward walk the programs of a `Windowed` schedule. Between the two, the node saves the
layer's input, the local o, and what the backward of local attention reads beside q, k, v and o
(`memory.recompute`). See Note [Two ways to differentiate] in `runner`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ...exchange.exchange import Node, refuse_second_derivatives, save_groups, saved_groups
from ...schedule import O, Op, without_o
from ..memory.checkpoint_cache import CheckpointPass
from ..memory.forward_state import Random, autocast_of
from .backward import BackwardRunner
from .execution import Call
from .input_gradients import InputGradients
from .linear import product_of, returned_by
from .output import OutputProjection
from .products import autocast, matrix
from .projections import ProjectionOperands, Projections
from .runner import ForwardRunner, LocalAttention


class _Windowed(Node):
    """Computes y of x: projections, exchanges, local attention and the output projection.

    x is [.., m], weight [m, k] and bias [m] are those of the output projection. The rest are the
    tensors that local attention learns, then the parameters of `Projections`. The other arguments
    are those of `windowed`.
    """

    @staticmethod
    def forward(
        ctx,
        call: Call,
        projections: Projections,
        local: LocalAttention,
        checkpoint: CheckpointPass | None,
        offload: bool,
        x,
        weight,
        bias,
        *rest,
    ):
        """Walk the forward program, or only its merges where a checkpoint has saved attention."""
        learned = len(local.learned)
        parameters = rest[learned:]
        x_needs_grad, ctx.weight_needs_grad, ctx.bias_needs_grad = ctx.needs_input_grad[5:8]
        needs_grad = x_needs_grad, *ctx.needs_input_grad[8 + learned :]
        inputs = ctx.inputs = InputGradients(
            call, projections, x, parameters=parameters, needs_grad=needs_grad
        )
        (x,) = autocast(x)  # here, so that dx is a sum in the dtype that x has outside
        output = ctx.output = OutputProjection(call, weight.shape)
        ctx.local, ctx.autocast = local, autocast_of(x.device)
        # The node saves the tables: autograd then notices changes, and frees them with the rest.
        tables, projections.tables = projections.tables, ()
        forward = ForwardRunner(call)
        forward.take_inputs(inputs, ProjectionOperands(x, parameters, tables, None, None))
        forward.take_attention(local, projections.recorded and any(ctx.needs_input_grad))
        forward.take_output(output, weight, bias)
        if checkpoint is not None and checkpoint.is_recompute:
            # The checkpoint has saved what attention made: only the merges run again. This node has
            # no backward. It saves tensors for the checkpoint, which hands them to the node of the
            # first run, whose backward runs.
            (outputs, forward.saved), (forward.attended, after) = checkpoint.take(call.where)
            for group, o in outputs.items():
                forward.values["o", group] = o.view(*x.shape[:2], o.shape[-1])
            forward.walk(call.schedule.recompute)
            if after is not None:
                after.set()  # guard: what is drawn behind attention is as before
        else:
            before = Random.now(x.device) if checkpoint is not None else None
            forward.walk(call.schedule.forward)
            if checkpoint is not None:
                after = Random.now(x.device)
                # The checkpoint saves no graphs, which may lead to the checkpoint itself. Backward
                # uses the graphs of this node (``ctx.attended``).
                attended = {  # guard: nothing circular
                    group: replace(record, edges=None) for group, record in forward.attended.items()
                }
                checkpoint.put(
                    call.where,
                    (forward.outputs, forward.saved),
                    (attended, None if after == before else after),
                    offload,
                    local.tensors,
                )
        attended = ctx.attended = forward.attended
        if attended:
            reads_o = any(record.reads_o for record in attended.values())
            foreign = next((record.foreign for record in attended.values() if record.foreign), "")
            # Collective in the first call of a kind.
            if not local.agree(reads_o, foreign):
                call.schedule = without_o(call.schedule)
        reads_outputs = ctx.weight_needs_grad or call.schedule.beside
        linear = inputs.linear_count
        save_groups(
            ctx,
            [x, weight],
            parameters[:linear],
            parameters[linear:],
            tables,
            [forward.outputs[group] for group in call.groups] if reads_outputs else [],
            *(forward.saved[group] for group in attended),
        )
        return forward.y

    @staticmethod
    def backward(ctx, dy):
        """Run `_gradients` in the autocast state of forward."""
        refuse_second_derivatives(ctx.inputs.call.where)
        with torch.autocast(**ctx.autocast):  # guard: q, k and v are made as before
            return None, None, None, None, None, *_gradients(ctx, dy)


def _gradients(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Walk the backward program of a `_Windowed`.

    Returns:
        The gradients of x and of the inputs behind x, in their order; None for each without one.
    """
    inputs, local, attended = ctx.inputs, ctx.local, ctx.attended
    call, program = inputs.call, inputs.call.schedule.backward
    (x, weight), parameters, norm_parameters, tables, outputs, *of_attention = saved_groups(ctx)
    operands = ProjectionOperands(x, parameters, tables, norm_parameters, {})
    runner = BackwardRunner(call, {})
    inputs.begin(operands, late=True)
    runner.take_inputs(inputs, operands)
    runner.take_attention_gradient(local, attended, dict(zip(attended, of_attention)))
    # Alike on all ranks: which projections and norms learn was compared in the first call. Which
    # tensors attention learns was not; no rank may learn others.
    reaches_attention = bool(local.learned) or any(map(inputs.is_needed, inputs.projections.rows))
    runner.take_output_gradient(
        ctx.output,
        dy,
        weight,
        outputs=dict(zip(call.groups, outputs)),
        o_needs_grad=[reaches_attention] * len(call.groups),
        weight_needs_grad=ctx.weight_needs_grad,
        late=True,
    )
    # The runner frees each tensor after its last step, which another reference would prevent.
    del x, operands, outputs, of_attention
    # Only dWo and its bias then: nothing is recomputed or exchanged.
    if not reaches_attention:
        program = tuple(step for step in program if step.op is Op.WGRAD and step.tensors == O)
    runner.walk(program)
    dx, *parameter_gradients = inputs.end()
    db = matrix(dy).sum(0) if ctx.bias_needs_grad else None
    return dx, runner.pieces.whole(), db, *runner.learned_gradients, *parameter_gradients


def windowed(
    call: Call,
    projections: Projections,
    local: LocalAttention,
    o_proj: nn.Linear,
    checkpoint: CheckpointPass | None,
    offload: bool,
    x: Tensor,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Run a layer by its `Windowed` schedule.

    To be called inside `linear.call_through`, where the weights are whole.

    Args:
        call: The call.
        projections: The projections of q, k and v.
        local: The local attention.
        o_proj: The output projection.
        checkpoint: The pass through the checkpoint around the layer, if the checkpoint saves
            attention; else None.
        offload: Whether the checkpoint saves attention in host memory.
        x: [.., m]. The layer's input.

    Returns:
        What ``o_proj`` returns, see `returned_by`.
    """
    plain = projections.plain
    y: Tensor = _Windowed.apply(
        call,
        projections,
        local,
        checkpoint,
        offload,
        x,
        *autocast(*product_of(o_proj, plain)),
        *local.learned,
        *projections.parameters(),
    )
    return returned_by(o_proj, plain, y)
