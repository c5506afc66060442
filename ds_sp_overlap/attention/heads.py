"""Whether local attention treats all heads alike: tried out, since nobody can see it from outside.

Head groups call the local attention with some of a rank's heads at a time. If it keeps something for each head (ALiBi slopes, a
scale of each KV head, a sink), every group would get what belongs to the first, without a word. So it is called on random
q, k and v before anything is exchanged, over all heads and group by group, and the two are compared.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..exchange.geometry import Geometry
from .execution import Call, Part, with_kv


@dataclass(frozen=True)
class PerHead:
    """An argument of local attention that has a slice for each query head: slopes, biases, sinks.

    tensor   [h, ..], of all heads; every call of the local attention gets the slices of the heads that it is called with
    """

    tensor: Tensor

    def check(self, heads: int) -> None:
        """Raises ValueError unless there is a slice for each of ``heads``."""
        if self.tensor.dim() == 0 or len(self.tensor) != heads:
            raise ValueError(f"PerHead: a tensor of {list(self.tensor.shape)} for {heads} query heads; give [{heads}, ..]")


def calling(local_attention: Callable[..., Any], geometry: Geometry, args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """``local_attention`` as a function of a head group and its q, k, v."""
    if not any(isinstance(x, PerHead) for x in (*args, *kwargs.values())):
        return lambda group, q, k, v: local_attention(q, k, v, *args, **kwargs)

    def attend(group: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
        start, stop = geometry.query_range(geometry.sp_rank, group)

        def given(x: Any) -> Any:
            return x.tensor[start:stop] if isinstance(x, PerHead) else x

        return local_attention(q, k, v, *map(given, args), **{key: given(x) for key, x in kwargs.items()})

    return attend


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


def fault(call: Call, local: Local, device: torch.device, form: Callable[[Any, Tensor], Tensor]) -> str:
    """Why the local attention of ``call`` needs all heads at once, on this rank; empty if it doesn't.

    form   ``form(o, q)`` gives o as [.., .., h_g/P, d]

    What it raises is a reason as well: it raises again where it is called for good. Random numbers are as before.
    """
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),  # guard: takes no random numbers
        _evaluating(local.attend),
    ):
        try:
            before = _random_state(devices)
            off = _difference(call, local, device, form)
            drew = any(not torch.equal(*states) for states in zip(before, _random_state(devices)))
        except Exception as error:  # of any kind: the other ranks wait for what was found
            return f"raises {type(error).__name__}: {error}"
    if not off <= 4 * max(torch.finfo(local.dtype).eps, 2.5e-5):  # far above rounding in another order, TF32's too
        return "draws random numbers, so that nothing can be compared" if drew else f"differs by {off:.2g}"
    return ""


def _difference(call: Call, local: Local, device: torch.device, form: Callable[[Any, Tensor], Tensor]) -> float:
    """Norm of the difference of attention by groups and attention over all heads, of the worst head, over that head's norm."""
    groups, whole = call.geometry, replace(call.geometry, groups=1)
    rank, generator = groups.sp_rank, torch.Generator(device).manual_seed(0)

    def random(kind: str, dim: int) -> Tensor:
        shape = whole.exchange(kind, 0, dim).target.shape
        return torch.randn(shape, generator=generator, dtype=local.dtype, device=device)

    def part(kind: str, x: Tensor, group: int) -> Tensor:
        """The heads that arrive with ``group``."""
        first = whole.sent_range(kind, rank, 0)[0]
        start, stop = groups.sent_range(kind, rank, group)
        return x.narrow(2, start - first, max(stop - start, 0)) if start < stop else x[:, :, :0]

    def attend(geometry: Geometry, group: int, q: Tensor, received: dict[Part, Tensor]) -> Tensor:
        heads = q, with_kv(geometry, "k", group, received), with_kv(geometry, "v", group, received)
        q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in heads)  # some attentions change them in place
        return form(calling(local.attend, geometry, local.args, local.kwargs)(group, q, k, v), q)

    q, k, v = random("q", local.q_dim), random("k", local.q_dim), random("v", local.v_dim)
    expected = attend(whole, 0, q, {("k", 0): k, ("v", 0): v})
    received = {(kind, group): part(kind, x, group) for group in call.groups for kind, x in (("k", k), ("v", v))}
    worst = 0.0
    for group in call.groups:
        got, want = attend(groups, group, part("q", q, group), received), part("q", expected, group)
        same = (got == want) | (got.isnan() & want.isnan())  # of rows that a mask hides altogether
        off = torch.where(same, 0, got - want)
        norms = (torch.linalg.vector_norm(x, dim=(0, 1, 3), dtype=torch.float64) for x in (off, want.nan_to_num(0, 0, 0)))
        off, norm = (x.tolist() for x in norms)
        worst = max([worst, *(a / b if a and b else float("inf") if a else 0.0 for a, b in zip(off, norm))])
    return worst


def _random_state(devices: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


def _modules(attend: Any) -> list[nn.Module]:
    """The modules that an attention is or is made of, as far as it can be known."""
    if isinstance(attend, nn.Module):
        return list(attend.modules())
    if isinstance(attend, functools.partial):
        inside = [attend.func, *attend.args, *attend.keywords.values()]
        return [module for x in inside for module in _modules(x)]
    inside = [getattr(attend, "__self__", None), *(cell.cell_contents for cell in getattr(attend, "__closure__", None) or ())]
    return [module for x in inside if isinstance(x, nn.Module) for module in x.modules()]


@contextlib.contextmanager
def _evaluating(attend: Any) -> Iterator[None]:
    """Run the body with the attention's modules in evaluation: dropout would be another one in every call."""
    were = [(module, module.training) for module in _modules(attend)]
    for module, _ in were:
        module.training = False  # guard: tried out in evaluation
    try:
        yield
    finally:
        for module, training in reversed(were):
            module.training = training  # guard: left as it was
