"""Describes mixers that run on the whole sequence with some heads: delta nets, and Mamba 1.

Mamba 1 has channels instead of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention.mixer import Heads, Mixer, Parameters, Source
from ..inspect.library import names_around, own_class
from .mixers_by_states import PER_HEAD, Mamba, StandIn, convolve, itself


def _heads(x: Tensor, count: int) -> Tensor:
    """Return x as [b, s/P, count, d]; in x, heads and head dim may be flattened."""
    return x if x.dim() == 4 else x.unflatten(-1, (count, -1))


def _with_rates(v: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Append b [b, s/P, h] and a [b, s/P, h * n] to the last dim of v, [b, s/P, h, d + 1 + n]."""
    heads = b.shape[-1]
    return torch.cat([_heads(v, heads), b.unsqueeze(-1), a.unflatten(-1, (heads, -1))], -1)


class _DeltaNet(Mixer):
    """Describes a gated delta net, which has more heads of v than of q and k.

    The exchange expects at least as many heads of q as of k and v. So v is exchanged as "q", and q
    as "v". b, the input of the rate, and a, the input of the decay, are appended to v.

    Attributes:
        rule: The name of the function that computes the delta rule.
        norm_and_out: The names of the gated norm and the output projection.
    """

    late, by_heads = ["z"], "delta rule"
    rule = "torch_chunk_gated_delta_rule"
    norm_and_out = "norm", "out_proj"

    def counts(self) -> Heads:
        """Return the number of heads of v, and the number of heads of q and k."""
        return self.num_v_heads, self.num_k_heads

    def parameters(self) -> Parameters:
        """Return weight and bias of the convolution, the log decays, and the bias of a."""
        few, many = self.head_k_dim, self.head_v_dim
        return self._learned(self.layer, few, many)

    def _learned(self, gate: Any, few: int, many: int) -> Parameters:
        """Return the parameters of the convolution and of ``gate``, with their sections.

        Args:
            gate: The module with ``A_log`` and ``dt_bias``.
            few: The head dim of q and k.
            many: The head dim of v.
        """
        convolution, (heads, _) = self.conv1d, self.counts()
        channels = (("k", few), ("k", few), ("q", many))
        return [
            (convolution.weight, channels),
            (convolution.bias, channels),
            (gate.A_log.flatten(), PER_HEAD),
            (gate.dt_bias.view(heads, -1), PER_HEAD),
        ]

    def mix(self, vba: Tensor, k: Tensor, q: Tensor, *learned: Any) -> Tensor:
        """Compute the convolution and the delta rule of some heads, as in the layer's forward.

        Args:
            vba: [b, s, h', ..]. v with b and a appended (`_with_rates`).
            k: [b, s, h_k', d_k].
            q: [b, s, h_k', d_k].
            *learned: The `parameters` of these heads: the convolution's weight for the channels of
                q, k and v, [channels, 1, taps]; its bias [channels], or None; the log decay of
                each head, [h']; the bias of a, [h', ..].

        Returns:
            o [b, s, h', d_v].
        """
        taps, taps_bias, decay, bias = learned
        v, b, a = vba.split([vba.shape[-1] - 1 - bias.shape[-1], 1, bias.shape[-1]], -1)
        flat = [x.flatten(2) for x in (q, k, v)]
        joined = torch.cat(flat, -1)
        mixed = convolve(self.layer, joined, taps, taps_bias, activation=self.activation)
        parts = zip(mixed.split([x.shape[-1] for x in flat], -1), (q, k, v))
        beta = b.squeeze(-1).sigmoid()
        output, *_ = names_around(self.layer)[self.rule](
            *[x.unflatten(-1, like.shape[2:]) for x, like in parts],
            g=self._log_decay(a, decay, bias),
            beta=beta * 2.0 if getattr(self, "allow_neg_eigval", False) else beta,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )
        return output

    def _log_decay(self, a: Tensor, decay: Tensor, bias: Tensor) -> Tensor:
        """Return the logarithm of each token's decay, [b, s, h']."""
        return -decay.float().exp() * F.softplus(a.float() + bias).squeeze(-1)

    def merge(self, o: Tensor, z: Tensor) -> Tensor:
        """Apply the gated norm and the output projection to o and z [b, s/P, h, d_v]."""
        norm, out = [getattr(self, name) for name in self.norm_and_out]
        width = o.shape[-1]
        y = norm(o.reshape(-1, width), z.reshape(-1, width))
        return out(y.view(o.shape).flatten(2))


