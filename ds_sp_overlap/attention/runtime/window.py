"""A layer that holds few head groups at a time: one node of autograd, whose backward makes q, k and
v again.

Forward and backward walk the programs of a `Windowed` schedule as they are. Between them live the
layer's input, the local o, and what local attention's backward reads beside q, k, v and o
(`memory.recompute`). See Note [Two ways to differentiate].
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn

from ...exchange.exchange import Node, refuse_second_derivatives
from ...schedule import O, Op, Part, without_o
from ..memory.checkpoint_cache import CheckpointPass
from ..memory.recompute import Random
from .backward import BackwardRunner
from .execution import Call
from .linear import autocast, autocast_of, matrix
from .output import OutputProjection
from .projections import InputGradients, Projections
from .runner import ForwardRunner, LocalAttention


class _Windowed(Node):
    """y of x, with all that lies between.

    x [.., m]        hidden states
    w [m, k], b [m]  of the output projection
    learned          by local attention
    parameters       as of `Projections`
    """

    @staticmethod
    def forward(
        ctx,
        call: Call,
        made: Projections,
        local: LocalAttention,
        checkpoint: CheckpointPass | None,
        offload: bool,
        x,
        weight,
        bias,
        *rest,
    ):
        learned, parameters = rest[: len(local.learned)], rest[len(local.learned) :]
        of_x, ctx.of_weight, ctx.of_bias, *needs = ctx.needs_input_grad[5:]
        ctx.of_learned, of_parameters = needs[: len(learned)], needs[len(learned) :]
        inputs = ctx.inputs = InputGradients(call, made, x, parameters, (of_x, *of_parameters))
        output = ctx.output = OutputProjection(call, weight.shape)
        ctx.local, ctx.autocast, tables = local, autocast_of(x.device), made.tables
        made.tables = ()  # saved below
        forward = ForwardRunner(call)
        forward.take_inputs(inputs, x, parameters, tables)
        forward.take_attention(local, made.recorded and any(ctx.needs_input_grad))
        forward.take_output(output, weight, bias)
        if checkpoint is not None and checkpoint.is_recompute:
            (outputs, forward.saved), (forward.attended, after) = checkpoint.take(call.where)
            for group, o in outputs.items():
                heads = o.view(*x.shape[:2], o.shape[-1] // made.head_dim, made.head_dim)
                forward.values["o", group] = heads
            forward.walk(call.schedule.recompute)
            if after is not None:
                after.set()  # guard: what is drawn behind attention is as before
        else:
            before = Random.now(x.device) if checkpoint is not None else None
            forward.walk(call.schedule.forward)
            if checkpoint is not None:
                after = Random.now(x.device)
                # Without their graphs, which may lead to the checkpoint that keeps this; backward
                # goes through those of this node.
                attended = {
                    group: replace(each, edges=None) for group, each in forward.attended.items()
                }  # guard: nothing circular
                rest = attended, None if after == before else after
                checkpoint.put(
                    call.where, (forward.outputs, forward.saved), rest, offload, local.given
                )
        attended = ctx.attended = forward.attended
        if attended:
            reads_o = any(each.reads_o for each in attended.values())
            foreign = next((each.foreign for each in attended.values() if each.foreign), "")
            if not local.agree(reads_o, foreign):
                call.run_by(without_o(call.schedule))
        outputs = (
            forward.outputs
            if ctx.of_weight or any(step.beside for step in call.schedule.backward)
            else {}
        )
        of_norms = parameters[inputs.linear :]
        ctx.sizes = inputs.linear, len(of_norms), len(tables), len(outputs)
        in_order = [x for group in attended for x in forward.saved[group]]
        ctx.save_for_backward(
            x,
            weight,
            *parameters[: inputs.linear],
            *of_norms,
            *tables,
            *outputs.values(),
            *in_order,
        )
        return forward.y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivatives(ctx.inputs.call.where)
        with torch.autocast(**ctx.autocast):  # guard: q, k and v are made as before
            return None, None, None, None, None, *_gradients(ctx, dy)


def _gradients(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Walk backward; returns gradients of x, weight, bias, of what attention learns, and of the
    parameters.
    """
    inputs, local, attended = ctx.inputs, ctx.local, ctx.attended
    call, made, program = inputs.call, inputs.made, inputs.call.schedule.backward
    saved = iter(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()  # unless the graph is retained: each goes after its use
    linear, of_norms, tables, outputs = ctx.sizes
    x, weight = next(saved), next(saved)
    parameters, learned = list(islice(saved, linear)), list(islice(saved, of_norms))
    rotations, merged = tuple(islice(saved, tables)), dict(zip(call.groups, islice(saved, outputs)))
    beside = {group: list(islice(saved, each.saved_count)) for group, each in attended.items()}

    runner = BackwardRunner(call, {})
    normed: dict[Part, Tensor] = {}
    inputs.begin(x, parameters, rotations, learned, normed, some=False, late=True)
    runner.take_inputs(inputs, x, parameters, rotations, of_norms=learned, normed=normed)
    runner.take_attention_gradient(local, attended, beside)
    goes_on = bool(local.learned) or any(map(inputs.is_needed, made.rows))
    needs = [goes_on for _ in call.groups]
    runner.sends_o = any(step.beside for step in program)
    runner.take_output_gradient(ctx.output, dy, weight, merged, needs, ctx.of_weight, late=True)
    del x, merged, normed, beside, saved
    if not goes_on:
        program = tuple(step for step in program if step.op is Op.WGRAD and step.tensors == O)
    runner.walk(program)
    dx, *of_parameters = inputs.end()
    db = matrix(dy).sum(0) if ctx.of_bias else None
    return dx, runner.pieces.whole(), db, *runner.learned, *of_parameters


def windowed(
    call: Call, made: Projections, local: LocalAttention, checkpoint: CheckpointPass | None, offload: bool, o_proj: nn.Linear,
    leaves: bool | None, x: Tensor,
) -> Tensor | tuple[Tensor, Tensor | None]:  # fmt: skip
    """A layer by its `Windowed` schedule, of ``x`` [.., m]; returns what ``o_proj`` returns.

    checkpoint    the checkpoint around it, where its attention is to be kept; ``offload`` in host memory
    leaves   whether that is ``(y, bias to add)``, None for y alone

    To be called inside `linear.call_through`.
    """
    parameters = made.parameters()
    linear = 2 * len(made.modules)
    operands = autocast(x, o_proj.weight, None if leaves else o_proj.bias, *parameters[:linear])
    y: Tensor = _Windowed.apply(
        call,
        made,
        local,
        checkpoint,
        offload,
        *operands[:3],
        *local.learned,
        *operands[3:],
        *parameters[linear:],
    )
    return y if leaves is None else (y, o_proj.bias if leaves else None)
