"""Probes whether local attention treats all heads alike, since its code can't tell.

Note [Heads alike]
~~~~~~~~~~~~~~~~~~
Head groups call the local attention with some of a rank's heads at a time. If the attention has a
value for each head (ALiBi slopes, a scale of each KV head, a sink), every group silently gets the
values of the first heads. So before anything is exchanged the attention is called on random q, k
and v, over all heads and group by group, and the two results are compared. The results of the ranks
are compared as well, on the same q, k and v: with head groups a rank may get other heads than
without them (`Geometry.groups_first`), and an attention that was built for its rank's heads would
be applied to another rank's.

What the attention holds for each head may be alike for all at first: a gain of ones, a bias of
zeros. So heads and groups are compared once more, with random numbers in place of the tensors that
the attention holds, as far as they are found (`arguments.tensors_of`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..exchange.geometry import Geometry
from ..schedule import Part
from .arguments import modules_of, named, slice_per_head, tensors_of
from .memory.forward_state import Random, in_modes
from .memory.recompute import join_pieces
from .runtime.execution import Call, pieces_of_queries, with_head_dim, with_kv
from .unobserved import unobserved


class Local(NamedTuple):
    """A local attention with its arguments beside q, k and v.

    Attributes:
        attend: q, k, v, *args, **kwargs -> o.
        args: Positional arguments.
        kwargs: Keyword arguments.
        q_dim: Head dim of q and k.
        v_dim: Head dim of v.
        dtype: Of q, k and v.
        around: Modules that the attention may reach, but reads nothing of.
    """

    attend: Callable[..., Tensor]
    args: tuple
    kwargs: dict[str, Any]
    q_dim: int
    v_dim: int
    dtype: torch.dtype
    around: Sequence[nn.Module] = ()

    @property
    def name(self) -> str:
        """The name of the function or class, for messages."""
        return getattr(self.attend, "__qualname__", type(self.attend).__name__)


def fault_of_heads(call: Call, local: Local, device: torch.device) -> str:
    """Return why local attention needs all heads at once on some rank, see Note [Heads alike].

    Collective. All ranks return the same text, which is empty if it may be called group by group.
    """
    faults, norms = zip(*call.sp_group.gather(probe_heads(call, local, device), call.where))
    fault = "; ".join(  # guard: what any rank found
        f"sp rank {rank}: {text}" for rank, text in enumerate(faults) if text
    )
    return fault or differing_rank(norms, local.dtype)  # guard: alike on all ranks


def probe_heads(call: Call, local: Local, device: torch.device) -> tuple[str, list[float] | None]:
    """Probe on this rank whether local attention may be called group by group.

    See Note [Heads alike]. Not collective. The state of the random generators stays as it was.

    Args:
        call: The call, in several head groups.
        local: The local attention.
        device: The device of q, k and v.

    Returns:
        The reason why the local attention needs all heads at once, empty if it doesn't. An
        exception that it raises is a reason as well; it raises again in the layer's own call.

        And the norm of the output of each head, for q, k and v that are the same on every rank;
        None where there is a reason, and where KV heads don't divide by the ranks, so that ranks
        can't be compared.
    """
    modules = modules_of(local.attend)
    # In training mode, dropout would differ in every call.
    with unobserved(modules, device), in_modes(modules, [False] * len(modules)):
        try:
            before = Random.now(device)
            difference, norms = _difference(call, local, device)
            if held := tensors_of(local.attend, local.around):
                with _random_values(held):  # guard: heads that begin alike
                    difference = max(difference, _difference(call, local, device)[0])
            after = Random.now(device)
        except Exception as error:
            # Of any kind: the other ranks wait for the result.
            return f"raises {type(error).__name__}: {error}", None
    if not difference <= _tolerance(local.dtype):
        if before != after:
            return "draws random numbers, so that nothing can be compared", None
        return f"differs by {difference:.2g}", None
    return "", norms if call.geometry.kv_heads % call.geometry.parts == 0 else None


@contextlib.contextmanager
def _random_values(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Run the body with random numbers between 0.5 and 1.5 in plain tensors of floats.

    The numbers have memory of their own, so that graphs which have saved a tensor don't notice.
    """
    generator, before = torch.Generator().manual_seed(0), []
    for x in tensors:
        is_plain = type(x) in (Tensor, nn.Parameter) and not x.is_inference()
        if is_plain and x.is_floating_point():
            before.append((x, x.data))
            x.data = (torch.rand(x.shape, generator=generator) + 0.5).to(x)
    try:
        yield
    finally:
        for x, data in before:
            x.data = data  # guard: values as they were


