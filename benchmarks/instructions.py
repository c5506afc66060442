"""Instructions of a layer's forward and backward on a GPU's host, over those of DeepSpeed's class; no GPU is needed.

    python benchmarks/host.py --instructions

callgrind counts what a step executes, so that neither load nor clock matters: two runs differ by 1 %. Rank 0 of 8 runs alone, over a
wire on which data only appear, on tensors so small that arithmetic is nothing beside the calls. The streams and events of a GPU are
stand-ins (instructions.c). Needs valgrind and a C compiler.

On an H100's host, microseconds are 0.5 times thousands of instructions, and one for each record of an event or wait for one.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
RANKS, STEPS = 8, 4


def variants(names):
    """Yield each variant's name, what runs it, and the layer that makes a step of it."""
    import stand_ins
    import torch

    from benchmarks.one_gpu import Emulated, Free, communication
    from benchmarks.variants import Layer, Shape
    from ds_sp_overlap.exchange.streams import SideStream

    torch.set_num_threads(1)

    cpu, layer = torch.device("cpu"), Layer(Shape(2 * RANKS, 32, 4, 8, 1, torch.float32, "cpu"), 0, RANKS)

    class Backend:
        """Stands in for `Accelerator`."""

        Event = stand_ins.Event
        current_stream, set_stream = staticmethod(stand_ins.current_stream), staticmethod(stand_ins.set_stream)

        @staticmethod
        def Stream(device, priority):
            return stand_ins.Stream()

    with communication(RANKS, Free()), torch.autograd.set_multithreading_enabled(False):
        for name in names:
            if name == "DeepSpeed":
                yield name, layer.stock(), layer
                continue
            layer.sp_group = Emulated(RANKS, Free())
            layer.sp_group.sides[cpu] = SideStream(Backend, cpu)
            yield name, layer.ours(head_groups=int(name[-1]), kernels="torch"), layer


def count(names) -> None:
    """Run each variant; callgrind writes a file for each."""
    import stand_ins

    for name, run, layer in variants(names):
        for _ in range(6):
            layer.step(run)
        gc.collect()
        gc.disable()
        stand_ins.begin()
        layer.step(run)
        stand_ins.zero()
        for _ in range(STEPS):
            layer.step(run)
        stand_ins.end(name)
        gc.enable()


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="DeepSpeed,G = 1,G = 2,G = 4", help="the first is that of the ratios")
    parser.add_argument("--count", action="store_true", help="what valgrind runs")
    args = parser.parse_args(arguments)
    names = args.variants.split(",")
    if args.count:
        count(names)
        return
    here = Path(__file__)
    with tempfile.TemporaryDirectory() as folder:
        include, library = sysconfig.get_paths()["include"], Path(folder, "stand_ins.so")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", f"-I{include}", here.with_suffix(".c"), "-o", library], check=True)
        environment = {**os.environ, "PYTHONPATH": folder, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        callgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts"]
        command = [*callgrind, sys.executable, here, "--count", "--variants", args.variants]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ran.returncode:
            sys.exit(ran.stderr[-2000:])
        counts = {}
        for path in Path(folder).glob("counts.*"):
            text = path.read_text()
            name = re.search(r"desc: Trigger: Client Request: (.+)", text)
            total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
            if name and total:
                counts[name[1].strip()] = int(total[1]) / STEPS
    for name in names:
        print(f"{name:12} {counts[name] / 1e6:6.2f} million instructions a step {counts[name] / counts[names[0]]:6.2f}")


if __name__ == "__main__":
    main()
