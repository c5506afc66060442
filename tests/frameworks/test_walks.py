"""Runs every code block of README and docs that can run here, as a reader would: see `tests.harness.pages`."""

import functools
import os
import subprocess
import sys
from itertools import groupby

import pytest
from transformers import AutoModelForCausalLM

from tests.harness.cases import full
from tests.harness.models import tiny, train_run
from tests.harness.pages import PAGES, ROOT, read
from tests.harness.ranks import on_ranks

MODEL = "Qwen/Qwen3-0.6B"  # transformers loads the model from a local folder of this name
STARTS_WITH = """
import os
if "RANK" in os.environ:
    import atexit, time
    atexit.register(time.sleep, 0.5)  # gloo's threads free tensors: after Python's end torch aborts, with stock attention too
    import deepspeed.ops
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it would be compiled, behind a file lock
"""
QUICK = "README.md", "When it pays"
RUN = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


def runs(block):
    return block.language in RUN and not block.said[0]


def walks():
    """Yield for each section its page, its name, and its blocks up to the last one that runs."""
    for path in PAGES:
        for section, blocks in groupby(read(path).blocks, lambda block: block.section):
            blocks = list(blocks)
            if any(map(runs, blocks)):
                marks = [pytest.mark.full] * ((path.name, section) != QUICK)
                yield pytest.param(blocks, id=f"{path.name}, {section}", marks=marks)


@pytest.mark.parametrize("blocks", list(walks()))
def test_it_runs_as_it_stands(blocks, tmp_path):
    model = tiny("qwen3", vocab_size=1000, max_position_embeddings=4096)
    model.save_pretrained(tmp_path / MODEL)
    (tmp_path / "sitecustomize.py").write_text(STARTS_WITH)
    bin = os.path.dirname(sys.executable)
    env = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1",
           "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    printed = ""
    for block in blocks:
        what, name = block.said
        if what == "file":
            (tmp_path / name).write_text(block.text)
        elif what == "printed":
            assert block.text in printed
        elif runs(block):
            done = subprocess.run(
                [*RUN[block.language], block.text], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
            )
            assert done.returncode == 0, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            printed = done.stdout
    for saved in tmp_path.glob("out/checkpoint-*"):
        AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize(
    "family, identical",
    [
        ("llama", True),
        full("mistral", True),
        full("qwen2", True),
        ("phi3", False),
        full("qwen3", False),
        full("hunyuan_v1_dense", False),
    ],
)
def test_one_head_group_trains_as_stock_bit_for_bit_or_as_nearly_as_features_says(family, identical):
    options = {"family": family, "steps": 2, **({"head_dim": 16} if "hunyuan" in family else {})}
    stock, one = (
        on_ranks(2, functools.partial(train_run, section=section, **options), 2) for section in (None, {"head_groups": 1})
    )
    for mine, theirs in zip(one, stock, strict=True):
        assert mine.equals(theirs) == identical
        assert mine.distance(theirs)["gradients"] < 1e-6