class Fused(_DeltaNet):
    """Describes Qwen3-Next's delta net, with two projections."""

    def sources(self, splits: bool) -> list[Source]:
        return [Source("qkvz", self._project)]

    def _project(self, x: Tensor) -> list[Tensor]:
        projected = self.in_proj_qkvz(x), self.in_proj_ba(x)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(*projected)
        return [_with_rates(v, b, a), k, q, z]


class Split(_DeltaNet):
    """Describes Qwen3.5's delta net, with four projections."""

    def sources(self, splits: bool) -> list[Source]:
        return [Source("qkv", self._project), Source("z", self.in_proj_z)]

    def _project(self, x: Tensor) -> list[Tensor]:
        _, few = self.counts()
        q, k, v = self.in_proj_qkv(x).split([self.key_dim, self.key_dim, self.value_dim], -1)
        rated = _with_rates(v, self.in_proj_b(x), self.in_proj_a(x))
        return [rated, _heads(k, few), _heads(q, few)]


class Separate(_DeltaNet):
    """Describes OLMo Hybrid's delta net, with a projection for each result.

    Attributes:
        decay: The names of the modules that compute the input of the decay, in the order of calls.
        gate: The names of the modules that compute the gate, in the order of calls.
    """

    decay: Sequence[str] = ["a_proj"]
    gate: Sequence[str] = ["g_proj"]
    norm_and_out = "o_norm", "o_proj"

    def sources(self, splits: bool) -> list[Source]:
        _, few = self.counts()
        return [
            Source("q", self._rated),
            Source("k", lambda x: _heads(self.k_proj(x), few)),
            Source("v", lambda x: _heads(self.q_proj(x), few)),
            Source("z", lambda x: self._through(self.gate, x)),
        ]

    def _rated(self, x: Tensor) -> Tensor:
        return _with_rates(self.v_proj(x), self.b_proj(x), self._through(self.decay, x))

    def _through(self, names: Sequence[str], x: Tensor) -> Tensor:
        for name in names:
            x = self.get_submodule(name)(x)
        return x


class Bailing(Separate):
    """Describes Bailing Hybrid's delta net: q, k and v have equal heads, each channel a decay."""

    decay = ["forget_gate.f_proj"]
    rule = "chunk_kimi_delta_attention"

    def counts(self) -> Heads:
        return self.num_heads, self.num_heads

    def parameters(self) -> Parameters:
        return self._learned(self.forget_gate, self.head_dim, self.head_dim)

    def _log_decay(self, a: Tensor, decay: Tensor, bias: Tensor) -> Tensor:
        """Return the log decay of each channel of some heads, from the forget gate's own forward.

        Args:
            a: [b, s, h', d]. The result of the gate's projections.
            decay: [h']. The gate's ``A_log`` for these heads.
            bias: [h', d]. The gate's ``dt_bias`` for these heads.
        """
        gate = self.forget_gate
        if gate.A_log.dim() == 4:
            decay = decay.view(1, 1, -1, 1)
        # ``a`` is already projected, so replace the gate's projections by identities.
        projections = dict.fromkeys(("f_a_proj", "f_b_proj", "f_proj"), itself)
        heads = dict(num_heads=len(bias), A_log=decay, dt_bias=bias.flatten())
        return StandIn(gate, **heads, **projections).run(a.flatten(2))


