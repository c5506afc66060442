"""The two ends of a layer, each one node of autograd: projections with the starts of q, k, v; finishes of o with their projection.

Forward and backward walk the schedule's programs as they are. One node instead of many: each costs the host time in every step,
dx is summed in place, and a parameter's gradient is delivered once, in the same order for every number of head groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..exchange.exchange import refuse_second_derivatives
from .execution import Call, Part, finish_output, start_inputs
from .linear import Plain, autocast, by_rank, matrix, projected_rows
from .slices import Ranges, batched, cut_ranges, join_pieces, put_ranges


class Rows(NamedTuple):
    """Where q, k or v of a group comes from: rows of one of the linear layers; those of each of ``ranks`` together in memory, if not 0."""

    module: int
    rows: Ranges
    ranks: int = 0


@dataclass
class Projections:
    """q, k and v of all groups from x: rows of linear layers, then for q and k a norm and a rotation.

    modules   the linear layers
    rows      of each part
    norms     of q and k, over d of heads [.., h, d]; computed again in backward, so that nothing but their input is kept
    rope      a `Rotary` that rotates q and k
    tables    (cos, sin) [.., 1, d_rot] by which, without a gradient; empty if nothing is rotated
    norm_last rotate before the norm instead of behind it
    folded    what the kernels rotate that pack it, so that `shape` does not
    head_dim  d
    plain     see `linear`
    recorded  whether there will be a backward
    """

    modules: list[nn.Linear]
    rows: dict[Part, Rows]
    norms: dict[str, nn.Module]
    rope: Any
    tables: tuple[Tensor, ...]
    norm_last: bool
    folded: frozenset[Part]
    head_dim: int
    plain: Plain
    recorded: bool

    @property
    def called(self) -> list[nn.Module]:
        """Modules whose weights must be there while it is made and run."""
        return list(dict.fromkeys((*self.modules, *self.norms.values())))

    @cached_property
    def learned(self) -> dict[str, slice]:
        """Places of what is learned in each norm among the `parameters`, behind those of the linear layers."""
        places, at = {}, 2 * len(self.modules)
        for kind, norm in self.norms.items():
            places[kind] = slice(at, at := at + len(list(norm.parameters())))
        return places

    def parameters(self) -> list[Tensor | None]:
        """Weight and bias of each linear layer, then what is learned in the norms."""
        linear = [p for m in self.modules for p in (m.weight, None if self.plain[type(m).forward](m) else m.bias)]
        return linear + [p for norm in self.norms.values() for p in norm.parameters()]

    def project(self, part: Part, x: Tensor, parameters: tuple[Any, ...]) -> Tensor:
        """[.., h, d], or [.., P, h, d] in the memory order of the wire; of `parameters`, where biases may be None."""
        module, rows, ranks = self.rows[part]
        y = projected_rows(x, parameters[2 * module], parameters[2 * module + 1], rows, ranks)
        return y.view(*y.shape[:-1], y.shape[-1] // self.head_dim, self.head_dim)

    def is_rotated(self, part: Part, tables: tuple[Tensor, ...]) -> bool:
        return bool(tables) and part[0] != "v" and part not in self.folded

    def shape(self, part: Part, heads: Tensor, tables: tuple[Tensor, ...], again: bool = False) -> Tensor:
        """Norm and rotation of what was projected, in the order of memory, which stays as it is.

        again   in backward, where the norm is called for its weights to be there; in forward it was (`called`)
        """
        module, rotated = self.norms.get(part[0]), self.is_rotated(part, tables)
        if not (rotated or module):
            return heads
        norm: Callable[..., Tensor] | None = module if module is None or again else module.forward
        ranks = self.rows[part].ranks
        heads = heads.movedim(2, 0) if ranks else heads
        heads = heads if norm is None or self.norm_last else norm(heads)
        heads = self.rope.rotate(heads, *tables) if rotated else heads
        heads = norm(heads) if norm is not None and self.norm_last else heads
        return heads.movedim(0, 2) if ranks else heads


class _StartInputs(torch.autograd.Function):
    """Tokens of the exchanges of q, k and v of all groups.

    x [.., m]     parameters   w [n, m] and b [n] of each linear layer, then what is learned in the norms

    forward    y_r = x w_r^T + b_r, normed and rotated, and started
    backward   dy_r finished, rotated back and through the norm;  dx += dy_r w_r,  dw_r = dy_r^T x,  db_r = sum dy_r
    """

    @staticmethod
    def forward(ctx, call: Call, made: Projections, x: Tensor, *parameters: Tensor | None):
        ctx.call, ctx.made, ctx.dtype, device = call, made, x.dtype, x.device.type
        ctx.set_materialize_grads(False)
        of_x, *of_parameters = ctx.needs_input_grad[2:]
        linear = 2 * len(made.modules)
        tables, made.tables = made.tables, ()  # saved where autograd watches, and let go with the rest
        normed: dict[Part, Tensor] = {}
        unneeded: list[Tensor] = []

        def is_needed(part: Part) -> bool:
            at = 2 * made.rows[part].module
            return of_x or any(of_parameters[at : at + 2]) or any(of_parameters[made.learned.get(part[0], slice(0))])

        def project(kind: str, group: int) -> Tensor:
            part = kind, group
            heads = made.project(part, x, parameters)
            if kind in made.norms and made.recorded and is_needed(part):
                normed[part] = heads
            return made.shape(part, heads, tables)

        tokens = start_inputs(call, project)
        if not of_x:
            for (of, group), token in tokens.items():
                call.exchanges[of, group].needed = needed = [is_needed((kind, group)) for kind in of]  # guard: only what is needed
                if not any(needed):
                    unneeded.append(token)
            ctx.mark_non_differentiable(*unneeded)
        ctx.shapes, ctx.normed, ctx.tables = [None if p is None else p.shape for p in parameters], list(normed), len(tables)
        if normed:
            enabled = torch.is_autocast_enabled(device)
            ctx.autocast = dict(device_type=device, dtype=torch.get_autocast_dtype(device), enabled=enabled)  # guard: as in forward
        # Only what some gradient reads: dx the weights, dw x, and a norm's its input.
        weights = (p if of_x and at % 2 == 0 else None for at, p in enumerate(parameters[:linear]))
        ctx.save_for_backward(x if any(of_parameters[:linear:2]) else None, *weights, *tables, *normed.values())  # guard: unchanged
        return tuple(tokens[exchange] for exchange in call.schedule.starts)

    @staticmethod
    def backward(ctx, *tokens):
        call, made, (x, *saved) = ctx.call, ctx.made, ctx.saved_tensors
        of_x, *of_parameters = ctx.needs_input_grad[2:]
        linear = 2 * len(made.modules)
        weights, tables = saved[:linear], saved[linear : linear + ctx.tables]
        normed = dict(zip(ctx.normed, saved[linear + len(tables) :]))
        del saved
        ctx.maybe_clear_saved_tensors()
        reached = {exchange for exchange, token in zip(call.schedule.starts, tokens) if token is not None}
        gradients: dict[Part, Tensor] = {}
        halved: set[Part] = set()  # either dgrad or wgrad is done
        pieces: list[list[tuple[Ranges, Tensor]]] = [[] for _ in range(linear)]
        learned: list[Tensor | None] = [None] * (len(ctx.shapes) - linear)
        dx: Tensor | None = None

        def unshaped(part: Part, dy: Tensor) -> Tensor:
            """The gradient of what was projected, [.., n], of that of what was sent."""
            if part not in normed:
                if made.is_rotated(part, tables):
                    dy = made.rope.rotate_back(dy.flatten(2, -2), *tables).to(ctx.dtype)
                return dy.flatten(2)
            leaf, of_norm = normed.pop(part).detach().requires_grad_(), list(made.norms[part[0]].parameters())
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                y = made.shape(part, leaf, tables, again=True)
            places = made.learned[part[0]]
            wanted = [at for at in range(places.start, places.stop) if of_parameters[at]]
            dy, *found = torch.autograd.grad(y, [leaf, *(of_norm[at - places.start] for at in wanted)], dy, allow_unused=True)
            for at, gradient in zip(wanted, found):
                if gradient is not None:
                    so_far = learned[at - linear]
                    learned[at - linear] = gradient if so_far is None else so_far + gradient
            return dy.flatten(2)

        for act, of, group in call.schedule.backward_of_inputs:
            part = of, group
            if act == "finish":
                if (of[1:], group) in reached:
                    for kind, dy in zip(of[1:], call.exchanges[of[1:], group].finish_gradient()):
                        if dy is not None:
                            gradients[kind, group] = unshaped((kind, group), dy)
                continue
            if part not in gradients:
                continue
            (module, rows, _), dy = made.rows[part], gradients[part]
            at = 2 * module
            if act == "dgrad" and of_x:
                weight = cut_ranges(weights[at], 0, rows)
                if dx is None:
                    dx = dy @ weight
                elif len(call.groups) == 1 or dx.dtype != dy.dtype:
                    dx += dy @ weight  # rounds as the layer that it replaces does
                else:
                    matrix(dx).addmm_(matrix(dy), weight)
            elif act == "wgrad":
                if of_parameters[at]:
                    pieces[at].append((rows, matrix(dy).t() @ matrix(x)))
                if of_parameters[at + 1]:
                    pieces[at + 1].append((rows, matrix(dy).sum(0)))
            del dy  # before the next one is unpacked
            if part in halved:
                del gradients[part]
            halved.add(part)
        of_linear = []
        for shape, left in zip(ctx.shapes, pieces):
            of_linear.append(join_pieces(shape, 0, left))
            left.clear()
        return None, None, dx, *of_linear, *learned


def start_projected(call: Call, made: Projections, x: Tensor) -> tuple[Tensor, ...]:
    """Walk the section of the inputs with projections of ``x`` [.., m]; returns the tokens in the order of their starts.

    To be called inside `linear.call_through`.
    """
    parameters = made.parameters()
    linear = 2 * len(made.modules)
    return _StartInputs.apply(call, made, *autocast(x, *parameters[:linear]), *parameters[linear:])


class _FinishOutput(torch.autograd.Function):
    """The output projection of o of all groups.

    w [m, k], w_g = w[:, c_g] its columns for a group     b [m]

    forward    y = b + sum of o_g w_g^T, each finished in its turn
    backward   do_g = dy w_g started, last group first;  then, under their exchanges, dw[:, c_g] = dy^T o_g,  db = sum dy
    """

    @staticmethod
    def forward(ctx, call: Call, weight: Tensor, bias: Tensor | None, *tokens: Tensor):
        outputs: dict[int, Tensor] = {}
        y: Tensor | None = None
        ctx.call, ctx.columns = call, {}

        def merge(group: int, o: Tensor) -> None:
            nonlocal y
            columns = call.geometry.elements_of("o", group, 0, o.shape[-1])
            (o,) = autocast(o.flatten(2))
            ctx.columns[group], outputs[group] = columns, o
            operands = matrix(o), cut_ranges(weight, 1, columns).t()
            if y is not None:
                matrix(y).addmm_(*operands)
                return
            y = o.new_empty(*o.shape[:-1], weight.shape[0])  # no view, so that the caller may update it in place
            torch.mm(*operands, out=matrix(y)) if bias is None else torch.addmm(bias, *operands, out=matrix(y))

        finish_output(call, {("o", group): token for group, token in enumerate(tokens)}, merge)
        of_weight, _, *of_tokens = ctx.needs_input_grad[1:]
        ctx.shape = weight.shape
        ctx.save_for_backward(weight if any(of_tokens) else None, *((outputs[group] for group in call.groups) if of_weight else ()))
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivatives(ctx.call.where)
        call, (weight, *outputs) = ctx.call, ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: `outputs` has them, and lets go of each after its use
        of_weight, of_bias, *of_tokens = ctx.needs_input_grad[1:]
        dw: Tensor | None = None

        def wgrad(group: int) -> None:
            nonlocal dw
            piece = matrix(dy).t() @ matrix(outputs[group])
            outputs[group] = None
            if len(outputs) == 1:
                dw = piece
                return
            dw = piece.new_empty(ctx.shape) if dw is None else dw
            put_ranges(dw, 1, ctx.columns[group], piece, add=False)

        def dgrad(group: int) -> Tensor:
            columns, head_dim = ctx.columns[group], call.exchanges["o", group].layout.target.shape[-1]
            if "o" in call.by_rank:
                do = by_rank(dy, batched(weight, 1, columns, call.geometry.sp_size))
            else:
                do = dy @ cut_ranges(weight, 1, columns)
            return do.view(*do.shape[:-1], do.shape[-1] // head_dim, head_dim)

        computed: dict[int, Tensor] = {}
        for act, _, group in call.schedule.backward_of_output:  # guard: the wgrad comes last
            if act == "wgrad" and of_weight:
                wgrad(group)
            elif act == "dgrad" and of_tokens[group]:
                computed[group] = dgrad(group)
            elif act == "start" and of_tokens[group]:
                call.exchanges["o", group].start_gradient([computed.pop(group)])
        db = matrix(dy).sum(0) if of_bias else None
        token = dy.new_empty(0)
        return None, dw, db, *(token if needed else None for needed in of_tokens)


def finish_projected(
    call: Call, module: nn.Linear, leaves: bool | None, tokens: tuple[Tensor, ...]
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Walk the section of the output, with the tokens of the groups and ``module``; returns what it returns.

    leaves   whether that is ``(y, bias to add)``, None for y alone

    To be called inside `linear.call_through`.
    """
    weight, bias = autocast(module.weight, None if leaves else module.bias)
    y = _FinishOutput.apply(call, weight, bias, *tokens)
    return y if leaves is None else (y, module.bias if leaves else None)
