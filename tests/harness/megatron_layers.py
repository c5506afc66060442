"""Stands in for the attention layer of Megatron-DeepSpeed, with the same contract and other code.

The contract is that of commit 4efb479d; FORK marks the changes of pull request 415:

- hidden states are [s/P, b, m]; the layer returns ``(output, bias)``, and its caller adds the bias;
- the layer makes, in this order: ``query_key_value`` (rows [all q | all k | all v]; FORK: ``query_linear``, ``key_linear``,
  ``value_linear``), ``dist_attn`` around the local attention, ``dense`` (which leaves its bias to the caller);
- linear layers return ``(output, bias or None)``;
- flash attention takes and returns [b, s, h, d]; Triton's takes [s, b, h, d] and returns [s, b, h d]; core attention takes
  [s, b, h, d] and a mask that is True for hidden tokens, needs as many KV heads as query heads, gets its width in the
  constructor, and returns [s, b, h d];
- the caller tries ``forward(hidden_states, attention_mask, encoder_output=None, inference_params=None, rotary_pos_emb=None)``
  with ``cpu_offloading=`` first, and without this keyword after a TypeError;
- rotary_pos_emb is None or (cos, sin), each [s, 1, 1, d], for the whole sequence, even if it is applied to a slice.
"""

import math
from dataclasses import dataclass, field

import torch
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

import ds_sp_overlap
from ds_sp_overlap.integrations.inspect.library import digest
from ds_sp_overlap.integrations.megatron import source
from tests.harness import reference
from tests.harness.layers import backward, faults, gradients

NAMES = {"q": "query_linear", "k": "key_linear", "v": "value_linear"}


class _Linear(nn.Module):
    def __init__(self, m, n, bias, skip_bias_add):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, m, dtype=torch.float64) / math.sqrt(m))
        self.bias = nn.Parameter(torch.randn(n, dtype=torch.float64)) if bias else None
        self.skip_bias_add, self.sequence_parallel = skip_bias_add, False

    def compute(self, x):
        y = x @ self.weight.t()
        if self.skip_bias_add or self.bias is None:
            return y, self.bias if self.skip_bias_add else None
        return y + self.bias, None


class ColumnParallelLinear(_Linear):
    def forward(self, input_, weight=None):
        return self.compute(input_)


class RowParallelLinear(_Linear):
    def forward(self, input_):
        return self.compute(input_)


class Flash(nn.Module):
    def __init__(self):
        super().__init__()
        self.flash_attn_func = flash_attn_varlen_func

    def forward(self, q, k, v):
        return self.flash_attn_func(q, k, v)


class OldFlash(Flash):
    """Flash attention 1, which has no grouped queries."""

    def __init__(self):
        super().__init__()
        self.flash_attn_func = flash_attn_unpadded_func


class Triton(nn.Module):
    def forward(self, q, k, v):
        return flash_attn_unpadded_func(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1).flatten(2)


class Core(nn.Module):
    def __init__(self, heads, head_dim, sp_size):
        super().__init__()
        self.hidden_size_per_partition = heads * head_dim // sp_size

    def forward(self, query_layer, key_layer, value_layer, attention_mask):
        if query_layer.shape != key_layer.shape:
            raise RuntimeError(f"core attention: query {list(query_layer.shape)}, key {list(key_layer.shape)}")
        s, b, h, d = query_layer.shape
        q, k, v = (x.view(s, b * h, d).transpose(0, 1) for x in (query_layer, key_layer, value_layer))
        scores = (q @ k.transpose(1, 2) / math.sqrt(d)).view(b, h, s, s).masked_fill(attention_mask, -math.inf)
        o = scores.softmax(-1).view(b * h, s, s) @ v
        return o.transpose(0, 1).reshape(s, b, h * d).view(s, b, self.hidden_size_per_partition)


def flash_attn_varlen_func(q, k, v):
    return reference.attention(q, k, v)


