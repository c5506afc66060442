"""Records the launches that a layer makes on an accelerator, without an accelerator.

The layer's own code runs with simulated streams, on tensors of the true shapes whose memory is
never touched: operators are recorded instead of being computed. So the record has every kernel,
copy, event and exchange in the order in which the host launches them, including copies that no
schedule names. Each call of local attention is recorded as one launch in forward and one in
backward. The tensors are CPU tensors: if the package chooses a copy by device, the record has the
copy for a CPU.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ....attention.layer import LayerRuntime
from ....attention.mixer import Mixer, Pieces
from ....attention.mixer_layer import MixerLayer
from ....attention.runtime import slices
from ....attention.self_attention import SelfAttention
from ....config import SpOverlapConfig
from ....exchange.layout import Range
from ....exchange.sp_group import SPGroup
from ....exchange.streams import SideStream
from ....exchange.transport import DONE, Done
from ....integrations.distributed_attention import STOCK
from ....rotary import Rotary, rotate
from ..costs import LayerShape, Way
from .launches import (
    COMPUTE,
    GATE,
    TRANSFER,
    Attention,
    Gemm,
    Host,
    Launch,
    Move,
    Record,
    Transfer,
    Wait,
)

# The number of layers that are recorded if the MLP is recorded too: a first, a middle and a last.
LAYERS = 3
# The number of tokens with which the functions of a mixer run, to find the shapes of their results.
# Some of these functions loop over tokens, so more tokens would take long.
FEW = 96
# Files of torch whose functions are called only because a dispatch mode is active.
OF_A_MODE = re.compile(r"torch/(_library|_dynamo|_compile\.py|compiler)")
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
# Operators whose last two arguments are multiplied.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class _Stream:
    """Simulates a CUDA stream: notes each record of an event, and each wait, in the recorder.

    An event's attribute ``number`` identifies its latest record.
    """

    def __init__(self, recorder: Recorder, name: str):
        self.recorder, self.name = recorder, name

    def record_event(self, event: SimpleNamespace) -> None:
        # Each record gets a new number, since a wait refers to the latest record before the wait.
        event.number = next(self.recorder.events)
        self.recorder.note(Record(self.name, event.number))

    def wait_event(self, event: SimpleNamespace) -> None:
        self.recorder.note(Wait(self.name, event.number))


class Recorder(TorchDispatchMode):
    """Replaces the accelerator and the transport, and records launches.

    Implements the part of `Accelerator` that `SideStream` uses.

    Attributes:
        launches: The launches in the order of the host, with the host's work between them.
        held: The bytes in memory after each change, without x, dy and the weights.
        forwards: The length of ``held`` when backward began.
    """

    forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.begin()
        self.current = self.compute = _Stream(self, COMPUTE)
        # The names of streams, in the order in which `SideStream` makes them.
        self._names = iter((TRANSFER, GATE, "relay"))
        self.events = itertools.count()
        # The depth of Python frames inside a function of this file; 0 outside.
        self._inside = 0

    def begin(self) -> None:
        """Begin a new record."""
        self.launches: list[Launch] = []
        self.held = [0]
        # The host's work since the last launch: how many times each kind of work, by `Host.name`.
        self.before: Counter[str] = Counter()
        # Weak references to the allocated memory; a callback of each runs when its memory is freed.
        self._memory: set[weakref.ref[Any]] = set()

    def end(self) -> None:
        """End the record: add the host's last work, and ignore memory that is freed from now on."""
        self.note()
        self._memory.clear()

    def hold(self, x: Tensor) -> None:
        """Count the memory of a new tensor ``x`` until it is freed."""
        storage = x.untyped_storage()
        self._memory.add(weakref.ref(storage, partial(self._free, storage.nbytes())))
        self.held.append(self.held[-1] + storage.nbytes())

    def _free(self, n_bytes: int, memory: weakref.ref[Any]) -> None:
        self._memory.remove(memory)
        self.held.append(self.held[-1] - n_bytes)

    def note(self, *launches: Launch) -> None:
        """Record the host's work since the last launch, then record ``launches``."""
        self.launches += itertools.starmap(Host, self.before.items())
        self.launches += launches
        self.before.clear()

    def count_calls(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count a call of a Python function; a callback of ``sys.setprofile``.

        Skips functions of this file, and functions that torch calls only for a dispatch mode: a
        step on a GPU calls neither. Skips comprehensions, which only some versions of Python call.
        """
        code = frame.f_code
        if event == "return" and self._inside:
            self._inside -= 1
        elif event == "call" and self._inside:
            self._inside += 1
        elif event == "call" and code.co_filename == __file__ and code.co_name != "forward":
            self._inside = 1
        elif event == "call" and code.co_name not in COMPREHENSIONS:
            if not OF_A_MODE.search(code.co_filename):
                self.before["call"] += 1

    # The interface of `Accelerator`.

    def Stream(self, device: Any, priority: int) -> _Stream:
        return _Stream(self, next(self._names))

    def Event(self) -> SimpleNamespace:
        return SimpleNamespace(number=-1)

    def current_stream(self, device: Any) -> _Stream:
        self.before["accelerator"] += 1
        return self.current

    def set_stream(self, stream: _Stream) -> None:
        self.before["accelerator"] += 1
        self.current = stream

    # The interface of `Transport`.

    def launch(
        self, send: Tensor, recv: Tensor, send_sizes: Any, recv_sizes: Any, group: Any, name: str
    ) -> Done:
        """Record an exchange on the current stream; move nothing."""
        # Part 0 stays on this rank, which is rank 0.
        remote = max(sum(send_sizes[1:]), sum(recv_sizes[1:]))
        name = name.removeprefix("layer ")
        self.note(Transfer(self.current.name, name, remote * send.element_size()))
        return DONE

    # The functions of ``deepspeed.comm`` that DeepSpeed's class calls.

    def get_world_size(self, group: SPGroup) -> int:
        return group.size

    def all_to_all_single(
        self, recv: Tensor, send: Tensor, group: SPGroup, async_op: bool = False
    ) -> None:
        sizes = (send.numel() // group.size,) * group.size
        self.launch(send, recv, sizes, sizes, group, "stock")

    # Kernels.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operator that launches a kernel; return results that are never computed."""
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if "empty" in name:
            self.before["empty"] += 1
            self.hold(made := func(*args, **kwargs))
            return made
        if func.is_view or name in ("_unsafe_view", "detach", "set_"):
            self.before["view"] += 1
            return func(*args, **kwargs)
        # An operator that writes into an argument returns this argument; other operators return
        # new tensors.
        if func._schema.is_mutable:
            returned = kwargs.get("out", args[0])
        else:
            on_meta = tree_map(_to_meta, (args, kwargs))
            returned = tree_map(self._unwritten, func(*on_meta[0], **on_meta[1]))
        self._kernel(name, args, returned)
        return returned

    def _unwritten(self, value: Any) -> Any:
        """Allocate a tensor like ``value``; it takes no physical memory until it is written."""
        if isinstance(value, Tensor):
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            self.hold(value)
        return value

    def _kernel(self, name: str, args: Any, returned: Any) -> None:
        """Record a matrix product, or a kernel that moves the bytes of its tensors."""
        on = self.current.name
        # Count each tensor once: an operator that works in place returns one of its arguments.
        leaves = tree_leaves((args, returned))
        tensors = {id(each): each for each in leaves if isinstance(each, Tensor)}
        if name.removesuffix("_") in PRODUCTS:
            a, b = args[-2:]
            batch = a.shape[0] if a.dim() == 3 else 1
            self.note(Gemm(on, a.shape[-2], b.shape[-1], a.shape[-1], batch))
        elif n_bytes := sum(x.numel() * x.element_size() for x in tensors.values()):
            shape = returned.shape if isinstance(returned, Tensor) else None
            orders = {_order(x) for x in tensors.values() if x.shape == shape}
            self.note(Move(on, name, n_bytes, len(orders) > 1))


def _order(x: Tensor) -> tuple[int, ...]:
    """Return the dims of ``x`` by descending stride, without dims of size 1."""
    dims = [dim for dim in range(x.dim()) if x.shape[dim] > 1]
    return tuple(sorted(dims, key=x.stride, reverse=True))


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, Tensor) else value


