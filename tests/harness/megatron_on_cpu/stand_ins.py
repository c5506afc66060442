"""Replaces parts that are missing on CPU, such as flash attention (by torch's SDPA), torchvision, and all-gather for gloo."""

import atexit
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import textwrap
import types
from collections import defaultdict

import torch

WANTED = os.environ["MEGATRON_ON_CPU"].split(",")  # may hold "builder", "compress", "reference" and "wrong"; see `install`


class _Changes(importlib.abc.MetaPathFinder):
    """Changes modules right after their import."""

    def __init__(self):
        self.of = defaultdict(list)

    def find_spec(self, name, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self.of else None
        if spec is not None:
            execute = spec.loader.exec_module

            def changed(module):
                execute(module)
                for change in self.of[name]:
                    change(module)

            spec.loader.exec_module = changed
        return spec


def module(name, **attributes):
    """Make a module without a file, and register it in ``sys.modules``."""
    made = sys.modules[name] = types.ModuleType(name)
    vars(made).update(attributes)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, made)
    return made


def rewritten(function, **pieces):
    """Return ``function`` with pieces of its source replaced; each piece must occur once."""
    source = textwrap.dedent(inspect.getsource(function))
    for before, after in pieces.items():
        if source.count(before) != 1:
            raise LookupError(f"{function.__qualname__} holds {before!r} {source.count(before)} times; another version?")
        source = source.replace(before, after)
    namespace = {}
    exec(source, function.__globals__, namespace)
    return namespace[function.__name__]


def sdpa(q, k, v, dropout, scale, causal):
    """Attend with q, k, v [b, s, h, d] -> [b, s, h, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return o.transpose(1, 2)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout_p, softmax_scale=None, causal=False):
    """Attend with q, k, v [b s, h, d], b sequences of equal length; takes the arguments of flash attention."""
    q, k, v = (x.unflatten(0, (-1, length)) for x, length in ((q, max_q), (k, max_k), (v, max_k)))
    return sdpa(q, k, v, dropout_p, softmax_scale, causal).flatten(0, 1)


def flash_attn_unpadded_func(q, k, v, *args, **kwargs):
    """Attend as flash attention 1, which has no grouped queries."""
    if q.shape[-2] != k.shape[-2]:
        raise RuntimeError(f"flash attention 1 needs as many KV heads as query heads, got {q.shape[-2]} and {k.shape[-2]}")
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


class FlashAttentionBuilder:
    """Builds the accelerator's flash attention op, which takes q, k, v [b, h, s, d]."""

    def __new__(cls):
        if "builder" not in WANTED:
            raise TypeError("no flash attention op here")
        return super().__new__(cls)

    def load(self):
        def flash_attn_func_v2(q, k, v, dropout, scale, causal):
            return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), dropout, scale, causal).transpose(1, 2)

        return types.SimpleNamespace(flash_attn_func_v2=flash_attn_func_v2)


def _attention(transformer):
    """Remove the checks by which flash attention refuses fp32, and tensors that are not on CUDA."""
    flash, triton = transformer.FlashSelfAttention, transformer.FlashSelfAttentionTriton
    flash.forward = rewritten(flash.forward, **{"[torch.float16, torch.bfloat16]": "[q.dtype]"})
    triton.forward = rewritten(triton.forward, **{"assert q.dtype in [torch.float16, torch.bfloat16]": "", "assert q.is_cuda": ""})


def _reference(transformer):
    """Replace the forward of attention by one that also works with grouped queries, at sp size 1.

    The rows of the projection are [all q | all k | all v].
    """

    def forward(self, hidden_states, attention_mask, encoder_output=None, inference_params=None, rotary_pos_emb=None):
        mixed, _ = self.query_key_value(hidden_states)
        heads, kv_heads, d = self.num_attention_heads, self.num_key_value_heads, self.hidden_size_per_attention_head
        q, k, v = (x.unflatten(-1, (-1, d)).transpose(0, 1) for x in mixed.split((heads * d, kv_heads * d, kv_heads * d), -1))
        return self.dense(sdpa(q, k, v, 0.0, None, True).transpose(0, 1).flatten(2))

    transformer.ParallelAttention.forward = forward


def _wrong(execution):
    """Plant an error: multiply v of every layer by 1 + 1e-5."""
    right = "pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)"
    wrong = rewritten(execution.with_kv, **{right: f"({right}) * (1.00001 if kind == 'v' else 1)"})
    execution.with_kv.__code__ = wrong.__code__  # in place, for modules that have imported the function


def _packages(_):
    """Stand in for missing packages; call this after the import of transformers, which would take them for the real packages."""
    module("torchvision", get_image_backend=lambda: "PIL")
    module("torchvision.transforms")
    module("torchvision.datasets", VisionDataset=object)
    module("flash_attn")
    module(
        "flash_attn.flash_attn_interface",
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_unpadded_func=flash_attn_unpadded_func,
    )
    module("flash_attn.flash_attn_triton", flash_attn_func=lambda q, k, v, bias, causal: sdpa(q, k, v, 0.0, None, causal))


def install():
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it would be compiled, behind a file lock
    accelerator = type(deepspeed.accelerator.get_accelerator())
    other = accelerator.get_op_builder
    accelerator.get_op_builder = lambda self, name: FlashAttentionBuilder if name == "FlashAttentionBuilder" else other(self, name)

    gather = torch.distributed.all_gather_into_tensor

    def all_gather_into_tensor(output_tensor, input_tensor, *args, **kwargs):
        return gather(output_tensor.view(-1), input_tensor.reshape(-1), *args, **kwargs)  # gloo requires equal shapes

    torch.distributed.all_gather_into_tensor = all_gather_into_tensor
    changes = _Changes()
    sys.meta_path.insert(0, changes)
    changes.of["megatron.tokenizer"].append(_packages)
    changes.of["megatron.model.transformer"].append(_attention)
    if "reference" in WANTED:
        changes.of["megatron.model.transformer"].append(_reference)
    if "wrong" in WANTED:
        changes.of["ds_sp_overlap.attention.runtime.execution"].append(_wrong)
    if "compress" in WANTED:  # for stock runs; otherwise the package provides this module (`megatron.bridge`)
        import deepspeed.compression

        module("deepspeed.compression.compress", init_compression=None, redundancy_clean=None)

    @atexit.register
    def leave():
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
