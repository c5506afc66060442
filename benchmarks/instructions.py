"""Count the host's instructions in a layer's forward and backward, relative to DeepSpeed's class; needs no GPU.

    python benchmarks/host.py --instructions

callgrind counts the executed instructions, so load and clock don't matter: two runs differ by 1 %. Rank 0 of 8 runs alone, with a
transport that moves no data, and with tensors so small that arithmetic takes almost no time. There are stand-ins (instructions.c)
for the streams and events of a GPU, and for batched products into slices, of which a GPU launches one, and a CPU one for each
slice. Needs valgrind and a C compiler.

    G = n                    SelfAttention, against DeepSpeed's class between projections; so are W = 1 and "W = 1, kept"
    W = 1                    four head groups, one at a time
    W = 1, kept              in a checkpoint that saves attention, against DeepSpeed's class in a checkpoint that saves nothing
    Llama, G = n             the attention of a transformers Llama with RoPE, against the same under ALST's Ulysses

On an H100's host, a thousand instructions take 0.5 microseconds, and each record of an event, or wait for one, a microsecond.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
RANKS, STEPS = 8, 4


# {variant: the variant that it is compared with}. DeepSpeed's variants are compared with themselves, and come first.
VARIANTS = {
    "DeepSpeed": "DeepSpeed",
    "G = 1": "DeepSpeed",
    "G = 2": "DeepSpeed",
    "G = 4": "DeepSpeed",
    "W = 1": "DeepSpeed",
    "DeepSpeed, checkpoint": "DeepSpeed, checkpoint",
    "W = 1, kept": "DeepSpeed, checkpoint",
    "ALST": "ALST",
    "Llama, G = 1": "ALST",
    "Llama, G = 2": "ALST",
}


def each(names, use) -> None:
    """Call ``use(name, run, layer)`` for each variant; ``layer.step(run)`` makes a step."""
    import stand_ins
    import torch
    from torch.utils.checkpoint import checkpoint
    from transformers import LlamaConfig, LlamaModel

    import ds_sp_overlap
    from benchmarks import longest
    from benchmarks.one_gpu import Emulated, Free, communication
    from benchmarks.variants import Layer, Shape
    from ds_sp_overlap.exchange.streams import SideStream

    torch.set_num_threads(1)
    bmm, one = torch.bmm, torch.ones(1, 1, 1)

    def one_product(*operands, out=None):
        return bmm(*operands) if out is None else bmm(one, one, out=one)

    cpu, shape = torch.device("cpu"), Shape(2 * RANKS, 32, 4, 8, 1, torch.float32, "cpu")

    class Backend:
        """Stands in for `Accelerator`."""

        Event = stand_ins.Event
        current_stream, set_stream = staticmethod(stand_ins.current_stream), staticmethod(stand_ins.set_stream)

        @staticmethod
        def Stream(device, priority):
            return stand_ins.Stream()

    class OnStandIns(Emulated):
        def __init__(self, size, transport):
            super().__init__(size, transport)
            self.sides[cpu] = SideStream(Backend, cpu)

    def layer_alone(name):
        layer = Layer(shape, 0, RANKS, sp_group=OnStandIns(RANKS, Free()))
        if name.startswith("DeepSpeed"):
            run = layer.stock()
        elif name.startswith("W"):
            run = layer.ours(head_groups=4, window=1, kernels="torch")
        else:
            run = layer.ours(head_groups=int(name[-1]), kernels="torch")
        if name == "DeepSpeed, checkpoint":
            run = functools.partial(checkpoint, run, use_reentrant=False)
        if name == "W = 1, kept":
            run = functools.partial(checkpoint, run, use_reentrant=False, context_fn=ds_sp_overlap.keep_attention)
        use(name, run, layer)

    def attention_of_llama(name):
        """Return the attention of a Llama; its model's forward, which gathers positions once for all layers, runs outside."""
        model = longest.Model(shape.width, shape.heads, shape.kv_heads, ranks=RANKS)
        config = LlamaConfig(
            vocab_size=8, hidden_size=model.hidden, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, attn_implementation="sdpa",
        )  # fmt: skip
        net, layer, tokens = LlamaModel(config).train(), Layer(shape, 0, RANKS), shape.seq // RANKS
        layer.projections = attention = net.layers[0].self_attn
        layer.x, layer.dy = (t.transpose(0, 1) for t in (layer.x, layer.dy))

        def decoder(hidden_states, **given):
            use(name, lambda x: attention(hidden_states=x, **given)[0], layer)
            return hidden_states

        net.layers[0].forward = decoder
        section = None if name == "ALST" else {"head_groups": int(name[-1]), "kernels": "torch"}
        patches = mock.patch.object(longest, "Emulated", OnStandIns), mock.patch.dict(longest.WAYS, {name: section})
        with patches[0], patches[1], longest.alone(RANKS, Free()), longest.running(name, net, model, tokens):
            net(inputs_embeds=layer.x, position_ids=torch.arange(tokens)[None], use_cache=False)

    patch = mock.patch.object(torch, "bmm", one_product)
    with patch, communication(RANKS, Free()), torch.autograd.set_multithreading_enabled(False):
        for name in names:
            (attention_of_llama if VARIANTS[name] == "ALST" else layer_alone)(name)


def count(name, run, layer) -> None:
    """Run a variant while callgrind counts; callgrind writes a file for the variant."""
    import stand_ins

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
    parser.add_argument("--variants", default="; ".join(VARIANTS))
    parser.add_argument("--count", action="store_true", help="what valgrind runs")
    args = parser.parse_args(arguments)
    names = args.variants.split("; ")
    if args.count:
        each(names, count)
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
        ratio = counts[name] / counts.get(VARIANTS[name], float("nan"))
        print(f"{name:21} {counts[name] / 1e6:6.2f} million instructions a step {ratio:6.2f}")


if __name__ == "__main__":
    main()
