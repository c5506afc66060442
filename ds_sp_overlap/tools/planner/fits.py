"""Computes the longest sequence whose training step fits on a GPU, by arithmetic.

The training is ZeRO-3 in bf16 with Adam, whose states lie over the ranks of the sp group. A model
is a number of equal layers, in transformers' code. Loss and MLP are computed in tiles, as in Arctic
long sequence training; with a window norms are, too (``"tiles"``). Beside the memory of its
attention (`memory`), a layer saves four tensors of the size of x: the inputs of the layer, of
attention, of the MLP's norm and of the MLP. A layer's backward is at its peak in one of these
phases, each with the layer's input and dy::

    MLP          inputs of attention, norm and MLP; what attention waits with; dx; a tile
    norm, whole  the input of attention; what attention waits with; what norms save and make
    attention    the input of attention; `memory`; what its norm saves

Beside it are the model's states, the weights of two layers, which ZeRO-3 gathers (one of them
ahead), and their gradients, until they are reduced; in tiles the gradients of the layer at work are
fp32 sums. Left out are CUDA itself, and memory that PyTorch's allocator reserves beyond what is
allocated, since it gives that back before it runs out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ...schedule import schedule_of
from .costs import LayerShape, Sizes
from .memory import Tensor
from .plan import BASELINE

# In sizes of x: the temporaries of a tile. What a norm in bf16 that runs whole saves beside its
# input, and what its backward makes beside that: fp32 tensors, read off transformers' code.
TILE, NORM_SAVES, NORM_MAKES = 0.5, 3, 9
# Bytes per parameter: weight and gradient of 2 each; in fp32 the weight and two moments.
STATES = 16
# Bytes per parameter of one layer: two layers' weights and gradients of 2 each. With tiles the fp32
# sums of one, their last term, which is at most a third of an MLP, and what they are rounded to.
GATHERED, GATHERED_IN_TILES = 8, 12


class Model(NamedTuple):
    """A model of equal layers.

    Attributes:
        layers: Number of layers.
        parameters: Number of parameters of the whole model.
    """

    layers: int
    parameters: int


class Way(NamedTuple):
    """Describes how a layer runs.

    Attributes:
        groups: G; 0 is DeepSpeed's own class.
        window: W; None: all groups are live.
    """

    groups: int
    window: int | None = None

    def __str__(self) -> str:
        name = f"G = {self.groups}" if self.groups else "none"
        return name if self.window is None else f"{name}, W = {self.window}"


def held_by_model(layer: LayerShape, model: Model, way: Way) -> dict[str, int]:
    """Return the most bytes of a training step on one rank, by what is done with activations.

    The keys of the result, of which only a window has "keep" and "offload":

    all kept         everything that backward reads is saved
    checkpointed     each layer's input is saved, and the layer is recomputed
    keep             o and the log-sum-exp are saved too (``"checkpointing": "keep"``); for a window
    inputs on host   as checkpointed, with the inputs in host memory
    offload          as keep, with all that is saved in host memory; for a window
    """
    sizes = Sizes(layer, max(1, way.groups))
    schedule = schedule_of(sizes.geometry, way.window) if way.groups else BASELINE
    held, forward = sizes.memory_bytes(schedule, is_baseline=not way.groups), len(schedule.forward)
    x = sizes.size(Tensor("y"))
    # What a layer saves for backward, without y, which is a term of the next layer's input.
    waits = held[forward] - x
    gathered = GATHERED if way.window is None else GATHERED_IN_TILES
    fixed = STATES * model.parameters // layer.sp_size
    fixed += gathered * model.parameters // model.layers
    # The tables of cos and sin of RoPE, which all layers share.
    fixed += 2 * x * layer.head_dim // layer.width
    # A window runs norms in tiles, which save nothing but their input.
    norm = 0 if way.window is not None else NORM_SAVES * x
    outside = int(waits + (6 + TILE) * x)
    if norm:
        outside = max(outside, waits + 4 * x + 2 * norm + NORM_MAKES * x)
    # A layer that is recomputed from its input, and dy. The inputs of all layers are added below.
    again = max(max(held) + 4 * x + norm, outside) - x
    found = {
        "all kept": model.layers * (waits + 4 * x + 2 * norm)
        + max(again - waits - 3 * x - norm, x),
        "checkpointed": again + model.layers * x,
        # One input in use, one on its way.
        "inputs on host": again + 2 * x,
    }
    if way.window is not None:
        # The kept o, and a copy of it in the layer that is recomputed.
        backward = max(max(held[forward:]) - waits + 4 * x, outside) - x
        found["keep"] = backward + model.layers * (x + waits)
        found["offload"] = backward + 2 * (x + waits)
    return {name: fixed + held_bytes for name, held_bytes in found.items()}


def longest(layer: LayerShape, model: Model, way: Way, memory: int) -> dict[str, int]:
    """Return the longest sequence whose training step fits into ``memory`` bytes.

    ``steps`` below counts multiples of 1024 tokens per rank.

    Returns:
        Tokens, in multiples of 1024 per rank, for each name of `held_by_model`; 0 where no sequence
        fits.
    """
    step = 1024 * layer.sp_size
    held = cache(lambda steps: held_by_model(replace(layer, seq=steps * step), model, way))
    found = {}
    for name in held(1):
        steps = 2**20
        # The memory of each step of a program grows by the same amount with every token. So the
        # largest of them is convex, and Newton's method converges from above.
        while steps > 1 and (over := held(steps)[name] - memory) > 0:
            steps = max(1, steps + -over // (held(steps)[name] - held(steps - 1)[name]))
        found[name] = steps * step if held(steps)[name] <= memory else 0
    return found
