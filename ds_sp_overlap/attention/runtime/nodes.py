"""Both ends of a layer whose middle autograd differentiates, one node of autograd each.

One node instead of many: each costs the host time in every step, dx is summed in place, and a
parameter's gradient is delivered once, in the same order for every number of head groups. See
Note [Two ways to differentiate].
"""

from __future__ import annotations

from torch import Tensor, nn

from ...exchange.exchange import Node, refuse_second_derivatives
from ...schedule import Part
from .backward import BackwardRunner
from .execution import Call
from .linear import autocast, matrix, parameter_of
from .output import OutputProjection
from .projections import InputGradients, Projections
from .runner import ForwardRunner


class _StartInputs(Node):
    """Tokens of the exchanges of q, k and v of all groups.

    x [.., m]     parameters   w [n, m] and b [n] of each linear layer, then what is learned in the
                  norms

    forward    y_r = x w_r^T + b_r, normed and rotated, and started
    backward   dy_r finished, rotated back and through the norm;  dx += dy_r w_r,  dw_r = dy_r^T x,
               db_r = sum dy_r
    """

    @staticmethod
    def forward(ctx, call: Call, made: Projections, x: Tensor, *parameters: Tensor | None):
        ctx.set_materialize_grads(False)
        inputs = ctx.inputs = InputGradients(call, made, x, parameters, ctx.needs_input_grad[2:])
        # Saved where autograd watches, and let go with the rest.
        tables, made.tables = made.tables, ()
        linear, normed = inputs.linear, dict[Part, Tensor]()
        runner = ForwardRunner(call)
        keeps = normed if made.recorded else None
        runner.take_inputs(inputs, x, parameters[:linear], tables, normed=keeps)
        runner.walk(call.schedule.inputs)  # guard: starts in the order drawn
        tokens, unneeded = runner.tokens, []
        if not inputs.of_x:
            for step in call.schedule.starts:
                call.exchanges[step.exchange].needed = needed = [
                    inputs.is_needed(part) for part in step.parts
                ]  # guard: only what is needed
                if not any(needed):
                    unneeded.append(tokens[step.exchange])
            ctx.mark_non_differentiable(*unneeded)
        ctx.normed, ctx.tables = list(normed), len(tables)
        # Only what some gradient reads: dx the weights, dw x, and a norm's its input.
        weights = (
            p if inputs.of_x and at % 2 == 0 else None for at, p in enumerate(parameters[:linear])
        )
        of_weights = inputs.of_parameters[:linear:2]
        of_norms = parameters[linear:] if normed else ()
        ctx.of_norms = len(of_norms)
        ctx.save_for_backward(
            x if any(of_weights) else None, *weights, *of_norms, *tables, *normed.values()
        )  # guard: unchanged
        return tuple(tokens.values())

    @staticmethod
    def backward(ctx, *tokens):
        inputs, (x, *saved) = ctx.inputs, ctx.saved_tensors
        call, linear = inputs.call, inputs.linear
        weights, of_norms, saved = (
            saved[:linear],
            saved[linear : linear + ctx.of_norms],
            saved[linear + ctx.of_norms :],
        )
        tables, normed = tuple(saved[: ctx.tables]), dict(zip(ctx.normed, saved[ctx.tables :]))
        del saved
        ctx.maybe_clear_saved_tensors()
        runner = BackwardRunner(call, call.exchanges)
        runner.inputs = inputs
        for step, token in zip(call.schedule.starts, tokens):
            if token is not None:
                runner.reached.add(step.exchange)
        some = len(runner.reached) < len(tokens)
        inputs.begin(x, weights, tables, of_norms, normed, some)
        del x, normed
        runner.walk(call.schedule.backward_of_inputs)
        return None, None, *inputs.end()


def start_projected(call: Call, made: Projections, x: Tensor) -> tuple[Tensor, ...]:
    """Walk the section of the inputs with projections of ``x`` [.., m]; returns the tokens in the
    order of their starts.

    To be called inside `linear.call_through`.
    """
    parameters = made.parameters()
    linear = 2 * len(made.modules)
    return _StartInputs.apply(call, made, *autocast(x, *parameters[:linear]), *parameters[linear:])


class _FinishOutput(Node):
    """The output projection of o of all groups.

    w [m, k]     b [m]

    forward    y = b + sum of o_g w_g^T, each finished in its turn
    backward   do_g = dy w_g started, last group first;  then, under their exchanges, dw[:, c_g] =
               dy^T o_g,  db = sum dy
    """

    @staticmethod
    def forward(ctx, call: Call, weight: Tensor, bias: Tensor | None, *_: Tensor):
        ctx.call, ctx.output = call, OutputProjection(call, weight.shape)
        runner = ForwardRunner(call)
        runner.take_output(ctx.output, weight, bias)
        runner.walk(call.schedule.output)
        of_weight, _, *of_tokens = ctx.needs_input_grad[1:]
        outputs = [runner.outputs[group] for group in call.groups] if of_weight else []
        ctx.save_for_backward(weight if any(of_tokens) else None, *outputs)
        return runner.y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivatives(ctx.call.where)
        call, (weight, *saved) = ctx.call, ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: each goes after its use
        of_weight, of_bias, *of_tokens = ctx.needs_input_grad[1:]
        outputs = dict(zip(call.groups, saved))
        del saved
        runner = BackwardRunner(call, call.exchanges)
        runner.take_output_gradient(ctx.output, dy, weight, outputs, of_tokens, of_weight)
        runner.walk(call.schedule.backward_of_output)  # guard: the wgrad comes last
        db = matrix(dy).sum(0) if of_bias else None
        token = dy.new_empty(0)
        dw = runner.pieces.whole()
        return None, dw, db, *(token if needed else None for needed in of_tokens)


def finish_projected(
    call: Call, module: nn.Linear, leaves: bool | None, *tokens: Tensor
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Walk the section of the output, with the tokens of the groups and ``module``; returns what it
    returns.

    leaves   whether that is ``(y, bias to add)``, None for y alone

    To be called inside `linear.call_through`.
    """
    bias = parameter_of(module, "bias")
    y = _FinishOutput.apply(
        call, *autocast(parameter_of(module, "weight"), None if leaves else bias), *tokens
    )
    return y if leaves is None else (y, bias if leaves else None)