def flash_bytes(q: Tensor, k: Tensor) -> int:
    """Return the bytes of temporaries in the backward of flash-attn; 0 if it has no kernel.

    flash-attn sums dq in fp32. If query heads share KV heads, flash-attn also computes dk and dv
    for each query head. flash-attn only has kernels for elements of 2 bytes.
    """
    return (q.element_size() == 2) * q.numel() * (4 + 4 * (q.shape[2] != k.shape[2]))


class _Kernel(torch.autograd.Function):
    """Records a call, without computing it, as one launch in forward and one in backward.

    Args:
        recorder: The recorder.
        launches: The launch in forward, and the launch in backward.
        work_bytes: The bytes of temporaries in backward.
        ys: The results. Both results and arguments are saved for backward.
        *xs: The arguments of the call.
    """

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, launches: Sequence[Launch], work_bytes: int, ys: Any, *xs: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*xs, *ys)
        ctx.of_call = recorder, launches[1], work_bytes, len(xs)
        recorder.note(launches[0])
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        recorder, launch, work_bytes, inputs = ctx.of_call
        recorder.note(launch)
        gradients = [x if x is None else torch.empty_like(x) for x in ctx.saved_tensors[:inputs]]
        recorder.held += [recorder.held[-1] + work_bytes, recorder.held[-1]]
        return (None, None, None, None, *gradients)


