"""Describes mixers that run on each rank's own tokens, given states or tokens of earlier ranks.

These are short convolutions, Mamba 2, lightning attention, RG-LRU and Zaya's projections.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.mixer import Heads, Mixer, Parameters, Sections, Source
from ..inspect.library import names_around

# The sections of a parameter with one row for each head.
PER_HEAD: Sections = (("q", 1),)


def _rows(projection: nn.Linear, sizes: Sequence[int]) -> list[Callable[[Tensor], Tensor]]:
    """Split the rows of a projection by ``sizes``; return a linear function for each part."""
    biases = [None] * len(sizes)
    if projection.bias is not None:
        biases = projection.bias.split(sizes)
    # Use ``split``: its backward concatenates the gradients of the parts in one pass.
    pairs = zip(projection.weight.split(sizes), biases)
    return [functools.partial(F.linear, weight=weight, bias=bias) for weight, bias in pairs]


def convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """Return the layer's causal convolution of x, one document [b, n, channels]."""
    function = names_around(layer)["causal_conv1d_fn"]
    return function(x.transpose(1, 2), weight.squeeze(1), bias, **options).transpose(1, 2)


class StandIn:
    """Replaces ``self`` in a module's own forward; some attributes have other values."""

    module: nn.Module

    def __init__(self, module: nn.Module, **others: Any):
        vars(self).update(others, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def run(self, *args: Any) -> Any:
        """Run the module's own forward, without decorators, on this stand-in."""
        return inspect.unwrap(type(self.module).forward)(self, *args)


def itself(x: Tensor) -> Tensor:
    """Return x; in a `StandIn`, this function replaces submodules that should not run."""
    return x


class Short(Mixer):
    """Describes a short convolution: out_proj(c * convolution(b * v)); in_proj gives b, c and v."""

    split, beside = "in_proj", ["c"]

    def sources(self, splits: bool) -> list[Source]:
        if splits:
            b, c, v = _rows(self.in_proj, [self.conv.in_channels] * 3)
            return [Source(["x"], lambda x: b(x) * v(x)), Source(["c"], c)]
        return [Source(["x", "c"], self._project)]

    def _project(self, x: Tensor) -> list[Tensor]:
        b, c, v = self.in_proj(x).chunk(3, -1)
        return [b * v, c]

    def reach(self) -> int:
        return self.conv_kernel_size - 1

    def convolve(self, x: Tensor) -> Tensor:
        return convolve(self.layer, x, self.conv.weight, self.conv.bias)

    def merge(self, y: Tensor, c: Tensor) -> Tensor:
        return self.out_proj(c * y)


class Mamba(Mixer):
    """Describes a Mamba: in_proj returns several results, one of which, x, is convolved.

    Attributes:
        sizes: Returns the widths of the results of in_proj by name, in the order of the rows.
        learned: Returns the parameters to cut by heads. Each has one row for each head.
    """

    split = "in_proj"
    sizes: Callable[[], dict[str, int]]
    learned: Callable[[], Sequence[Tensor]]

    def sources(self, splits: bool) -> list[Source]:
        names, widths = zip(*self.sizes().items())
        if splits:
            rows = _rows(self.in_proj, widths)
            return [Source([name], project) for name, project in zip(names, rows)]
        return [Source(names, lambda x: self.project_in(x).split(widths, -1))]

    def project_in(self, x: Tensor) -> Tensor:
        return self.in_proj(x)

    def reach(self) -> int:
        return self.conv_kernel_size - 1

    def convolve(self, x: Tensor) -> Tensor:
        taps = self.conv1d
        return convolve(self.layer, x, taps.weight, taps.bias, activation=self.activation)

    def parameters(self) -> Parameters:
        return [(x, PER_HEAD) for x in self.learned()]


class Mamba2(Mamba):
    """Describes Mamba 2: in_proj returns the gate z; x, B and C, which are convolved; and dt."""

    beside, late = ["dt"], ["z"]
    by_states, by_heads = True, "scan without final states"

    def sizes(self) -> dict[str, int]:
        return dict(z=self.intermediate_size, x=self.conv1d.in_channels, dt=self.num_heads)

    def learned(self) -> Sequence[Tensor]:
        """Return the log decays, D, and the bias of dt."""
        return self.A_log, self.D, self.dt_bias

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the convolution's result into x [b, n, h, d], B and C [b, n, groups, n_state]."""
        groups = self.n_groups
        few = groups * self.ssm_state_size
        inner, b, c = x.split([self.intermediate_size, few, few], -1)
        inner = inner.unflatten(-1, (self.num_heads, self.head_dim))
        return inner, b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))

    def _kernel(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *learned: Tensor, **options: Any
    ) -> Any:
        """Run the scan on some heads; ``learned`` are the parameters of these heads."""
        a_log, d, bias = learned
        options |= dict(chunk_size=self.chunk_size, dt_softplus=True)
        options |= dict(D=d, dt_bias=bias, dt_limit=self.time_step_limit)
        scan = names_around(self.layer)["mamba2_chunk_scan"]
        return scan(x, dt, -torch.exp(a_log.float()), b, c, **options)

    def scan(self, x: Tensor, dt: Tensor) -> tuple[Tensor, Any]:
        inner, b, c = self.parts(x)
        results = self._kernel(inner, dt, b, c, *self.learned(), return_final_states=True)
        return results if isinstance(results, tuple) else (results, None)

    def log_decay(self, x: Tensor, dt: Tensor) -> Tensor:
        step = F.softplus(dt.float() + self.dt_bias.float())
        step = step.clamp(*self.time_step_limit)  # guard: the step that the scan takes
        return -torch.exp(self.A_log.float()) * step

    def read(self, state: Tensor, x: Tensor, dt: Tensor) -> Tensor:
        *_, c = self.parts(x)
        grouped = state.unflatten(1, (self.n_groups, -1)).flatten(2, 3)
        y = torch.einsum("bsgn,bgqn->bsgq", c.to(state.dtype), grouped)
        return y.reshape(*y.shape[:2], self.num_heads, self.head_dim)

    def widths(self) -> list[int]:
        return [*self.sizes().values()][1:]

    def counts(self) -> Heads:
        return self.num_heads, self.n_groups

    def inputs(self, dt: Tensor) -> list[Source]:
        """Return the source of three tensors: x with dt appended to each head, B, and C."""

        def project(x: Tensor) -> list[Tensor]:
            inner, b, c = self.parts(x)
            return [torch.cat([inner, dt.unsqueeze(-1)], -1), b, c]

        return [Source("qkv", project)]

    def mix(self, x_dt: Tensor, b: Tensor, c: Tensor, *learned: Tensor) -> Tensor:
        x, dt = x_dt.split([self.head_dim, 1], -1)
        return self._kernel(x, dt.squeeze(-1), b, c, *learned)

    def merge(self, y: Tensor, dt: Tensor, z: Tensor) -> Tensor:
        y = y.flatten(2)
        y = self.norm(y, z) if getattr(self, "mamba_rms_norm", True) else y * F.silu(z)
        return self.out_proj(y.to(z.dtype))


