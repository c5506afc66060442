"""Provides the text, the variants and the training run (`train`) of the convergence benchmark."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

# hidden size, intermediate size, layers, query heads, KV heads
MODELS = {
    "tiny": (128, 256, 2, 8, 4),
    "few": (128, 256, 2, 2, 1),  # few heads, for more ranks than heads
    "1b": (2048, 5632, 22, 32, 8),
    "7b": (4096, 11008, 32, 32, 32),
}
NOISE = ["stock, split batch", "stock, split sums", "sp = 1, split batch", "sp = 1, split sums"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """Describes one way to train.

    sp             sequence parallel over the sp group; False for sp = 1
    microbatches   number of microbatches in a step
    split_sums     whether linear layers sum their products in two halves
    groups         number of head groups; None for no overlap
    section        further keys of the sp_overlap section
    kept           whether to use non-reentrant activation checkpointing
    """

    name: str
    sp: bool = True
    microbatches: int = 1
    split_sums: bool = False
    groups: int | None = None
    section: dict = dataclasses.field(default_factory=dict)
    kept: bool = False


def variants(groups: list[int], heads: int = 4, sp: int = 2) -> list[Variant]:
    """Return all variants; the others are compared with the first.

    heads   query heads of a rank; 0 with fewer heads than ranks, which stock refuses: then the first variant is one rank
    sp      the sp size
    """
    if not heads:
        everywhere = {"shares": sp}
        return [
            Variant("sp = 1", sp=False),
            Variant("sp = 1, again", sp=False),
            Variant("sp = 1, split batch", sp=False, microbatches=2),
            Variant("sp = 1, split sums", sp=False, split_sums=True),
            Variant("G = 1", groups=1),
            Variant("G = 2, r = P", groups=2, section=everywhere),
            Variant("window, kept", groups=2, section={"window": 1, "checkpointing": "keep", **everywhere}, kept=True),
        ]
    return [
        Variant("stock"),
        Variant("stock, again"),
        Variant(NOISE[0], microbatches=2),
        Variant(NOISE[1], split_sums=True),
        Variant("sp = 1", sp=False),
        *(Variant(f"G = {g}", groups=g) for g in groups),
        Variant("window, kept", groups=min(4, heads), section={"window": 2, "checkpointing": "keep"}, kept=True),
    ]


def text() -> np.ndarray:
    """Return the files at the top of the standard library, joined in the order of their names, as byte tokens."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def batch(corpus: np.ndarray, step: int, args: argparse.Namespace, sp_group: int, sp_groups: int) -> np.ndarray:
    """Return the token ids [b, s] of an sp group in a step; the groups read on through the text, and restart at its end."""
    rows = corpus[: len(corpus) // args.seq * args.seq].reshape(-1, args.seq)
    first = (step * sp_groups + sp_group) * args.batch
    return rows.take(range(first, first + args.batch), axis=0, mode="wrap").astype(np.int64)


class Watch:
    """Counts the tensors that the package exchanges; multiplies v of layer 0 and the first head group by 1 + ``plant``.

    Tensors in the same exchange as this v are multiplied, too.
    """

    def __init__(self, plant: float):
        self.plant, self.planted, self.launched = plant, 0, Counter()

    def __enter__(self):
        from ds_sp_overlap.exchange.transport import C10d

        original = C10d.launch

        def launch(transport, send, recv, send_sizes, recv_sizes, group, name):
            layer, what = name.split()
            kinds = what.rstrip("0123456789")  # without the head group; one exchange may send several tensors
            gradient = "d" * kinds.startswith("d")
            every = ["o", "do"] if kinds == "odo" else [gradient + kind for kind in kinds.removeprefix("d")]
            self.launched.update((layer, kind) for kind in every)
            if self.plant and ".layers.0." in layer and re.fullmatch("q?k?v0?", what):
                self.planted, send = self.planted + 1, send * (1 + self.plant)
            return original(transport, send, recv, send_sizes, recv_sizes, group, name)

        self._patch = mock.patch.object(C10d, "launch", launch)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()

    def check(self, variant: Variant, layers: int, passes: int) -> None:
        """Check that a run with the package overlapped every layer in every pass, and other runs nothing.

        Raises:
            RuntimeError: if not.
        """
        expected = 0 if variant.groups is None else 8 * layers
        # q and o have one exchange for each group. KV heads are sent with the first group that needs them: at least one exchange.
        least = {kind: passes * ((variant.groups or 0) if kind in "qo" else 1) for kind in "qkvo"}
        short = [name for name, count in self.launched.items() if count < least[name[1][-1]]]
        if self.plant and variant.groups and not self.planted:
            raise RuntimeError(f"{variant.name}: nothing was planted")
        if len(self.launched) != expected or short:
            raise RuntimeError(
                f"{variant.name}: expected {expected} kinds of exchanges through the plugin ({layers} layers, each "
                f"kind in all of {passes} passes), it launched {dict(self.launched)}"
            )


def train(variant: Variant, dtype: str, corpus: np.ndarray, args: argparse.Namespace, advance: Callable[[], None]):
    """Train from the seed; call this in a process without an engine.

    Returns the curve [steps, 2] of loss and gradient norm, and the parameters before and after training (fp32, on the host).
    Collective over all ranks. Raises RuntimeError if a variant with the package did not overlap.
    """
    import deepspeed
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import ds_sp_overlap

    rank, world = dist.get_rank(), dist.get_world_size()
    sp_group, sp_rank = divmod(rank, args.sp)
    sp = args.sp if variant.sp else 1
    hidden, intermediate, layers, heads, kv_heads = MODELS[args.model]
    llama = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=args.seq,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(llama)
    if args.checkpointing or variant.kept:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if variant.split_sums:
        split_sums(model)
    micro = args.batch // variant.microbatches // (1 if variant.sp else args.sp)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", sp, micro)
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": variant.microbatches,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "torch_adam": True}},
        # With reduce_scatter, stage 3 averages over the sp group instead of summing, which gives 1/P of the gradient.
        "zero_optimization": {"stage": args.zero, "reduce_scatter": args.zero != 3},
        "bf16": {"enabled": dtype == "bf16"},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
    }
    if variant.groups is None and variant.sp:
        config["sp_overlap"] = {"enabled": False}  # else the start-up warns that nothing is overlapped
    elif variant.groups is not None:
        config["sp_overlap"] = {"head_groups": variant.groups, "on_unsupported": "error", **variant.section}
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)

    def parameters() -> list[np.ndarray]:
        """Return the optimizer's fp32 parameters on rank 0, else an empty list; gathers one parameter at a time."""
        whole = ((p, deepspeed.utils.safe_get_full_fp32_param(p)) for p in engine.module.parameters())
        return [(p if full is None else full).detach().float().cpu().numpy().copy() for p, full in whole if rank == 0]

    def loss_of(tokens):
        """Return this rank's share of the mean over tokens; ZeRO sums the shares of an sp group, and averages over groups."""
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        positions = torch.arange(args.seq, device=tokens.device).expand_as(tokens)
        ids, labels, positions = (x.chunk(sp, dim=1)[sp_rank % sp].contiguous() for x in (tokens, labels, positions))
        logits = engine(input_ids=ids, position_ids=positions, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / (tokens.shape[0] * (args.seq - 1))

    before, curve = parameters(), []
    with Watch(args.plant_error) as watch:
        for step in range(args.steps):
            tokens = torch.from_numpy(batch(corpus, step, args, sp_group, world // args.sp)).to(engine.device)
            shares = []
            mine = tokens if variant.sp else tokens.chunk(args.sp)[sp_rank]
            for piece in mine.chunk(variant.microbatches):
                loss = loss_of(piece)
                engine.backward(loss)
                engine.step()
                shares.append(loss.detach().double())
            mean = torch.stack(shares).mean() * sp / world
            dist.all_reduce(mean)
            curve.append((mean.item(), float(engine.get_global_grad_norm())))
            advance()
    watch.check(variant, layers, args.steps * variant.microbatches)
    after = parameters()
    ds_sp_overlap.disable(engine.module)
    engine.destroy()
    # Remove all state of sequence parallelism from the process.
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
    parallel_state_sp._release_sequence_parallel_groups()
    deepspeed.utils.groups.mpu = deepspeed.utils.groups.mesh_device = None
    gc.collect()
    return np.array(curve), before, after


def split_sums(model) -> None:
    """Let every linear layer sum its products in two halves: x w^T = x_1 w_1^T + x_2 w_2^T."""
    import torch
    import torch.nn.functional as F

    for linear in [module for module in model.modules() if isinstance(module, torch.nn.Linear)]:

        def forward(x, linear=linear):
            half = linear.in_features // 2
            (x_1, x_2), (w_1, w_2) = ((t[..., :half], t[..., half:]) for t in (x, linear.weight))
            return F.linear(x_1, w_1) + F.linear(x_2, w_2)

        linear.forward = forward