def _attend(
    recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, queries: Range | None = None
) -> Tensor:
    """Record local attention of q [s, b, h, d]; return an uncomputed o of this shape."""
    seq, batch, heads, head_dim = q.shape
    of = COMPUTE, seq, queries[1] if queries else seq, batch * heads, head_dim
    ys = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    launches = Attention(*of, False), Attention(*of, True)
    return _Kernel.apply(recorder, launches, flash_bytes(q, k), ys, q, k, v)[0]


class _Layer(nn.Module):
    """Runs a layer with Llama's norms and MLP around an attention."""

    def __init__(self, attention: Callable[[Tensor], Tensor], mlp: list[nn.Linear]):
        super().__init__()
        self.attention, (self.up, self.gate, self.down) = attention, mlp
        self.weight = nn.Parameter(torch.empty_like(mlp[0].weight[0]))

    def norm(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class _Alone(SPGroup):
    """Simulates rank 0 of an sp group; the other ranks contribute the same values as rank 0."""

    def __init__(self, size: int, recorder: Recorder):
        super().__init__(None, recorder, kernels="torch")
        self.size = size
        # Never compare calls over the ranks.
        self.calls.EVERY = sys.maxsize
        device = torch.device("cpu")
        self.sides[device] = SideStream(recorder, device)

    def gather(self, what: Any, where: str = "") -> list[Any]:
        return [what] * self.size


@functools.cache
def record(layer: LayerShape, way: Way) -> Recorder:
    """Record forward and backward on rank 0, in the second of two steps.

    Args:
        layer: The shape of the layer. Without an MLP, one attention layer runs; with an MLP, three
            whole layers with Llama's RoPE and norms.
        way: How the layer runs.
    """
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[layer.element_bytes]
    recorder = Recorder()
    sp_group, attend = _Alone(layer.sp_size, recorder), partial(_attend, recorder)
    linears = []

    def linear(inside: int, out: int) -> nn.Linear:
        linears.append(skip_init(nn.Linear, inside, out, bias=False, dtype=dtype))
        return linears[-1]

    shape = (layer.seq // layer.sp_size, layer.batch, layer.width)
    tables = None
    if layer.intermediate:
        tables = (torch.empty(shape[0], 1, 1, layer.head_dim, dtype=dtype),) * 2
    rows, kv_rows = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim

    def attention() -> Callable[[Tensor], Tensor]:
        """Make the attention of one layer, over the simulated sp group."""
        projections: dict[str, Any] = {
            "q_proj": linear(layer.width, rows),
            "k_proj": linear(layer.width, kv_rows),
            "v_proj": linear(layer.width, kv_rows),
            "o_proj": linear(rows, layer.width),
        }
        if not way.groups:
            return _stock(attend, sp_group, layer, tables, projections)
        made = SelfAttention(
            local_attention=attend,
            num_heads=layer.heads,
            num_kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            batch_first=False,
            heads_alike=True,
            rope=tables and Rotary(lambda tables: tables),
            config={"shares": layer.shares, "head_groups": way.groups, "window": way.window},
            name="layer",
            **projections,
        )
        made.layer.sp_group, made.layer.tells = sp_group, False
        return partial(made, position_embeddings=tables)

    forward = attention()
    if layer.intermediate:
        wide = layer.width, layer.intermediate
        mlps = [[linear(*wide), linear(*wide), linear(*wide[::-1])] for _ in range(LAYERS)]
        forward = nn.Sequential(*(_Layer(attention(), mlp) for mlp in mlps))
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    return _second_step(recorder, forward, x, [each.weight for each in linears])


def _second_step(
    recorder: Recorder, forward: Callable[[Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]
) -> Recorder:
    """Record the second of two steps, since the first step also runs probes and makes plans."""
    no_device, dy = mock.patch.object(slices, "unbatched", ()), torch.empty_like(x)
    try:
        with recorder, no_device, mock.patch(f"{STOCK}.dist", recorder):
            for _ in range(2):
                for each in (x, *weights):
                    each.grad = None
                recorder.begin()
                sys.setprofile(recorder.count_calls)
                y = forward(x)
                recorder.forwards = len(recorder.held)
                y.backward(dy)
                recorder.end()
    finally:
        sys.setprofile(None)
    return recorder


def _on_meta(x: Any, tokens: int, to: int) -> Any:
    """Return ``x`` on the meta device, with ``to`` tokens if it has a dimension of ``tokens``."""
    # Tensors with tokens have three or more dimensions, or are integer positions. Leave parameters,
    # which have up to two dimensions, as they are.
    if x is None or x.shape[1:2] != (tokens,) or (x.dim() == 2 and x.is_floating_point()):
        return _to_meta(x)
    return torch.empty((len(x), to, *x.shape[2:]), dtype=x.dtype, device="meta")


def _mix(recorder: Recorder, name: str, function: Callable[..., Any], *xs: Any) -> Any:
    """Record a call of a mixer's function; return uncomputed results.

    Args:
        recorder: The recorder.
        name: The name of the launches.
        function: The mixer's function, called on the meta device to find the shapes of its results.
        *xs: The arguments of the call.
    """
    tokens = xs[0].shape[1]
    with _disable_current_modes():
        found = function(*(_on_meta(x, tokens, FEW) for x in xs))
        results = found if isinstance(found, tuple) else (found,)
        shapes = [_on_meta(each, FEW, tokens) for each in results]
    n_bytes = sum(x.nbytes for x in (*xs, *shapes) if x is not None)
    ys = tuple(map(recorder._unwritten, shapes))
    launches = Move(COMPUTE, name, n_bytes), Move(COMPUTE, name, 2 * n_bytes)
    ys = _Kernel.apply(recorder, launches, 0, ys, *xs)
    return ys if isinstance(found, tuple) else ys[0]


def record_mixer(layer: LayerShape, module: nn.Module, kind: type[Mixer]) -> Recorder:
    """Record a mixer with the width, tokens and ranks of a layer.

    Each convolution and scan is recorded as one launch in forward, with the bytes of its tensors,
    and one launch in backward, with twice as many bytes.

    Args:
        layer: The layer's shape.
        module: The mixer, on the meta device; it is copied.
        kind: The `Mixer` class that describes the mixer.
    """
    recorder = Recorder()
    sp_group, tokens = _Alone(layer.sp_size, recorder), layer.seq // layer.sp_size
    module = copy.deepcopy(module).to(torch.bfloat16)
    here = copy.deepcopy(module).to_empty(device="cpu")
    mixer, on_meta = kind(here), kind(module)
    if on_meta.convolve is not None:
        mixer.convolve = partial(_mix, recorder, "convolution", on_meta.convolve)
    if mixer.by_states:
        mixer.scan, mixer.by_heads = partial(_mix, recorder, "scan", on_meta.scan), ""
    elif mixer.by_heads:
        mixer.mix = partial(_mix, recorder, mixer.by_heads, on_meta.mix)
    runtime = LayerRuntime(sp_group, SpOverlapConfig(head_groups=1), "layer")
    run, pieces = MixerLayer(runtime, mixer), Pieces([tokens] * layer.sp_size)
    positions = torch.arange(tokens).expand(layer.batch, -1) if mixer.by_positions else None

    def forward(x: Tensor) -> Tensor:
        y = run(x, pieces, positions)
        return y[0] if isinstance(y, tuple) else y

    x = torch.empty(layer.batch, tokens, layer.width, dtype=torch.bfloat16, requires_grad=True)
    return _second_step(recorder, forward, x, [*here.parameters()])


def _stock(
    attend: Callable[..., Tensor],
    sp_group: SPGroup,
    layer: LayerShape,
    tables: tuple[Tensor, Tensor] | None,
    projections: dict[str, nn.Linear],
) -> Callable[[Tensor], Tensor]:
    """Return a layer with DeepSpeed's class between projections that are called whole."""
    ulysses = importlib.import_module(STOCK).DistributedAttention(attend, sp_group)
    q_proj, k_proj, v_proj, o_proj = projections.values()
    repeat = max(1, layer.sp_size // layer.kv_heads)

    def forward(x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, layer.head_dim)) for each in (q_proj, k_proj, v_proj))
        if tables is not None:
            q, k = rotate(q, *tables), rotate(k, *tables)
        # DeepSpeed's class refuses fewer KV heads than ranks. Repeat the KV heads, as DeepSpeed's
        # adapter for transformers does.
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        return o_proj(ulysses(q, k, v, 1).flatten(2))

    return forward
