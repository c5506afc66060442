"""Runs one transfer: pack, launch, wait, unpack; and owns its buffers until it is finished.

Note [Buffers until finish]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A transfer reads and writes memory that the compute stream allocated, while the compute stream goes
on. The allocator must not reuse the memory before the transfer is over. So `InFlight` references
all buffers from the launch on. `finish` first makes the compute stream wait for the transfer, and
then drops the references: the allocator reuses the memory in the order of the compute stream.
``record_stream`` would free the memory later, and costs host time for each buffer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..relayout import ops
from . import check
from .copies import copies_of, pack, unpack, unpacked
from .layout import Layout
from .sp_group import SPGroup

Tables = tuple[Tensor, Tensor]
_shape_of = operator.attrgetter("shape")


def _listed(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


class InFlight:
    """Holds a transfer in flight and its buffers, see Note [Buffers until finish].

    The constructor packs ``xs`` and launches the transfer. Collective.

    Args:
        layout: The shapes and parts of the tensors that are sent and received.
        sp_group: The sp group.
        name: Name for logs and errors, for instance ``layers.7 dv``.
        xs: The tensors that are sent, in the shapes of ``layout.sources``.
        checked: Whether to compare with a plain exchange (``sp_overlap.check``).
        rope: (cos, sin) by which pack rotates a single tensor; None for no rotation.
        rope_back: (cos, sin) by which unpack rotates a single tensor back; None for no rotation.

    Raises:
        ValueError: before any communication, if a tensor has another shape.
    """

    # In check mode, the tensors that must arrive.
    expected: list[check.Expected] | tuple[()] = ()
    handle: Any = None
    # The mark that `SideStream.begin` returned; None after `finish`, and with a `HostStream`.
    received: Any = None
    # The dtype of each tensor, if the dtypes differ; the wire has the dtype that all promote to.
    dtypes: list[torch.dtype] | None = None
    # The received tensors; empty until unpacked. A single tensor whose memory has the order of the
    # wire is ``recv`` itself, and is set from the start.
    outs: Sequence[Tensor] = ()

    def __init__(
        self,
        layout: Layout,
        sp_group: SPGroup,
        name: str,
        xs: Sequence[Tensor],
        checked: bool = False,
        rope: Tables | None = None,
        rope_back: Tables | None = None,
    ):
        self.sp_group, self.layout, self.name = sp_group, layout, name
        self.sources, self.rope, self.rope_back = xs, rope, rope_back
        x, sources, targets = xs[0], layout.sources, layout.targets
        shapes = list(map(_shape_of, xs))
        if shapes != sources.shapes:  # guard: this half belongs here
            raise ValueError(
                f"{name}: expected a tensor of shape {_listed(sources.shapes)}, "
                f"got {_listed(shapes)}"
            )
        if checked:
            self.expected = [
                check.plain_exchange(sp_group, *ends, tensor, name, rope, rope_back)
                for ends, tensor in zip(layout.each, xs)
            ]
        copies = self.copies = copies_of(sources, tuple(map(Tensor.stride, xs)))
        new_empty = x.new_empty
        if len(xs) > 1 and len({each.dtype for each in xs}) > 1:
            self.dtypes = [each.dtype for each in xs]
            wider = functools.reduce(torch.promote_types, self.dtypes)
            new_empty = partial(new_empty, dtype=wider)
        self.copies_back = copies_of(targets)
        rotates = rope_back is not None  # guard: rotated, so unpacked
        if rotates or self.copies_back.flat is None:
            recv = new_empty(targets.elements)
        else:
            # Receive into the tensor that the caller gets. It is no view, so that the caller may
            # change it in place.
            self.outs = self._new_outs(x)
            recv = self.outs[0]
        if copies.flat is None or rope is not None:  # guard: rotated, so packed
            send = self._packed(new_empty)
            self.sources = ()  # guard: packed, so let go
        elif x.is_contiguous():
            send = x
        else:
            first = x.storage_offset() + copies.flat
            send = x.as_strided((sources.elements,), (1,), first)
        self.send, self.recv = send, recv
        device = x.device
        side = self.side = sp_group.sides.get(device) or sp_group.streams(device)
        mark = self.received = side.begin()
        try:
            handle = self.handle = sp_group.transport.launch(
                send, recv, sources.sizes, targets.sizes, sp_group.group, name
            )
            if not (side.blocks and side.overlaps):
                # The transfer stream waits here, so that `end` records the mark after the transfer.
                handle.wait()  # guard: waits on its stream
        except RuntimeError as error:  # guard: a failed launch has a name
            raise sp_group.failed(name, "the exchange", error) from error
        finally:
            # Call `end` also after an exception, since queued work may use the buffers.
            side.end(mark)  # guard: what is sent is kept

    def _new_outs(self, like: Tensor) -> Sequence[Tensor]:
        """Allocate the tensors that are received, on the device of ``like``."""
        new_empty, outs = like.new_empty, []
        for place, shape in enumerate(self.layout.targets.shapes):
            if self.dtypes is not None:
                new_empty = partial(like.new_empty, dtype=self.dtypes[place])
            outs.append(new_empty(*shape))  # guard: memory of its own
        return outs

    def _packed(self, new_empty: Callable[..., Tensor]) -> Tensor:
        """Pack the sources into a buffer that ``new_empty`` allocates in the wire's dtype."""
        relayout, cut = ops.implementation(self.sp_group.kernels), self.layout.sources.cut
        if self.rope is None and (relayout.pack is None or cut is None):
            return pack(self.sources, self.copies, new_empty)
        assert cut is not None
        wire, (dim, starts, stops) = new_empty(self.copies.elements), cut
        if self.rope is not None:
            relayout.rotate_pack(self.sources[0], *self.rope, starts, stops, wire)
        else:
            relayout.pack(self.sources[0], dim, starts, stops, wire)
        return wire

    def _unpacked(self) -> Sequence[Tensor]:
        """Unpack the received buffer into new tensors."""
        copies, cut = self.copies_back, self.layout.targets.cut
        relayout = ops.implementation(self.sp_group.kernels)
        by_copies = self.rope_back is None and (relayout.pack is None or cut is None)
        if by_copies and copies.in_order and self.dtypes is None:
            return unpacked(self.recv, copies)
        outs = self._new_outs(self.recv)
        if by_copies:
            unpack(self.recv, copies, outs)
            return outs
        assert cut is not None
        wire, (dim, starts, stops) = self.recv.view(-1), cut
        if self.rope_back is not None:
            relayout.unpack_rotate_back(wire, *self.rope_back, starts, stops, *outs)
        else:
            relayout.unpack(wire, dim, starts, stops, *outs)
        return outs

    def finish(self) -> Sequence[Tensor]:
        """Order compute after the transfer, free the sent buffer, and unpack; call this once.

        Collective in check mode. The host waits if `HostStream.blocks`; otherwise the current
        stream waits.

        Returns:
            The received tensors, in the order of ``layout.each``.
        """
        side, mark = self.side, self.received
        if side.blocks and side.overlaps:  # guard: waits before it unpacks
            try:
                self.handle.wait()  # guard: waits before it reads
            except RuntimeError as error:  # guard: a failed wait has a name
                raise self.sp_group.failed(self.name, "the exchange", error) from error
        current = side.before_compute(mark)  # guard: compute waits for it
        self.received = None  # guard: freed, waits for nothing
        # Free the sent buffer, which the handle may reference too, before unpack allocates memory.
        self.sources, self.handle = (), None
        del self.send  # guard: sent, not read again
        # If a relay stream allocated the buffers, unpack into memory of the current stream: freed
        # memory of the relay stream could be reused while compute still reads the outputs.
        elsewhere = mark is not None and current != mark[1]  # guard: outputs of its own stream
        if elsewhere or not self.outs:
            self.outs = self._unpacked()  # guard: unpacked once
        if elsewhere:
            side.order(mark[1], current)  # guard: memory returns once it was read
        if self.expected:  # guard: check mode compares
            for out, expected in zip(self.outs, self.expected):
                expected.compare(out)
        return self.outs  # guard: received, not read again

    def __del__(self) -> None:
        # An exception between start and finish abandoned this transfer. Its memory must not be
        # reused before the transfer is over. (Where waiting blocks the host, there is no mark;
        # c10d then references the buffers itself.)
        if self.received is not None:
            self.side.before_compute(self.received)  # guard: memory returns in order