class Kimi(Bailing):
    """Describes Kimi Linear's delta net, with two projections each for decay and gate."""

    decay = ["forget_gate.f_a_proj", "forget_gate.f_b_proj"]
    gate = ["g_a_proj", "g_b_proj"]


class Mamba1(Mamba):
    """Describes Mamba 1, which has a decay for each channel and state; channels count as heads.

    in_proj returns x, which is convolved, and the gate z. x_proj returns the latent of dt, and B
    and C. All channels share these three.
    """

    late, by_heads = ["z"], "selective scan"

    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(("x", "z"), self.intermediate_size)

    def inputs(self) -> list[Source]:
        """Return the source of three tensors: x by channels, dt's latent, and B with C."""
        return [Source("qkv", self._project)]

    def _project(self, x: Tensor) -> list[Tensor]:
        few = self.ssm_state_size
        dt, b, c = self._latent(x).split([self.time_step_rank, few, few], -1)
        if hasattr(self, "dt_layernorm"):
            dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        return [x.unsqueeze(-1), dt, torch.cat([b, c], -1)]

    def _latent(self, x: Tensor) -> Tensor:
        return self.x_proj(x).unsqueeze(2)

    def counts(self) -> Heads:
        """Return the number of channels, and the number of heads of dt, B and C.

        Raises:
            ValueError: if the weight of dt's projection can't be cut by channels.
        """
        if own_class(type(self.dt_proj)) is not nn.Linear:
            raise ValueError(
                f"{type(self.layer).__name__}: its dt_proj is a {type(self.dt_proj).__name__}, whose "
                "weight can't be cut by channels; leave dt_proj out of the adapter or quantisation"
            )
        return self.intermediate_size, 1

    def learned(self) -> Sequence[Tensor]:
        """Return weight and bias of dt's projection, the log decays, and D: all [channels, ..]."""
        return self.dt_proj.weight, self.dt_proj.bias, self.A_log, self.D

    def mix(self, x: Tensor, dt: Tensor, bc: Tensor, *parameters: Tensor) -> Tensor:
        """Scan some channels; each head of dt, B and C serves equally many successive channels."""
        heads = dt.shape[2]
        of_heads = zip(
            x.chunk(heads, 2), dt.unbind(2), bc.unbind(2), *[p.chunk(heads) for p in parameters]
        )
        mixed = []
        for x_head, dt_head, bc_head, weight, bias, a_log, d in of_heads:
            y = names_around(self.layer)["mamba_selective_scan"](
                x_head.squeeze(-1).transpose(1, 2),
                weight @ dt_head.transpose(1, 2),
                -torch.exp(a_log.float()),
                *bc_head.transpose(1, 2).chunk(2, 1),
                D=d.float(),
                z=None,
                delta_bias=bias.float(),
                delta_softplus=True,
                use_associative_scan=self.use_associative_scan,
                use_mambapy=getattr(self, "use_mambapy", False),
            )
            mixed.append(y)
        return torch.cat(mixed, 1).transpose(1, 2).unsqueeze(-1).to(x.dtype)

    def merge(self, y: Tensor, z: Tensor) -> Tensor:
        return self.out_proj(y.squeeze(-1) * F.silu(z))


class Zamba(Mamba1):
    """Describes Zamba's Mamba 1, in which the channels of a head share dt, B and C."""

    split = ""

    def sources(self, splits: bool) -> list[Source]:
        return [Source("xz", lambda x: self.in_proj(x).unflatten(-1, (-1, 2)).unbind(-1))]

    def _latent(self, x: Tensor) -> Tensor:
        by_heads = _heads(x, self.n_mamba_heads).unsqueeze(-2)
        return (by_heads @ self.x_proj_weight.transpose(1, 2)).squeeze(-2)

    def counts(self) -> Heads:
        return self.intermediate_size, self.n_mamba_heads

    def learned(self) -> Sequence[Tensor]:
        of_heads = self.dt_proj_weight, self.dt_proj_bias, self.A_log, self.D
        return [x.flatten(0, 1) for x in of_heads]