def flash_attn_unpadded_func(q, k, v):
    if q.shape != k.shape:
        raise RuntimeError(f"flash attention 1: query {list(q.shape)}, key {list(k.shape)}")
    return reference.attention(q, k, v)


@dataclass(frozen=True)
class Shape:
    attention: str = "flash"  # or "flash v1", "triton", "core"
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    batch: int = 2
    seq: int = 12  # length of the whole sequence
    rope: bool = True
    bias: bool = True
    split: bool = False  # FORK
    config: dict = field(default_factory=dict, hash=False)

    @property
    def width(self):
        return self.heads * self.head_dim


class ParallelAttention(nn.Module):
    def __init__(self, shape, group, layer_number=1):
        super().__init__()
        sp_size = torch.distributed.get_world_size(group)
        self.layer_number, self.sequence_parallel = layer_number, False
        self.num_attention_heads = self.num_attention_heads_per_partition = shape.heads
        self.num_key_value_heads, self.hidden_size_per_attention_head = shape.kv_heads, shape.head_dim
        self.use_flash_attn, self.use_flash_attn_triton = shape.attention != "core", shape.attention == "triton"
        rows = {"q": shape.width, "k": shape.kv_heads * shape.head_dim, "v": shape.kv_heads * shape.head_dim}
        if shape.split:
            for kind, n in rows.items():
                setattr(self, NAMES[kind], ColumnParallelLinear(shape.width, n, shape.bias, False))
        else:
            self.query_key_value = ColumnParallelLinear(shape.width, sum(rows.values()), shape.bias, False)
        local = {"flash": Flash, "flash v1": OldFlash, "triton": Triton}.get(shape.attention)
        local = local() if local else Core(shape.heads, shape.head_dim, sp_size)
        self.dist_attn = DistributedAttention(local, group, gather_idx=1 if shape.attention.startswith("flash") else 0)
        self.dense = RowParallelLinear(shape.width, shape.width, shape.bias, True)

    def heads_of(self, hidden_states):
        """Return q, k and v. As in HEAD of Megatron-DeepSpeed, the numbers of query heads and KV heads must be equal."""
        assert self.num_attention_heads == self.num_key_value_heads
        if hasattr(self, "query_linear"):
            made = [getattr(self, name)(hidden_states)[0] for name in ("query_linear", "key_linear", "value_linear")]
            return [x.unflatten(-1, (self.num_attention_heads, -1)) for x in made]
        return self.query_key_value(hidden_states)[0].unflatten(-1, (3, self.num_attention_heads, -1)).unbind(2)

    def forward(self, hidden_states, attention_mask, encoder_output=None, inference_params=None, rotary_pos_emb=None):
        """Compute as HEAD of Megatron-DeepSpeed does, with its two faults.

        The numbers of query heads and KV heads must be equal. For core attention, the mask is passed in place of batch_dim_idx.
        """
        return self.attend(*self.heads_of(hidden_states), attention_mask, rotary_pos_emb)

    def attend(self, q, k, v, attention_mask, rotary_pos_emb):
        if not self.use_flash_attn:
            context = self.dist_attn(q, k, v, attention_mask)
        elif self.use_flash_attn_triton:
            context = self.dist_attn(q, k, v, 1, rotary_pos_emb=rotary_pos_emb)
        else:
            q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
            context = self.dist_attn(q, k, v, 0, rotary_pos_emb=rotary_pos_emb).transpose(0, 1).flatten(2)
        return self.dense(context)


# The package recognises Megatron's layers by a digest of their source. Register the digests of these layers, too.
source.PARTS += ("heads_of", "attend")
source.KNOWN.add(digest(ParallelAttention, *source.PARTS))
source.KNOWN_LINEAR.update(digest(kind, "forward") for kind in (ColumnParallelLinear, RowParallelLinear))