class Falcon(Mamba2):
    """Describes the Mamba 2 of Falcon-H1, whose projections are scaled."""

    split = ""

    def project_in(self, x: Tensor) -> Tensor:
        return self.in_proj(x * self.ssm_in_multiplier) * self.mup_vector


class Lightning(Mixer):
    """Describes lightning attention; the scan runs the layer's own forward, a loop over blocks."""

    late, by_states = ["z"], True

    def sources(self, splits: bool) -> list[Source]:
        qkv = Source(["x"], lambda x: self.act_fn(self.qkv_proj(x)))
        return [qkv, Source(["z"], self.output_gate)]

    def scan(self, x: Tensor) -> tuple[Tensor, Tensor]:
        modules = dict.fromkeys(("act_fn", "qkv_proj", "norm", "out_proj"), itself)
        # For infinity, the sigmoid gate is 1. `merge` applies the true gate.
        inner = StandIn(self.layer, **modules, output_gate=lambda x: x.new_full((), float("inf")))
        y, state = inner.run(x, None, None)
        return y.unflatten(-1, (self.num_attention_heads, -1)), state

    def log_decay(self, x: Tensor) -> Tensor:
        return -self.slope_rate.float().view(1, 1, -1).expand(*x.shape[:2], -1)

    def read(self, state: Tensor, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (self.num_attention_heads, -1))[..., : self.head_dim]
        return (q.transpose(1, 2).to(state.dtype) @ state).transpose(1, 2)

    def merge(self, y: Tensor, z: Tensor) -> tuple[Tensor, None]:
        y = F.sigmoid(z) * self.norm(y.flatten(2))
        return self.out_proj(y), None


class Lru(Mixer):
    """Describes an RG-LRU: a state and a decay for each channel.

    The scan runs the own forward of the layer's RG-LRU unit, which resets the state where a
    position is 0. A `StandIn` gets the final state, which the forward would set on the unit.
    """

    late, by_states, by_positions = ["z"], True, True

    def sources(self, splits: bool) -> list[Source]:
        gate = Source("z", lambda x: self.act_fn(self.linear_y(x)))
        return [Source("x", self.linear_x), gate]

    def reach(self) -> int:
        return self.conv1d_width - 1

    def convolve(self, x: Tensor) -> Tensor:
        return self.conv_1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)

    def scan(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        unit = StandIn(self.rg_lru, recurrent_states=None)
        return unit.run(x, positions).unsqueeze(-1), unit.recurrent_states.unsqueeze(-1)

    def log_decay(self, x: Tensor, positions: Tensor) -> Tensor:
        # Take the decay that the forward passes to the scan, so that it is rounded in the same way.
        given = {"_rnn_scan": lambda recurrent_gate, **_: (recurrent_gate, None)}
        y = StandIn(self.rg_lru, recurrent_states=None, **given).run(x, positions).float()
        return y.clamp_min(torch.finfo(y.dtype).tiny).log()

    def read(self, state: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        return state.unsqueeze(1)

    def merge(self, y: Tensor, positions: Tensor, z: Tensor) -> tuple[Tensor, None]:
        return self.linear_out(y.squeeze(-1) * z), None


class Cca(Mixer):
    """Describes the projections of Zaya's compressed convolutional attention.

    The projections convolve q, k and v. The layer's own forward runs on this rank's tokens and a
    few tokens before them. Half of each head of v comes from the previous token.
    """

    def sources(self, splits: bool) -> list[Source]:
        return [Source("x", itself)]

    def reach(self) -> int:
        return max(1, self.conv_kernel_size)

    def convolve(self, x: Tensor) -> Tensor:
        return torch.cat([y.flatten(2) for y in StandIn(self.layer).run(x, None)], -1)

    def merge(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v [b, s/P, heads, d]."""
        heads, few = self.num_attention_heads, self.num_key_value_heads
        return y.unflatten(-1, (-1, self.head_dim)).split([heads, few, few], 2)
