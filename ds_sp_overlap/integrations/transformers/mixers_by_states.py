"""Mixers that work on each rank's own tokens: short convolutions, Mamba 2, lightning attention, RG-LRU."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.mixer import ByHeads, Mixer, Sections, Source, States
from ..inspect.library import names_around

# Of a parameter with a row for each head.
PER_HEAD: Sections = (("q", 1),)


def _rows(projection: nn.Linear, sizes: Sequence[int]) -> list[Callable[[Tensor], Tensor]]:
    """Return for each run of rows of a projection the function of x that computes it."""
    biases: Sequence[Tensor | None] = [None] * len(sizes)
    if projection.bias is not None:
        biases = projection.bias.split(sizes)
    # The gradients of the rows are joined in one pass.
    pairs = zip(projection.weight.split(sizes), biases)
    return [functools.partial(F.linear, weight=weight, bias=bias) for weight, bias in pairs]


def in_proj_parts(layer: Any, splits: bool, names: list[str], sizes: list[int]) -> list[Source]:
    """Return the sources of the results of ``in_proj`` that lie end to end."""
    if splits:
        rows = _rows(layer.in_proj, sizes)
        return [Source([name], project) for name, project in zip(names, rows)]
    return [Source(names, lambda x: layer.in_proj(x).split(sizes, -1))]


def convolve(child: str, activation: str, layer: Any, x: Tensor) -> Tensor:
    """Return the causal convolution of one document [b, n, channels]."""
    convolution, function = getattr(layer, child), names_around(layer)["causal_conv1d_fn"]
    weight, channels_first = convolution.weight.squeeze(1), x.transpose(1, 2)
    options = dict(activation=getattr(layer, activation)) if activation else {}
    return function(channels_first, weight, convolution.bias, **options).transpose(1, 2)


def reach(layer: Any) -> int:
    """Return how many tokens before a token its convolution needs."""
    return layer.conv_kernel_size - 1


# Short convolutions: out_proj(c * convolution(b * v)), where in_proj gives b, c and v.


def _short_sources(layer: Any, splits: bool) -> list[Source]:
    if splits:
        b, c, v = _rows(layer.in_proj, [layer.conv.in_channels] * 3)
        return [Source(["x"], lambda x: b(x) * v(x)), Source(["c"], c)]

    def whole(x: Tensor) -> list[Tensor]:
        b, c, v = layer.in_proj(x).chunk(3, -1)
        return [b * v, c]

    return [Source(["x", "c"], whole)]


SHORT = Mixer(
    sources=_short_sources,
    merge=lambda layer, y, given: layer.out_proj(given["c"] * y),
    beside=["c"],
    reach=reach,
    convolve=functools.partial(convolve, "conv", ""),
    split=["in_proj"],
)

# Mamba 2: in_proj gives the gate z; x, B and C, which are convolved; and dt.


def _mamba2_sizes(layer: Any) -> list[int]:
    return [layer.intermediate_size, layer.conv1d.in_channels, layer.num_heads]


def _mamba2_sources(layer: Any, splits: bool) -> list[Source]:
    return in_proj_parts(layer, splits, ["z", "x", "dt"], _mamba2_sizes(layer))


def _falcon_sources(layer: Any, splits: bool) -> list[Source]:
    """Return the projections of a Mamba 2 of Falcon-H1, which are scaled."""

    def scaled(x: Tensor) -> Sequence[Tensor]:
        y = layer.in_proj(x * layer.ssm_in_multiplier) * layer.mup_vector
        return y.split(_mamba2_sizes(layer), -1)

    return [Source(["z", "x", "dt"], scaled)]


def _mamba2_parts(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [b, n, h, d], B and C [b, n, groups, n_state] of the convolution's result."""
    few = layer.n_groups * layer.ssm_state_size
    inner, b, c = x.split([layer.intermediate_size, few, few], -1)
    b, c = (y.unflatten(-1, (layer.n_groups, layer.ssm_state_size)) for y in (b, c))
    return inner.unflatten(-1, (layer.num_heads, layer.head_dim)), b, c


