"""An exchange in two differentiable halves, and everything that is in flight between them.

    token = exchange.start(x)      launch; returns an empty tensor that autograd tracks
    y     = exchange.finish(token) order the compute stream after it; the received tensor

    Before:  x -> [all-to-all] -> y                         dx <- [all-to-all] <- dy
    Now:     x -> start -> token -> finish -> y             dx <- start' <- token <- finish' <- dy
                  launch            wait                          wait             launch

In backward the roles swap: the backward of ``finish`` launches the exchange of the gradient, the backward of ``start``
waits for it. Autograd runs nodes that are ready in the reverse order of their creation, so whatever is computed between
``start`` and ``finish`` hides the exchange, and its backward hides the gradient's exchange. Correctness never depends on
that order, only the overlap does.

The token carries no data. What is in flight hangs on the `Exchange`, which belongs to one call of one layer.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import check, ops
from .clock import named
from .layout import Layout, Side
from .timeline import UNTRACKED, Timeline
from .transport import Transport, by_name


class HostStream:
    """Null object where there are no streams (CPU): program order is the only order."""

    deferred_unpack = True  # waiting would block the host, so it is put off until ``finish``

    def after_compute(self):
        return contextlib.nullcontext()

    def mark(self):
        pass

    def before_compute(self, mark):
        pass


class SideStream:
    """The stream that carries exchanges: pack, transfer and unpack of buffers that an exchange owns.

    All of them are allocated by the compute stream and kept referenced until ``before_compute``, so their memory
    returns to the compute stream in order; no ``record_stream``.
    """

    def __init__(self, backend: Any, device: Any, stream: Any | None = None, deferred_unpack: bool = False):
        self.backend, self.device = backend, device  # torch.cuda, or another accelerator's module of the same form
        self.stream = stream if stream is not None else backend.Stream(device, priority=-1)
        self.deferred_unpack = deferred_unpack

    @contextlib.contextmanager
    def after_compute(self):
        """Run the body on the side stream, after what the compute stream holds now."""
        self.stream.wait_stream(self.backend.current_stream(self.device))
        with self.backend.stream(self.stream):
            yield

    def mark(self) -> Any:
        """What the side stream holds now; exchanges that are started later come after it."""
        return self.stream.record_event()

    def before_compute(self, mark: Any) -> None:
        """Order the compute stream after ``mark``, and not after what was started since: that is to stay hidden."""
        self.backend.current_stream(self.device).wait_event(mark)


class Channel:
    """The sp group with the means to exchange over it: transport and side stream.

    group       process group of the sp ranks; None for one rank
    transport   mover of bytes, or what ``sp_overlap.transport`` calls it; "auto" if None
    stream      a stream to use instead of one of our own (accelerators only)
    kernels     which pack and unpack: ``sp_overlap.kernels``
    """

    def __init__(
        self, group: Any, transport: Transport | str | None = None, stream: Any | None = None, kernels: str = "auto"
    ):
        self.group, self.kernels = group, kernels
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("sequence_process_group: this process is not a member of it; pass the group that it belongs to")
        self._unprepared = transport is None or isinstance(transport, str)
        self.transport = by_name(transport or "auto", self.size) if self._unprepared else transport
        self.timeline: Timeline | None = None
        self._stream = stream
        self._sides: dict[torch.device, HostStream | SideStream] = {}

    def side(self, device: torch.device) -> HostStream | SideStream:
        """The side stream for tensors on ``device``; made once."""
        if device not in self._sides:
            if device.type == "cpu":
                self._sides[device] = HostStream()
            else:
                backend = torch.get_device_module(device)
                blocking = self.size > 1 and dist.get_backend(self.group) == "gloo"
                self._sides[device] = SideStream(backend, device, self._stream, deferred_unpack=blocking)
        return self._sides[device]

    @property
    def holds_first_rank(self) -> bool:
        """Whether it is the sp group of the process that reports."""
        return self.group is None or dist.get_process_group_ranks(self.group)[0] == 0

    def prepare(self) -> None:
        """Make what the transport needs. Collective the first time, once the ranks have agreed; raises its ValueError."""
        if self._unprepared:
            self.transport.prepare(self)
            self._unprepared = False

    def gather(self, what: Any) -> list[Any]:
        """``what`` of every rank, in rank order. Collective; pickles, so it is for the first step and for checks."""
        every = [what] * self.size
        if self.size > 1:
            dist.all_gather_object(every, what, group=self.group)
        return every

    def agree(self, where: str, describe: Callable[[], Any]) -> None:
        """Compare ``describe()`` over the ranks; what it raises on one of them is raised on every one.

        Collective. Raises ValueError, on all ranks alike.
        """
        try:
            mine = (True, describe())
        except Exception as error:  # of any kind: the other ranks wait for this one
            mine = (False, str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
        every = self.gather(mine)
        alike = all(other == every[0] for other in every)
        faults = [f"sp rank {rank}: {what}" for rank, (fine, what) in enumerate(every) if not fine]
        if faults:
            raise ValueError(f"{where}: {mine[1] if alike else '; '.join(faults)}")
        if not alike:
            seen = "; ".join(f"sp rank {rank}: {what}" for rank, (_, what) in enumerate(every))
            raise ValueError(f"{where}: the ranks of the sp group are about to exchange different things ({seen})")


Tables = tuple[Tensor, Tensor]


def _as_it_travels(x: Tensor, side: Side) -> Tensor | None:
    """``x``, one end of an exchange, as the flat buffer that travels, if it lies in memory that way: each part together."""
    if side.is_wire_layout:
        return x.contiguous().view(-1)
    front = x.movedim(side.dim, 0)
    return front.view(-1) if side.is_cut_into_slices and front.is_contiguous() else None


class _InFlight:
    """One launched transfer; owns its buffers until it is collected.

    turn, turn_back   (cos, sin) by which the source is rotated as it is packed, the target as it is unpacked (the other way)
    """

    def __init__(
        self,
        channel: Channel,
        layout: Layout,
        x: Tensor,
        name: str,
        checked: bool,
        turn: Tables | None = None,
        turn_back: Tables | None = None,
    ):
        source, target = layout.source, layout.target
        if x.shape != source.shape:
            raise ValueError(f"{name}: expected a tensor of shape {list(source.shape)}, got {list(x.shape)}")
        self.name, self.layout, self.channel = name, layout, channel
        self.side = channel.side(x.device)
        self.turn, self.turn_back = turn, turn_back
        self.expected = check.plain_exchange(channel, layout, x, name, turn, turn_back) if checked else None
        self.source = x  # guard: read by the transfer, so kept alive until it is over
        self.send = _as_it_travels(x, source) if turn is None else None
        packs = self.send is None
        if packs:
            self.send = x.new_empty(sum(source.split_sizes))
        self.recv = x.new_empty(sum(target.split_sizes))
        self.unpacks = turn_back is not None or not target.is_wire_layout
        # Where unpacking is put off, so is its memory; else it must come from the compute stream, here.
        later = self.unpacks and self.side.deferred_unpack
        self.out = None if later else x.new_empty(target.shape) if self.unpacks else self.recv.view(target.shape)
        self.track = channel.timeline.exchange(name, self._sent_bytes(), x) if channel.timeline else UNTRACKED
        self.track.mark("issued")
        with named(name, "start"), self.side.after_compute():
            self.track.mark("started")
            if packs:
                self._pack()
                if isinstance(self.side, HostStream):
                    self.source = None  # was read
            self.track.mark("packed")
            try:
                self.handle = channel.transport.launch(
                    self.send, self.recv, source.split_sizes, target.split_sizes, channel.group, name
                )
            except RuntimeError as error:
                raise self._failed(error) from error
            self.track.follow(self.handle)
            if not self.side.deferred_unpack:
                self._receive()
        self.track.mark("launched")

    def _sent_bytes(self) -> int:
        sizes = self.layout.source.split_sizes
        return (sum(sizes) - sizes[self.channel.rank]) * self.send.element_size()

    def _failed(self, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"{self.name}: the exchange over the sp group (size {self.channel.size}) failed on sp rank {self.channel.rank}; "
            f"look for the first error on the other ranks: {error}"
        )

    def _receive(self):
        try:
            self.handle.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        self.track.mark("unpacking")
        if self.unpacks:
            self._unpack()
        self.track.mark("done")
        self.received = self.side.mark()

    def _pack(self):
        relayout, source = ops.implementation(self.channel.kernels), self.layout.source
        if self.turn is None:
            relayout.pack(self.source, source.dim, *source.edges, self.send)
        else:
            relayout.pack_qkv([self.source], [], *self.turn, False, 1, *source.edges, [self.send])

    def _unpack(self):
        relayout, target = ops.implementation(self.channel.kernels), self.layout.target
        if self.turn_back is None:
            relayout.unpack(self.recv, target.dim, *target.edges, self.out)
        else:
            relayout.unpack_qkv([self.recv], *self.turn_back, False, 1, *target.edges, [self.out])

    def collect(self) -> Tensor:
        """Wait, and hand over the received tensor."""
        self.track.mark("wait")
        with named(self.name, "finish"):
            if self.side.deferred_unpack:
                self.out = self.recv.new_empty(self.layout.target.shape) if self.out is None else self.out
                with self.side.after_compute():
                    self._receive()
            self.side.before_compute(self.received)
        self.track.mark("go")
        self.handle = None
        if self.expected is not None:
            check.compare(self.channel, self.out, self.expected, self.name, turned=(self.turn or self.turn_back) is not None)
        return self.out

    def __del__(self):
        # Abandoned (an exception between start and finish). On the side stream the memory must not return to the compute
        # stream before the transfer is over; where waiting blocks the host, c10d holds the buffers itself.
        if getattr(self, "handle", None) is not None and not self.side.deferred_unpack:
            self.side.before_compute(self.side.mark())


class Exchange:
    """One exchange of one call: state of its forward transfer, and of the gradient's.

    channel   the sp group
    layout    what is given and what is received
    name      of the layer and the exchange, for instance ``layers.7 q``; the gradient's is ``layers.7 dq``
    checked   compare with a plain exchange (``sp_overlap.check``)
    turn      (cos, sin) [.., d_rot], broadcast to the local side's tokens: rotary embedding on the way out, and its
              transpose on the gradient's way in, in the kernels that move the data
    """

    def __init__(
        self, channel: Channel, layout: Layout, where: str, what: str, checked: bool = False, turn: Tables | None = None
    ):
        self.channel, self.layout, self.where, self.what = channel, layout, where, what
        self.checked, self.turn = checked, turn
        self.forward: _InFlight | None = None
        self.gradient: _InFlight | None = None

    def start(self, x: Tensor) -> Tensor:
        """Launch the exchange of ``x`` and return at once.

        x       shape of ``layout.source``; kept alive until finished
        token   [0]   tracked by autograd; give it to ``finish``

        Collective: every rank of the sp group starts the same exchanges in the same order.
        Raises ValueError, before any communication, if ``x`` has another shape.
        """
        return _Start.apply(x, self)

    def finish(self, token: Tensor) -> Tensor:
        """Order the compute stream after the exchange and return what was received, in the shape of ``layout.target``."""
        if self.forward is None:
            raise RuntimeError(f"{self.where} {self.what}: finished without having been started, or finished twice")
        return _Finish.apply(token, self)

    def launch(self, x: Tensor) -> None:
        name = f"{self.where} {self.what}"
        self.forward = _InFlight(self.channel, self.layout, x, name, self.checked, turn=self.turn)

    def launch_gradient(self, dy: Tensor) -> None:
        name = f"{self.where} d{self.what}"
        self.gradient = _InFlight(self.channel, self.layout.inverse, dy, name, self.checked, turn_back=self.turn)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange = exchange
        exchange.launch(x)
        return x.new_empty(0)  # on the tensor's device: both halves stay in one ready queue of the autograd engine

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        """Before: dx = all_to_all(dy). Now: that exchange is under way since `_Finish.backward`; wait for it."""
        gradient, ctx.exchange.gradient = ctx.exchange.gradient, None
        return gradient.collect(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, exchange):
        ctx.exchange = exchange
        in_flight, exchange.forward = exchange.forward, None
        return in_flight.collect()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        """Before: nothing, finish moved no data. Now: launch the exchange of dy, the moment it is known."""
        ctx.exchange.launch_gradient(dy)
        return dy.new_empty(0), None
