"""Defines the launches of a host on a GPU; does not import torch."""

from __future__ import annotations

from typing import NamedTuple

# The names of the streams; the first has normal priority, the others have high priority.
COMPUTE, TRANSFER, GATE = "compute", "transfer", "gate"


class Gemm(NamedTuple):
    """Describes a matrix product: ``batch`` products [m, k] x [k, n]."""

    stream: str
    m: int
    n: int
    k: int
    batch: int


class Attention(NamedTuple):
    """Describes the forward or backward of causal attention.

    Attributes:
        seq: The number of queries.
        keys: The number of keys that the last query attends to.
        heads: The number of heads, times the batch size.
    """

    stream: str
    seq: int
    keys: int
    heads: int
    head_dim: int
    backward: bool


class Move(NamedTuple):
    """Describes a kernel whose time is that of reading and writing ``n_bytes``.

    Attributes:
        permutes: Whether the kernel reads or writes a tensor in another order than that in memory.
    """

    stream: str
    name: str
    n_bytes: int
    permutes: bool = False


class Transfer(NamedTuple):
    """Describes a collective that sends ``n_bytes``; its communicator has the name ``stream``."""

    stream: str
    name: str
    n_bytes: int


class Record(NamedTuple):
    """Records the event with this number on the stream."""

    stream: str
    event: int


class Wait(NamedTuple):
    """Makes the stream wait for the event with this number."""

    stream: str
    event: int


class Host(NamedTuple):
    """Describes the host's work before its next launch: ``times`` x the figure ``{name}_us``."""

    name: str
    times: int


Queued = Gemm | Attention | Move | Transfer | Record | Wait
Launch = Queued | Host
