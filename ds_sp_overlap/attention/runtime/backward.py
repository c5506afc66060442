"""What each step of backward does, by hand, inside a node of autograd.

See Note [Two ways to differentiate] in `runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...exchange.exchange import Exchange
from ...schedule import Exchanged, O, Part, Step
from ..memory.recompute import Attended, LocalAttention
from .execution import Call, attend_in_pieces, with_kv
from .output import OutputProjection
from .pieces import Pieces
from .products import matrix
from .runner import ForwardRunner


class BackwardRunner(ForwardRunner):
    """Performs the steps of backward, and the steps of forward that backward recomputes.

    A node makes one for each backward: `window` walks the whole program, the two nodes of `nodes`
    one section each, and each hands over only what its steps need.

    Attributes:
        grads: do of head groups, first local and then received; and dq, dk and dv from attention
            until they are sent. Received dq, dk and dv go to ``inputs``.
        exchanges: The exchanges of the steps: those that forward used, or new ones. Each carries
            values, and gradients in the opposite direction.
        reached: The exchanges whose gradients were started.
        learned_gradients: For each tensor of ``local.learned``, the sum of its gradients; None
            where there is none.
    """

    def __init__(self, call: Call, exchanges: dict[Exchanged, Exchange]):
        super().__init__(call)
        self.exchanges = exchanges
        self.reached: set[Exchanged] = set()
        self.grads: dict[Part, Tensor] = {}
        # The gradients that are sums made here. Nobody else reads these tensors, so that they may
        # be added to in place.
        self._owned: set[Part] = set()

    def take_output_gradient(
        self,
        output: OutputProjection,
        dy: Tensor,
        weight: Tensor | None,
        outputs: dict[int, Tensor],
        o_needs_grad: Sequence[bool],
        weight_needs_grad: bool,
        late: bool = False,
    ) -> None:
        """Take what the steps of the output projection need: DGRAD, WGRAD, and the start of do.

        Args:
            output: The output projection.
            dy: [.., m]. The gradient of y.
            weight: The weight of the projection; may be None where no gradient of o is needed.
            outputs: Local o of each group that some step reads. The last step that reads an o
                takes it out.
            o_needs_grad: For each group, whether a gradient of o is needed.
            weight_needs_grad: Whether a gradient of the weight is needed.
            late: As in `Pieces`.
        """
        self.output, self.dy_transposed, self.outputs = output, matrix(dy).t(), outputs
        self.o_needs_grad, self.weight_needs_grad = o_needs_grad, weight_needs_grad
        self.pieces = Pieces(output.shape, 1, output.columns, late=late)
        self.output_dgrad = None if weight is None else output.dgrads(dy, weight)

    def take_attention_gradient(
        self,
        local: LocalAttention,
        attended: dict[int, Attended],
        saved: dict[int, Sequence[Tensor]],
    ) -> None:
        """Take what the steps ATTEND need; the arguments are attributes of `ForwardRunner`."""
        self.local, self.attended, self.saved = local, attended, saved
        self.learned_gradients: list[Tensor | None] = [None] * len(local.learned)

    def start(self, step: Step) -> None:
        """Launch the exchange of recomputed values, of o beside do, or of gradients.

        Collective. Launches nothing where no gradient of the step's parts is needed.
        """
        exchange, parts = self.exchanges.get(step.exchange), step.parts
        if exchange is None:
            # Forward kept no exchange (`window`): make it again.
            dims = (self.inputs.projections.head_dim,) * (len(step.beside) + len(step.tensors))
            exchange = self.exchanges[step.exchange] = self.call.exchange(step, dims)
        if not step.grad:
            exchange.start_forward([self.values.pop(part) for part in parts])
            return
        if step.beside:
            do = self.grads.pop(parts[0])
            exchange.start_forward([self.outputs.pop(step.group).view(do.shape), do])
            return
        # `dgrad` and `attend` have put in each gradient that modules need, zero where this rank has
        # none: all ranks must launch the same exchanges.
        needed = [part in self.grads for part in parts]
        if any(needed):
            exchange.needed = needed
            exchange.start_gradient([self.grads.pop(part) for part in parts if part in self.grads])
            self.reached.add(step.exchange)

    def finish(self, step: Step) -> None:
        """Take what arrived: values, o and do, or gradients; nothing if none were started."""
        exchange = self.exchanges[step.exchange]
        if not step.grad:
            self.values.update(zip(step.parts, exchange.finish_forward()))
        elif step.beside:
            self.values["o", step.group], self.grads["o", step.group] = exchange.finish_forward()
        elif step.exchange in self.reached:
            for part, dx in zip(step.parts, exchange.finish_gradient()):
                if dx is not None and step.tensors == O:
                    self.grads[part] = dx
                elif dx is not None:
                    self.inputs.arrived(part, dx)
                del dx  # before the next part is computed

    def dgrad(self, step: Step) -> None:
        """Compute do of a group, or add the share of a part of q, k and v to dx."""
        (part,) = step.parts
        if step.tensors != O:
            self.inputs.dgrad(part)
        elif self.output_dgrad is not None and self.o_needs_grad[step.group]:
            self.grads[part] = self.output_dgrad(step.group)

    def wgrad(self, step: Step) -> None:
        """Compute a group's columns of dWo, or a part's rows of a weight gradient of q, k and v."""
        group = step.group
        if step.tensors != O:
            self.inputs.wgrad(step.parts[0])
        elif self.weight_needs_grad:
            # Where o travels beside do, that start comes later and takes it out.
            o = self.outputs[group] if self.call.schedule.beside else self.outputs.pop(group)
            self.pieces.put(self.output.columns[group], torch.mm, self.dy_transposed, o)

    def attend(self, step: Step) -> None:
        """Run the backward of the attention of a group; groups come in descending order."""
        call, group, attend = self.call, step.group, self.local.attend
        needs_grad = self.qkv_need_grad()
        heads = self.heads(group)
        dq, dk, dv, *learned_gradients = self.attended[group].backward(
            partial(attend_in_pieces, call, attend, group),
            heads,
            needs_grad,
            self.values.pop(("o", group), None),
            self.grads.pop(("o", group)),
            self.saved.pop(group),
            self.local,
        )
        for index, gradient in enumerate(learned_gradients):
            if gradient is not None:
                so_far = self.learned_gradients[index]
                self.learned_gradients[index] = gradient if so_far is None else so_far + gradient
        # A needed gradient that attention does not give is zero: the other ranks exchange theirs.
        if needs_grad[0]:
            dq = torch.zeros_like(heads[0]) if dq is None else dq  # guard: others may exchange one
            self.grads["q", group] = dq
        for kind, dx, x, is_needed in zip(("k", "v"), (dk, dv), heads[1:], needs_grad[1:]):
            if is_needed:
                self._add_to_pieces(kind, group, torch.zeros_like(x) if dx is None else dx)
            # Backward takes the groups in reverse: the group with which k and v travelled reads
            # them last.
            self.values.pop((kind, group), None)  # guard: the last that attends to them, here

    def _add_to_pieces(self, kind: str, group: int, dx: Tensor) -> None:
        """Add dk or dv of a group to the gradients of the received pieces that made its k or v.

        Args:
            kind: "k" or "v".
            group: The head group that attended.
            dx: The gradient of what `with_kv` returns.
        """
        pieces = {
            (kind, sent): self.values[kind, sent].detach().requires_grad_()
            for sent, *_ in self.call.geometry.kv_pieces(group)
        }
        # Heads may be cut, joined or repeated. Autograd derives how dx returns to the pieces.
        with torch.enable_grad():
            joined = with_kv(self.call.geometry, kind, group, pieces)
        # A leaf is the one piece itself.
        gradients = (
            [dx] if joined.is_leaf else torch.autograd.grad(joined, list(pieces.values()), dx)
        )
        for part, gradient in zip(pieces, gradients):
            if part in self._owned:  # guard: others may read it
                self.grads[part] += gradient
            elif part in self.grads:
                # The first gradient is attention's own tensor, which may be a view of a larger one.
                self.grads[part] = self.grads[part] + gradient
                self._owned.add(part)
            else:
                self.grads[part] = gradient
