"""A layer that holds few head groups at a time: one node of autograd, whose backward makes q, k and v again.

Forward and backward walk the programs of a `Windowed` schedule as they are. Between them live the layer's input, the local o, and
what local attention's backward reads beside q, k, v and o (`again`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..exchange.exchange import Exchange, Node, refuse_second_derivatives
from ..schedule import Step, without_o
from .again import Attended, Random, attend_once
from .execution import Attend, Call, Part, attend_group, with_kv
from .kept import Visit
from .linear import autocast, autocast_of, matrix
from .output import OutputProjection
from .projections import InputGradients, Projections


class LocalAttention(NamedTuple):
    """
    attend    a group and its q, k, v -> o
    given     tensors that it is called with beside them
    learned   those of them, and of its parameters, that have a gradient
    agree     whether o must travel in backward, on any rank, of what is needed on this one
    """

    attend: Attend
    given: list[Tensor]
    learned: list[Tensor]
    agree: Callable[[bool, str], bool]


class _Forward:
    """The forward program; what it leaves is read by `_Windowed`.

    outputs   local o of each group as it was projected, [tokens, k_g]
    attended  of each group, with the tensors to keep
    """

    def __init__(self, call: Call, made: Projections, local: LocalAttention, inputs: InputGradients, output: OutputProjection):
        self.call, self.made, self.local, self.inputs, self.output = call, made, local, inputs, output
        self.outputs: dict[int, Tensor] = {}
        self.attended: dict[int, Attended] = {}
        self.kept: dict[int, list[Tensor]] = {}

    def run(
        self, x: Tensor, parameters: Sequence, tables: tuple, weight: Tensor, bias: Tensor | None, recorded: bool
    ) -> Tensor | None:
        call, y = self.call, None
        project, merge = self.made.projecting(matrix(x), x.shape[:2], parameters), self.output.merging(weight, bias)
        heads: dict[Part, Tensor] = {}  # projected, then received
        last_use = call.geometry.last_use
        for step in call.schedule.forward:
            act, of, group, _ = step
            if act == "start":
                call.start(of, group, *[heads.pop((kind, group)) for kind in of])
            elif act == "finish":
                heads.update(zip([(kind, group) for kind in of], call.exchanges[of, group].finish_forward()))
            else:
                with call.named(step):
                    if act == "project":
                        heads[of, group] = self.made.shape((of, group), project((of, group)), tables)
                    elif act == "attend":
                        heads["o", group] = self._attend(group, heads, recorded)
                        for sent in range(group + 1):
                            if last_use[sent] == group:  # guard: let go when no group needs them
                                heads.pop(("k", sent), None), heads.pop(("v", sent), None)
                    else:
                        y, self.outputs[group] = merge(y, group, heads.pop(("o", group)))
        return y

    def _attend(self, group: int, received: dict[Part, Tensor], recorded: bool) -> Tensor:
        q = received.pop(("q", group))
        k, v = (with_kv(self.call.geometry, kind, group, received) for kind in "kv")
        if not recorded:
            return attend_group(self.call, self.local.attend, group, q, k, v)
        wanted = wanted_of(self.call, self.inputs, group)
        o, self.attended[group], self.kept[group] = attend_once(
            lambda *heads: attend_group(self.call, self.local.attend, group, *heads),
            (q, k, v),
            wanted,
            self.local.given,
            self.local.learned,
        )
        return o


def wanted_of(call: Call, inputs: InputGradients, group: int) -> list[bool]:
    """Of which of q, k and v of a group there will be a gradient."""
    sent = [sent for sent, *_ in call.geometry.kv_pieces(group)]
    return [inputs.is_needed(("q", group)), *(any(inputs.is_needed((kind, at)) for at in sent) for kind in "kv")]


class _Windowed(Node):
    """y of x, with all that lies between.

    x [.., m]     w [m, k], b [m] of the output projection     what local attention learns     parameters as of `Projections`
    """

    @staticmethod
    def forward(
        ctx, call: Call, made: Projections, local: LocalAttention, visit: Visit | None, offload: bool, x, weight, bias, *rest
    ):
        learned, parameters = rest[: len(local.learned)], rest[len(local.learned) :]
        of_x, ctx.of_weight, ctx.of_bias, *needs = ctx.needs_input_grad[5:]
        ctx.of_learned, of_parameters = needs[: len(learned)], needs[len(learned) :]
        inputs = ctx.inputs = InputGradients(call, made, x, parameters, (of_x, *of_parameters))
        output = ctx.output = OutputProjection(call, weight.shape)
        ctx.local, ctx.autocast, tables = local, autocast_of(x.device), made.tables
        made.tables = ()  # saved below
        forward = _Forward(call, made, local, inputs, output)
        if visit is not None and visit.again:
            (forward.outputs, forward.kept), (forward.attended, after) = visit.take(call.where)
            y: Tensor | None = None
            merge = output.merging(weight, bias)
            for group, o in forward.outputs.items():
                heads = o.view(*x.shape[:2], o.shape[-1] // made.head_dim, made.head_dim)
                y, _ = merge(y, group, heads)
            if after is not None:
                after.set()  # guard: what is drawn behind attention is as before
        else:
            before = Random.now(x.device) if visit is not None else None
            y = forward.run(x, parameters, tables, weight, bias, made.recorded and any(ctx.needs_input_grad))
            if visit is not None:
                after = Random.now(x.device)
                # Without their graphs, which may lead to the checkpoint that keeps this; backward goes through those of this node.
                attended = {group: replace(each, edges=None) for group, each in forward.attended.items()}  # guard: nothing circular
                rest = attended, None if after == before else after
                visit.put(call.where, (forward.outputs, forward.kept), rest, offload, local.given)
        attended = ctx.attended = forward.attended
        if attended:
            reads_o = any(each.reads_o for each in attended.values())
            foreign = next((each.foreign for each in attended.values() if each.foreign), "")
            if not local.agree(reads_o, foreign):
                call.run_by(without_o(call.schedule))
        outputs = forward.outputs if ctx.of_weight or "odo" in {step.of for step in call.schedule.backward} else {}
        of_norms = parameters[inputs.linear :]
        ctx.sizes = inputs.linear, len(of_norms), len(tables), len(outputs)
        in_order = [x for group in attended for x in forward.kept[group]]
        ctx.save_for_backward(x, weight, *parameters[: inputs.linear], *of_norms, *tables, *outputs.values(), *in_order)
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivatives(ctx.inputs.call.where)
        with torch.autocast(**ctx.autocast):  # guard: q, k and v are made as before
            return None, None, None, None, None, *_Backward(ctx, dy).run()


class _Backward:
    """The backward program, of dy and of what `_Windowed` saved."""

    def __init__(self, ctx, dy: Tensor):
        self.inputs, self.output, self.local, self.attended = ctx.inputs, ctx.output, ctx.local, ctx.attended
        self.call, self.made, self.ctx, self.dy = self.inputs.call, self.inputs.made, ctx, dy
        linear, of_norms, tables, outputs = ctx.sizes
        self.x, self.weight, *saved = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: what is here is let go after its use
        self.parameters, self.of_norms = saved[:linear], saved[linear : (at := linear + of_norms)]
        self.tables = tuple(saved[at : at + tables])
        self.outputs = dict(zip(self.call.groups, saved[at + tables : (at := at + tables + outputs)]))
        self.kept = {group: saved[at : (at := at + attended.kept)] for group, attended in self.attended.items()}
        self.heads: dict[Part, Tensor] = {}  # projected, then received
        self.sums: dict[Part, Tensor] = {}  # gradients of what was received
        self.owned: set[Part] = set()  # sums that nobody else reads
        self.flights: dict[Part, Exchange] = {}
        self.do: dict[int, Tensor] = {}
        self.o: dict[int, Tensor] = {}

    def run(self) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight, bias, of what attention learns, and of the parameters."""
        inputs, rows, dw = self.inputs, matrix(self.dy), self.output.pieces(late=True)
        inputs.begin(self.x, self.parameters, self.tables, self.of_norms, {}, some=False, late=True)
        self.project = self.made.projecting(matrix(self.x), self.dy.shape[:2], self.parameters)
        self.dgrad = self.output.dgrads(self.dy, self.weight)
        self.learned: list[Tensor | None] = [None] * len(self.local.learned)
        goes_on = bool(self.learned) or any(map(inputs.is_needed, self.made.rows))
        for step in self.call.schedule.backward:
            act, of, group, _ = step
            if (act, of) == ("wgrad", "o"):
                if self.ctx.of_weight:
                    with self.call.named(step):
                        dw.put(self.output.columns[group], torch.mm, rows.t(), self.outputs[group])
            elif goes_on:
                self._do(step)
        dx, *of_parameters = inputs.end()
        return dx, dw.whole(), rows.sum(0) if self.ctx.of_bias else None, *self.learned, *of_parameters

    def _do(self, step: Step) -> None:
        act, of, group, _ = step
        if act == "start":
            self._start(of, group)
        elif act == "finish":
            self._finish(of, group)
        else:
            with self.call.named(step):
                if act == "project":
                    self._project((of, group))
                elif act == "attend":
                    self._attend(group)
                elif of == "o":
                    self.do[group] = self.dgrad(group, self.made.head_dim)
                else:
                    self.inputs.step(act, (of, group))

    def _project(self, part: Part) -> None:
        heads = self.project(part)
        if part[0] in self.made.norms and self.inputs.is_needed(part):
            self.inputs.normed[part] = heads
        self.heads[part] = self.made.shape(part, heads, self.tables, self.of_norms)

    def _start(self, of: str, group: int) -> None:
        d = self.made.head_dim
        is_gradient = of != "odo" and of[0] == "d"
        kinds = of[1:] if is_gradient else of
        flight = self.flights[of, group] = self.call.exchange(kinds, group, (d,) * (2 if of == "odo" else len(kinds)))
        if of == "odo":
            do = self.do.pop(group)
            flight.start_forward([self.outputs.pop(group).view(do.shape), do])  # projected before
        elif of == "do":
            self.outputs.pop(group, None)
            flight.start_gradient([self.do.pop(group)])
        elif is_gradient:
            flight.needed = [self.inputs.is_needed((kind, group)) for kind in kinds]
            if any(flight.needed):
                parts = ((kind, group) for kind, needed in zip(kinds, flight.needed) if needed)
                flight.start_gradient([self.sums.pop(part) for part in parts])
        else:
            flight.start_forward([self.heads.pop((kind, group)) for kind in kinds])

    def _finish(self, of: str, group: int) -> None:
        flight = self.flights.pop((of, group))
        if of == "odo":
            self.o[group], self.do[group] = flight.finish_forward()
        elif of == "do":
            (do,) = flight.finish_gradient()
            assert do is not None
            self.do[group] = do
        elif of[0] == "d":
            if any(flight.needed):
                for kind, dy in zip(of[1:], flight.finish_gradient()):
                    if dy is not None:
                        self.inputs.arrived((kind, group), dy)
        else:
            self.heads.update(zip([(kind, group) for kind in of], flight.finish_forward()))

    def _attend(self, group: int) -> None:
        call, wanted = self.call, wanted_of(self.call, self.inputs, group)
        heads = [self.heads.pop(("q", group)), *(with_kv(call.geometry, kind, group, self.heads) for kind in "kv")]
        (
            dq,
            *dkv,
        ) = (
            found := self.attended[group].backward(
                lambda *heads: attend_group(call, self.local.attend, group, *heads),
                heads,
                wanted,
                self.o.pop(group, None),
                self.do.pop(group),
                self.kept.pop(group),
                self.local.learned,
            )
        )[:3]
        for at, gradient in enumerate(found[3:]):
            if gradient is not None:
                so_far = self.learned[at]
                self.learned[at] = gradient if so_far is None else so_far + gradient
        if wanted[0]:
            self.sums["q", group] = torch.zeros_like(heads[0]) if dq is None else dq  # guard: others may exchange one
        for kind, dx, x, is_wanted in zip("kv", dkv, heads[1:], wanted[1:]):
            if is_wanted:
                self._add(kind, group, torch.zeros_like(x) if dx is None else dx)
            self.heads.pop((kind, group), None)  # guard: the last that attends to them, here

    def _add(self, kind: str, group: int, dx: Tensor) -> None:
        """The gradient of k or v that a group attended to, to the pieces that it was put together from."""
        sent = [sent for sent, *_ in self.call.geometry.kv_pieces(group)]
        pieces = {(kind, at): self.heads[kind, at].detach().requires_grad_() for at in sent}
        with torch.enable_grad():
            joined = with_kv(self.call.geometry, kind, group, pieces)
        found = (
            [dx] if len(sent) == 1 and joined is pieces[kind, sent[0]] else torch.autograd.grad(joined, list(pieces.values()), dx)
        )
        for part, gradient in zip(pieces, found):
            if part in self.owned:  # guard: others may read it
                self.sums[part] += gradient
            elif part in self.sums:
                self.sums[part] = self.sums[part] + gradient
                self.owned.add(part)
            else:
                self.sums[part] = gradient


def windowed(
    call: Call, made: Projections, local: LocalAttention, visit: Visit | None, offload: bool, o_proj: nn.Linear,
    leaves: bool | None, x: Tensor,
) -> Tensor | tuple[Tensor, Tensor | None]:  # fmt: skip
    """A layer by its `Windowed` schedule, of ``x`` [.., m]; returns what ``o_proj`` returns.

    visit    the checkpoint around it, where its attention is to be kept; ``offload`` in host memory
    leaves   whether that is ``(y, bias to add)``, None for y alone

    To be called inside `linear.call_through`.
    """
    parameters = made.parameters()
    linear = 2 * len(made.modules)
    operands = autocast(x, o_proj.weight, None if leaves else o_proj.bias, *parameters[:linear])
    y: Tensor = _Windowed.apply(
        call, made, local, visit, offload, *operands[:3], *local.learned, *operands[3:], *parameters[linear:]
    )
    return y if leaves is None else (y, o_proj.bias if leaves else None)
