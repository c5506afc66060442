"""Names what a host launches on a GPU; needs no torch."""

from __future__ import annotations

from typing import NamedTuple

# Streams by name; the first has normal priority, the others have high priority.
COMPUTE, TRANSFER, GATE = "compute", "transfer", "gate"


class Gemm(NamedTuple):
    """A matrix product: ``batch`` products [m, k] x [k, n]."""

    stream: str
    m: int
    n: int
    k: int
    batch: int


class Attention(NamedTuple):
    """Causal attention of ``heads`` heads, the batch included; or its backward.

    Attributes:
        seq: Tokens whose queries attend.
        keys: Tokens that the last query sees.
    """

    stream: str
    seq: int
    keys: int
    heads: int
    head_dim: int
    backward: bool


class Move(NamedTuple):
    """A kernel that takes the time of reading and writing ``n_bytes``.

    Attributes:
        permutes: Whether a tensor is read or written in another order than it lies in memory.
    """

    stream: str
    name: str
    n_bytes: int
    permutes: bool = False


class Transfer(NamedTuple):
    """A collective; ``stream`` is also the name of its communicator."""

    stream: str
    name: str
    n_bytes: int


class Record(NamedTuple):
    """Record the event with this number."""

    stream: str
    event: int


class Wait(NamedTuple):
    """Let the stream wait for the event with this number."""

    stream: str
    event: int


class Host(NamedTuple):
    """What the host does before its next launch: ``times`` what `Gpu` has as ``{name}_us``."""

    name: str
    times: int


Queued = Gemm | Attention | Move | Transfer | Record | Wait
Launch = Queued | Host
