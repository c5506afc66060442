"""The bytes that a layer has in memory while its programs run.

A tensor lives from the step that makes it to the last step that reads it. So there is no rule for
what is saved for backward: the saved tensors are those that steps of backward read and no step of
backward makes. The backward of a window recomputes q, k and v, so its forward frees them.

    tensor       [..]         made by       read by
    local q 0    [s/P, h_0]   project q 0   start q 0
    send q 0     [s/P, h_0]   start q 0     finish q 0
    recv q 0     [s, h_0/P]   start q 0     finish q 0
    global q 0   [s, h_0/P]   finish q 0    attend o 0, attend do 0
    global o 0   [s, h_0/P]   attend o 0    start o 0, attend do 0
    lse o 0      [s, h_0/P]   attend o 0    attend do 0
    work do 0                 attend do 0   attend do 0
    local o 0    [s/P, h_0]   finish o 0    merge o 0, wgrad o 0, start odo 0
    rows q 0     [h_0, m]     wgrad q 0     into dW q, at the end
    y, dx, dW q               the first step that adds to it; read by the layer's caller, at the end

There is no ``send`` where ``local`` already has the layout of the transfer: ``local`` then lives to
``finish``. There is no ``recv`` where ``global`` has that layout. lse is the log-sum-exp, one
number per head and token. work is the memory that the backward of local attention allocates for
itself. rows exist only in a window.

Gradients have the same roles in the other direction: ``dgrad o`` makes local do, ``attend do``
makes global dq. x, dy and the weights are not counted, since they exist before. Left out are inputs
of norms, KV heads that are repeated for attention, and what a checkpoint runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from ...schedule import MLP, QKV, O, Op, Schedule, Step, Windowed


class Tensor(NamedTuple):
    """A tensor of the table above.

    Attributes:
        role: First word of its row. "more dx" is the term that a step makes and adds to the dx that
            exists already.
        name: q, k, v or o: the tensor itself, or the projection that it belongs to.
        group: Head group.
        grad: Whether this is the gradient of ``name``.
        start: For a send or receive buffer, the start of its exchange.
    """

    role: str
    name: str = ""
    group: int = 0
    grad: bool = False
    start: Step | None = None


class _Use(NamedTuple):
    """A part of a step: it allocates the tensors that it makes, then frees those it read last."""

    reads: Sequence[Tensor]
    makes: Sequence[Tensor]


def memory_bytes(
    schedule: Schedule,
    size_bytes: Callable[[Tensor], int],
    kv_groups_of: Callable[[int], Sequence[int]],
    caller_has_qkv: bool,
) -> list[int]:
    """Return the most bytes in memory during each step, without running any.

    Args:
        schedule: The schedule.
        size_bytes: Bytes of a tensor. 0 for a send buffer if the transfer reads the source where it
            is, and for a receive buffer if the transfer writes to the target.
        kv_groups_of: For a group, the groups with which the KV heads travelled that it attends to.
        caller_has_qkv: Whether q, k and v are variables of a caller, so that they live until
            forward returns.

    Returns:
        Bytes for each step of forward; for `MLP`, the bytes that wait for backward; and for each
        step of backward.
    """
    # Uses in their order, each with the index of its step.
    uses: list[tuple[int, _Use]] = []
    for index, uses_of_step in enumerate(_uses(schedule, size_bytes, kv_groups_of)):
        uses += [(index, use) for use in uses_of_step]
    if isinstance(schedule, Windowed):
        # After the last step, rows become dW.
        last_index = uses[-1][0]
        wgrads = [step for step in schedule.backward if step.op is Op.WGRAD]
        for name in (*QKV, *O):
            rows = [Tensor("rows", name, step.group) for step in wgrads if name in step.tensors]
            uses.append((last_index, _Use(rows, [Tensor("dW", name)])))
    # `returned` is the use of `MLP`, the first behind forward.
    end, returned = len(uses), [index for index, _ in uses].index(len(schedule.forward))
    # When each tensor was made; and for each time that it was made, when it is read last.
    made: dict[Tensor, int] = {}
    last_read: dict[tuple[Tensor, int], int] = {}
    for now, (_, use) in enumerate(uses):
        made.update((tensor, now) for tensor in use.makes)
        for tensor in (*use.makes, *use.reads):
            last_read[tensor, made[tensor]] = now
    # The bytes that are freed after each use; at `end`, those that the caller reads.
    freed = [0] * (end + 1)
    for (tensor, _), now in last_read.items():
        if tensor.role in ("y", "dx", "dW"):
            now = end
        elif caller_has_qkv and tensor.role == "local" and tensor.name in QKV and not tensor.grad:
            now = returned - 1
        freed[now] += size_bytes(tensor)
    live, most = 0, [0] * (uses[-1][0] + 1)
    for now, (index, use) in enumerate(uses):
        live += sum(map(size_bytes, use.makes))
        # The most of all uses of the step.
        most[index] = max(most[index], live)
        live -= freed[now]
    return most


def _uses(
    schedule: Schedule,
    size_bytes: Callable[[Tensor], int],
    kv_groups_of: Callable[[int], Sequence[int]],
) -> Iterator[Sequence[_Use]]:
    """Yield the uses of each step of forward, of `MLP`, and of each step of backward."""
    # Sums that have a term already: y, dx, dW, and dk and dv of each group.
    sums: set[Tensor] = set()

    def add(tensor: Tensor, *terms: Tensor) -> _Use:
        """Add ``terms`` to a sum; the first of its terms becomes the sum."""
        made = tensor._replace(role=f"more {tensor.role}") if tensor in sums else tensor
        sums.add(tensor)
        return _Use((*terms, tensor), [made])

    for step in (*schedule.forward, MLP, *schedule.backward):
        if step == MLP:
            yield [_Use((), ())]
        elif step.on_wire:
            yield _exchange_uses(step, size_bytes)
        elif step.op is Op.ATTEND:
            group, kv = step.group, [*product(("k", "v"), kv_groups_of(step.group))]
            qkv = [Tensor("global", *part) for part in (("q", group), *kv)]
            o = [Tensor("global", "o", group), Tensor("lse", "o", group)]
            if not step.grad:
                yield [_Use(qkv, o)]
            else:
                makes = [Tensor("global", "q", group, True), Tensor("work", "o", group, True)]
                reads = [*qkv, *o, Tensor("global", "o", group, True)]
                # Every group that attends to a KV head adds a term to its dk and dv.
                for part in kv:
                    term = add(Tensor("global", *part, True))
                    reads, makes = [*reads, *term.reads], [*makes, *term.makes]
                yield [_Use(reads, makes)]
        elif step.op is Op.MERGE:
            yield [add(Tensor("y"), *_tensors("local", step))]
        elif step.op is Op.WGRAD:
            (name,) = step.tensors
            local = Tensor("local", name, step.group, grad=step.tensors != O)
            if isinstance(schedule, Windowed):
                yield [_Use([local], [Tensor("rows", name, step.group)])]
            else:
                # The rows are written into dW at once.
                yield [add(Tensor("dW", name), local)]
        elif step.op is Op.PROJECT or step.tensors == O:
            # The dgrad of o makes local do. The dgrads of q, k and v below are terms of dx.
            yield [_Use((), _tensors("local", step))]
        else:
            yield [add(Tensor("dx"), *_tensors("local", step))]


def _tensors(role: str, step: Step) -> list[Tensor]:
    """Return the tensors of a step in one role; those of `Step.beside` come first."""
    values = [Tensor(role, name, step.group) for name in step.beside]
    return values + [Tensor(role, name, step.group, step.grad) for name in step.tensors]


def _exchange_uses(step: Step, size_bytes: Callable[[Tensor], int]) -> Sequence[_Use]:
    """Return the uses of a start or a finish."""
    start = step._replace(op=Op.START)
    ends = ("global", "local") if step.to_tokens else ("local", "global")
    sources, targets = (_tensors(end, step) for end in ends)
    send, recv = (Tensor(role, group=step.group, start=start) for role in ("send", "recv"))
    # Without a receive buffer the transfer writes to the target, which the start then allocates.
    unpacks = size_bytes(recv) > 0
    if step.op is Op.START:
        return [_Use(sources, [send, recv] if unpacks else [send, *targets])]
    # Two uses: what was sent is freed before memory for the unpacked tensors is allocated.
    return [
        _Use([send] if size_bytes(send) else sources, ()),
        _Use([recv], targets) if unpacks else _Use(targets, ()),
    ]
