"""What a layer holds while its programs run: a tensor lives from the step that makes it to the last
one that reads it.

So nothing is said here about what is saved for backward: it is what steps of backward read and none
of them makes. The backward of a window makes q, k and v again; so its forward lets go of them.

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
    y, dx, dW q               the first step that adds to it; the layer's caller reads it

There is no ``send`` where ``local`` lies in memory as it travels, and no ``recv`` where ``global``
does. lse is the log-sum-exp, one number a head and token; work is what the backward of local
attention takes for itself. There are rows in a window alone; elsewhere they are written into dW at
once.

do, dq, dk and dv likewise. x, dy and the weights were there before. Left out are inputs of norms,
KV heads that are repeated for attention, and blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from .steps import MLP, QKV, O, Op, Part, Schedule, Step
from .window import Windowed


class Tensor(NamedTuple):
    """One of those above.

    Attributes:
        what: Its kind. "more dx" is what a step makes to add it to dx, which is there already.
        of: q, k, v or o that it is, or whose projection it belongs to.
        group: Head group.
        grad: It is the gradient of that.
        start: Of a send or receive buffer, the start of its exchange.
    """

    what: str
    of: str = ""
    group: int = 0
    grad: bool = False
    start: Step | None = None


class _Use(NamedTuple):
    """Something that happens at once: memory for what it makes is taken before that of what it
    reads last is given back.
    """

    reads: Sequence[Tensor]
    makes: Sequence[Tensor]


def memory_bytes(
    schedule: Schedule,
    size: Callable[[Tensor], int],
    attends: Callable[[int], Sequence[int]],
    caller_holds: bool,
) -> list[int]:
    """Bytes while each step of forward runs, then `MLP` in whose place is what waits for backward,
    then those of backward.

    size           bytes of a tensor; 0 for what is sent from where it lies, or received to where it
                   is to lie
    attends        the groups with which those KV heads travelled that a group attends to
    caller_holds   q, k and v are variables of a caller, who has them until the layer returns
    """
    happens = [(at, use) for at, uses in enumerate(_uses(schedule, size, attends)) for use in uses]
    if isinstance(schedule, Windowed):  # behind the last step
        wgrads = [step for step in schedule.backward if step.op is Op.WGRAD]
        rows = [Tensor("rows", *part) for step in wgrads for part in step.parts]
        happens += [
            (happens[-1][0], _Use([each for each in rows if each.of == of], [Tensor("dW", of)]))
            for of in (*QKV, *O)
        ]
    end, returned = len(happens), [at for at, _ in happens].index(len(schedule.forward))
    last: dict[tuple[Tensor, int], int] = {}  # when a tensor that was made then is read last
    made: dict[Tensor, int] = {}
    for now, (_, use) in enumerate(happens):
        made.update((tensor, now) for tensor in use.makes)
        last.update(((tensor, made[tensor]), now) for tensor in (*use.makes, *use.reads))
    given_back = [0] * (end + 1)
    for (tensor, _), now in last.items():
        if tensor.what in ("y", "dx", "dW"):
            now = end
        elif caller_holds and tensor.what == "local" and tensor.of in QKV and not tensor.grad:
            now = returned - 1
        given_back[now] += size(tensor)
    alive, most = 0, [0] * (happens[-1][0] + 1)
    for now, (at, use) in enumerate(happens):
        alive += sum(map(size, use.makes))
        most[at] = max(most[at], alive)
        alive -= given_back[now]
    return most


def _uses(
    schedule: Schedule, size: Callable[[Tensor], int], attends: Callable[[int], Sequence[int]]
) -> Iterator[Sequence[_Use]]:
    """What happens in each step."""
    there: set[Tensor] = set()

    def add(tensor: Tensor, *terms: Tensor) -> _Use:
        """``terms`` are read for a sum; the first of its terms is the sum."""
        begun = tensor in there
        there.add(tensor)
        return _Use(
            (*terms, tensor), [tensor._replace(what=f"more {tensor.what}")] if begun else [tensor]
        )

    for step in (*schedule.forward, MLP, *schedule.backward):
        if step == MLP:
            yield [_Use((), ())]
        elif step.on_wire:
            yield _exchanged(step, size)
        elif step.op is Op.ATTEND:
            group, kv = step.group, [*product(("k", "v"), attends(step.group))]
            heads = [Tensor("global", *part) for part in (("q", group), *kv)]
            o = [Tensor("global", "o", group), Tensor("lse", "o", group)]
            if not step.grad:
                yield [_Use(heads, o)]
            else:
                made = [Tensor("global", "q", group, True), Tensor("work", "o", group, True)]
                reads = [*heads, *o, Tensor("global", "o", group, True)]
                for part in kv:
                    term = add(Tensor("global", *part, True))
                    reads, made = [*reads, *term.reads], [*made, *term.makes]
                yield [_Use(reads, made)]
        elif step.op is Op.MERGE:
            yield [add(Tensor("y"), *_locals(step.parts))]
        elif step.op is Op.PROJECT:
            yield [_Use((), _locals(step.parts))]
        elif step.op is Op.WGRAD:
            (part,) = step.parts
            local = Tensor("local", *part, step.tensors != O)
            made_apart = isinstance(schedule, Windowed)
            yield [
                _Use([local], [Tensor("rows", *part)])
                if made_apart
                else add(Tensor("dW", part[0]), local)
            ]
        elif step.tensors == O:
            yield [_Use((), _locals(step.parts, True))]
        else:
            yield [add(Tensor("dx"), *_locals(step.parts, True))]


def _locals(parts: Sequence[Part], grad: bool = False) -> list[Tensor]:
    return [Tensor("local", *part, grad) for part in parts]


def _exchanged(step: Step, size: Callable[[Tensor], int]) -> Sequence[_Use]:
    """What happens at one end of an exchange."""
    start = step._replace(op=Op.START)
    ends = ("global", "local") if step.to_tokens else ("local", "global")
    moved = [(kind, step.group, False) for kind in step.beside]
    moved += [(*part, step.grad) for part in step.parts]
    sources, targets = ([Tensor(end, *each) for each in moved] for end in ends)
    send, recv = (Tensor(what, group=step.group, start=start) for what in ("send", "recv"))
    unpacks = size(recv) > 0
    if step.op is Op.START:
        return [_Use(sources, [send, recv] if unpacks else [send, *targets])]
    # What was sent is given back before memory is taken for what was received.
    return [
        _Use([send] if size(send) else sources, ()),
        _Use([recv], targets) if unpacks else _Use(targets, ()),
    ]
