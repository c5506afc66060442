"""Whether local attention treats all heads alike: tried out, since nobody can see it from outside.

Head groups call the local attention with some of a rank's heads at a time. If it keeps something
for each head (ALiBi slopes, a scale of each KV head, a sink), every group would get what belongs to
the first, without a word. So it is called on random q, k and v before anything is exchanged, over
all heads and group by group, and the two are compared. So are the ranks, on whose heads it is
called too: with head groups a rank gets others than without (`Geometry.groups_first`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..exchange.geometry import Geometry
from ..exchange.layout import Range
from ..schedule import Part
from .runtime.execution import Call, with_kv


@dataclass(frozen=True)
class PerHead:
    """An argument of local attention that has a slice for each query head: slopes, biases, sinks.

    tensor   [h, ..], of all heads; every call of the local attention gets the slices of the heads
             that it is called with
    """

    tensor: Tensor

    def check(self, heads: int) -> None:
        """Raises ValueError unless there is a slice for each of ``heads``."""
        if self.tensor.dim() == 0 or len(self.tensor) != heads:
            raise ValueError(
                f"PerHead: a tensor of {list(self.tensor.shape)} for {heads} query heads; give [{heads}, ..]"
            )


def calling(
    local_attention: Callable[..., Any], geometry: Geometry, args: tuple, kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """``local_attention`` as a function of a head group and its q, k, v."""
    if not any(isinstance(x, PerHead) for x in (*args, *kwargs.values())):
        return lambda group, q, k, v: local_attention(q, k, v, *args, **kwargs)

    def attend(group: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
        mine, named = _of_heads(geometry.query_range(geometry.sp_rank, group), args, kwargs)
        return local_attention(q, k, v, *mine, **named)

    return attend


def _of_heads(heads: Range, args: tuple, kwargs: dict[str, Any]) -> tuple[list, dict[str, Any]]:
    def given(x: Any) -> Any:
        return x.tensor[slice(*heads)] if isinstance(x, PerHead) else x

    return [given(x) for x in args], {key: given(x) for key, x in kwargs.items()}


class Local(NamedTuple):
    """A local attention and what it is called with.

    attend         q, k, v, *args, **kwargs -> o
    q_dim, v_dim   head dims of q and k, and of v
    """

    attend: Callable[..., Tensor]
    args: tuple
    kwargs: dict[str, Any]
    q_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return getattr(self.attend, "__qualname__", type(self.attend).__name__)


def fault(
    call: Call, local: Local, device: torch.device, form: Callable[[Any, Tensor], Tensor]
) -> tuple[str, list[float] | None]:
    """Why the local attention of ``call`` needs all heads at once, on this rank, empty if it
    doesn't; and the norm of what it makes of each head of q, k and v that are the same on every
    rank, None where the ranks have unlike many.

    form   ``form(o, q)`` gives o as [.., .., h_g/P, d]

    What it raises is a reason as well: it raises again where it is called for good. Random numbers
    are as before.
    """
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.no_grad(),
        torch.random.fork_rng(
            devices, device_type=device.type if devices else "cuda"
        ),  # guard: takes no random numbers
        _evaluating(local.attend),
    ):
        try:
            before = _random_state(devices)
            off, norms = _difference(call, local, device, form)
            drew = any(not torch.equal(*states) for states in zip(before, _random_state(devices)))
        except Exception as error:  # of any kind: the other ranks wait for what was found
            return f"raises {type(error).__name__}: {error}", None
    if not off <= _tolerance(local.dtype):
        return (
            "draws random numbers, so that nothing can be compared"
            if drew
            else f"differs by {off:.2g}",
            None,
        )
    return "", norms if call.geometry.kv_heads % call.geometry.sp_size == 0 else None


def difference_of_ranks(norms: Sequence[list[float] | None], dtype: torch.dtype) -> str:
    """Which rank makes something else of the same heads, by the norms that each has found; empty if
    none does.
    """
    every = torch.zeros(len(norms), 0) if None in norms else torch.tensor(norms)
    off = [not torch.allclose(row, every[0], rtol=_tolerance(dtype), atol=0) for row in every]
    return f"sp rank {off.index(True)}: differs from sp rank 0" if any(off) else ""


def _tolerance(dtype: torch.dtype) -> float:
    return 4 * max(
        torch.finfo(dtype).eps, 2.5e-5
    )  # far above rounding in another order, TF32's too


def _difference(
    call: Call, local: Local, device: torch.device, form: Callable[[Any, Tensor], Tensor]
) -> tuple[float, list[float]]:
    """Norm of the difference of attention by groups and attention over all heads, of the worst
    head, over that head's norm; and that of each head.
    """
    groups, whole = call.geometry, replace(call.geometry, groups=1)
    rank, generator = groups.sp_rank, torch.Generator(device).manual_seed(0)

    def random(kind: str, dim: int) -> Tensor:
        shape = whole.exchange(kind, 0, dim).target.shape
        return torch.randn(shape, generator=generator, dtype=local.dtype, device=device)

    def part(kind: str, x: Tensor, group: int) -> Tensor:
        """The heads that arrive with ``group``, of those of all groups in the order of their
        arrival.
        """
        ranges = (groups.sent_range(kind, rank, each) for each in call.groups)
        return x.split([max(stop - start, 0) for start, stop in ranges], 2)[group]

    def attend(geometry: Geometry, group: int, q: Tensor, received: dict[Part, Tensor]) -> Tensor:
        heads = q, with_kv(geometry, "k", group, received), with_kv(geometry, "v", group, received)
        q, k, v = (
            x.clone(memory_format=torch.contiguous_format) for x in heads
        )  # some attentions change them in place
        first = sum(
            stop - start
            for start, stop in (geometry.query_range(rank, each) for each in range(group))
        )
        args, kwargs = _of_heads(
            (first, first + q.shape[2]), local.args, local.kwargs
        )  # `PerHead`: the same on every rank
        return form(local.attend(q, k, v, *args, **kwargs), q)

    q, k, v = random("q", local.q_dim), random("k", local.q_dim), random("v", local.v_dim)
    expected = attend(whole, 0, q, {("k", 0): k, ("v", 0): v})
    received = {
        (kind, group): part(kind, x, group)
        for group in call.groups
        for kind, x in (("k", k), ("v", v))
    }
    worst, every = 0.0, []
    for group in call.groups:
        got, want = attend(groups, group, part("q", q, group), received), part("q", expected, group)
        same = (got == want) | (got.isnan() & want.isnan())  # of rows that a mask hides altogether
        off = torch.where(same, 0, got - want)
        norms = (
            torch.linalg.vector_norm(x, dim=(0, 1, 3), dtype=torch.float64)
            for x in (off, want.nan_to_num(0, 0, 0))
        )
        off, norm = (x.tolist() for x in norms)
        worst = max(
            [worst, *(a / b if a and b else float("inf") if a else 0.0 for a, b in zip(off, norm))]
        )
        every += norm
    return worst, every


def _random_state(devices: list[torch.device]) -> list[Tensor]:
    return [
        torch.get_rng_state(),
        *(torch.get_device_module(device).get_rng_state(device) for device in devices),
    ]


def modules_of(attend: Any) -> list[nn.Module]:
    """The modules that an attention is or is made of, as far as it can be known."""
    if isinstance(attend, nn.Module):
        return list(attend.modules())
    if isinstance(attend, functools.partial):
        inside = [attend.func, *attend.args, *attend.keywords.values()]
        return [module for x in inside for module in modules_of(x)]
    inside = [
        getattr(attend, "__self__", None),
        *(cell.cell_contents for cell in getattr(attend, "__closure__", None) or ()),
    ]
    return [module for x in inside if isinstance(x, nn.Module) for module in x.modules()]


@contextlib.contextmanager
def _evaluating(attend: Any) -> Iterator[None]:
    """Run the body with the attention's modules in evaluation: dropout would be another one in
    every call.
    """
    were = [(module, module.training) for module in modules_of(attend)]
    for module, _ in were:
        module.training = False  # guard: tried out in evaluation
    try:
        yield
    finally:
        for module, training in reversed(were):
            module.training = training  # guard: left as it was
