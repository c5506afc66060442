"""Tests ranks that share one GPU, with scripts in place of CUDA's daemon and of training; and the kernels in a GPU's profile."""

import contextlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import shared_gpu as launcher
from benchmarks import strip_nccl
from benchmarks.profiles import kernels
from ds_sp_overlap.tools import doctor, shared_gpu
from tests.harness.ranks import soon

RANKS = """
import os, sys, time
rank = int(os.environ["RANK"])
print(rank, *(os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")), os.environ.get(sys.argv[1]), flush=True)
"""


@pytest.fixture
def script(tmp_path):
    def write(*lines):
        path = tmp_path / "script.py"
        path.write_text("\n".join((RANKS, *lines)))
        return [str(path), shared_gpu.SHARING]

    return write


def test_every_rank_is_on_the_first_gpu_and_rank_0_is_heard(script, capfd):
    assert launcher.run(2, script(), 60) == 0
    assert capfd.readouterr().out == "0 2 0 2 None\n"


def test_a_rank_that_fails_ends_the_others_and_is_heard(script, capfd):
    assert launcher.run(2, script("if rank: sys.exit('no memory left')", "time.sleep(600)"), 600) == 1
    assert "no memory left" in capfd.readouterr().err


def test_ranks_are_ended_when_time_is_over(script):
    words = script("time.sleep(600)")
    assert launcher.run(2, words, 15) == 124
    assert soon(lambda: subprocess.run(["pgrep", "-f", words[0]]).returncode == 1), "ranks still run"


@pytest.mark.parametrize("status, says", [(0, "under MPS"), (1, "WITHOUT MPS, so that they take turns"), (None, "WITHOUT MPS")])
def test_mps_is_started_for_the_ranks_and_ended_after_them(status, says, script, capfd, tmp_path, monkeypatch):
    said = tmp_path / "said"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if status is not None:
        (tmp_path / shared_gpu.MPS).write_text(
            f'#!/bin/sh\necho "$* in $CUDA_MPS_PIPE_DIRECTORY" >> {said}\n[ "$1" = -d ] && exit {status}\ncat >> {said}\n'
        )
        (tmp_path / shared_gpu.MPS).chmod(0o755)
    monkeypatch.setattr(launcher, "lacks", lambda: "")
    monkeypatch.setattr(launcher, "nccl_version", lambda: (2, 30, 7))
    monkeypatch.setattr(sys, "argv", ["shared_gpu", "--seconds", "60", "2", *script()])
    assert launcher.main() == 0
    printed = capfd.readouterr().out.splitlines()
    assert printed[0].startswith(f"2 ranks share one GPU, {says}") and printed[0].endswith("over NCCL 2.30.7")
    assert printed[1] == "0 2 0 2 1"  # the environment tells NCCL to share the GPU
    expected = {0: ["-d in /", " in /", "quit -t 5"], 1: ["-d in /"], None: []}[status]
    lines = said.read_text().splitlines() if status is not None else []
    assert len(lines) == len(expected) and all(line.startswith(words) for line, words in zip(lines, expected))
    assert not any(name in shared_gpu.os.environ for name in (shared_gpu.SHARING, "CUDA_MPS_PIPE_DIRECTORY"))


@pytest.mark.parametrize("version, lacks", [((2, 28, 9), True), ((2, 30, 0), False), ((3, 0, 0), False)])
def test_an_older_nccl_is_refused_with_what_to_install(version, lacks, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(shared_gpu, "nccl_version", lambda: version)
    assert bool(shared_gpu.lacks()) is lacks
    if lacks:
        monkeypatch.setattr(sys, "argv", ["shared_gpu", "2", "never.py"])
        assert launcher.main() == 1
        said = "need NCCL 2.30, and 2.28.9 is loaded; pip install --no-deps --target DIR 'nvidia-nccl-cu13>=2.30'"
        assert said in capfd.readouterr().err


def test_nccl_tells_its_version_and_torch_only_where_there_is_no_library(monkeypatch):
    def loaded(name):
        assert name == "libnccl.so.2"
        return SimpleNamespace(ncclGetVersion=lambda number: setattr(number._obj, "value", 23007))

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(shared_gpu.ctypes, "CDLL", loaded)
    assert shared_gpu.nccl_version() == (2, 30, 7)

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(shared_gpu.ctypes, "CDLL", missing)
    assert shared_gpu.nccl_version() == (2, 28, 9)


def test_the_code_of_one_architecture_is_kept_where_it_lies():
    entries = [(90, b"nine" * 4), (100, b"tenx" * 4), (90, b"more" * 2)]
    body = b"".join(struct.pack("<HHIQ12xI", 2, 1, 64, len(code), of).ljust(64, b"h") + code for of, code in entries)
    binary = struct.pack("<IHHQ", strip_nccl.MAGIC, 1, 16, len(body)) + body
    data = bytearray(b"before-- " + bytes(7) + binary + bytes(8) + binary)
    expected = bytes(data).replace(b"tenx" * 4, bytes(16))
    assert strip_nccl.keep_one(data, 16, len(data) - 16, 90) == 4
    assert bytes(data) == expected


def test_ranges_of_the_profiler_are_no_kernels():
    recorded = json.loads(Path(__file__).parents[1].joinpath("harness", "profile_of_a_gpu.json").read_text())["events"]
    events = []
    for event in reversed(recorded):
        device = getattr(torch.profiler.DeviceType, event["device_type"])
        events.append(
            SimpleNamespace(
                name=lambda event=event: event["name"],
                device_type=lambda device=device: device,
                is_user_annotation=lambda event=event: event["is_user_annotation"],
                start_ns=lambda event=event: event["start_ns"],
            )
        )
    assert [event.name().split("<")[0] for event in kernels(events)] == [
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "Memcpy DtoD (Device -> Device)", "void at::native::vectorized_elementwise_kernel",
        "Memset (Device)", "void at::native::reduce_kernel", "Memcpy DtoH (Device -> Pageable)",
    ]  # fmt: skip


@pytest.mark.parametrize("gpus, reason, where", [
    (0, "", "gloo on the CPU"), (1, "", "NCCL, sharing 1 GPU under MPS"), (1, "NCCL is old", "gloo on the CPU"), (2, "", "NCCL, a GPU each")
])  # fmt: skip
def test_doctor_runs_its_ranks_over_nccl_on_one_gpu_too_and_says_where(gpus, reason, where, monkeypatch, capsys):
    on_gpu = []

    def start_processes(run, arguments, **options):
        ranks, over_nccl, folder = arguments
        on_gpu.append((over_nccl, shared))
        torch.save({"G = 1": {"output": 0.0}, "control": {"output": 1.0}}, Path(folder, "result"))

    @contextlib.contextmanager
    def sharing():
        nonlocal shared
        shared = True
        yield "under MPS"
        shared = False

    shared = False
    monkeypatch.setattr(doctor, "versions", lambda: "")
    monkeypatch.setattr(doctor, "lacks", lambda: reason)
    monkeypatch.setattr(doctor, "sharing", sharing)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.multiprocessing, "start_processes", start_processes)
    assert doctor.doctor(2) == 0
    printed = capsys.readouterr().out
    assert f"2 ranks over {where}, fp64" in printed and (reason in printed) and not shared
    assert on_gpu == [("NCCL" in where, "sharing" in where)]
