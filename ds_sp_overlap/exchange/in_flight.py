"""One launched transfer with its buffers: pack, launch, wait, unpack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..profiling.ranges import is_profiled, named
from ..profiling.timeline import UNTRACKED, Track, Untracked
from ..relayout import ops
from . import check
from .channel import Channel, HostStream, SideStream
from .joined import join, split, split_copies
from .layout import Layout, Side

Tables = tuple[Tensor, Tensor]


def _as_it_travels(x: Tensor, side: Side) -> Tensor | None:
    """``x``, one end of an exchange, as the flat buffer that travels, if it lies in memory that way: each part together."""
    if side.is_wire_layout:
        return x.contiguous().view(-1)  # guard: one piece of memory
    if not side.is_cut_into_slices:  # guard: each part together
        return None
    if x.is_contiguous() and len(side.parts) > 1:  # so its parts are not together; costs the host less than to look
        return None
    front = x.movedim(side.dim, 0)
    return front.view(-1) if front.is_contiguous() else None


class InFlight:
    """One launched transfer; owns its buffers until it is finished.

    rope, rope_back   (cos, sin) by which the source is rotated as it is packed, the target as it is unpacked (the other way)
    """

    expected: Sequence[Tensor] = ()
    handle: Any = None
    received: Any = None  # mark of the transfer stream, between launch and finish

    # From `launch` on.
    side: HostStream | SideStream
    sources: Sequence[Tensor]  # empty once they have been packed
    send: Tensor
    recv: Tensor
    outs: tuple[Tensor, ...]  # empty until they are unpacked
    unpacks: bool
    track: Track | Untracked

    def __init__(self, channel: Channel, layout: Layout, name: str, rope: Tables | None = None, rope_back: Tables | None = None):
        self.channel, self.layout, self.name = channel, layout, name
        self.rope, self.rope_back = rope, rope_back

    def launch(self, xs: Sequence[Tensor], checked: bool) -> InFlight:
        """Pack ``xs`` and launch their transfer. Collective."""
        channel, layout, x = self.channel, self.layout, xs[0]
        source, target, joined = layout.source, layout.target, bool(layout.also)
        shapes = [x.shape] if len(xs) == 1 else [given.shape for given in xs]
        if shapes != layout.sources.shapes:  # guard: this half belongs here
            expected, got = (", ".join(str(list(shape)) for shape in each) for each in (layout.sources.shapes, shapes))
            raise ValueError(f"{self.name}: expected a tensor of shape {expected}, got {got}")
        if checked:
            plain = partial(check.plain_exchange, channel, name=self.name, rope=self.rope, rope_back=self.rope_back)
            self.expected = [plain(each, given) for each, given in zip(layout.each, xs)]
        self.side = channel.side(x.device)
        self.sources = xs  # read by the transfer, so kept alive until it is over
        ready = None if joined or self.rope is not None else _as_it_travels(x, source)  # guard: rotated, so packed
        self.dtypes, new_empty = None, x.new_empty
        if joined and len(dtypes := {given.dtype for given in xs}) > 1:
            self.dtypes = [given.dtype for given in xs]
            new_empty = partial(new_empty, dtype=functools.reduce(torch.promote_types, dtypes))
        self.unpacks = joined or self.rope_back is not None or not target.is_wire_layout  # guard: rotated, so unpacked
        self.outs = () if self.unpacks else self._new_outs(x)
        # What is received as it lies is no view: its owner may change it in place, as he may what was unpacked.
        self.recv = new_empty(layout.targets.elements) if self.unpacks else self.outs[0].view(-1)
        self.track = channel.timeline.exchange(self.name, self._sent_bytes(), x) if channel.timeline else UNTRACKED
        self.track.mark("issued")
        if is_profiled():
            with named(self.name, "start"):
                self._send(ready, new_empty)
        else:
            self._send(ready, new_empty)
        self.track.mark("launched")
        return self

    def _send(self, ready: Tensor | None, new_empty: Callable[..., Tensor]) -> None:
        if ready is None:
            self.send = self._packed(new_empty)
            self.sources = ()  # guard: packed, so let go
        else:
            self.send = ready
        self.track.mark("packed")
        try:
            if self.side.blocks:
                self._transfer()
            else:
                with self.side.after_compute():  # guard: its mark comes after
                    self._transfer()
                    self._wait()
                    self.track.mark("arrived")
        finally:  # whatever is raised, what was queued may use the buffers
            self.received = self.side.mark()  # guard: what is sent is kept

    def _transfer(self) -> None:
        channel, layout = self.channel, self.layout
        self.track.mark("started")
        try:
            self.handle = channel.transport.launch(
                self.send, self.recv, layout.sources.sizes, layout.targets.sizes, channel.group, self.name
            )
        except RuntimeError as error:  # guard: a failed launch has a name
            raise channel.failed(self.name, "the exchange", error) from error
        self.track.follow(self.handle)

    def _new_outs(self, like: Tensor) -> tuple[Tensor, ...]:
        sides = self.layout.targets.each
        if self.dtypes is None:
            return tuple([like.new_empty(*side.shape) for side in sides])  # guard: memory of its own
        return tuple([like.new_empty(*side.shape, dtype=dtype) for side, dtype in zip(sides, self.dtypes)])

    def _sent_bytes(self) -> int:
        sizes = self.layout.sources.sizes
        return (sum(sizes) - sizes[self.channel.rank]) * self.recv.element_size()

    def _wait(self) -> None:
        try:
            self.handle.wait()  # guard: waits before it reads
        except RuntimeError as error:  # guard: a failed wait has a name
            raise self.channel.failed(self.name, "the exchange", error) from error

    def _packed(self, new_empty: Callable[..., Tensor]) -> Tensor:
        """What is sent; ``new_empty`` gives it the dtype in which it travels."""
        relayout, source, sources = ops.implementation(self.channel.kernels), self.layout.source, self.layout.sources
        x = self.sources[0]
        evenly = self.rope is None and sources.places() and x.is_contiguous() and relayout.copies(x)
        if self.layout.also or evenly or not source.covers:
            return join(self.sources, sources, new_empty)
        wire = new_empty(source.elements)
        if self.rope is None:
            relayout.pack(x, source.dim, *source.edges, wire)
        else:
            relayout.rotate_pack(x, *self.rope, *source.edges, wire)
        return wire

    def _unpacked(self, into: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What was received, in ``into`` if given."""
        relayout, target, targets = ops.implementation(self.channel.kernels), self.layout.target, self.layout.targets
        evenly = self.rope_back is None and self.dtypes is None and targets.copied and not into
        if evenly and (self.layout.also or relayout.copies(self.recv)):
            return split_copies(self.recv, targets)
        outs = into or self._new_outs(self.recv)
        if self.layout.also or not target.covers:
            split(self.recv, targets, outs)
        elif self.rope_back is None:
            relayout.unpack(self.recv, target.dim, *target.edges, *outs)
        else:
            relayout.unpack_rotate_back(self.recv, *self.rope_back, *target.edges, *outs)
        return outs

    def finish(self, into: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Wait, and hand over what was received; in ``into``, if given, where what no part of the target holds stays as it is."""
        self.track.mark("wait")
        if is_profiled():
            with named(self.name, "finish"):
                self._receive(into)
        else:
            self._receive(into)
        self.track.mark("go")
        if self.expected:  # guard: check mode compares
            rotated = (self.rope or self.rope_back) is not None
            for each, out, expected in zip(self.layout.each, self.outs, self.expected):
                check.compare(self.channel, out, expected, self.name, rotated, each.target)
        return self.outs  # guard: received, not read again

    def _receive(self, into: Sequence[Tensor]) -> None:
        if self.side.blocks:  # guard: waits before it unpacks
            self._wait()
        else:
            self.side.before_compute(self.received)  # guard: compute waits for it
        self.received = None  # guard: freed, waits for nothing
        self.track.mark("unpacking")
        # Sent: given back before memory is taken for what was received. The handle may hold it too.
        self.sources, self.handle = (), None
        del self.send  # guard: sent, not read again
        if self.unpacks:
            self.outs = self._unpacked(tuple(into))  # guard: unpacked once
        elif into:
            into[0].copy_(self.outs[0])
            self.outs = tuple(into)
        self.track.mark("done")

    def __del__(self) -> None:
        # Abandoned (an exception between start and finish). The memory must not return to the compute stream before the
        # transfer is over; where waiting blocks the host there is no mark, and c10d holds the buffers itself.
        if self.received is not None:
            self.side.before_compute(self.received)  # guard: memory returns in order
