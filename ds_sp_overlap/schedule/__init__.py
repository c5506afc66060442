"""The order of work in an attention layer, as plain data. No torch here.

An exchange is one all-to-all: from all heads of a piece of the sequence to some heads of all of it,
or back. A head group is a part of the heads that each rank attends with.

A schedule is two programs, forward and backward; a program is a tuple of steps:

    forward
    project q 0    W x, norm and RoPE of head group 0: q0
    attend o 0     attention of the group: o0 of q, k, v
    merge o 0      y += o0 Wo of the group

    backward
    dgrad o 0      do0 = dy Wo               wgrad o 0    dWo = dy^T o0
    attend do 0    dq0, dk0, dv0 of do0
    dgrad q 0      dx += dq0 W               wgrad q 0    dW = dq0^T x

    both
    start q 0      launch an exchange, which goes on by itself
    finish q 0     the compute row waits for it

``start`` packs and ``finish`` unpacks, on the compute row. ``finish dq`` also takes dq back through
RoPE and norm. Kernels that fold RoPE rotate in ``start``, and back in ``finish``.

With two head groups, as `draw` prints it. Bars are as long as their names, not as their times.
Dots: the compute row waits. The wire carries one exchange at a time. ``Wo wgrad`` is one product a
group. In backward ``Wq0`` is dgrad and wgrad.

    forward
    compute | Wq0 Wk0 Wv0 Wq1 Wk1 Wv1 attention 0 attention 1 Wo0 Wo1
    wire    |     q0  k0  v0          qkv1        o0          o1

    backward
    compute | Wo1 dgrad Wo0 dgrad Wo wgrad attention 1 attention 0 Wv1 Wk1 Wq1 Wv0 Wk0 Wq0
    wire    |           do1       do0                  dqkv1       dv0 dk0 dq0

With one head group nothing hides v, o and dv. There is no other choice where a rank attends with
one query head:

    forward
    compute | Wq Wk Wv ..attention ..Wo
    wire    |    q  k  v           o

    backward
    compute | Wo dgrad Wo wgrad attention ...Wv Wk Wq
    wire    |          do                 dv dk dq

A KV head travels once, with the first group that needs it. A group that needs no new one sends q
alone. Autograd sums dk and dv over the groups before they start. q, k and v of the first group
travel one by one, each under the next projection; those of a later group are hidden by attention
anyway, and travel in one exchange.

Who reads it: `Runner.walk` of ``attention.runtime.runner`` is the one loop over steps; what performs
them is chosen when a call begins. Where the layer's ends are nodes of their own, they walk the two
ends of backward, and autograd does its middle. `attention.runtime.window` walks both programs of a
window, and sums dk and dv itself. `chain.block` walks a block's forward; autograd runs its backward
in the order that is drawn, to which tests hold it. `plan` plays programs with costs, and `held`
says what is in memory meanwhile. `timeline` names measured bars by them. Tests hold a recorded
layer against them.

`by_window` holds few groups at a time: its backward makes q, k and v again. `by_chunks` goes from
one attention to the next in chunks of tokens.

An end that is not cut, since its projection is called whole, or by the caller (the drop-in): the
first ``project`` calls the module, or slices what the caller made, Wo comes behind the last
``merge``, and autograd orders the backward of that end. The drop-in rotates on arrival. A step
whose result nobody needs is left out.

Another schedule is another function ``(kinds, wgrad_last) -> Schedule``, see `by_head_groups`:
``SelfAttention(schedule=...)``. Give the same on every rank. It is asked for each number of head
groups that is tried. The layer checks what it returns.
"""

from .block import Block, Recompute, by_chunks, head, periods, tail
from .by_groups import by_head_groups, by_starts
from .checked import check, needs_of
from .choice import schedule_of
from .memory import Tensor, memory_bytes
from .simulation import Bar, Simulation, draw, order, simulate
from .steps import (
    MLP,
    OF_MLP,
    QKV,
    Exchanged,
    O,
    Op,
    Part,
    Program,
    Schedule,
    Step,
    Tensors,
    stop_of,
)
from .window import Windowed, by_window, without_o

__all__ = [
    "MLP", "OF_MLP", "QKV", "Bar", "Block", "Exchanged", "O", "Op", "Part", "Simulation", "Program", "Recompute", "Schedule", "Step", "Tensor", "Tensors",
    "Windowed", "by_chunks", "by_head_groups", "by_starts", "by_window", "check", "draw", "head", "memory_bytes", "needs_of", "order", "periods", "simulate",
    "tail",
    "schedule_of", "stop_of", "without_o",
]  # fmt: skip
