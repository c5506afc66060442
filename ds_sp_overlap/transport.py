"""How the bytes of an exchange move between ranks.

A transport launches one all-to-all of flat buffers and returns a handle; tests put their own in its place.
"""

from __future__ import annotations

from typing import Protocol

import deepspeed.comm
import torch.distributed
from torch import Tensor


class Handle(Protocol):
    def wait(self) -> None:
        """Order what follows after the transfer: the host (gloo) or the current stream (NCCL)."""


class Transport(Protocol):
    def launch(self, send: Tensor, recv: Tensor, send_sizes: list[int], recv_sizes: list[int], group, name: str) -> Handle:
        """Send ``send_sizes[p]`` elements of ``send`` to rank ``p``, fill ``recv`` likewise, and return at once.

        send   flat; read until the handle has been waited for, never written
        recv   flat; undefined until then
        name   for logs and errors, for instance ``layers.7 dv``

        Collective: every rank of the group launches the same exchanges in the same order.
        """


class C10d:
    """``all_to_all_single`` of ``deepspeed.comm`` (of torch.distributed where DeepSpeed has not been initialised)."""

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        if deepspeed.comm.is_initialized():
            return deepspeed.comm.all_to_all_single(
                recv, send, recv_sizes, send_sizes, group=group, async_op=True, log_name=name
            )
        return torch.distributed.all_to_all_single(recv, send, recv_sizes, send_sizes, group=group, async_op=True)


class OneRank:
    """The transport of an sp group of one: what is sent is what is received."""

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        recv.copy_(send)
        return self

    def wait(self):
        pass
