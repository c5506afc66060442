"""Trains with Liger's RoPE and fused loss on two ranks by Triton's interpreter: ``TRITON_INTERPRET=1 python -m tests.harness.liger``.

A process of its own, since Triton reads that variable when it is imported. Prints, rank by rank and section by section, the layers
that were overlapped and how far the run is from stock's with Liger; stock's without Liger besides.
"""

import json
import tempfile

from tests.harness.clients import train
from tests.harness.ranks import on_ranks

SECTIONS = {"G = 1": {"head_groups": 1}, "G = 2": {"head_groups": 2}, "auto": {}}
# Liger's norm and SwiGLU don't run in the interpreter (Liger 0.8.5, Triton 3.9).
LIGER = dict(
    use_liger_kernel=True, liger_kernel_config=dict(rope=True, fused_linear_cross_entropy=True, rms_norm=False, swiglu=False)
)  # fmt: skip


def with_liger(rank, folder):
    plain, stock = (train(rank, "Trainer", None, f"{folder}/{name}", more=more) for name, more in (("plain", {}), ("stock", LIGER)))
    logs = {name: train(rank, "Trainer", section, f"{folder}/{name}", more=LIGER) for name, section in SECTIONS.items()}
    return {name: (log.bound, log.distance(stock)) for name, log in {"plain": plain, **logs}.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(on_ranks(2, with_liger, folder, timeout_s=600)))
