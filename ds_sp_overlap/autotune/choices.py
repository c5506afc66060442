"""Chooses which candidates ``"memory": "auto"`` times, those that need least memory first.

Candidates are numbers of head groups G, and windows (G, W). Only windows are timed whose predicted
time is close to the shortest prediction. Predictions are made for two networks: one with the rate
of a network card, and one that costs nothing. No rate is measured: ranks would measure different
rates, and data-parallel replicas, which must time the same candidates, can't ask one another before
their first step. A window is left out only if it is predicted slow on both networks. A window that
is timed by mistake is not chosen. What matters most needs no rates: how long attention is beside
the projections, which backward recomputes with a window.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..config import SpOverlapConfig
from ..exchange.geometry import Geometry
from ..schedule import Simulation, schedule_of
from .costs import WINDOWS, Costs, LayerShape, Rates
from .trial import CLOSE, GROUPS, OFF, Candidate, candidates_for

# The two networks: one of 45 GB/s a GPU, and one that costs nothing.
RATES = (Rates(600e12, 500e12, 45e9), Rates(600e12, 500e12, float("inf"), 0.0))


class Candidates(NamedTuple):
    """Lists what is timed for a layer.

    Attributes:
        candidates: Those that need less memory before those that need more.
        default: Of those that are predicted to take no longer than the fastest, the candidate that
            needs least memory. Where nothing is predicted (``head_dim`` 0): the default G.
    """

    candidates: tuple[Candidate, ...]
    default: Candidate


def candidates_of_call(
    config: SpOverlapConfig,
    geometry: Geometry,
    width: int,
    element_bytes: int,
    head_dim: int,
    off: bool,
    has_replicas: bool,
) -> Candidates:
    """Choose the candidates for a call, alike on all ranks that choose together.

    Runs in every call with ``"memory": "auto"``; `candidates_of` caches what it simulates.

    Args:
        config: The ``sp_overlap`` section.
        geometry: Of the call, with the default G.
        width: Model dim ``m``.
        element_bytes: Bytes of an element that is exchanged.
        head_dim: ``d`` of a layer that can run by a window; 0 for other layers.
        off: Whether DeepSpeed's own layer is possible. It is no candidate beside a fixed G of a
            layer without windows, for which there is nothing to choose.
        has_replicas: Whether several sp groups choose together, each with batches of its own.
    """
    # ``fixed``: G where the config gives it, or where the call has one group anyway (no more heads,
    # or an argument that may have a slice for each head, see `call_geometry`); None: G is open.
    size, fixed = geometry.sp_size, None
    if config.head_groups != "auto" or geometry.groups == 1:
        fixed = geometry.groups
    if not head_dim:
        # The memory that such a layer needs is not known, but more groups need less.
        if fixed is not None:
            return Candidates((fixed,), fixed)
        return Candidates(candidates_for(geometry.max_groups, off)[::-1], geometry.groups)
    # The power of two above, so that lengths that vary a little have the same candidates; of these
    # `Policy.trial` makes its key. Replicas have other lengths, and must have the same candidates,
    # too: those of a length that is long in any case.
    local_seq, batch = 1 << (sum(geometry.seq_lens) // size).bit_length(), geometry.batch
    if has_replicas:
        local_seq, batch = 2**20, 1
    shape = LayerShape(
        width=width,
        heads=geometry.heads,
        kv_heads=geometry.kv_heads,
        head_dim=head_dim,
        seq=local_seq * size,
        sp_size=size,
        batch=batch,
        element_bytes=element_bytes,
        shares=geometry.shares,
    )
    return candidates_of(
        shape,
        fixed,
        config.window,
        # A checkpoint that saves attention saves no q, k, v, which backward then makes again.
        again=config.checkpointing != "recompute",
        off=off,
        # Each candidate needs two steps, one of them untimed (`policy`).
        most=config.policy.warmup_steps // 2,
    )


@lru_cache(maxsize=4096)
def candidates_of(
    layer: LayerShape, groups: int | None, window: int | None, again: bool, off: bool, most: int
) -> Candidates:
    """Choose the candidates for a layer.

    Args:
        layer: Shape of the layer.
        groups: G, where it is given; None: open.
        window: W, where it is given; None: open.
        again: Whether backward recomputes q, k and v with every candidate.
        off: Whether DeepSpeed's own layer is possible.
        most: The most candidates, with "off"; two at the least are taken beside it.
    """
    possible = range(1, layer.geometry(1).max_groups + 1)
    ways: list[int | tuple[int, int]]
    if groups is not None:
        ways = [groups]
        if window is None:
            ways += [(groups, few) for few in (1, 2) if few < groups]
    elif window is not None:
        ways = [count for count in (*GROUPS, 8) if count in possible]
    else:
        ways = [count for count in GROUPS if count in possible]
        ways += [pair for pair in WINDOWS if pair[0] in possible]
    peaks: dict[int | tuple[int, int], int] = {}
    # On each of the two networks.
    times_ms: dict[int | tuple[int, int], list[float]] = {}
    for way in ways:
        simulated = [_simulated(layer, rates, way, window, again) for rates in RATES]
        peaks[way], times_ms[way] = simulated[0].peak, [each.step_ms for each in simulated]
    # For each candidate: whether it is close to the fastest, on each of the two networks.
    close = {}
    fastest_ms = [min(times) for times in zip(*times_ms.values())]
    for way, times in times_ms.items():
        close[way] = [ms <= (1 + CLOSE) * least for ms, least in zip(times, fastest_ms)]
    least_first = sorted(ways, key=peaks.__getitem__)
    default = next(way for way in least_first if close[way][0])
    fastest_first = sorted(ways, key=lambda way: times_ms[way][0])
    whole = [way for way in fastest_first if isinstance(way, int)]
    windows = [way for way in least_first if isinstance(way, tuple) and any(close[way])]
    # Where these are too many, the last are given up: first the windows that need most memory, then
    # the slowest G.
    taken = list(dict.fromkeys((default, *whole, *windows)))[: max(2, most - off)]
    candidates: list[Candidate] = [way for way in least_first if way in taken]
    # DeepSpeed's own layer needs most memory.
    if off:
        candidates.append(OFF)
    return Candidates(tuple(candidates), default)


def _simulated(
    layer: LayerShape,
    rates: Rates,
    way: int | tuple[int, int],
    window: int | None,
    again: bool,
) -> Simulation:
    """Simulate a candidate, G or (G, W), on a machine with ``rates``; others as `candidates_of`."""
    groups, few = way if isinstance(way, tuple) else (way, window)
    # Where all candidates recompute, a G without a window stands for a window of half of its groups
    # (`SpOverlapConfig.window_of`).
    if few is None and again:
        few = max(1, groups // 2)
    costs = Costs(layer, rates, groups)
    return costs.simulate(schedule_of(costs.geometry, few))
