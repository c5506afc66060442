"""Computes the longest sequence whose training step fits on a GPU, by arithmetic.

The training is ZeRO-3 in bf16 with Adam, whose states lie over the ranks of the sp group. A model
is a number of equal layers, in transformers' code. Loss and MLP are computed in tiles, as in Arctic
long sequence training; with a window norms are, too (``"tiles"``). Beside the memory of its
attention, which is recorded, a layer saves four tensors of the size of x: the inputs of the layer,
of attention, of the MLP's norm and of the MLP. A layer's backward is at its peak in one of these
phases, each with the layer's input and dy::

    MLP          inputs of attention, norm and MLP; what attention waits with; dx; a tile
    norm, whole  the input of attention; what attention waits with; what norms save and make
    attention    the input of attention; what it has in memory; what its norm saves

Beside it are the model's states, the weights of two layers, which ZeRO-3 gathers (one of them
ahead), and their gradients, until they are reduced; in tiles the gradients of the layer at work are
fp32 sums. Left out are CUDA itself, and memory that PyTorch's allocator reserves beyond what is
allocated, since it gives that back before it runs out.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .costs import LayerShape, Way
from .gpu.recorder import record

# In sizes of x: the temporaries of a tile. What a norm in bf16 that runs whole saves beside its
# input, and what its backward makes beside that: fp32 tensors, read off transformers' code.
TILE, NORM_SAVES, NORM_MAKES = 0.5, 3, 9
# Bytes per parameter: weight and gradient of 2 each; in fp32 the weight and two moments.
STATES = 16
# Bytes per parameter of one layer: two layers' weights and gradients of 2 each. With tiles the fp32
# sums of one, their last term, which is at most a third of an MLP, and what they are rounded to.
GATHERED, GATHERED_IN_TILES = 8, 12


# Tokens per rank of the sequences that are recorded.
SHORT = 1024


class Model(NamedTuple):
    """A model of equal layers.

    Attributes:
        layers: Number of layers.
        parameters: Number of parameters of the whole model.
    """

    layers: int
    parameters: int


def _held(layer: LayerShape, way: Way) -> tuple[int, int, int]:
    """Return three numbers of bytes of the attention layer, without x, dy and weights.

    The most that it has in memory; the most in backward; and what it saves for backward. All grow by
    the same amount with every token, so that two short sequences tell of longer ones, for which
    there may be no memory here.
    """
    each = layer.seq // layer.sp_size / SHORT
    seqs = SHORT * layer.sp_size, 2 * SHORT * layer.sp_size
    few, more = (record(replace(layer, seq=seq, intermediate=0), way) for seq in seqs)
    held = few.held + (each - 1) * np.subtract(more.held, few.held)
    return int(max(held)), int(max(held[few.forwards :])), int(held[few.forwards - 1])


def held_by_model(layer: LayerShape, model: Model, way: Way) -> dict[str, int]:
    """Return the most bytes of a training step on one rank, by what is done with activations.

    The keys of the result, of which only a window has "keep" and "offload":

    all kept         everything that backward reads is saved
    checkpointed     each layer's input is saved, and the layer is recomputed
    keep             o and the log-sum-exp are saved too (``"checkpointing": "keep"``); for a window
    inputs on host   as checkpointed, with the inputs in host memory
    offload          as keep, with all that is saved in host memory; for a window
    """
    most, most_in_backward, waits = _held(layer, way)
    x = layer.seq // layer.sp_size * layer.batch * layer.width * layer.element_bytes
    # Without y, which is a term of the next layer's input.
    waits -= x
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
    again = max(most + 4 * x + norm, outside) - x
    found = {
        "all kept": model.layers * (waits + 4 * x + 2 * norm)
        + max(again - waits - 3 * x - norm, x),
        "checkpointed": again + model.layers * x,
        # One input in use, one on its way.
        "inputs on host": again + 2 * x,
    }
    if way.window is not None:
        # The kept o, and a copy of it in the layer that is recomputed.
        backward = max(most_in_backward - waits + 4 * x, outside) - x
        found["keep"] = backward + model.layers * (x + waits)
        found["offload"] = backward + 2 * (x + waits)
    return {name: fixed + held_bytes for name, held_bytes in found.items()}


def longest(layer: LayerShape, model: Model, way: Way, memory: int) -> dict[str, int]:
    """Return the longest sequence whose training step fits into ``memory`` bytes.

    Returns:
        Tokens, in multiples of `SHORT` per rank, for each name of `held_by_model`; 0 where no sequence
        fits.
    """
    step = SHORT * layer.sp_size

    def held(steps: int) -> dict[str, int]:
        return held_by_model(replace(layer, seq=steps * step), model, way)

    steps = range(1, 2**20)
    return {
        name: step * bisect_right(steps, memory, key=lambda n: held(n)[name]) for name in held(1)
    }
