"""Computes the longest sequence whose training step fits on a GPU, by arithmetic.

The training is ZeRO-3 in bf16 with Adam. The states of Adam are sharded over the sp group. A model
consists of equal layers, in transformers' code. Loss and MLP run in tiles, as in Arctic long
sequence training; with a window, norms run in tiles, too (``"tiles"``). `gpu.recorder` records the
memory of attention. Besides, a layer saves four tensors of the size of x: the inputs of the layer,
of attention, of the MLP's norm and of the MLP. The backward of a layer has its peak in one of these
phases; each phase also holds the layer's input and dy::

    MLP            inputs of attention, norm and MLP; tensors saved by attention; dx; one tile
    untiled norm   input of attention; tensors saved by attention; tensors that norms save and make
    attention      input of attention; all tensors of attention; tensors saved by the norm before it

The total adds the model's states; the weights of two layers, since ZeRO-3 gathers the next layer
ahead; and the gradients of these layers until they are reduced. With tiles, the gradients of the
current layer are fp32 sums. The total omits CUDA's own memory, and memory that PyTorch's allocator
reserves but does not use: the allocator frees such memory before it runs out.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .costs import LayerShape, Way
from .gpu.recorder import record

# In multiples of x: the temporaries of a tile; the tensors that a norm in bf16 without tiles saves
# besides its input; and the tensors that the norm's backward makes. The norm's tensors are fp32;
# their numbers were counted in transformers' code.
TILE, NORM_SAVES, NORM_MAKES = 0.5, 3, 9
# Bytes per parameter: 2 each for weight and gradient; 4 each for the fp32 weight and two moments.
STATES = 16
# Bytes per parameter of one layer. Without tiles: weights and gradients of two layers, in bf16.
# With tiles: weights of two layers (4); for the gradients of one layer their fp32 sums (4), the
# term being added (at most a third of an MLP), and the sums rounded to bf16 (2).
GATHERED, GATHERED_IN_TILES = 8, 12


# Tokens per rank: in the shorter sequence that `_held` records, and in one step of `longest`.
SHORT = 1024


class Model(NamedTuple):
    """Describes a model of equal layers.

    Attributes:
        layers: Number of layers.
        parameters: Number of parameters of the whole model.
    """

    layers: int
    parameters: int


def _held(layer: LayerShape, way: Way) -> tuple[int, int, int]:
    """Return the memory of the attention layer in bytes, without x, dy and weights.

    Extrapolates from two short sequences, since the memory is linear in the number of tokens, and
    this machine may not have the memory for the whole sequence.

    Returns:
        The peak of forward and backward; the peak of backward; and the bytes saved for backward.
    """
    each = layer.seq // layer.sp_size / SHORT
    seqs = SHORT * layer.sp_size, 2 * SHORT * layer.sp_size
    few, more = (record(replace(layer, seq=seq, intermediate=0), way) for seq in seqs)
    held = few.held + (each - 1) * np.subtract(more.held, few.held)
    return int(max(held)), int(max(held[few.forwards :])), int(held[few.forwards - 1])


def held_by_model(layer: LayerShape, model: Model, way: Way) -> dict[str, int]:
    """Return the peak memory of a training step on one rank, in bytes, by treatment of activations.

    The result has these keys; "keep" and "offload" only with a window:

    all kept         everything that backward reads is saved
    checkpointed     each layer's input is saved, and the layer is recomputed
    keep             o and the log-sum-exp are saved, too (``"checkpointing": "keep"``)
    inputs on host   as checkpointed, with the inputs in host memory
    offload          as keep, with all saved tensors in host memory
    """
    most, most_in_backward, waits = _held(layer, way)
    x = layer.seq // layer.sp_size * layer.batch * layer.width * layer.element_bytes
    # Subtract y, which is counted as the input of the next layer.
    waits -= x
    gathered = GATHERED_IN_TILES if way.window else GATHERED
    fixed = STATES * model.parameters // layer.sp_size
    fixed += gathered * model.parameters // model.layers
    # The tables of cos and sin of RoPE, which all layers share.
    fixed += 2 * x * layer.head_dim // layer.width
    # With a window, norms run in tiles, and save only their input.
    norm = 0 if way.window else NORM_SAVES * x
    outside = int(waits + (6 + TILE) * x)
    if norm:
        outside = max(outside, waits + 4 * x + 2 * norm + NORM_MAKES * x)
    # The peak of a recomputed layer, with dy. The layer's input is left out, since the inputs of
    # all layers are added below.
    again = max(most + 4 * x + norm, outside) - x
    found = {
        "all kept": model.layers * (waits + 4 * x + 2 * norm)
        + max(again - waits - 3 * x - norm, x),
        "checkpointed": again + model.layers * x,
        # One layer's input in use, and one on its way from the host.
        "inputs on host": again + 2 * x,
    }
    if way.window:
        # With a window, ``waits`` is the size of the saved o and log-sum-exp of a layer.
        backward = max(most_in_backward - waits + 4 * x, outside) - x
        found["keep"] = backward + model.layers * (x + waits)
        found["offload"] = backward + 2 * (x + waits)
    return {name: fixed + held_bytes for name, held_bytes in found.items()}


def longest(layer: LayerShape, model: Model, way: Way, memory: int) -> dict[str, int]:
    """Return the longest sequence whose training step fits into ``memory`` bytes.

    Returns:
        The number of tokens, a multiple of `SHORT` per rank, for each key of `held_by_model`; 0 if
        no sequence fits.
    """
    step = SHORT * layer.sp_size

    def held(steps: int) -> dict[str, int]:
        return held_by_model(replace(layer, seq=steps * step), model, way)

    return {
        name: step * bisect_right(range(1, 2**20), memory, key=lambda steps: held(steps)[name])
        for name in held(1)
    }
