"""Searches for deadlocks between two communicators, by random delays of hosts and kernels.

Collectives wait on their SMs for the other ranks. If rank 0 runs a collective of one communicator,
rank 1 runs one of the other, and no rank has room for both, both wait for ever.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .constants import Gpu
from .launches import COMPUTE, Gemm, Launch, Record, Transfer, Wait
from .player import Player

WEIGHTS = "weights"
# Mean of the additional time of a launch, and range of the factor of a kernel's time.
DELAY_US, STRETCH = 30.0, (0.5, 2.0)


def with_gathers(launches: Sequence[Launch], n_bytes: int) -> list[Launch]:
    """Return the launches with those of ZeRO-3, which gathers the weights of each matrix product.

    The gather for a product is launched just before the product in front of it, over the
    communicator `WEIGHTS`, and the product waits for it.

    Args:
        launches: What the layer launches.
        n_bytes: What a rank sends in a gather.
    """
    mixed: list[Launch] = []
    # Numbers of events below 0, which the layer's own events don't have.
    event, pending = -1, None
    for launch in launches:
        if isinstance(launch, Gemm):
            if pending is not None:
                mixed.append(Wait(COMPUTE, pending))
            mixed += [Transfer(WEIGHTS, "gather", n_bytes), Record(WEIGHTS, event)]
            event, pending = event - 1, event
        mixed.append(launch)
    return mixed


def search(
    gpus: Sequence[Gpu], launches: Sequence[Sequence[Launch]], seeds: Sequence[int]
) -> dict[int, str]:
    """Return for each seed that ends in a deadlock what rank 0 waits for.

    Args:
        gpus: The GPU of each rank.
        launches: What each rank's host launches.
        seeds: Of the random delays; each is one try.
    """
    found = {}
    for seed in seeds:
        # Delays and factors of one seed come from one generator, so that a try can be repeated.
        rng = random.Random(seed)

        def delay(rank: int, rng: random.Random = rng) -> float:
            return rng.expovariate(1 / DELAY_US)

        def stretch(rank: int, rng: random.Random = rng) -> float:
            return rng.uniform(*STRETCH)

        first = Player(gpus, launches, delay, stretch).play()[0]
        if first.stuck:
            found[seed] = ", ".join(first.stuck[:3])
    return found
