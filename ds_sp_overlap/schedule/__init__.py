"""Describes the order of work in an attention layer as plain data. Does not import torch.

An exchange is one all-to-all. Before attention, an exchange turns all heads of the local sequence
into some heads of the global sequence. After attention, an exchange does the reverse. Each rank
computes attention for some of the heads. A head group is a part of a rank's heads.

A schedule has two programs, forward and backward. A program is a tuple of steps:

    forward
    project q 0    W x, norm and RoPE of head group 0: q0
    attend o 0     attention of the group: o0 of q, k, v
    merge o 0      y += o0 Wo of the group

    backward
    dgrad o 0      do0 = dy Wo               wgrad o 0    dWo = dy^T o0
    attend do 0    dq0, dk0, dv0 of do0
    dgrad q 0      dx += dq0 W               wgrad q 0    dW = dq0^T x

    both
    start q 0      launch an exchange, which proceeds beside the compute row
    finish q 0     the compute row waits for the exchange

The compute row is the stream on which everything is computed; exchanges run on another stream.
``start`` packs and ``finish`` unpacks, on the compute row. Where projections are computed part by
part, ``finish dq`` also computes the backward of RoPE and of the norm. For this, ``finish dq``
recomputes the norm from the norm's input, which forward saved, or which backward recomputed in a
windowed schedule. Where projections are called whole, autograd differentiates RoPE and norm. Where
the packing kernel also applies RoPE, ``start`` rotates q and k, and ``finish`` rotates dq and dk
back.

`draw` prints the drawings below. The first is for two head groups. The length of a bar is the
length of its name, not a duration. Dots mean that the compute row waits. The wire carries one
exchange at a time. Successive steps with the same name share one bar: ``Wo wgrad`` stands for one
product per group, and ``Wq0`` in backward for dgrad and wgrad.

    forward
    compute | Wq0 Wk0 Wv0 Wq1 Wk1 Wv1 attention 0 attention 1 Wo0 Wo1
    wire    |     q0  k0  v0          qkv1        o0          o1

    backward
    compute | Wo1 dgrad Wo0 dgrad Wo wgrad attention 1 attention 0 Wv1 Wk1 Wq1 Wv0 Wk0 Wq0
    wire    |           do1       do0                  dqkv1       dv0 dk0 dq0

The output projection of the earlier groups hides o of the last group. The dgrad of the earlier
groups hides do of the last group. So with two groups, there is work to hide every exchange.

With one head group, nothing hides the exchanges of v, o and dv. A rank with a single query head can
have only one group:

    forward
    compute | Wq Wk Wv ..attention ..Wo
    wire    |    q  k  v           o

    backward
    compute | Wo dgrad Wo wgrad attention ...Wv Wk Wq
    wire    |          do                 dv dk dq

A KV head travels once, with the first group that needs it. A group that needs no new KV head sends
q alone. Autograd sums dk and dv over the groups before their exchange starts. q, k and v of the
first group travel one by one, each hidden by the next projection. q, k and v of a later group
travel in one exchange, which attention hides anyway.

The code that makes and reads schedules:

- ``attention.layer`` calls the function that was passed as ``schedule=``, by default
  `by_head_groups`. For a window, ``attention.self_attention`` calls `schedule_of`.
- ``attention.runtime.plan`` cuts both programs into pieces. ``attention.runtime.compiler`` turns
  each step into operations, once for each form of a call. ``attention.runtime.nodes`` runs a piece
  as one node of autograd. ``attention.runtime.walk`` runs all pieces in order.
- The ends of a layer are the projections of q, k and v, and the output projection. An end that is
  computed part by part is one piece, with the end's section of the backward program as backward.
- A layer that runs by a windowed schedule is one piece. In the recompute of a checkpoint that saved
  attention, only the merges of forward run again.
- Tests compare the recorded order of a layer's steps with the layer's schedule.

`by_window` makes schedules with few groups in memory at a time: backward recomputes q, k and v.

If a projection must be called whole, the first ``project`` step of the projection calls the module.
In the drop-in, the caller has projected q, k and v, so the layer only cuts these tensors into head
groups. An output projection that is called whole comes after the last ``merge``, and autograd
orders its backward. The drop-in applies RoPE after the exchange. A step whose result is not needed
is left out.

For another order, pass another function ``(kinds, wgrad_last) -> Schedule`` as
``SelfAttention(schedule=...)``, the same on every rank; `by_head_groups` is an example. The layer
calls the function for each number of head groups to try, and checks every returned schedule. The
config must then leave out ``window`` and ``checkpointing``. Without ``heads_alike=True``, the layer
has one head group.
"""

from .by_groups import by_head_groups, by_starts
from .checked import check
from .simulation import Simulation, draw, order, simulate
from .steps import Exchanged, O, Op, Part, Program, Schedule, Step, Tensors
from .window import by_window, schedule_of, without_o

__all__ = [
    "O", "Exchanged", "Op", "Part", "Program", "Schedule", "Simulation", "Step", "Tensors",
    "by_head_groups", "by_starts", "by_window", "check", "draw", "order", "schedule_of", "simulate",
    "without_o",
]  # fmt: skip
