"""Tests parts of the benchmarks: the five-of-eight schedule, and scripts that must run without a GPU and without root."""

import contextlib
import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks import link, pictures, record, wire
from benchmarks.simulated import UPSTREAM
from benchmarks.variants import ASYNC_ULYSSES, Layer, Shape, check_parity
from benchmarks.wire import Wire
from ds_sp_overlap.relayout import kernels
from ds_sp_overlap.schedule import order
from tests.harness.ranks import RankError, on_ranks
from tests.harness.transports import Recording

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(*words):
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, words)], env=env, capture_output=True, text=True, timeout=200)


def test_a_picture_says_what_its_figures_are_of(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(pictures, "_save", lambda figure, path, title: titles.append(title))
    for name in ("link2", "training_steps", "memory"):
        pictures.draw(pictures.RESULTS / name)
    assert all("Measured on CPUs, not on a GPU: " in title for title in titles)
    pictures.for_readme(tmp_path / "readme.png")
    assert "two ranks that share one H100" in titles[-1]


def five_of_eight(rank, size):
    """Return the order of exchanges of five of eight, forward and backward; its results must equal those of DeepSpeed's class."""
    layer = Layer(Shape(8 * size, 4, 8, 4, dtype=torch.float64), rank, size, torch.distributed.group.WORLD)
    mover = Recording()
    got = layer.step(layer.five_of_eight(mover))
    check_parity("five of eight", got, layer.step(layer.stock()), 1e-12)
    return mover.log


@pytest.mark.parametrize("size", [2, 4])
def test_five_of_eight_is_right_and_is_the_program_that_plan_plays(size):
    expected = order(UPSTREAM, UPSTREAM.forward) + order(UPSTREAM, UPSTREAM.backward)
    assert on_ranks(size, five_of_eight, size) == [expected] * size


@pytest.mark.parametrize("cores, says", [(4, "4 ranks"), (2, "4 ranks on 2 cores: no claim about time")])
def test_figures_of_a_link_say_whether_its_ranks_share_cores(monkeypatch, cores, says):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert Wire.kind.fget(SimpleNamespace(ranks=4, per_node=1)) == f"rate-limited link (veth and token bucket), {says}"


def test_one_gpu_rehearses_on_a_cpu_and_labels_what_it_writes(tmp_path):
    ran = script(BENCHMARKS / "one_gpu.py", "--rehearse", "--out", tmp_path / "emulated")
    assert ran.returncode == 0, ran.stderr
    assert "EMULATED network" in ran.stdout and "REHEARSED ON A CPU: no claim about time" in ran.stdout
    table = (tmp_path / "emulated.csv").read_text()
    assert table.startswith("emulated,") and all(name in table for name in ("ALST", "DeepSpeed", "five of eight", "G = 2"))
    assert "EMULATED" in (tmp_path / "emulated.json").read_text()


def gpu_sh(*words, **environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **environment}
    return subprocess.run([BENCHMARKS / "gpu.sh", "--rehearse", *words], env=env, capture_output=True, text=True, timeout=400)


compiled = pytest.mark.skipif(kernels.library().path is None, reason=f"no compiled kernels: {kernels.library().reason}")
# {stages: (tables that they write, words of their output)}.
STAGES = {
    "whole": ({"whole.csv"}, "REHEARSED: gloo, 2 processes on a CPU"),
    "parity": ({"setting-order1-queuesnot set.csv"}, "parity: under ZeRO-3"),
    "models": (set(), "models: 16 right, 0 wrong, 0 left out; 2 ranks over gloo"),
    "race sync one": (set(), "decide the transport: auto works"),
    "emulated": ({"emulated.csv"}, "rehearsed, means nothing: decide head_groups, rehearsal"),
    "contention": ({"contention.csv"}, "rehearsed, means nothing: decide max_ctas"),
    "convergence": (set(), "PASS"),
    "bandwidth memcheck": ({"bandwidth-moves.csv"}, "1 MB of q: copy "),
}


@pytest.mark.parametrize("stages", [pytest.param(name, marks=compiled if "memcheck" in name else ()) for name in STAGES])
@pytest.mark.full
def test_stages_for_a_gpu_rehearse_on_a_cpu(stages, tmp_path):
    tables, says = STAGES[stages]
    ran = gpu_sh(*stages.split(), RESULTS=str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == f"REHEARSED on a CPU: no claim about a kernel or a time: {stages}"
    assert {path.name for path in tmp_path.glob("*.csv")} == tables and says in ran.stdout
    assert ran.stdout.count("the planted fault is seen") == 2 * ("race" in stages)


def test_the_call_for_a_gpu_has_its_stages_in_order_each_with_an_end():
    ran = gpu_sh(PYTHON="true")
    begun = re.findall(r"^=== ([\w-]+), at \d+ s, ends at (\d+) s$", ran.stdout, re.M)
    assert ran.stdout.splitlines()[-1].endswith(": " + " ".join(name for name, _ in begun))
    assert [name for name, _ in begun][:5] == ["install", "build", "whole", "parity", "models"]
    assert all(int(end) <= 530 for _, end in begun)
    assert ran.stdout.count("PASSED, at") == 6  # these checks run at the same time; each prints its result


def test_a_check_that_fails_side_by_side_fails_the_stage(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *on_gpu.py\\ race*) exit 1;; esac\n')
    python.chmod(0o755)
    ran = gpu_sh("checks", PYTHON=str(python))
    assert ran.returncode == 1 and "--- race: FAILED" in ran.stdout and ran.stdout.count(": PASSED, at") == 5


def test_a_stage_begins_in_time_or_fails():
    ran = gpu_sh("layer", PYTHON="true", LIMIT="0")
    assert ran.returncode == 1 and "no time left for: true benchmarks/on_gpu.py layer" in ran.stdout


def test_the_command_for_a_gpu_goes_on_after_a_stage_that_fails_and_says_which():
    ran = gpu_sh("nonsense", "layer", PYTHON="true")
    assert ran.returncode == 1 and "no such stage: nonsense" in ran.stdout
    assert ran.stdout.endswith("FAILED nonsense\nPASSED layer\nFAILED: nonsense\n")


@pytest.mark.full
def test_the_command_for_several_gpus_rehearses_on_a_cpu_and_ends_with_one_table(tmp_path):
    env = {**os.environ, "PYTHON": sys.executable, "RESULTS": str(tmp_path)}
    ran = subprocess.run([BENCHMARKS / "nccl.sh", "--rehearse", "2"], env=env, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("parity: 8 heads") == 3 and "parity: under ZeRO-3" in ran.stdout
    assert (
        "alike on all ranks: starts q0 k0 v0 qkv1 o0 o1 do1 do0 dqkv1 dv0 dk0 dq0" in ran.stdout
        and (tmp_path / "trace.json.gz").exists()
    )
    table = ran.stdout[ran.stdout.index("| measured on") :].splitlines()
    assert len(table) == 2 + 4 * 4  # head; 4 settings, each with stock and three numbers of groups
    assert all("REHEARSED: gloo, 2 processes on a CPU, no claim about time" in row for row in table[2:])


def test_rows_are_there_when_a_run_ends_early(tmp_path):
    rows = record.Rows(tmp_path / "folder" / "rows.csv")
    rows.append({"a": 1})
    rows.append({"a": 2, "b": 3})
    with rows.path.open() as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "3"}]


# A stand-in for VeOmni: has the functions that `Layer.veomni` calls, and exchanges lists of tensors as VeOmni does.
PEER = """
import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import comm


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter, gather):
        ctx.back = gather, scatter
        sends = [part.contiguous() for part in x.chunk(dist.get_world_size(comm.group), scatter)]
        received = [torch.empty_like(part) for part in sends]
        dist.all_to_all(received, sends, group=comm.group, async_op=True).wait()
        return torch.cat(received, gather)

    @staticmethod
    def backward(ctx, dy):
        return Exchange.apply(dy, *ctx.back), None, None


def async_ulysses_qkv_projection(
    hidden_states, seq_dimension, head_dimension, q_weight, k_weight, v_weight, unpadded_dim_size, head_dim
):
    assert unpadded_dim_size == hidden_states.shape[seq_dimension] * dist.get_world_size(comm.group)
    for weight in (q_weight, k_weight, v_weight):
        heads = F.linear(hidden_states, weight).unflatten(-1, (-1, head_dim))
        yield Exchange.apply(heads, head_dimension, seq_dimension)


def async_ulysses_output_projection(hidden_states, seq_dimension, head_dimension, proj_weight, unpadded_dim_size):
    return F.linear(Exchange.apply(hidden_states, seq_dimension, head_dimension).flatten(2), proj_weight)
"""


def beside_a_peer(rank, size, checkout, port):
    """Return the output of rank 0 of `link.py`, run over local connections instead of a slow link."""
    words = f"link.py --veomni {checkout} --seq 32 --heads 4 --head-dim 8 --groups 1 --steps 1 --warmup 0 --no-switches"
    with mock.patch.object(wire, "PORT", port), mock.patch.object(wire.Wire, "host", lambda rank: "127.0.0.1"):
        streams = wire.Streams(rank, size, 1)
    exchanges = mock.patch.multiple(
        torch.distributed, all_to_all=streams.all_to_all, all_to_all_single=streams.all_to_all_single,
        destroy_process_group=lambda: None,
    )  # fmt: skip
    argv = mock.patch.object(sys, "argv", f"{words} --rank {rank} --ranks {size}".split())
    printed, modules = io.StringIO(), mock.patch.dict(sys.modules)  # forget modules of another checkout
    with exchanges, argv, modules, mock.patch.object(link, "join"), contextlib.redirect_stdout(printed):
        link.main()
    return printed.getvalue()


@pytest.mark.parametrize("factor", [1, 1.001])
def test_link_times_a_peer_only_if_it_computes_what_deepspeed_does(factor, tmp_path):
    path = tmp_path / (ASYNC_ULYSSES.replace(".", "/") + ".py")
    path.parent.mkdir(parents=True)
    (path.parent / "comm.py").write_text("def set_ulysses_sequence_parallel_group(own):\n    global group\n    group = own\n")
    for package in path.parent, path.parents[1], path.parents[2]:
        (package / "__init__.py").write_text("raise AssertionError('more of the checkout runs than is needed')")
    path.write_text(PEER.replace("return Exchange.apply(dy,", f"return Exchange.apply({factor} * dy,"))
    port = 20000 + 4 * (os.getpid() % 2500)  # differs between test processes
    if factor != 1:
        with pytest.raises(RankError, match="VeOmni"):
            on_ranks(2, beside_a_peer, 2, tmp_path, port)
        return
    result = json.loads(on_ranks(2, beside_a_peer, 2, tmp_path, port)[0].splitlines()[-1])
    rows = {row["variant"]: row for row in link.rows_of(1, 1, result)}
    assert rows["VeOmni"]["DeepSpeed / step"] > 0 and result["peak_bytes"]["VeOmni"] > 0
    assert rows["compute: VeOmni"]["median ms"] > 0


@pytest.mark.full
def test_host_times_every_variant_and_writes_it(tmp_path):
    ran = script(BENCHMARKS / "host.py", "--steps", 2, "--groups", 1, 2, "--out", tmp_path / "host")
    assert ran.returncode == 0, ran.stderr
    with (tmp_path / "host.csv").open() as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["stock", "drop-in, G = 1", "G = 1", "G = 2"]
    assert all(0 < int(row["min"]) <= int(row["median"]) <= int(row["max"]) for row in rows.values())
    assert "nothing moved" in json.loads((tmp_path / "host.json").read_text())["kind"]


PLAN = "plan --hidden 32 --heads 4 --seq 64 --sp 2 --bandwidth 3"


def test_plan_measures_what_is_not_given_says_so_and_reads_what_it_wrote(tmp_path):
    command = [sys.executable, "-m", "ds_sp_overlap", *PLAN.split()]
    ran = subprocess.run([*command, "--measure"], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    measured = r"\(measured, measured.json\)"
    rates = re.search(rf"; gemm_share (\S+) {measured}; attention_share (\S+) {measured}; ", ran.stdout)
    latency = re.search(rf"; wire_gbs 3 \(given\); latency_us (\S+) {measured}\n", ran.stdout)
    assert all(float(rate) > 0 for rate in (*rates.groups(), *latency.groups()))
    assert json.loads((tmp_path / "measured.json").read_text())["wire_gbs"] > 0
    again = subprocess.run([*command, "--measured", "measured.json"], capture_output=True, text=True, cwd=tmp_path)
    assert again.stdout == ran.stdout and len(ran.stdout.splitlines()) > 10