def differing_rank(norms: Sequence[list[float] | None], dtype: torch.dtype) -> str:
    """Find a rank whose local attention computes other results than rank 0's from the same inputs.

    Args:
        norms: The norms that `probe_heads` returned on each rank.
        dtype: Of q, k and v.

    Returns:
        The first rank that differs from sp rank 0, in words; empty if none does, or if a rank has
        no norms to compare.
    """
    if None in norms:
        return ""
    first, *others = torch.tensor(norms)
    for rank, other in enumerate(others, 1):
        if not torch.allclose(other, first, rtol=_tolerance(dtype), atol=0):
            return f"sp rank {rank}: differs from sp rank 0"
    return ""


def _tolerance(dtype: torch.dtype) -> float:
    # A share of the norm. Far above rounding in another order, also that of TF32.
    return 4 * max(torch.finfo(dtype).eps, 2.5e-5)


def _difference(call: Call, local: Local, device: torch.device) -> tuple[float, list[float]]:
    """Compare attention group by group with attention over all heads, on random q, k and v.

    Returns:
        The norm of the difference as a share of the norm of the output, of the worst head; and the
        norm of the output for each head.
    """
    # The queries of one share, so that ranks that share heads attend with the same tokens as well.
    rank = call.geometry.first_of_part
    groups = replace(call.geometry, sp_rank=rank)
    whole, generator = replace(groups, groups=1), torch.Generator(device).manual_seed(0)

    def random(kind: str, dim: int) -> Tensor:
        # Of all heads of a rank; the same on ranks that have equally many.
        shape = whole.exchange(kind, 0, (dim,)).target.shape
        return torch.randn(shape, generator=generator, dtype=local.dtype, device=device)

    def part(kind: str, x: Tensor, group: int) -> Tensor:
        """Return the heads that arrive with ``group``.

        ``x`` holds the heads of all groups in the order of their arrival.
        """
        ranges = (groups.sent_range(kind, rank, index) for index in call.groups)
        return x.split([stop - start for start, stop in ranges], 2)[group]

    def attend(geometry: Geometry, group: int, q: Tensor, received: dict[Part, Tensor]) -> Tensor:
        """Attend with a group of ``geometry``, as a call of the layer would."""
        heads = q, with_kv(geometry, "k", group, received), with_kv(geometry, "v", group, received)
        # Copies, since some attentions change q, k and v in place.
        q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in heads)
        earlier = (geometry.query_range(rank, index) for index in range(group))
        first = sum(stop - start for start, stop in earlier)
        # Counted from 0 on every rank, so that all ranks get the same slices of a `PerHead`.
        own = first, first + q.shape[2]
        args, kwargs = slice_per_head(own, local.args, local.kwargs)
        pieces = []
        for part, *tokens in pieces_of_queries(geometry, q):
            part = part.clone(memory_format=torch.contiguous_format) if tokens else part
            o = local.attend(part, k, v, *args, **kwargs, **named(tuple(tokens)))
            pieces.append(with_head_dim(o, part, call.where))
        return join_pieces(pieces, geometry.seq_dim)

    q, k, v = random("q", local.q_dim), random("k", local.q_dim), random("v", local.v_dim)
    expected = attend(whole, 0, q, received={("k", 0): k, ("v", 0): v})
    received: dict[Part, Tensor] = {}
    for group in call.groups:
        received["k", group], received["v", group] = part("k", k, group), part("v", v, group)
    worst, norms = 0.0, []
    for group in call.groups:
        got = attend(groups, group, part("q", q, group), received=received)
        want = part("q", expected, group)
        # Rows that a mask hides altogether are NaN in both.
        same = (got == want) | (got.isnan() & want.isnan())
        off_norms = _norms_of_heads(torch.where(same, 0, got - want))
        want_norms = _norms_of_heads(want.nan_to_num(0, 0, 0))
        for off, norm in zip(off_norms, want_norms):
            if off:  # NaN on one side alone, too
                share = off / norm if norm else math.inf
                worst = max(worst, math.inf if math.isnan(share) else share)
        norms += want_norms
    return worst, norms


def _norms_of_heads(x: Tensor) -> list[float]:
    """Return the norm of each head of ``x`` [.., .., heads, d]."""
    return torch.linalg.vector_norm(x, dim=(0, 1, 3), dtype=torch.float64).tolist()
