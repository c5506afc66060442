"""Records the launches that a layer makes on an accelerator, without an accelerator.

The layer's own code runs over a stand-in for the streams of a GPU, on tensors of the true shapes
whose memory is never touched: operators are noted instead of being computed. So the list holds
every kernel, copy, event and exchange in the order in which the host launches them, also copies
that no schedule names. One launch with its shape stands for the forward of each call of local
attention, and one for its backward. The tensors are a CPU's: where the package chooses a copy by
device, the list has the copy that it makes on a CPU.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ....attention.runtime import products
from ....attention.self_attention import SelfAttention
from ....exchange.layout import Range
from ....exchange.sp_group import SPGroup
from ....exchange.streams import SideStream
from ....exchange.transport import DONE, Done
from ..costs import LayerShape
from .launches import (
    COMPUTE,
    GATE,
    TRANSFER,
    Attention,
    Gemm,
    Launch,
    Move,
    Record,
    Transfer,
    Wait,
)

# Layers that are recorded where there is an MLP: a first, a middle and a last one.
LAYERS = 3
# Operators whose last two arguments are multiplied.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class _Event:
    """Stands for a CUDA event; ``number`` is that of its latest record, -1 before it."""

    number = -1


class _Stream:
    """Stands for a CUDA stream; what happens on it goes into the recorder's list."""

    def __init__(self, recorder: Recorder, name: str):
        self.recorder, self.name = recorder, name

    def record_event(self, event: _Event) -> None:
        self.recorder.record(self.name, event)

    def wait_event(self, event: _Event) -> None:
        self.recorder.wait(self.name, event)


class Recorder(TorchDispatchMode):
    """The part of `Accelerator` that `SideStream` uses, a transport, and a list of launches.

    Attributes:
        launches: What was launched, in the order of the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.current = self.compute = _Stream(self, COMPUTE)
        # In the order in which `SideStream` asks for them. A third one is that of the second leg of
        # k and v, see `relayed`.
        self._names = itertools.chain(
            (TRANSFER, GATE), (f"{TRANSFER} {number}" for number in itertools.count(2))
        )
        self._events = 0

    # The interface of `Accelerator`.

    def Stream(self, device: Any, priority: int) -> _Stream:
        return _Stream(self, next(self._names))

    def Event(self) -> _Event:
        return _Event()

    def current_stream(self, device: Any) -> _Stream:
        return self.current

    def set_stream(self, stream: _Stream) -> None:
        self.current = stream

    def record(self, stream: str, event: _Event) -> None:
        # A later record of the same event is another event: a wait is for the record before it.
        self._events += 1
        event.number = self._events
        self.launches.append(Record(stream, event.number))

    def wait(self, stream: str, event: _Event) -> None:
        self.launches.append(Wait(stream, event.number))

    # A transport.

    def launch(
        self, send: Tensor, recv: Tensor, send_sizes: Any, recv_sizes: Any, group: Any, name: str
    ) -> Done:
        """Note an exchange on the current stream; nothing is moved, and nothing needs a wait."""
        # Part 0 stays on this rank.
        remote = max(sum(send_sizes[1:]), sum(recv_sizes[1:]))
        name = name.removeprefix("layer ")
        self.launches.append(Transfer(self.current.name, name, remote * send.element_size()))
        return DONE

    # Kernels.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operator that launches a kernel; return results of its shapes, not computed."""
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or "empty" in name or name in ("_unsafe_view", "detach", "set_"):
            return func(*args, **kwargs)
        # An operator that writes into a tensor returns that; others get new memory of their shapes.
        if func._schema.is_mutable:
            returned = kwargs.get("out", args[0])
        else:
            on_meta = tree_map(_to_meta, (args, kwargs))
            returned = tree_map(_unwritten, func(*on_meta[0], **on_meta[1]))
        self._kernel(name, args, returned)
        return returned

    def _kernel(self, name: str, args: Any, returned: Any) -> None:
        """Add a matrix product, or a kernel that moves the bytes of its tensors, to the list."""
        on = self.current.name
        # Each tensor once: an operator that works in place returns one of its arguments.
        tensors = {}
        for each in tree_leaves((args, returned)):
            if isinstance(each, Tensor):
                tensors[id(each)] = each
        if name.removesuffix("_") in PRODUCTS:
            a, b = args[-2:]
            batch = a.shape[0] if a.dim() == 3 else 1
            self.launches.append(Gemm(on, a.shape[-2], b.shape[-1], a.shape[-1], batch))
        elif n_bytes := sum(x.numel() * x.element_size() for x in tensors.values()):
            self.launches.append(Move(on, name, n_bytes))

    def attention(self, q: Tensor, keys: int, backward: bool) -> None:
        """Record one launch for attention of q, [s, b, h, d], whose last query sees ``keys``."""
        seq, batch, heads, head_dim = q.shape
        self.launches.append(Attention(COMPUTE, seq, keys, batch * heads, head_dim, backward))


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _unwritten(value: Any) -> Any:
    """Return memory that is never written, so that the system need not provide it."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


class _Attend(torch.autograd.Function):
    """Local attention that is noted as one launch in forward and one in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, recorder: Recorder, keys: int) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.of_call = recorder, keys
        recorder.attention(q, keys, backward=False)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        (recorder, keys), inputs = ctx.of_call, ctx.saved_tensors
        recorder.attention(inputs[0], keys, backward=True)
        return (*(torch.empty_like(each) for each in inputs), None, None)


