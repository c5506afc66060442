"""What a layer holds while its programs run: a tensor lives from the step that makes it to the last one that reads it.

So nothing is said here about what is saved for backward: it is what steps of backward read and none of them makes. The backward of
a window makes q, k and v again; so its forward lets go of them.

    tensor         [..]          made by          read by
    local q 0      [s/P, h_0]    project q 0      start q 0
    send q 0       [s/P, h_0]    start q 0        finish q 0                 none where ``local`` lies in memory as it travels
    recv q 0       [s, h_0/P]    start q 0        finish q 0                 none where ``global`` does
    global q 0     [s, h_0/P]    finish q 0       attend o 0, attend do 0
    global o 0     [s, h_0/P]    attend o 0       start o 0, attend do 0
    lse o 0        [s, h_0/P]    attend o 0       attend do 0                log-sum-exp, one number a head and token
    work do 0                    attend do 0      attend do 0                what local attention's backward takes for itself
    local o 0      [s/P, h_0]    finish o 0       merge o 0, wgrad o 0, start odo 0
    rows q 0       [h_0, m]      wgrad q 0        into dW q, at the end      of a window; else written there at once
    y, dx, dW q                  the first step that adds to it; the layer's caller reads it

and likewise do, dq, dk, dv. x, dy and the weights were there before. Left out are inputs of norms, KV heads that are repeated for
attention, and blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from .steps import MLP, Schedule
from .window import Windowed


class Tensor(NamedTuple):
    """One of those above; ``of`` and ``group`` as of a `Step`. "more dx" is what a step makes to add it to dx, which is there already."""

    what: str
    of: str = ""
    group: int = 0


class _Use(NamedTuple):
    """Something that happens at once: memory for what it makes is taken before that of what it reads last is given back."""

    reads: Sequence[Tensor]
    makes: Sequence[Tensor]


def _kinds(of: str) -> tuple[str, ...]:
    """What an exchange moves: q, k, v of "qkv", dk, dv of "dkv", o and do of "odo"."""
    if of == "odo":
        return "o", "do"
    return tuple("d" + kind for kind in of[1:]) if of[0] == "d" else tuple(of)


def held(
    schedule: Schedule,
    size: Callable[[Tensor], int],
    attends: Callable[[int], Sequence[int]],
    caller_holds: bool,
) -> list[int]:
    """Bytes while each step of forward runs, then `MLP` in whose place is what waits for backward, then those of backward.

    size           bytes of a tensor; 0 for what is sent from where it lies, or received to where it is to lie
    attends        the groups with which those KV heads travelled that a group attends to
    caller_holds   q, k and v are variables of a caller, who has them until the layer returns
    """
    happens = [(at, use) for at, uses in enumerate(_uses(schedule, size, attends)) for use in uses]
    if isinstance(schedule, Windowed):  # behind the last step
        rows = [Tensor("rows", of, group) for act, of, group, _ in schedule.backward if act == "wgrad"]
        happens += [(happens[-1][0], _Use([each for each in rows if each.of == of], [Tensor("dW", of)])) for of in "qkvo"]
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
        elif caller_holds and tensor.what == "local" and tensor.of in ("q", "k", "v"):
            now = returned - 1
        given_back[now] += size(tensor)
    alive, most = 0, [0] * (happens[-1][0] + 1)
    for now, (at, use) in enumerate(happens):
        alive += sum(map(size, use.makes))
        most[at] = max(most[at], alive)
        alive -= given_back[now]
    return most


def _uses(schedule: Schedule, size: Callable[[Tensor], int], attends: Callable[[int], Sequence[int]]) -> Iterator[Sequence[_Use]]:
    """What happens in each step."""
    there: set[Tensor] = set()

    def add(tensor: Tensor, *terms: Tensor) -> _Use:
        """``terms`` are read for a sum; the first of its terms is the sum."""
        begun = tensor in there
        there.add(tensor)
        return _Use((*terms, tensor), [tensor._replace(what=f"more {tensor.what}")] if begun else [tensor])

    for step in (*schedule.forward, MLP, *schedule.backward):
        act, of, group, _ = step
        if step == MLP:
            yield [_Use((), ())]
        elif act == "project":
            yield [_Use((), [Tensor("local", of, group)])]
        elif act in ("start", "finish"):
            scattered = of == "o" or of[0] == "d" and of != "do"  # along the sequence; else along heads
            ends = ("global", "local") if scattered else ("local", "global")
            sources, targets = ([Tensor(end, kind, group) for kind in _kinds(of)] for end in ends)
            send, recv = Tensor("send", of, group), Tensor("recv", of, group)
            unpacks = size(recv) > 0
            if act == "start":
                yield [_Use(sources, [send, recv] if unpacks else [send, *targets])]
            else:  # what was sent is given back before memory is taken for what was received
                yield [_Use([send] if size(send) else sources, ()), _Use([recv], targets) if unpacks else _Use(targets, ())]
        elif act == "attend":
            heads = [Tensor("global", "q", group), *(Tensor("global", kind, at) for kind in "kv" for at in attends(group))]
            o = [Tensor("global", "o", group), Tensor("lse", "o", group)]
            if of == "o":
                yield [_Use(heads, o)]
            else:
                made = [Tensor("global", "dq", group), Tensor("work", of, group)]
                reads = [*heads, *o, Tensor("global", "do", group)]
                for kind, at in product("kv", attends(group)):
                    term = add(Tensor("global", "d" + kind, at))
                    reads, made = [*reads, *term.reads], [*made, *term.makes]
                yield [_Use(reads, made)]
        elif act == "merge":
            yield [add(Tensor("y"), Tensor("local", "o", group))]
        elif act == "wgrad":
            local = Tensor("local", of if of == "o" else "d" + of, group)
            yield [_Use([local], [Tensor("rows", of, group)]) if isinstance(schedule, Windowed) else add(Tensor("dW", of), local)]
        elif of == "o":
            yield [_Use((), [Tensor("local", "do", group)])]
        else:
            yield [add(Tensor("dx"), Tensor("local", "d" + of, group))]
