"""Time whole training steps of a transformers model under DeepSpeed over a real slow link: stock ALST, and overlapped.

    sudo python benchmarks/training_steps.py --out benchmarks/results/training_steps

Method. As in `link.py`: ranks in network namespaces behind token buckets, a core each. One engine (ZeRO 1, AdamW, a LLaMA of a few
layers) trains on random tokens throughout; ``enable`` and ``disable`` turn the overlap on and off between steps. The first step
after each switch is not timed, the next one is. Variants take turns in one loop; a step (forward, backward, optimizer) takes as
long as its slowest rank. Before timing, every variant must give the same loss as stock, and the same norm of the embedding's
gradient, on the same tokens and weights.

    exposed   time that a step spends on exchanges of the sp group: step - stock's step with exchanges that take no time

With --windows and --checkpointing, there are also windows of head groups, and all variants use gradient checkpointing. At the end,
"head_groups": "auto" runs the steps in which it tries candidates; a note names its choice.

The figures are of a rate-limited link. They compare schedules, and say nothing about any fabric.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.wire import Wire, join  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[200, 400], help="Mbit/s")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096, help="global sequence, tokens")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--windows", type=int, nargs="*", default=[], help="W of the most head groups, without and with what is kept"
    )
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, non-reentrant")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write OUT.csv, OUT.json and OUT.png")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args: argparse.Namespace) -> None:
    os.environ["LOCAL_RANK"] = str(args.rank)  # DeepSpeed's launcher would set it
    join(args.rank, args.ranks)
    import deepspeed
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import LlamaConfig, LlamaForCausalLM

    import ds_sp_overlap
    from ds_sp_overlap.config import SpOverlapConfig
    from ds_sp_overlap.warn import LOGGER

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=args.hidden, intermediate_size=args.hidden * 8 // 3, num_hidden_layers=args.layers,
            num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, max_position_embeddings=args.seq,
            attn_implementation="sdpa",
        )
    )  # fmt: skip
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", args.ranks, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "steps_per_print": 10**9,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    tokens = torch.randint(256, (1, args.seq))
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    whole = tokens, labels, torch.arange(args.seq)[None]
    ids, labels, positions = (x.chunk(args.ranks, dim=1)[args.rank].contiguous() for x in whole)

    def loss(model=engine):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (args.seq - 1)

    def step():
        engine.backward(loss())
        engine.step()

    most = args.heads // args.ranks
    sections = {f"G = {g}": {"head_groups": g} for g in args.groups}
    for window in args.windows:
        name, section = f"G = {most}, W = {window}", {"head_groups": most, "window": window}
        sections |= {name: section, f"{name}, kept": {**section, "checkpointing": "keep"}}
    sections = {"stock ALST": None, **{name: {"on_unsupported": "error", **section} for name, section in sections.items()}}
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def switch(section):
        ds_sp_overlap.disable(engine.module)
        if section is not None:
            ds_sp_overlap.enable(engine.module, section)

    losses: dict[str, float] = {}
    expected = None
    for name, section in sections.items():
        switch(section)
        share = loss(engine.module)  # not through the engine, which would count a step
        (slope,) = torch.autograd.grad(share, engine.module.get_input_embeddings().weight)
        found = torch.stack([share.detach(), slope.square().sum()])
        dist.all_reduce(found)
        losses[name], expected = found[0].item(), found if expected is None else expected
        # The tolerance is for a few thousand fp32 additions in another order.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=lambda m, name=name: f"{name}: {m}")

    exchange, moved = dist.all_to_all_single, [True]

    def maybe(output, *arguments, **options):
        if moved[0]:
            return exchange(output, *arguments, **options)
        output.zero_()

    dist.all_to_all_single = maybe
    times: dict[str, list[float]] = {"stock, free wire": [], **{name: [] for name in sections}}
    for _ in range(args.steps):
        for name in times:
            switch(sections.get(name))
            moved[0] = name in sections
            step()
            dist.barrier()
            begin = time.perf_counter()
            step()
            took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            times[name].append(took.item() * 1e3)
    switch({})
    said = io.StringIO()
    LOGGER.addHandler(logging.StreamHandler(said))
    for _ in range(SpOverlapConfig().policy.warmup_steps + 2):
        step()
    dist.barrier()
    if args.rank == 0:
        print(json.dumps({"times_ms": times, "losses": losses, "auto": said.getvalue().strip()}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    args = arguments()
    if args.rank is not None:
        return work(args)
    from benchmarks import pictures, record

    rows, notes, words = [], [], list(sys.argv)
    with Wire(args.ranks) as wire:
        for rate in args.rates:
            wire.limit(rate)
            result = wire.run(words)
            times, losses = result["times_ms"], result["losses"]
            stock = losses["stock ALST"]
            notes.append(f"{rate:g} Mbit/s, auto: {result['auto']}")
            median = {name: statistics.median(values) for name, values in times.items()}
            for name, values in times.items():
                alone = name == "stock, free wire"
                rows.append(
                    {
                        "Mbit/s": rate,
                        "variant": name,
                        "min ms": round(min(values)),
                        "median ms": round(median[name]),
                        "max ms": round(max(values)),
                        "exposed ms": "" if alone else round(median[name] - median["stock, free wire"]),
                        "stock / step": "" if alone else round(median["stock ALST"] / median[name], 2),
                        "loss - stock": "" if alone else f"{losses[name] - stock:+.1e} of {stock:.4f}",
                    }
                )
    kind = (
        f"{wire.kind}, whole training steps: LLaMA of {args.layers} layers, hidden {args.hidden}, {args.heads} query and "
        f"{args.kv_heads} KV heads, {args.seq} tokens, fp32, ZeRO 1" + ", gradient checkpointing" * args.checkpointing
    )
    record.write(args.out, rows, kind, notes)
    if args.out is not None:
        pictures.draw(args.out)


if __name__ == "__main__":
    main()