class _Residual(nn.Module):
    """Adds what a module makes of the normed x to x.

    ``neg`` stands for the norm: one kernel in forward and one in backward.
    """

    def __init__(self, of: Callable[[Tensor], Tensor]):
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return x + self.of(torch.neg(x))


class _MLP(nn.Module):
    """A gated MLP; one kernel stands for what lies between its products."""

    def __init__(self, up: nn.Linear, gate: nn.Linear, down: nn.Linear):
        super().__init__()
        self.up, self.gate, self.down = up, gate, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.mul(self.gate(x), self.up(x)))


class _Alone(SPGroup):
    """Rank 0 of an sp group that is not there: all ranks say what this rank says."""

    def __init__(self, size: int, recorder: Recorder):
        super().__init__(None, recorder)
        self.size = size
        # Nobody is there to compare calls with.
        self.calls.EVERY = sys.maxsize
        device = torch.device("cpu")
        self._sides[device] = SideStream(recorder, device)

    def gather(self, what: Any, where: str = "") -> list[Any]:
        return [what] * self.size


def record(layer: LayerShape, groups: int) -> list[Launch]:
    """Return the launches of forward and backward on rank 0.

    Args:
        layer: Shape of the layer. Without an MLP one attention layer runs; with one, `LAYERS`
            whole layers, one behind the other.
        groups: Head groups, G.
    """
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[layer.element_bytes]
    recorder = Recorder()
    sp_group = _Alone(layer.sp_size, recorder)

    def linear(inside: int, out: int) -> nn.Linear:
        return skip_init(nn.Linear, inside, out, bias=False, dtype=dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor, queries: Range | None = None) -> Tensor:
        return _Attend.apply(q, k, v, recorder, queries[1] if queries else len(q))

    rows, kv_rows = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim

    def attention(at: int) -> SelfAttention:
        """Make the attention of layer ``at``, over the sp group that is not there."""
        made = SelfAttention(
            local_attention=attend,
            num_heads=layer.heads,
            num_kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            q_proj=linear(layer.width, rows),
            k_proj=linear(layer.width, kv_rows),
            v_proj=linear(layer.width, kv_rows),
            o_proj=linear(rows, layer.width),
            batch_first=False,
            heads_alike=True,
            config={"head_groups": groups, "shares": layer.shares},
            name=f"layer {at}" if layer.intermediate else "layer",
        )
        made.layer.sp_group, made.layer.tells = sp_group, False
        return made

    forward: Callable[[Tensor], Tensor] = attention(0)
    if layer.intermediate:
        wide = layer.width, layer.intermediate
        layers = []
        for at in range(LAYERS):
            mlp = _MLP(linear(*wide), linear(*wide), linear(*wide[::-1]))
            layers += [_Residual(attention(at)), _Residual(mlp)]
        forward = nn.Sequential(*layers)
    shape = (layer.seq // layer.sp_size, layer.batch, layer.width)
    unbatched = set(products.unbatched)
    products.unbatched.clear()
    try:
        with recorder:
            x = torch.empty(shape, dtype=dtype, requires_grad=True)
            y = forward(x)
            y.backward(torch.empty_like(y))
    finally:
        products.unbatched.update(unbatched)
    return recorder.launches
