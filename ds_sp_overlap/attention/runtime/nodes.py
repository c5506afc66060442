"""The two ends of a layer as one node of autograd each; autograd differentiates what lies between.

One node instead of many saves host time in every step. It sums dx in place. It delivers the
gradient of each parameter once, in the same order for every number of head groups. See
Note [Two ways to differentiate] in `runner`.
"""

from __future__ import annotations

from torch import Tensor, nn

from ...exchange.exchange import (
    Node,
    new_token,
    refuse_second_derivatives,
    save_groups,
    saved_groups,
)
from ...schedule import Part
from .backward import BackwardRunner
from .execution import Call
from .input_gradients import InputGradients
from .linear import Plain, product_of, returned_by
from .output import OutputProjection
from .products import autocast, matrix
from .projections import ProjectionOperands, Projections
from .runner import ForwardRunner


class _StartInputs(Node):
    """Projects x, and starts the exchanges of q, k and v of all groups; returns their tokens.

    forward    y_r = x w_r^T + b_r of each part r, normed, rotated and sent
    backward   dy_r arrives, and goes back through the rotation and the norm;
               dx += dy_r w_r,  dw_r = dy_r^T x,  db_r = sum dy_r

    x is [.., m]. The parameters are w [n, m] and b [n] of each linear layer, then those of the
    norms.
    """

    @staticmethod
    def forward(ctx, call: Call, projections: Projections, x: Tensor, *parameters: Tensor | None):
        """Walk the inputs section of forward; save what the section of backward reads."""
        ctx.set_materialize_grads(False)
        inputs = ctx.inputs = InputGradients(
            call, projections, x, parameters=parameters, needs_grad=ctx.needs_input_grad[2:]
        )
        # The node saves the tables: autograd then notices changes, and frees them with the rest.
        tables, projections.tables = projections.tables, ()
        linear, norm_inputs = inputs.linear_count, dict[Part, Tensor]()
        runner = ForwardRunner(call)
        (x,) = autocast(x)  # here, so that dx is a sum in the dtype that x has outside
        filled = norm_inputs if projections.recorded else None
        runner.take_inputs(inputs, ProjectionOperands(x, parameters[:linear], tables, None, filled))
        runner.walk(call.schedule.inputs)  # guard: starts in the order drawn
        tokens, unneeded = [new_token(x) for _ in call.schedule.starts], []
        # If x needs a gradient, every part does.
        if not inputs.x_needs_grad:
            for step, token in zip(call.schedule.starts, tokens):
                call.exchanges[step.exchange].needed = needed = [
                    inputs.is_needed(part) for part in step.parts
                ]  # guard: only what is needed
                if not any(needed):
                    unneeded.append(token)
            ctx.mark_non_differentiable(*unneeded)
        # Beside the tables, only tensors that some gradient reads are saved: weights for dx, x for
        # dw, the inputs of the norms for their gradients.
        weights: list[Tensor | None] = [None] * linear
        if inputs.x_needs_grad:
            weights[::2] = parameters[:linear:2]
        ctx.normed = list(norm_inputs)
        saved = (
            [x if any(inputs.parameters_need_grad[:linear:2]) else None],
            weights,
            parameters[linear:] if norm_inputs else (),
        )
        save_groups(ctx, *saved, tables, list(norm_inputs.values()))  # guard: unchanged
        return tuple(tokens)

    @staticmethod
    def backward(ctx, *tokens):
        """Walk the inputs section of backward; ``tokens`` are gradients without data, or None."""
        (x,), weights, norm_parameters, tables, normed = saved_groups(ctx)
        norm_inputs = dict(zip(ctx.normed, normed))
        operands = ProjectionOperands(x, weights, tables, norm_parameters, norm_inputs)
        inputs, call = ctx.inputs, ctx.inputs.call
        runner = BackwardRunner(call, call.exchanges)
        runner.inputs = inputs
        # A token has a gradient where the backward of the finish has started that of the exchange.
        runner.reached = {
            step.exchange for step, token in zip(call.schedule.starts, tokens) if token is not None
        }
        inputs.begin(operands, some_missing=len(runner.reached) < len(tokens))
        # References that would keep tensors alive behind their last step.
        del x, weights, normed, norm_inputs, operands
        runner.walk(call.schedule.backward_of_inputs)
        return None, None, *inputs.end()


def start_projected(call: Call, projections: Projections, x: Tensor) -> tuple[Tensor, ...]:
    """Project x and start the exchanges of q, k and v, in the order of the schedule.

    To be called inside `linear.call_through`, where the weights are whole.

    Args:
        call: The call.
        projections: The projections, with the norm and the rotation that follow them.
        x: [.., m]. The layer's input.

    Returns:
        The tokens of the exchanges, in the order of their starts.
    """
    return _StartInputs.apply(call, projections, x, *projections.parameters())


class _FinishOutput(Node):
    """Finishes the exchanges of o of all groups, and projects o.

    forward    y = b + sum of o_g w_g^T; each o_g is finished before its product
    backward   do_g = dy w_g is started, last group first;
               dw[:, c_g] = dy^T o_g as drawn (by default under these exchanges),  db = sum dy

    w is [m, k], b is [m], and c_g are the columns w_g of group g.
    """

    @staticmethod
    def forward(ctx, call: Call, weight: Tensor, bias: Tensor | None, *_: Tensor):
        """Walk the output section of forward; the tokens only tie this node to the starts of o."""
        ctx.call, ctx.output = call, OutputProjection(call, weight.shape)
        runner = ForwardRunner(call)
        runner.take_output(ctx.output, weight, bias)
        runner.walk(call.schedule.output)
        weight_needs_grad, _, *tokens_need_grad = ctx.needs_input_grad[1:]
        outputs = [runner.outputs[group] for group in call.groups] if weight_needs_grad else []
        save_groups(ctx, [weight if any(tokens_need_grad) else None], outputs)
        return runner.y

    @staticmethod
    def backward(ctx, dy):
        """Walk the output section of backward; this node of the layer is the first to run."""
        refuse_second_derivatives(ctx.call.where)
        call, ((weight,), saved) = ctx.call, saved_groups(ctx)
        weight_needs_grad, bias_needs_grad, *tokens_need_grad = ctx.needs_input_grad[1:]
        runner = BackwardRunner(call, call.exchanges)
        runner.take_output_gradient(
            ctx.output,
            dy,
            weight,
            outputs=dict(zip(call.groups, saved)),
            o_needs_grad=tokens_need_grad,
            weight_needs_grad=weight_needs_grad,
        )
        del saved  # each o is freed after its wgrad
        runner.walk(call.schedule.backward_of_output)  # guard: the wgrad comes last
        db = matrix(dy).sum(0) if bias_needs_grad else None
        # Empty: it only makes autograd run the exchanges' other halves.
        token = dy.new_empty(0)
        dw = runner.pieces.whole()
        return None, dw, db, *(token if needed else None for needed in tokens_need_grad)


def finish_projected(
    call: Call, module: nn.Linear, plain: Plain, *tokens: Tensor
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Finish the exchanges of o and project o, in the order of the schedule.

    To be called inside `linear.call_through`.

    Args:
        call: The call.
        module: The output projection.
        plain: Known forwards of plain linear layers, that of ``module`` among them.
        tokens: The token of the exchange of o of each group.

    Returns:
        What ``module`` returns, see `returned_by`.
    """
    weight, bias = autocast(*product_of(module, plain))
    return returned_by(module, plain, _FinishOutput.apply(call, weight, bias, *tokens))
