"""Trains two ranks for many steps, and checks that no resource grows: a user would notice a small leak only after days.

    python -m tests.harness.long_run --steps 2000

The model is a small LLaMA, trained through DeepSpeed, with all features that keep state: ``head_groups`` is "auto", and a timeline
records some steps. In every tenth step, local attention raises on all ranks, by turns in forward and in backward, and training goes
on. Every fifth step has an evaluation. After the first third of the run, memory may grow by at most `MEMORY_BYTES` a step, and the
other amounts of `census` by at most `COUNT` a step.
"""

import argparse
import contextlib
import gc
import sys
import tempfile
import threading
import weakref

import psutil
import torch
from tabulate import tabulate
from torch.optim import optimizer

from ds_sp_overlap.exchange.in_flight import InFlight
from tests.harness import models
from tests.harness.faulty_training import attention_raises
from tests.harness.ranks import on_ranks

SAMPLES = 12
MEMORY_BYTES = 2048  # a step: about the size of one leaked tensor with one element
COUNT = 0.01  # a step; the rarest possible leak, one object in every tenth step, is ten times as large


def census(model):
    """Return the amount of each kind of resource that this process holds."""
    gc.collect()
    things, process = gc.get_objects(), psutil.Process()
    owners = [*model.modules(), *model.parameters()]
    hooks = [getattr(owner, name) for owner in owners for name in dir(owner) if name.endswith("_hooks")]
    return {
        "memory": process.memory_info().rss,
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in things),
        "exchanges in flight": sum(type(thing) is InFlight for thing in things),
        "hooks": len(optimizer._global_optimizer_post_hooks) + sum(len(hook) for hook in hooks if isinstance(hook, dict)),
        "finalizers": len(weakref.finalize._registry),
        "objects": len(things),
    }


class Leak:
    """Leaks a tensor, a thread and a descriptor in each step, as a faulty package would."""

    def __init__(self, planted):
        self.planted, self.kept, self.over = planted, [], threading.Event()

    def __call__(self):
        if self.planted:
            self.kept += [torch.ones(1), tempfile.TemporaryFile()]
            threading.Thread(target=self.over.wait, daemon=True).start()

    def close(self):
        self.over.set()
        self.kept.clear()


def train(rank, folder, steps, planted=False):
    """Train; return {step: `census`} of some steps, and the numbers of exceptions and evaluations."""
    model, leak, samples, happened = models.tiny(), Leak(planted), {}, {"exceptions": 0, "evaluations": 0}
    section = {"head_groups": "auto", "timeline": {"path": folder, "steps": [steps // 6, steps // 6 + 5]}}
    config, tokens = {**models.ds_config(), "sp_overlap": section}, models.batches(8)[:, None]
    with contextlib.closing(leak), models.engine_of(model, config) as (engine, group):
        for step in range(1, steps + 1):
            batch = tokens[step % len(tokens)]
            if not step % 10:
                with attention_raises(1, backward=not step % 20):
                    models.step(engine, batch, rank, 2, group)
                engine.zero_grad()
                happened["exceptions"] += 1
            if not step % 5:
                engine.eval()
                with torch.no_grad():
                    models.mean_loss(engine, models.cut(batch[0], rank, 2), group)
                engine.train()
                happened["evaluations"] += 1
            models.step(engine, batch, rank, 2, group)
            leak()
            if step >= steps // 3 and not (steps - step) % max(1, steps * 2 // 3 // SAMPLES):
                samples[step] = census(model)
    return samples, happened


def growth(samples):
    """Return for each kind of resource its first and last amount, and its growth per step.

    The growth of memory is a least-squares fit.
    """
    steps = torch.tensor([*samples], dtype=torch.float64)
    found = {}
    for sort in next(iter(samples.values())):
        counts = torch.tensor([sample[sort] for sample in samples.values()], dtype=torch.float64)
        away = steps - steps.mean()
        slope = (
            (away @ counts / (away @ away)).item()
            if sort == "memory"
            else (counts[-1] - counts[0]).item() / (steps[-1] - steps[0]).item()
        )
        found[sort] = int(counts[0]), int(counts[-1]), slope
    return found


def what_grows(samples):
    return [
        sort
        for sort, (first, last, slope) in growth(samples).items()
        if (slope > MEMORY_BYTES if sort == "memory" else slope > COUNT and last > first + 1)  # Python's caches may add one object
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--leak", action="store_true", help="leave a tensor, a thread and a descriptor behind in each step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        every = on_ranks(2, train, folder, args.steps, args.leak, timeout_s=24 * 3600)
    for rank, (samples, happened) in enumerate(every):
        print(f"rank {rank}: {args.steps} steps, {happened}, {len(samples)} samples from step {min(samples)} on")
        rows = [(sort, first, last, f"{slope:.3f}") for sort, (first, last, slope) in growth(samples).items()]
        print(tabulate(rows, headers=("", "first", "last", "a step"), tablefmt="github"))
    grows = {rank: what for rank, (samples, _) in enumerate(every) if (what := what_grows(samples))}
    print(f"grows: {grows or 'nothing'}")
    sys.exit(bool(grows))


if __name__ == "__main__":
    main()
