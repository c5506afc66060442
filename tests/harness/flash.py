"""Replaces the functions of flash-attn that transformers calls by PyTorch code, which never waits for the values of a tensor."""

import contextlib
from unittest import mock

import torch
from transformers import modeling_flash_attention_utils as flash

NAME = "flash_attention_2"


def _attend(q, k, v, may_see, scale, dropout, causal, window, sinks, softcap):
    """Attend with q [b, n, h, d], k, v [b, s, h_kv, d] -> [b, n, h, d]; the queries are the last n of the s tokens.

    ``may_see`` is a mask that broadcasts to [n, s], ``sinks`` is [h] or None, ``softcap`` is 0 for no cap.
    """
    at = torch.arange(k.shape[1], device=q.device)
    return _attend_at(q, k, v, at[k.shape[1] - q.shape[1] :], at, may_see, scale, dropout, causal, window, sinks, softcap)


def _attend_at(q, k, v, at_q, at_k, may_see, scale, dropout, causal, window, sinks, softcap):
    """Attend as `_attend` does, with queries and keys at the given positions ``at_q`` and ``at_k``."""
    assert causal and dropout == 0.0
    behind = at_q[:, None] - at_k
    may_see = may_see & (behind >= 0) & (behind <= (window[0] if window[0] >= 0 else k.shape[1]))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if sinks is None and not softcap:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, may_see, scale=scale).transpose(1, 2)
    scores = q @ k.mT * scale
    scores = (softcap * torch.tanh(scores / softcap) if softcap else scores).masked_fill(~may_see, -torch.inf)
    if sinks is None:
        return (scores.softmax(-1) @ v).transpose(1, 2)
    assert sinks.shape == q.shape[1:2]
    sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return (torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)


@contextlib.contextmanager
def flash_attention():
    """Let models use the implementation ``NAME`` while the body runs; yield the list of calls.

    A call without documents is listed as None. A call with documents is listed as (edges for q, longest length for q, edges for k,
    longest length for k).
    """
    calls = []

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), s_aux=None, softcap=0.0):
        calls.append(None)
        return _attend(q, k, v, torch.ones((), dtype=torch.bool), softmax_scale, dropout_p, causal, window_size, s_aux, softcap)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), s_aux=None, softcap=0.0,
    ):  # fmt: skip
        calls.append((cu_seqlens_q, max_seqlen_q, cu_seqlens_k, max_seqlen_k))
        documents, places = [], []
        for x, edges in ((q, cu_seqlens_q), (k, cu_seqlens_k)):
            documents.append(torch.searchsorted(edges, torch.arange(len(x), dtype=torch.int32), right=True))
            places.append(torch.arange(len(x)) - edges[documents[-1]])  # relative to the end of the document
        q, k, v = (x[None] for x in (q, k, v))
        may_see = documents[0][:, None] == documents[1]
        return _attend_at(q, k, v, *places, may_see, softmax_scale, dropout_p, causal, window_size, s_aux, softcap)[0]

    functions = flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input
    with _nothing_loaded(), mock.patch.object(flash, "_lazy_imports", lambda *args, **kwargs: functions):
        yield calls


@contextlib.contextmanager
def _nothing_loaded():
    """Run the body as if transformers had loaded no flash attention yet."""
    with contextlib.ExitStack() as stack:
        for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn",
                     "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):  # fmt: skip
            stack.enter_context(mock.patch.object(flash, name, None))
        yield
