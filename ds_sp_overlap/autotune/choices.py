"""What ``"memory": "auto"`` tries: windows that are predicted to take no longer than the fastest, those that hold least first.

Predicted is with two sets of rates: those of a GPU that reaches the others through a network card, and those of a wire that costs
nothing. Nothing is measured for it: rates that ranks measured would differ, and data-parallel replicas, which have to try the same,
can't ask one another before their first step. What is left out by mistake is a window that would be exposed on either; what is
tried by mistake is measured, and not kept. Most depends on what needs no rates: how long attention is beside the projections, that
a window computes once more in backward.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .costs import WINDOWS, Costs, LayerShape, Rates, schedule_of
from .trial import CLOSE, GROUPS, OFF, Candidate

RATES = (Rates(600e12, 500e12, 45e9), Rates(600e12, 500e12, float("inf"), 0.0))


class Tried(NamedTuple):
    """
    candidates   those that hold less before those that hold more
    default      what holds least of those that are predicted to take no longer than the fastest
    """

    candidates: tuple[Candidate, ...]
    default: Candidate


@lru_cache(maxsize=4096)
def tried(layer: LayerShape, groups: int | None, window: int | None, again: bool, off: bool, most: int) -> Tried:
    """What to try for a layer.

    groups, window   G and W, where they are given
    again            every layer makes q, k and v again in backward, in a window of half its groups if in no other (`window_of`)
    off              DeepSpeed's own is possible; it holds most
    most             so many candidates
    """
    possible = range(1, layer.geometry(1).max_groups + 1)
    ways: list[int | tuple[int, int]]
    if groups is not None:
        ways = [groups, *((groups, few) for few in (1, 2) if few < groups and window is None)]
    elif window is not None:
        ways = [each for each in (*GROUPS, 8) if each in possible]
    else:
        ways = [each for each in GROUPS if each in possible] + [way for way in WINDOWS if way[0] in possible]
    found = {}
    for way in ways:
        each, few = way if isinstance(way, tuple) else (way, window or (max(1, way // 2) if again else None))
        played = [of.played(schedule_of(of.geometry, few)) for of in (Costs(layer, rates, each) for rates in RATES)]
        found[way] = played[0].peak, [of.step_ms for of in played]
    fastest = [min(times) for times in zip(*(times for _, times in found.values()))]
    near = {way: [ms <= (1 + CLOSE) * least for ms, least in zip(times, fastest)] for way, (_, times) in found.items()}
    least_first = sorted(found, key=lambda way: found[way][0])
    default = next(way for way in least_first if near[way][0])
    whole = sorted((way for way in ways if isinstance(way, int)), key=lambda way: found[way][1][0])  # the fastest first
    few_held = [way for way in least_first if way not in whole and any(near[way])]
    taken = list(dict.fromkeys((default, *whole, *few_held)))[: max(2, most - off)]
    return Tried((*(way for way in least_first if way in taken), *((OFF,) if off else ())), default)
