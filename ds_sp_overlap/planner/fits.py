"""The longest sequence whose training step fits on a GPU, by arithmetic.

ZeRO-3 in bf16 with Adam, states over the ranks of the sp group. A model is equal layers; loss and MLP are computed in tiles, as Arctic
long sequence training does, and hold nothing to speak of. Beside what `schedule.held` says of its attention, a layer holds four
tensors of the size of x: its input, the input of attention, that of the MLP's norm, that of the MLP.

What it leaves out: weights that are gathered ahead, buffers of reductions, memory in pieces too small to use, CUDA itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ..autotune.costs import LayerShape, Sizes, schedule_of
from ..schedule import Tensor
from .plan import NONE

STATES = 16  # bytes a parameter: weight and gradient of 2; in fp32 the weight and two moments


class Model(NamedTuple):
    layers: int
    parameters: int


class Way(NamedTuple):
    """How a layer runs: in how many groups and which window; 0 groups are DeepSpeed's class."""

    groups: int
    window: int | None = None

    def __str__(self) -> str:
        name = f"G = {self.groups}" if self.groups else "none"
        return name if self.window is None else f"{name}, W = {self.window}"


def held_by_model(layer: LayerShape, model: Model, way: Way) -> dict[str, int]:
    """Most bytes of a training step on one rank, by what is done with activations.

    all kept         all that backward reads is kept
    checkpointed     each layer's input is kept, and the layer computed again
    keep             o and the log-sum-exp too (``"checkpointing": "keep"``); for a window
    inputs on host   checkpointed, and the inputs in host memory
    offload          o and the log-sum-exp too; for a window
    """
    sizes = Sizes(layer, max(1, way.groups))
    schedule = schedule_of(sizes.geometry, way.window) if way.groups else NONE
    held, forward = sizes.held(schedule, is_stock=not way.groups), len(schedule.forward)
    x = sizes.size(Tensor("y"))
    waits = held[forward] - x  # without y, which is a term of the next layer's input
    states = STATES * model.parameters // layer.sp_size
    again = states + max(held) + 4 * x  # a layer from its input, which comes on top; and dy
    found = {
        "all kept": states + model.layers * (waits + 4 * x) + max(held) - waits + x,
        "checkpointed": again + model.layers * x,
        "inputs on host": again + 2 * x,  # one in use, one on its way
    }
    if way.window is not None:
        backward = states + max(held[forward:]) - waits + 4 * x
        found["keep"] = backward + model.layers * (x + waits)
        found["offload"] = backward + 2 * (x + waits)
    return found


def longest(layer: LayerShape, model: Model, way: Way, memory: int) -> dict[str, int]:
    """Tokens of the longest sequence that ``memory`` bytes hold, in multiples of 1024 a rank, for each of those; 0 where none does."""
    step = 1024 * layer.sp_size
    held = cache(lambda steps: held_by_model(replace(layer, seq=steps * step), model, way))
    found = {}
    for name in held(1):
        steps = 2**20
        # Each step of a program holds as much more with every token as with the last: the most of them is convex, Newton comes from above.
        while steps > 1 and (over := held(steps)[name] - memory) > 0:
            steps = max(1, steps + -over // (held(steps)[name] - held(steps - 1)[name]))
        found[name] = steps * step if held(steps)[name] <= memory else 0
    return found