def _mamba2_kernel(
    layer: Any, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *learned: Tensor, **options: Any
) -> Any:
    """Run the kernel on some heads; ``learned`` are their decays, D, and what is added to dt."""
    a_log, d, bias = learned
    return names_around(layer)["mamba2_chunk_scan"](
        x,
        dt,
        -torch.exp(a_log.float()),
        b,
        c,
        chunk_size=layer.chunk_size,
        D=d,
        dt_bias=bias,
        dt_softplus=True,
        dt_limit=layer.time_step_limit,
        **options,
    )


def _mamba2_scan(layer: Any, x: Tensor, dt: Tensor) -> tuple[Tensor, Any]:
    inner, b, c = _mamba2_parts(layer, x)
    learned = layer.A_log, layer.D, layer.dt_bias
    results = _mamba2_kernel(layer, inner, dt, b, c, *learned, return_final_states=True)
    return results if isinstance(results, tuple) else (results, None)


def _mamba2_log_decay(layer: Any, x: Tensor, dt: Tensor) -> Tensor:
    step = F.softplus(dt.float() + layer.dt_bias.float())
    step = step.clamp(*layer.time_step_limit)  # guard: the step that the scan takes
    return -torch.exp(layer.A_log.float()) * step


def _mamba2_read(layer: Any, state: Tensor, x: Tensor, dt: Tensor) -> Tensor:
    *_, c = _mamba2_parts(layer, x)
    grouped = state.unflatten(1, (layer.n_groups, -1)).flatten(2, 3)
    y = torch.einsum("bsgn,bgqn->bsgq", c.to(state.dtype), grouped)
    return y.reshape(*y.shape[:2], layer.num_heads, layer.head_dim)


def _mamba2_merge(layer: Any, y: Tensor, given: dict[str, Tensor]) -> Tensor:
    z, y = given["z"], y.flatten(2)
    y = layer.norm(y, z) if getattr(layer, "mamba_rms_norm", True) else y * F.silu(z)
    return layer.out_proj(y.to(z.dtype))


def _mamba2_inputs(layer: Any, given: dict[str, Tensor]) -> list[Source]:
    """Return the source of x, with dt behind each head; of B; and of C."""

    def project(x: Tensor) -> list[Tensor]:
        inner, b, c = _mamba2_parts(layer, x)
        return [torch.cat([inner, given["dt"].unsqueeze(-1)], -1), b, c]

    return [Source("qkv", project)]


def _mamba2_of_heads(layer: Any, x_dt: Tensor, b: Tensor, c: Tensor, *learned: Tensor) -> Tensor:
    x, dt = x_dt.split([layer.head_dim, 1], -1)
    return _mamba2_kernel(layer, x, dt.squeeze(-1), b, c, *learned)


MAMBA2 = Mixer(
    sources=_mamba2_sources,
    merge=_mamba2_merge,
    beside=["dt"],
    late=["z"],
    reach=reach,
    convolve=functools.partial(convolve, "conv1d", "activation"),
    states=States(
        _mamba2_scan, _mamba2_log_decay, _mamba2_read, lambda layer: _mamba2_sizes(layer)[1:]
    ),
    heads=ByHeads(
        "scan without final states",
        lambda layer: (layer.num_heads, layer.n_groups),
        _mamba2_of_heads,
        lambda layer: [(x, PER_HEAD) for x in (layer.A_log, layer.D, layer.dt_bias)],
        _mamba2_inputs,
    ),
    split=["in_proj"],
)
FALCON = dataclasses.replace(MAMBA2, sources=_falcon_sources, split=[])

# Lightning attention: the loop over blocks stands in the forward, which also returns the state.


def _itself(x: Tensor) -> Tensor:
    """Stand in for a module of a forward that is called for what it does between its modules."""
    return x


def _open(x: Tensor) -> Tensor:
    """Stand in for the projection of a gate, so that the gate is 1."""
    return x.new_full((), float("inf"))


