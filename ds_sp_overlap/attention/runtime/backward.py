"""The steps of backward by hand, inside a node of autograd. See Note [Two ways to differentiate]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...exchange.exchange import Exchange
from ...schedule import Exchanged, O, Op, Part, Step
from ..memory.recompute import Attended
from .execution import Call, attend_group, with_kv
from .linear import matrix
from .output import OutputProjection
from .runner import FORWARD, ForwardRunner, LocalAttention


class BackwardRunner(ForwardRunner):
    """Performs the steps of backward, and those of forward that are done again there.

    Attributes:
        grads: Gradients of q, k, v and o of head groups: made, or summed, then received.
        exchanges: Those of forward, whose gradients go the other way, or new ones.
        reached: Exchanges whose gradients are under way.
    """

    sends_o = False  # o travels beside do, after it was multiplied

    def __init__(self, call: Call, exchanges: dict[Exchanged, Exchange]):
        super().__init__(call)
        self.exchanges = exchanges
        self.reached: set[Exchanged] = set()
        self.grads: dict[Part, Tensor] = {}
        self._owned: set[Part] = set()  # sums that nobody else reads

    handlers = FORWARD | {Op.ATTEND: "attend_backward", Op.DGRAD: "dgrad", Op.WGRAD: "wgrad"}

    def take_output_gradient(
        self,
        output: OutputProjection,
        dy: Tensor,
        weight: Tensor | None,
        outputs: dict[int, Tensor],
        needs: Sequence[bool],
        of_weight: bool,
        late: bool = False,
    ) -> None:
        """For DGRAD and WGRAD of the output projection.

        Args:
            output: The output projection.
            dy: The gradient of y.
            weight: Of the projection; None where no gradient of o is needed.
            outputs: Local o of each group, as far as something reads it. Taken out when read last.
            needs: For each group, whether a gradient of o is needed.
            of_weight: Whether there is to be a gradient of the weight.
            late: As in `Pieces`.
        """
        self.output, self.rows, self.outputs, self.of_o = output, matrix(dy), outputs, needs
        self.of_weight, self.pieces = of_weight, output.pieces(late=late)
        self.output_dgrad = None if weight is None else output.dgrads(dy, weight)

    def take_attention_gradient(
        self,
        local: LocalAttention,
        attended: dict[int, Attended],
        saved: dict[int, list[Tensor]],
    ) -> None:
        """For ATTEND; see `ForwardRunner`."""
        self.local, self.attended, self.saved = local, attended, saved
        self.learned: list[Tensor | None] = [None] * len(local.learned)

    def is_needed(self, part: Part) -> bool:
        """Whether there is to be a gradient of a part."""
        return self.of_o[part[1]] if part[0] == "o" else self.inputs.is_needed(part)

    def start(self, step: Step) -> None:
        exchange, parts = self._exchange(step), step.parts
        if not step.grad:
            exchange.start_forward([self.values.pop(part) for part in parts])
        elif step.beside:
            do = self.grads.pop(parts[0])
            exchange.start_forward([self.outputs.pop(step.group).view(do.shape), do])
        elif any(needed := [self.is_needed(part) for part in parts]):
            exchange.needed = needed
            sent = [part for part, is_needed in zip(parts, needed) if is_needed]
            exchange.start_gradient([self.grads.pop(part) for part in sent])
            self.reached.add(step.exchange)

    def finish(self, step: Step) -> None:
        exchange = self.exchanges[step.exchange]
        if not step.grad:
            self.values.update(zip(step.parts, exchange.finish_forward()))
        elif step.beside:
            part = step.parts[0]
            self.values[part], self.grads[part] = exchange.finish_forward()
        elif step.exchange in self.reached:
            for part, dx in zip(step.parts, exchange.finish_gradient()):
                if dx is not None and step.tensors == O:
                    self.grads[part] = dx
                elif dx is not None:
                    self.inputs.arrived(part, dx)
                del dx

    def dgrad(self, step: Step) -> None:
        (part,) = step.parts
        if step.tensors != O:
            self.inputs.dgrad(part)
        elif self.of_o[step.group]:
            assert self.output_dgrad is not None
            self.grads[part] = self.output_dgrad(step.group)

    def wgrad(self, step: Step) -> None:
        group = step.group
        if step.tensors != O:
            self.inputs.wgrad(step.parts[0])
        elif self.of_weight:
            o = self.outputs[group] if self.sends_o else self.outputs.pop(group)
            self.pieces.put(self.output.columns[group], torch.mm, self.rows.t(), o)

    def attend_backward(self, step: Step) -> None:
        call, group, attend = self.call, step.group, self.local.attend
        wanted, geometry = self.wanted(group), call.geometry
        q = self.values.pop(("q", group))
        heads = [q, *(with_kv(geometry, kind, group, self.values) for kind in ("k", "v"))]
        dq, dk, dv, *of_learned = self.attended[group].backward(
            lambda *heads: attend_group(call, attend, group, *heads),
            heads,
            wanted,
            self.values.pop(("o", group), None),
            self.grads.pop(("o", group)),
            self.saved.pop(group),
            self.local.learned,
        )
        for at, gradient in enumerate(of_learned):
            if gradient is not None:
                so_far = self.learned[at]
                self.learned[at] = gradient if so_far is None else so_far + gradient
        if wanted[0]:
            self.grads["q", group] = (
                torch.zeros_like(heads[0]) if dq is None else dq
            )  # guard: others may exchange one
        for kind, dx, x, is_wanted in zip(("k", "v"), (dk, dv), heads[1:], wanted[1:]):
            if is_wanted:
                self._add(kind, group, torch.zeros_like(x) if dx is None else dx)
            self.values.pop((kind, group), None)  # guard: the last that attends to them, here

    def _add(self, kind: str, group: int, dx: Tensor) -> None:
        """Add the gradient of k or v that a group attended to, to the pieces that it was put
        together from.
        """
        sent = [sent for sent, *_ in self.call.geometry.kv_pieces(group)]
        pieces = {(kind, at): self.values[kind, at].detach().requires_grad_() for at in sent}
        with torch.enable_grad():
            joined = with_kv(self.call.geometry, kind, group, pieces)
        is_one = len(sent) == 1 and joined is pieces[kind, sent[0]]
        found = [dx] if is_one else torch.autograd.grad(joined, list(pieces.values()), dx)
        for part, gradient in zip(pieces, found):
            if part in self._owned:  # guard: others may read it
                self.grads[part] += gradient
            elif part in self.grads:
                self.grads[part] = self.grads[part] + gradient
                self._owned.add(part)
            else:
                self.grads[part] = gradient

    def _exchange(self, step: Step) -> Exchange:
        if (known := self.exchanges.get(step.exchange)) is not None:
            return known
        dims = (self.inputs.made.head_dim,) * (len(step.beside) + len(step.tensors))
        made = self.exchanges[step.exchange] = self.call.exchange(step, dims)
        return made
