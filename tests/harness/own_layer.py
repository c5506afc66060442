"""Defines a layer as a user may write it, with several implementations of attention."""

import torch
from deepspeed.sequence.layer import DistributedAttention
from torch import nn

import ds_sp_overlap
from tests.harness.reference import attention

WIDTH, HEADS, HEAD_DIM = 32, 4, 8
ds_sp_overlap.attention_function(attention, heads_alike=True)


def linear(width_in, width_out):
    return nn.Linear(width_in, width_out, bias=False, dtype=torch.float64)


class Layer(nn.Module):
    """Attention with a residual.

    kind   "whole": on the whole sequence; "stock": with DeepSpeed's `DistributedAttention`; "drop-in": with the package's
           `DistributedAttention`; "block": with `SelfAttention`
    """

    def __init__(self, kind, group, local=attention, **options):
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(WIDTH, dtype=torch.float64)
        layer = {f"{name}_proj": linear(WIDTH, WIDTH // (2 if name in "kv" else 1)) for name in "qkvo"}
        for name, projection in layer.items():
            self.add_module(name, projection)
        if kind in ("stock", "drop-in"):
            attend = DistributedAttention if kind == "stock" else ds_sp_overlap.DistributedAttention
            self.attend = attend(local, group, scatter_idx=2, gather_idx=1, **options)
        if kind == "block":
            self.attend = ds_sp_overlap.SelfAttention(
                local_attention=attention, num_heads=HEADS, num_kv_heads=HEADS // 2, head_dim=HEAD_DIM,
                sequence_process_group=group, **layer,
            )  # fmt: skip

    def forward(self, x):
        y = self.norm(x)
        if self.kind == "block":
            return x + self.attend(y)
        q, k, v = (projection(y).unflatten(-1, (-1, HEAD_DIM)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        o = attention(q, k, v) if self.kind == "whole" else self.attend(q, k, v, 0)
        return x + self.o_proj(o.flatten(2))
