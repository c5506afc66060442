"""A self-attention layer built in each rank of a test, and the same layer on the whole sequence."""

from dataclasses import dataclass, field

import reference
import torch
from torch import nn

import ds_sp_overlap


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    batch: int = 2
    lengths: tuple = (6, 6)  # local sequence of each rank
    batch_first: bool = True
    rope: bool = True
    bias: bool = False
    fused: bool = False
    dtype: torch.dtype = torch.float64
    config: dict = field(default_factory=dict, hash=False)

    @property
    def width(self):
        return self.heads * self.head_dim


def projections(shape, seed=1):
    """The projections of the layer, alike on every rank."""
    torch.manual_seed(seed)
    linear = lambda n, m: nn.Linear(n, m, bias=shape.bias, dtype=shape.dtype)  # noqa: E731
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = nn.ModuleDict({"o_proj": linear(q, shape.width)})
    if shape.fused:
        layer["qkv_proj"] = linear(shape.width, q + 2 * kv)
    else:
        layer.update({"q_proj": linear(shape.width, q), "k_proj": linear(shape.width, kv), "v_proj": linear(shape.width, kv)})
    return layer


def whole_inputs(shape, seed=2):
    """Hidden states [b, s, m] and a cotangent for the output, of the whole sequence."""
    torch.manual_seed(seed)
    size = (shape.batch, sum(shape.lengths), shape.width)
    return torch.randn(size, dtype=shape.dtype), torch.randn(size, dtype=shape.dtype)


def reference_layer(shape, layer, x):
    """Output [b, s, m] of the layer on the whole sequence."""
    split = (shape.heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2)
    if shape.fused:
        q, k, v = layer["qkv_proj"](x).split(split, -1)
    else:
        q, k, v = (layer[f"{kind}_proj"](x) for kind in "qkv")
    q, k, v = (t.unflatten(-1, (-1, shape.head_dim)) for t in (q, k, v))
    if shape.rope:
        tables = reference.rope_tables(torch.arange(x.shape[1]), shape.head_dim, shape.dtype)
        q, k = reference.rope(q, *tables), reference.rope(k, *tables)
    return layer["o_proj"](reference.attention(q, k, v).flatten(2))


def block(shape, layer, group, transport=None, local_attention=None):
    """The overlapped block over the layer's own modules."""
    local = reference.attention if shape.batch_first else reference.sequence_first_attention

    def rope(x, tables):
        x = x if shape.batch_first else x.transpose(0, 1)
        x = reference.rope(x, *tables)
        return x if shape.batch_first else x.transpose(0, 1)

    return ds_sp_overlap.SelfAttention(
        local_attention=local_attention or local,
        num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        rope=rope if shape.rope else None, sequence_process_group=group, batch_first=shape.batch_first,
        config=shape.config, transport=transport, name="layer", **layer,
    )  # fmt: skip


def my_slice(shape, rank, x, batch_first=None):
    """This rank's part [.., s_r, ..] of a whole tensor [b, s, ...], in the layout of the shape."""
    start = sum(shape.lengths[:rank])
    x = x[:, start : start + shape.lengths[rank]]
    return (x if shape.batch_first else x.transpose(0, 1)).contiguous()


def call_block(shape, attend, rank, x):
    tables = None
    if shape.rope:
        start = sum(shape.lengths[:rank])
        tables = reference.rope_tables(torch.arange(start, start + shape.lengths[rank]), shape.head_dim, shape.dtype)
    lengths = shape.lengths if len(set(shape.lengths)) > 1 else None
    return attend(x, position_embeddings=tables, sequence_lengths=lengths)


def worst_error(shape, rank, layer, x, y, reference_parts):
    """Largest relative error of output, input gradient and the summed weight gradients against the reference's."""
    expected_y, expected_dx, expected_grads = reference_parts
    errors = {
        "output": reference.relative_error(y, my_slice(shape, rank, expected_y)),
        "dx": reference.relative_error(x.grad, my_slice(shape, rank, expected_dx)),
    }
    for name, parameter in layer.named_parameters():
        total = parameter.grad.clone()
        torch.distributed.all_reduce(total)
        errors[name] = reference.relative_error(total, expected_grads[name])
    return errors


def expected(shape):
    """(output, dx, weight gradients) of the reference."""
    layer = projections(shape)
    x, dy = whole_inputs(shape)
    x.requires_grad_()
    y = reference_layer(shape, layer, x)
    y.backward(dy)
    return y.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters()}


def block_errors(rank, shape, transport=None):
    """Run forward and backward of the block on this rank; relative error of everything it computes."""
    layer = projections(shape)
    x, dy = (my_slice(shape, rank, t) for t in whole_inputs(shape))
    x.requires_grad_()
    y = call_block(shape, block(shape, layer, torch.distributed.group.WORLD, transport), rank, x)
    y.backward(dy)
    return worst_error(shape, rank, layer, x, y.detach(), expected(shape))
