"""Compares the drop-in `DistributedAttention`, run on each rank of a test, with attention on the whole sequence."""

import functools
from dataclasses import dataclass, field

import torch

import ds_sp_overlap
from tests.harness import layers, reference
from tests.harness.layers import faults, my_slice


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    value_dim: int = 8
    batch: int = 2
    lengths: tuple = (6, 6)
    batch_first: bool = True
    rotary_dims: int = 0
    flat: bool = False  # the local attention flattens heads and head dim
    config: dict = field(default_factory=dict, hash=False)


def whole_inputs(case):
    """Draw q, k, v [b, s, heads, d] of the whole sequence and a cotangent for the output."""
    torch.manual_seed(3)
    sizes = (
        (case.heads, case.head_dim),
        (case.kv_heads, case.head_dim),
        (case.kv_heads, case.value_dim),
        (case.heads, case.value_dim),
    )
    return [torch.randn(case.batch, sum(case.lengths), *size, dtype=torch.float64) for size in sizes]


def tables(case):
    """Return (cos, sin), each [s, 1, 1, d_rot], as Megatron gives them; None without RoPE."""
    if not case.rotary_dims:
        return None
    positions = torch.arange(sum(case.lengths))
    return tuple(t[:, None, None] for t in reference.rope_tables(positions, case.rotary_dims, torch.float64))


def whole_attention(case):
    """Return a function q, k, v -> o that computes the reference attention on the whole sequence."""

    def attend(q, k, v):
        if case.rotary_dims:
            cos, sin = (t[:, 0, 0] for t in tables(case))
            q, k = reference.rope(q, cos, sin), reference.rope(k, cos, sin)
        return reference.attention(q, k, v)

    return attend


def local_attention(case):
    attend = reference.attention if case.batch_first else reference.sequence_first_attention
    local = (lambda q, k, v, queries=None: attend(q, k, v, queries=queries).flatten(2)) if case.flat else attend
    return ds_sp_overlap.attention_function(local, heads_alike=True)


def module(case, transport=None, cls=ds_sp_overlap.DistributedAttention, local=None, **arguments):
    if cls is ds_sp_overlap.DistributedAttention:
        arguments = {"heads_alike": True, "config": case.config, "transport": transport, **arguments}
    group = torch.distributed.group.WORLD
    return cls(local or local_attention(case), group, gather_idx=1 if case.batch_first else 0, **arguments)


def backward(call, q, k, v, do):
    o = call(q, k, v)
    o.backward(do)
    return {"output": o, "dq": q.grad, "dk": k.grad, "dv": v.grad}


def dropin_faults(rank, case, use=backward, transport=None, tolerance=1e-12, attend=None, whole=None, **keywords):
    """List the results on this rank in which the drop-in differs from the reference.

    use        ``use(call, q, k, v, do)`` -> tensors along the sequence by name; runs with the drop-in and with the reference
    attend     replaces the drop-in; ``whole`` replaces the reference
    keywords   further arguments of each call of the drop-in
    """
    inputs = whole_inputs(case)
    expected = use(whole or whole_attention(case), *(t.clone().requires_grad_() for t in inputs[:3]), inputs[3])
    attend = attend or module(case, transport)
    *qkv, do = (my_slice(case, rank, t) for t in inputs)
    if len(set(case.lengths)) > 1:
        keywords["sequence_lengths"] = case.lengths

    def call(q, k, v):
        o = attend(q, k, v, 0 if case.batch_first else 1, tables(case), **keywords)
        assert o.dim() == (3 if case.flat else 4)
        return o.unflatten(2, (case.heads, -1)) if case.flat else o

    got = use(call, *(t.requires_grad_() for t in qkv), do)
    return faults(tolerance, **{name: (got[name].detach(), my_slice(case, rank, expected[name].detach())) for name in expected})


faults_of_all = functools.partial(layers.faults_of_all, of_one=dropin_faults)