def _lightning_scan(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    names = ("block_size", "head_dim", "num_attention_heads", "slope_rate", "query_decay")
    known = {name: getattr(layer, name) for name in (*names, "key_decay", "diagonal_decay")}
    modules = dict.fromkeys(("act_fn", "qkv_proj", "norm", "out_proj"), _itself)
    inner = types.SimpleNamespace(**known, **modules, output_gate=_open)
    y, state = inspect.unwrap(type(layer).forward)(inner, x, None, None)
    return y.unflatten(-1, (layer.num_attention_heads, -1)), state


def _lightning_log_decay(layer: Any, x: Tensor) -> Tensor:
    return -layer.slope_rate.float().view(1, 1, -1).expand(*x.shape[:2], -1)


def _lightning_read(layer: Any, state: Tensor, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (layer.num_attention_heads, -1))[..., : layer.head_dim]
    return (q.transpose(1, 2).to(state.dtype) @ state).transpose(1, 2)


def _lightning_merge(layer: Any, y: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, None]:
    return layer.out_proj(F.sigmoid(given["z"]) * layer.norm(y.flatten(2))), None


LIGHTNING = Mixer(
    sources=lambda layer, splits: [
        Source(["x"], lambda x: layer.act_fn(layer.qkv_proj(x))),
        Source(["z"], layer.output_gate),
    ],
    merge=_lightning_merge,
    late=["z"],
    states=States(_lightning_scan, _lightning_log_decay, _lightning_read),
)

# RG-LRU: a state and a decay for each channel. The unit's own forward runs, with a stand-in for the
# unit, for the state; it starts the document anew where a position is 0.

_UNIT = (
    "num_attention_heads", "block_width", "recurrent_param", "input_gate_weight", "input_gate_bias",
    "recurrent_gate_weight", "recurrent_gate_bias",
)  # fmt: skip


def _lru(layer: Any, x: Tensor, positions: Tensor, scan: Callable[..., Any]) -> tuple[Tensor, Any]:
    """Run the forward of the unit around ``scan``; return both of its results."""
    unit = types.SimpleNamespace(**{name: getattr(layer.rg_lru, name) for name in _UNIT})
    unit.recurrent_states, unit._rnn_scan = None, functools.partial(scan, unit)
    y = inspect.unwrap(type(layer.rg_lru).forward)(unit, x, positions)
    return y.unsqueeze(-1), unit.recurrent_states


def _lru_scan(layer: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    y, state = _lru(layer, x, positions, type(layer.rg_lru)._rnn_scan)
    return y, state.unsqueeze(-1)


def _lru_log_decay(layer: Any, x: Tensor, positions: Tensor) -> Tensor:
    def decay(unit: Any, recurrent_gate: Tensor, **_: Any) -> tuple[Tensor, None]:
        return recurrent_gate, None

    # The decay that the scan uses, rounded as it is there.
    y = _lru(layer, x, positions, decay)[0].squeeze(-1).float()
    return y.clamp_min(torch.finfo(y.dtype).tiny).log()


def _lru_convolve(layer: Any, x: Tensor) -> Tensor:
    return layer.conv_1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


LRU = Mixer(
    sources=lambda layer, splits: [
        Source("x", layer.linear_x),
        Source("z", lambda x: layer.act_fn(layer.linear_y(x))),
    ],
    merge=lambda layer, y, given: (layer.linear_out(y.squeeze(-1) * given["z"]), None),
    late=["z"],
    reach=lambda layer: layer.conv1d_width - 1,
    convolve=_lru_convolve,
    states=States(_lru_scan, _lru_log_decay, lambda layer, state, x, positions: state.unsqueeze(1)),
    by_positions=True,
)

# Zaya's compressed convolutional attention makes q, k and v of a few tokens: its own forward runs on
# them. v has half of each head from the token before.


def _cca(layer: Any, x: Tensor) -> Tensor:
    results = inspect.unwrap(type(layer).forward)(layer, x, None)
    return torch.cat([y.flatten(2) for y in results], -1)


def _cca_merge(layer: Any, y: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return q, k and v [b, s/P, heads, d]."""
    heads, few = layer.num_attention_heads, layer.num_key_value_heads
    return y.unflatten(-1, (-1, layer.head_dim)).split([heads, few, few], 2)


CCA = Mixer(
    sources=lambda layer, splits: [Source("x", lambda x: x)],
    merge=_cca_merge,
    reach=lambda layer: max(1, layer.conv_kernel_size),
    convolve=_cca,
)
