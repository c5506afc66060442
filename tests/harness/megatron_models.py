"""A stand-in for Megatron-DeepSpeed's layers one after another, whose contract it keeps and whose code it does not share.

The contract (commit 4efb479d), beside that of `megatron_layers`:

- a layer is ``r = h + dropout(attention(norm(h)) + bias)``, ``r + dropout(mlp(norm(r)) + bias)``, and returns ``(hidden states, 0)``;
  or ``normed + ...`` where residuals come from behind the norms. It may drop paths;
- an MLP leaves the bias of its first linear layer to a fused activation, and may leave its last one to the layer;
- experts return three tensors;
- the layers are in a list, ``layers``, of a module that runs them one by one, or under activation checkpoints, with
  ``checkpoint_activations`` so many of them at a time as ``checkpoint_num_layers`` says, in ``_checkpointed_forward``.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness import megatron_layers
from tests.harness.megatron_layers import ColumnParallelLinear, ParallelAttention, RowParallelLinear


@dataclass(frozen=True)
class Model(megatron_layers.Shape):
    layers: int = 3
    gated: bool = False
    fused: bool = False  # activation and bias
    leaves: bool = False  # the last linear layer of an MLP its bias
    norm: str = "layer"  # or "rms"


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.eps, self.weight = 1e-5, nn.Parameter(torch.rand(width, dtype=torch.float64) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def layer_norm(width):
    norm = nn.LayerNorm(width, dtype=torch.float64)
    nn.init.normal_(norm.bias)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


class FusedGelu(torch.autograd.Function):
    """Gives the bias a gradient of every token, for autograd to add up."""

    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return F.gelu(x + bias)

    @staticmethod
    def backward(ctx, dy):
        x, bias = ctx.saved_tensors
        y = x + bias
        slope = 0.5 * (1 + torch.erf(y / math.sqrt(2))) + y * torch.exp(-y * y / 2) / math.sqrt(2 * math.pi)
        return dy * slope, dy * slope


class ParallelMLP(nn.Module):
    def __init__(self, shape):
        super().__init__()
        inner = 2 * shape.width
        self.gated, self.fused = shape.gated, shape.fused
        self.dense_h_to_4h = ColumnParallelLinear(shape.width, (2 if shape.gated else 1) * inner, shape.bias, True)
        self.dense_4h_to_h = RowParallelLinear(inner, shape.width, shape.bias, shape.leaves)

    def forward(self, hidden_states):
        x, bias = self.dense_h_to_4h(hidden_states)
        if self.fused:
            assert bias is not None
            return self.dense_4h_to_h(FusedGelu.apply(x, bias))
        x = x if bias is None else x + bias
        if self.gated:
            gate, x = x.chunk(2, -1)
            return self.dense_4h_to_h(F.silu(gate) * x)
        return self.dense_4h_to_h(F.gelu(x))


class Experts(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.expert = ParallelMLP(shape)

    def forward(self, hidden_states):
        y, bias = self.expert(hidden_states)
        return y if bias is None else y + bias, y.new_ones(()), None


class DropPath(nn.Module):
    def forward(self, x):
        return x * 0.5


class ParallelTransformerLayer(nn.Module):
    def __init__(self, shape, group, number):
        super().__init__()
        norm = RMSNorm if shape.norm == "rms" else layer_norm
        self.layer_number, self.num_experts, self.hidden_dropout = number, 1, 0.0
        self.apply_residual_connection_post_layernorm = self.fp32_residual_connection = False
        self.input_layernorm, self.post_attention_layernorm = norm(shape.width), norm(shape.width)
        self.self_attention, self.mlp, self.drop_path = ParallelAttention(shape, group, number), ParallelMLP(shape), None

    def add(self, residual, output, bias):
        output = output if bias is None else output + bias.expand_as(residual)
        output = F.dropout(output, self.hidden_dropout, self.training)
        return residual + (output if self.drop_path is None else self.drop_path(output))

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_output=None,
        enc_dec_attn_mask=None,
        inference_params=None,
        rotary_pos_emb=None,
        aggregated_moe_loss=None,
    ):
        normed = self.input_layernorm(hidden_states)
        given = {"inference_params": inference_params, "rotary_pos_emb": rotary_pos_emb}
        try:
            output, bias = self.self_attention(normed, attention_mask, **given, cpu_offloading=False)
        except TypeError:
            output, bias = self.self_attention(normed, attention_mask, **given)
        behind = self.apply_residual_connection_post_layernorm
        middle = self.add(normed if behind else hidden_states, output, bias)
        normed = self.post_attention_layernorm(middle)
        loss, bias = torch.tensor(0.0, dtype=normed.dtype), torch.tensor(0.0, dtype=normed.dtype)
        if self.num_experts == 1:
            output, bias = self.mlp(normed)
        else:
            output, loss, _ = self.mlp(normed)
        if aggregated_moe_loss is not None:
            loss += aggregated_moe_loss
        return self.add(normed if behind else middle, output, bias), loss


class ParallelTransformer(nn.Module):
    """``stops`` at a layer; a layer's hidden states go through ``between``; under ``checkpointed``, with or without reentry."""

    def __init__(self, shape, group):
        super().__init__()
        self.layers = nn.ModuleList(ParallelTransformerLayer(shape, group, number) for number in range(1, shape.layers + 1))
        self.stops, self.between, self.checkpointed = shape.layers, lambda at, x: x, None
        self.checkpoint_activations, self.checkpoint_num_layers, self.num_layers = False, 1, shape.layers

    def _get_layer(self, number):
        return self.layers[number]

    def _checkpointed_forward(
        self, hidden_states, attention_mask, encoder_output, enc_dec_attn_mask, rotary_pos_emb, first_microbatch
    ):
        losses = []
        for at in range(0, self.num_layers, self.checkpoint_num_layers):

            def run(x, at=at):
                found = []
                for number in range(at, min(at + self.checkpoint_num_layers, self.num_layers)):
                    layer = self._get_layer(number)
                    x, loss = layer(x, attention_mask, encoder_output, enc_dec_attn_mask, rotary_pos_emb=rotary_pos_emb)
                    found.append(loss)
                return x, *found

            hidden_states, *found = checkpoint(run, hidden_states, use_reentrant=True)
            losses += found
        return hidden_states, losses

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None):
        if self.checkpoint_activations:
            return self._checkpointed_forward(hidden_states, attention_mask, None, None, rotary_pos_emb, None)
        losses = []
        for at, layer in enumerate(self.layers[: self.stops]):
            if self.checkpointed is None:
                hidden_states, loss = layer(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb)
            else:
                hidden_states, loss = checkpoint(
                    lambda x, layer=layer: layer(x, attention_mask, rotary_pos_emb=rotary_pos_emb),
                    hidden_states,
                    use_reentrant=self.checkpointed == "reentrant",
                )
            losses.append(loss)
            hidden_states = self.between(at, hidden_states)
        return hidden_states, losses


