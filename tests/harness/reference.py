"""Computes attention on the whole sequence in one process, as the oracle of tests; does not use the package."""

import math

import torch


def attention(q, k, v, causal=True, queries=None, window=None, starts=()):
    """Attend with q [b, s, h, d], k [b, s, h_kv, d] and v [b, s, h_kv, d_v] -> [b, s, h, d_v]; softmax is written out.

    queries   (a, b) if q holds only the tokens from a to b; None for all tokens
    window    the number of tokens that a token sees at most, including itself; None for no limit
    starts    the first tokens of documents; no document sees another
    """
    repeat = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    keys = torch.arange(k.shape[1], device=q.device)
    own = keys[slice(*(queries or (None,)))]
    document = sum(((keys >= start).int() for start in starts), torch.zeros_like(keys))
    hidden = document[own][:, None] != document
    if causal:
        hidden = hidden | (keys > own[:, None])
    if window is not None:
        hidden = hidden | (keys <= own[:, None] - window)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def sequence_first_attention(q, k, v, causal=True, queries=None, **options):
    return attention(*(x.transpose(0, 1) for x in (q, k, v)), causal, queries, **options).transpose(0, 1)


def fused(q, k, v, dropout=0.0):
    """Attend as causal `attention` does, with PyTorch's fused kernel, whose backward reads o and a log-sum-exp."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return o.transpose(1, 2)


def rope_tables(positions, dims, dtype):
    """Return cos and sin [s, dims]; dim i is rotated with dim i + dims / 2."""
    frequencies = 10000.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angles = positions.double()[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope(x, cos, sin):
    """Rotate x [b, s, h, d] by cos, sin [s, dims]; further dims of x stay as they are."""
    dims = cos.shape[-1]
    turned, rest = x[..., :dims], x[..., dims:]
    half = dims // 2
    swapped = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    return torch.cat((turned * cos[None, :, None] + swapped * sin[None, :, None], rest), -1)


def relative_error(got, expected):
    """Return the largest difference relative to the largest expected magnitude; infinity if the shapes differ."""
    if got.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    return ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()
