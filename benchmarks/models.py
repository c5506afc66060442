"""Compare transformers models, overlapped on the ranks of the world over NCCL, with the same models on one rank, in fp64.

    python benchmarks/shared_gpu.py 4 benchmarks/models.py                           ranks that share one GPU
    torchrun --nproc-per-node 4 benchmarks/models.py                                                  a GPU each
    python benchmarks/shared_gpu.py --rehearse 2 benchmarks/models.py --rehearse     over gloo on a CPU

Compares logits and every gradient of each model and mode, in the second step, with the model on the whole sequence. Counts as left
out: cases for which the time is too short, and models whose code differs in this version of transformers.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

BEGIN = time.monotonic()  # imports take seconds, too

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.distributed as dist
import transformers

import ds_sp_overlap
from benchmarks.profiles import join

SEQ, VOCABULARY = 48, 64
# Limits, relative to the largest element; a mistake gives more than 1e-3. The second is for models with parts always in fp32.
BOUND, IN_FP32 = 1e-9, 2e-6
DOCUMENTS = (11, 20, SEQ - 31)


@dataclass
class Case:
    """A tiny model and an ``sp_overlap`` section.

    Attributes:
        ranks: The smallest number of ranks for this case.
        bound: The limit of the relative error.
        by_code: Whether the package recognises the layers by their code, which may differ in another version of transformers:
            then `enable` may refuse them.
    """

    config: str
    heads: int
    kv_heads: int
    section: dict
    packed: bool = False
    checkpointed: bool = False
    ranks: int = 2
    bound: float = BOUND
    by_code: bool = False
    more: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        flags = " packed" * self.packed + " checkpointed" * self.checkpointed
        return f"{self.config.removesuffix('Config')}, {self.heads}/{self.kv_heads} heads, {self.section}{flags}"


EXPERTS = dict(experts_implementation="eager", num_experts_per_tok=2)  # torch has no grouped product in fp64
MIXTRAL = dict(**EXPERTS, num_local_experts=4)
TWO = {"head_groups": 2}
CASES = [
    Case("LlamaConfig", 8, 4, {"head_groups": 1}),
    Case("LlamaConfig", 8, 4, TWO),
    Case("LlamaConfig", 8, 4, {**TWO, "kernels": "auto"}),
    Case("LlamaConfig", 8, 4, {**TWO, "window": 1}),
    Case("LlamaConfig", 8, 4, {"head_groups": "auto", "policy": {"warmup_steps": 0}}),
    Case("LlamaConfig", 8, 2, TWO, packed=True),
    Case("MistralConfig", 8, 2, TWO, more=dict(sliding_window=17)),
    Case("Qwen3Config", 8, 1, TWO),
    Case("LlamaConfig", 8, 4, TWO, checkpointed=True),
    Case("LlamaConfig", 8, 4, {**TWO, "window": 1, "checkpointing": "keep"}, checkpointed=True),
    Case("LlamaConfig", 8, 4, {**TWO, "window": 1, "checkpointing": "offload"}, checkpointed=True),
    Case("LlamaConfig", 2, 1, {"head_groups": 1}, ranks=4),
    Case("Qwen3Config", 6, 2, {"head_groups": 1}, ranks=4),
    Case("LlamaConfig", 8, 1, {**TWO, "kv_once_per_node": True}, ranks=4),
    Case("LlamaConfig", 2, 1, {"head_groups": 1}, packed=True, ranks=4),
    Case("MixtralConfig", 8, 2, TWO, more=MIXTRAL),
    Case("Gemma3TextConfig", 8, 2, TWO, bound=IN_FP32, more=dict(num_hidden_layers=6, sliding_window=24)),
    Case("Olmo2Config", 8, 4, TWO),
    Case(
        "DeepseekV3Config", 8, 8, TWO, bound=IN_FP32,
        more=dict(
            EXPERTS, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, head_dim=8, n_group=2,
            topk_group=1, n_routed_experts=4, moe_intermediate_size=32, first_k_dense_replace=1,
        ),
    ),
    Case(
        "Qwen3NextConfig", 8, 2, TWO, bound=IN_FP32, by_code=True,
        more=dict(
            EXPERTS, num_hidden_layers=4, linear_conv_kernel_dim=4, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4, moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
    ),
]  # fmt: skip


class Refused(Exception):
    """The error for a model that `enable` may refuse (`by_code`)."""


def error_of(case: Case, device: torch.device) -> float:
    """Return the largest relative error of the logits and the gradients. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads, head_dim=16, max_position_embeddings=128, pad_token_id=0, attn_implementation="sdpa",
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, case.config)(**{**sizes, **case.more}))
    model = model.double().to(device).train()
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (1, SEQ), generator=generator).to(device)
    cotangent = torch.randn(1, SEQ, VOCABULARY, generator=generator, dtype=torch.float64).to(device)
    documents = DOCUMENTS if case.packed else (SEQ,)
    positions = torch.cat([torch.arange(length) for length in documents])[None].to(device)

    def step(ids, positions, cotangent):
        model.zero_grad()
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        logits.backward(cotangent)
        return logits.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    expected, gradients = step(ids, positions, cotangent)
    mine = [x.chunk(size, 1)[rank] for x in (ids, positions, cotangent)]
    try:
        ds_sp_overlap.enable(model, {"on_unsupported": "error", **case.section}, dist.group.WORLD)
    except ValueError as error:  # on all ranks alike
        if case.by_code:
            raise Refused(error) from error
        raise
    step(*mine)
    logits, got = step(*mine)
    ds_sp_overlap.disable(model)
    errors = [(logits - expected.chunk(size, 1)[rank]).abs().max() / expected.abs().max()]
    for parameter, own, wanted in zip(model.parameters(), got, gradients):
        total = torch.zeros_like(parameter) if own is None else own
        dist.all_reduce(total)
        if wanted is not None:
            errors.append((total - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    return torch.stack(errors).amax().item()  # keeps a NaN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no case after so many")
    parser.add_argument("--cases", type=int, nargs="+", help="these cases alone, by number")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    device = join(args.rehearse)
    torch.set_default_dtype(torch.float64)
    size = dist.get_world_size()
    cases = [case for case in CASES if case.ranks <= size]
    right, wrong, left = 0, [], 0
    for case in [cases[at] for at in args.cases] if args.cases else cases:
        late = torch.tensor(float(time.monotonic() - BEGIN > 60 * args.minutes), device=device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if late.item():
            left += 1
            continue
        try:
            error, why = error_of(case, device), ""
        except Refused as refused:
            left += 1
            if dist.get_rank() == 0:
                print(f"models: left out: {case.name}: {refused}", flush=True)
            continue
        except (ValueError, RuntimeError, NotImplementedError) as refused:
            error, why = float("nan"), f"{type(refused).__name__}: {str(refused).splitlines()[0]}"
        worst = torch.tensor(error if error == error else float("inf"), device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        is_right = worst.item() <= case.bound
        right += is_right
        wrong += [] if is_right else [case.name]
        if dist.get_rank() == 0:
            print(f"models: {'right' if is_right else 'WRONG'}: {case.name}: {why or f'{worst.item():.1e}'}", flush=True)
    if dist.get_rank() == 0:
        print(f"models: {right} right, {len(wrong)} wrong, {left} left out; {size} ranks over {dist.get_backend()}", flush=True)
    dist.destroy_process_group()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
