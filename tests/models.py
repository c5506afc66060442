"""Small transformers models, trained for a few steps through DeepSpeed on each rank of a test."""

import copy
import gc
import warnings

import deepspeed
import deepspeed.comm
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import ds_sp_overlap

VOCABULARY, SEQ, BATCH = 64, 32, 2


def tiny(family="llama", heads=4, kv_heads=2, layers=2, dtype=torch.float32, **more):
    """A model of random weights, alike on every rank."""
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=8 * heads, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    if family == "qwen3":
        sizes["head_dim"] = 16
    config = AutoConfig.for_model(family, **{**sizes, **more})
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def batches(steps, batch=BATCH, seq=SEQ, seed=5):
    """Token ids [steps, b, s]."""
    return torch.randint(1, VOCABULARY, (steps, batch, seq), generator=torch.Generator().manual_seed(seed))


def cut(tokens, rank, size, positions=None):
    """This rank's slice of input_ids, labels (shifted over the whole sequence) and position_ids."""
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens) if positions is None else positions
    return {
        key: value.chunk(size, dim=1)[rank].contiguous()
        for key, value in (("input_ids", tokens), ("labels", labels), ("position_ids", positions))
    }


def mean_loss(model, inputs, group):
    """Token mean over the sp group; its gradient is the whole sequence's on every rank once DeepSpeed has averaged."""
    logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    labels = inputs["labels"]
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")
    count = (labels != -100).sum()
    if group is not None:
        torch.distributed.all_reduce(count, group=group)
        total = torch.distributed.nn.all_reduce(total, group=group)
    return total / count


def sequence_parallel(model, size, **more):
    """Register stock Ulysses; returns its mpu."""
    return UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", size, BATCH, **more)


def forget_sequence_parallel():
    """Back to a process that never heard of sequence parallelism."""
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
    parallel_state_sp._release_sequence_parallel_groups()
    deepspeed.utils.groups.mpu = None
    deepspeed.utils.groups.mesh_device = None
    gc.collect()


def ds_config(stage=0, accumulation=1, dtype=torch.float32, **more):
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "stage3_param_persistence_threshold": 0,
                              "reduce_scatter": stage != 3},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    return {**config, **more}


def train(rank, size, family, section, steps=5, accumulation=1, stage=0, dtype=torch.float32, prepare=None, more_config=None, **model_options):
    """Losses and grad norms of each step, parameters at the end; ``section`` None trains stock."""
    model = tiny(family, **model_options)
    if prepare is not None:
        model = prepare(model)
    mpu = sequence_parallel(model, size)
    config = ds_config(stage, accumulation, dtype, **(more_config or {}))
    if section is not None:
        config["sp_overlap"] = section
    try:
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
        group = mpu.get_sequence_parallel_group()
        losses, norms = [], []
        for step in batches(steps * accumulation).unflatten(0, (steps, accumulation)):
            for tokens in step:
                loss = mean_loss(engine, cut(tokens, rank, size), group)
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
            norms.append(float(engine.get_global_grad_norm() or 0.0))
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
            parameters = {name: p.detach().clone().float() for name, p in engine.module.named_parameters()}
        ds_sp_overlap.disable(engine.module)
        engine.destroy()
        return losses, norms, parameters
    finally:
        forget_sequence_parallel()
