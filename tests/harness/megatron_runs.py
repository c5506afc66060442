"""Runs pretrain_gpt.py of a checkout of Megatron-DeepSpeed, unchanged, on CPU with gloo.

The environment variable MEGATRON_DEEPSPEED is the path of the checkout. `megatron_on_cpu`, which the ranks find on PYTHONPATH,
replaces parts that need a GPU, such as flash attention.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
VOCABULARY, WIDTH = 128, 64
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 1 --init-method-std 0.2 "
    "--attention-dropout 0 --hidden-dropout 0 --no-bias-gelu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion "
    "--no-gradient-accumulation-fusion --lr 3e-4 --min-lr 3e-4 --lr-decay-style constant --weight-decay 0 --clip-grad 0 "
    "--optimizer adam --eval-interval 1000 --eval-iters 0 --log-interval 1 --num-workers 0 --data-impl mmap --split 90,10,0 "
    "--distributed-backend gloo --deepspeed --no-query-key-layer-scaling"
).split()


def write_data(folder):
    """Write a tokenized corpus in the format of ``--data-path``; return its path. The random tokens have a structure to learn."""
    prefix = folder / "corpus"
    draw = np.random.default_rng(3)
    documents = [np.cumsum(draw.integers(1, 4, 300)) % (VOCABULARY - 1) for _ in range(40)]
    sizes = [len(document) for document in documents]
    np.concatenate(documents).astype(np.uint16).tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1))
        index.write(np.array(sizes, np.int32).tobytes())
        index.write((np.cumsum([0, *sizes[:-1]]) * 2).astype(np.int64).tobytes())
        index.write(np.arange(len(sizes) + 1).astype(np.int64).tobytes())
    return prefix


def _environment(checkout, record, steps, stand_ins):
    """Return the environment of the ranks; ``stand_ins`` names stand-ins besides "flash", which every run needs."""
    return {
        **os.environ,
        "MEGATRON_ON_CPU": ",".join(["flash", *stand_ins]),
        "MEGATRON_RECORD": str(record),
        "MEGATRON_RECORD_STEPS": str(steps),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE / "megatron_on_cpu"), str(HERE.parents[1]), str(checkout), *sys.path]),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def _launch(ranks, launcher, arguments, env, folder):
    """Run a launcher's module on several ranks; return the exit status and the output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_ranks = "--nproc_per_node" if launcher == "torch.distributed.run" else "--num_gpus"
    with subprocess.Popen(
        [sys.executable, "-m", launcher, f"{of_ranks}={ranks}", f"--master_port={port}", *arguments],
        env={**env, "LOCAL_SIZE": str(ranks)}, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as running:  # fmt: skip
        try:
            output, _ = running.communicate(timeout=900)
        except BaseException:
            running.terminate()  # on SIGTERM, the launcher ends its ranks, too
            raise
    return running.returncode, output


def train(
    checkout, folder, section=None, way="run", ranks=2, sp=2, steps=10, stage=0, accumulation=1, dtype="fp32",
    flash="--use-flash-attn-v2", pipeline=False, more=(), planted=(), must_fail=False,
):  # fmt: skip
    """Train with pretrain_gpt.py; return the record of `recorder` with the output.

    section   the sp_overlap section of the DeepSpeed config; None for none
    way       "run": torchrun -m ds_sp_overlap run; "deepspeed": DeepSpeed's launcher with --module ds_sp_overlap run; "import": a
              copy of the script that first imports ds_sp_overlap; "stock": the script by itself, without the package
    more      further arguments of the script
    planted   further stand-ins. "wrong": an error in v; "reference": attention with grouped queries, which Megatron-DeepSpeed lacks
              at sp size 1
    must_fail whether the run must fail; then only the output is returned
    """
    record, micro = folder / "record.pt", 2
    batch = micro * accumulation * (ranks // sp)
    config = {
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation, "train_batch_size": batch,
        "zero_optimization": {"stage": stage}, **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        **({} if section is None else {"sp_overlap": section}),
    }  # fmt: skip
    (folder / "ds.json").write_text(json.dumps(config))
    flags = [flash] * bool(flash) + ["--no-pipeline-parallel"] * (not pipeline) + [f"--{dtype}"] * (dtype != "fp32")
    arguments = [
        *MODEL, *flags, "--ds-sequence-parallel-size", str(sp), "--zero-stage", str(stage), "--train-iters", str(steps),
        "--micro-batch-size", str(micro), "--global-batch-size", str(batch), "--data-path", str(write_data(folder)),
        "--deepspeed_config", str(folder / "ds.json"), *more,
    ]  # fmt: skip
    script = Path(checkout) / "pretrain_gpt.py"
    if way == "import":
        copy = folder / script.name
        copy.write_text("import ds_sp_overlap\n" + script.read_text())
        script = copy
    head = {"run": ["-m", "ds_sp_overlap", "run"], "deepspeed": ["--module", "ds_sp_overlap", "run"]}.get(way, [])
    stand_ins = [*planted, *["compress"] * (way == "stock"), *["builder"] * ("builder" in (flash or ""))]
    launcher = "deepspeed.launcher.runner" if way == "deepspeed" else "torch.distributed.run"
    code, output = _launch(
        ranks, launcher, [*head, str(script), *arguments], _environment(checkout, record, steps, stand_ins), folder
    )
    assert (code != 0) == must_fail, f"exit status {code}\n{output[-6000:]}"
    return output if must_fail else types.SimpleNamespace(**torch.load(record, weights_only=False), output=output)


def apart(one, other):
    """Return {name: largest relative difference between two runs}.

    loss, norm   the loss and the gradient norm of all steps
    gradients    the parameters' gradients in the first step, before training amplifies rounding
    parameters   the parameters at the end

    Leaves out the bias of k. With learned positions, attention does not depend on this bias, so the bias's gradient is only
    rounding. But Adam turns even such a gradient into full steps.
    """
    assert len(one.losses) == len(other.losses) and one.parameters.keys() == other.parameters.keys()

    def far(ones, others):
        return max(abs(x - y) / abs(y) for x, y in zip(ones, others))

    def farthest(ones, others):
        found = []
        for name, x in others.items():
            off = ones[name] - x
            if name.endswith("query_key_value.bias"):
                off[WIDTH : (len(x) + WIDTH) // 2] = 0  # [q | k | v]
            found.append((off.norm() / x.norm()).item())
        return max(found)

    return {
        "loss": far(one.losses, other.losses), "norm": far(one.norms, other.norms),
        "gradients": farthest(one.gradients, other.gradients), "parameters": farthest(one.parameters, other.parameters),
    }  # fmt: skip