class ParallelTransformerLayer(nn.Module):
    """Calls attention as Megatron does: tries ``cpu_offloading=`` first, and adds the bias and the residual."""

    def __init__(self, shape, group, attention=ParallelAttention):
        super().__init__()
        self.self_attention = attention(shape, group)

    def forward(self, x, mask, tables):
        given = {"inference_params": None, "rotary_pos_emb": tables}
        try:
            output, bias = self.self_attention(x, mask, **given, cpu_offloading=False)
        except TypeError:
            output, bias = self.self_attention(x, mask, **given)
        return x + output if bias is None else x + (output + bias)


def layer(shape, group, seed=1):
    """Make a layer with random weights, equal on every rank."""
    torch.manual_seed(seed)
    return ParallelTransformerLayer(shape, group)


def inputs(shape, seed=2):
    """Draw hidden states and a cotangent [s, b, m], and a mask [b, 1, s, s]; return them with (cos, sin), or None without RoPE.

    The mask never hides a token from itself.
    """
    torch.manual_seed(seed)
    x, dy = torch.randn(2, shape.seq, shape.batch, shape.width, dtype=torch.float64)
    mask = (torch.rand(shape.batch, 1, shape.seq, shape.seq) < 0.3) & ~torch.eye(shape.seq, dtype=torch.bool)
    tables = reference.rope_tables(torch.arange(shape.seq), shape.head_dim, torch.float64) if shape.rope else None
    return x, dy, mask, tables and tuple(table[:, None, None] for table in tables)


def reference_attention(shape, weights, x, mask, tables, where="self_attention."):
    """Return the attention layer's output on the whole sequence, without the residual; ``weights`` is {name: tensor}."""
    pick = lambda name: weights[where + name]  # noqa: E731
    names = list(NAMES.values()) if shape.split else ["query_key_value"]
    y = x @ torch.cat([pick(f"{name}.weight") for name in names]).t()
    if shape.bias:
        y = y + torch.cat([pick(f"{name}.bias") for name in names])
    kv = shape.kv_heads * shape.head_dim
    q, k, v = (t.unflatten(-1, (-1, shape.head_dim)).transpose(0, 1) for t in y.split((shape.width, kv, kv), -1))
    if tables:
        cos, sin = (table[:, 0, 0] for table in tables)
        q, k = reference.rope(q, cos, sin), reference.rope(k, cos, sin)
    if shape.attention == "core":
        k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(shape.head_dim)
        o = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(mask, -math.inf).softmax(-1), v)
    else:
        o = reference.attention(q, k, v)
    o = o.transpose(0, 1).flatten(2) @ pick("dense.weight").t()
    return o + (pick("dense.bias") if shape.bias else 0)


def reference_layer(shape, weights, x, mask, tables):
    """Return the output of the layer on the whole sequence; ``weights`` is {name: tensor}."""
    return x + reference_attention(shape, weights, x, mask, tables)


def layer_faults(rank, shape, use=backward, overlap=True, tolerance=1e-12):
    """List the results on this rank in which the layer differs from the reference, as `layers.block_faults` does."""
    group = torch.distributed.group.WORLD
    mine = layer(shape, group)
    weights = {name: p.detach().clone().requires_grad_() for name, p in mine.named_parameters()}
    x, dy, mask, tables = inputs(shape)
    expected = use(lambda x: reference_layer(shape, weights, x, mask, tables), None, x.clone().requires_grad_(), dy)
    if overlap:
        ds_sp_overlap.enable(mine, shape.config)
    size = torch.distributed.get_world_size()
    cut = lambda t: t.chunk(size)[rank].contiguous()  # noqa: E731
    got = use(lambda x: mine(x, mask, tables), mine, cut(x).requires_grad_(), cut(dy))
    pairs = {name: (got[name].detach(), cut(expected[name].detach())) for name in expected}
    return faults(tolerance, **pairs, **gradients(mine, weights))


def faults_of_all(rank, shapes, use=backward):
    return [f"{shape}: {fault}" for shape in shapes for fault in layer_faults(rank, shape, use)]
