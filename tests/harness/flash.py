"""flash-attn behind transformers' own code for it, on CPU: functions of the same form that never look at a value on the host."""

import contextlib
from unittest import mock

import torch
from transformers import modeling_flash_attention_utils as flash

NAME = "flash_attention_2"


def _attend(q, k, v, may_see, scale, dropout, causal, window, sinks, softcap):
    """q, k, v [b, s, h, d], may_see [s, s], sinks [h] or None, softcap or 0 -> [b, s, h, d]."""
    assert causal and dropout == 0.0
    at = torch.arange(q.shape[1], device=q.device)
    behind = at[:, None] - at
    may_see = may_see & (behind >= 0) & (behind <= (window[0] if window[0] >= 0 else q.shape[1]))
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
    """Models may be switched to ``NAME`` inside; yields the list of calls: None, or the documents' edges and the longest one's length."""
    calls = []

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), s_aux=None, softcap=0.0):
        calls.append(None)
        return _attend(q, k, v, torch.ones((), dtype=torch.bool), softmax_scale, dropout_p, causal, window_size, s_aux, softcap)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), s_aux=None, softcap=0.0,
    ):  # fmt: skip
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q is max_seqlen_k
        calls.append((cu_seqlens_q, max_seqlen_q))
        document = torch.searchsorted(cu_seqlens_q, torch.arange(len(q), dtype=torch.int32), right=True)
        q, k, v = (x[None] for x in (q, k, v))
        return _attend(q, k, v, document[:, None] == document, softmax_scale, dropout_p, causal, window_size, s_aux, softcap)[0]

    functions = flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input
    with contextlib.ExitStack() as stack:
        for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn",
                     "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):  # fmt: skip
            stack.enter_context(mock.patch.object(flash, name, None))
        stack.enter_context(mock.patch.object(flash, "_lazy_imports", lambda *args, **kwargs: functions))
        yield calls