def model(shape, group, seed=1):
    """Layers of random weights, alike on every rank."""
    torch.manual_seed(seed)
    return ParallelTransformer(shape, group)


def _norm(shape, weights, where, x):
    weight, bias = weights[where + "weight"], weights.get(where + "bias")
    if shape.norm == "rms":
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def _linear(weights, where, x):
    y = x @ weights[where + ".weight"].t()
    return y + weights[where + ".bias"] if where + ".bias" in weights else y


def reference(shape, weights, x, mask, tables, stops=None, between=lambda at, x: x):
    """The layers on the whole sequence, from a dict of their weights by name."""
    for at in range(shape.layers if stops is None else stops):
        where = f"layers.{at}."
        normed = _norm(shape, weights, where + "input_layernorm.", x)
        x = x + megatron_layers.reference_attention(shape, weights, normed, mask, tables, where + "self_attention.")
        y = _linear(weights, where + "mlp.dense_h_to_4h", _norm(shape, weights, where + "post_attention_layernorm.", x))
        half = y.shape[-1] // 2
        y = y[..., :half] * torch.sigmoid(y[..., :half]) * y[..., half:] if shape.gated else y * (1 + torch.erf(y / 2**0.5)) / 2
        x = between(at, x + _linear(weights, where + "mlp.dense_4h_to_h", y))
    return x
