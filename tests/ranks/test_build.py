"""Tests how the compiled operators are found, loaded, built and chosen."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import deepspeed.sequence.layer
import pytest
import torch

import ds_sp_overlap
from csrc import check_cubins
from ds_sp_overlap.exchange import sp_group as sp_group_module
from ds_sp_overlap.exchange.sp_group import SPGroup
from ds_sp_overlap.relayout import build, kernels, ops
from tests.harness import ranks

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
needs_library = pytest.mark.skipif(not kernels.library().cuda, reason=f"no compiled CUDA kernels: {kernels.library().reason}")


def python(code, **environment):
    """Return the output of a new process that runs ``code`` with the package under test."""
    root = Path(build.__file__).parents[2]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(root), **environment}
    ran = subprocess.run(  # elsewhere: -c puts the working directory first in sys.path
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, cwd="/"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_without_the_binary_everything_is_pytorch():
    code = (
        "import torch; from ds_sp_overlap.relayout import ops, kernels\n"
        "print(ops.implementation('auto').pack is None, kernels.library().path)\n"
        "print(ops.lacks_compiled(build=True))"
    )
    last = python(code, DS_SP_OVERLAP_BUILD="0").splitlines()[-2:]
    assert last[0] == "True None"
    assert last[1].startswith("DS_SP_OVERLAP_BUILD is 0; build them with `python -m")


def copy_of_the_package(folder):
    """Copy the package and its sources, without binaries."""
    ignore = shutil.ignore_patterns("_kernels.*", "__pycache__")
    shutil.copytree(build.PACKAGE, folder / "ds_sp_overlap", ignore=ignore)
    shutil.copytree(build.sources(), folder / "csrc", dirs_exist_ok=True)


@needs_compiler
@pytest.mark.full
def test_a_package_without_binaries_builds_them_at_first_use(tmp_path):
    """By the op builder, into torch's extensions folder; a second process finds them there."""
    copy_of_the_package(tmp_path)
    code = (
        "import torch; from ds_sp_overlap.relayout import ops, kernels\n"
        "before = kernels.library().path; now = kernels.demanded()\n"
        "out = torch.full((192,), float('nan')); x = torch.randn(4, 6, 8)\n"
        "torch.ops.ds_sp_overlap.pack(x, 1, [0, 4], [4, 6], out)\n"
        "assert torch.equal(out, torch.cat((x[:, :4].flatten(), x[:, 4:].flatten())))\n"
        "assert b'\\0libtorch.so\\0' in now.path.read_bytes()\n"  # `link` was used
        "print(before, now.path.parent.name, now.path.stat().st_mtime_ns, now.cuda)"
    )
    environment = dict(DS_SP_OVERLAP_BUILD="cpu", TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"), PYTHONPATH=str(tmp_path))
    first = python(code, **environment).splitlines()[-1]
    assert first.startswith("None ds_sp_overlap_kernels_torch") and first.endswith("False")
    assert python(code, **environment).splitlines()[-1] == first


@needs_compiler
def test_a_library_is_kept_for_as_long_as_it_is_of_these_sources(tmp_path, monkeypatch):
    """Tests and users build the library once for the same sources."""
    for name in (build.NAME, "_kernels.json"):
        shutil.copy(build.PACKAGE / name, tmp_path)
    assert build.is_current(tmp_path, build.wish())
    changed = tmp_path / "csrc"
    shutil.copytree(build.sources(), changed)
    (changed / "ops.cpp").write_text((changed / "ops.cpp").read_text() + "// changed")
    monkeypatch.setattr(build, "sources", lambda: changed)
    assert not build.is_current(tmp_path, build.wish())
    assert not build.is_current(changed, build.wish()), "no library"
    monkeypatch.setattr(build, "_run", lambda commands: None)  # the build makes no library
    with pytest.raises(FileNotFoundError):
        build.build(tmp_path, build.wish())
    assert not build.is_current(tmp_path, build.wish()), "killed before it replaced the library"


@needs_compiler
@pytest.mark.parametrize(
    "linker", ["c++", pytest.param("nvcc", marks=pytest.mark.skipif(build.nvcc() is None, reason="needs nvcc"))]
)
def test_a_library_depends_on_libtorch_though_the_linker_leaves_out_what_is_not_used(tmp_path, linker):
    """The library must list libtorch.so, which lists libtorch_cuda.so in a torch with CUDA.

    torch does not make the symbols of its libraries global, so only listed libraries are searched.
    """
    (tmp_path / "empty.cpp").touch()
    subprocess.run([build.compiler(), "-fPIC", "-c", "-o", tmp_path / "empty.o", tmp_path / "empty.cpp"], check=True)
    by = build.linker(build.nvcc() if linker == "nvcc" else None, build.compiler())
    left_out = [*by, "-Xlinker", "--as-needed"]  # the default of many distributions' compilers
    linked = tmp_path / "linked.so"
    subprocess.run(build.link(left_out, [str(tmp_path / "empty.o")], str(linked)), check=True)
    assert b"\0libtorch.so\0" in linked.read_bytes()


def test_a_build_that_is_not_wished_for_or_impossible_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("DS_SP_OVERLAP_BUILD", "gpu")
    with pytest.raises(build.BuildError, match="must be 0, cpu or cuda, got 'gpu'"):
        build.wish()
    monkeypatch.setattr(build, "nvcc", lambda: None)
    with pytest.raises(build.BuildError, match="nvcc not found"):
        build.build(tmp_path, "cuda")
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(build.BuildError, match="no C.. compiler found"):
        build.build(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@needs_compiler
def test_what_is_built_by_hand_is_found(tmp_path):
    copy_of_the_package(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-m", "ds_sp_overlap", "build", "cpu"], cwd=tmp_path, env=environment, check=True, timeout=300)
    code = "from ds_sp_overlap.relayout import kernels; print(kernels.library().path)"
    assert python(code, PYTHONPATH=str(tmp_path)).splitlines()[-1] == str(tmp_path / "ds_sp_overlap" / build.NAME)


def test_the_arch_list_is_torch_s():
    assert build.gencode("8.0;9.0+PTX") == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    assert build.gencode("9.0a 10.0") == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100,code=sm_100",
    ]


@pytest.mark.parametrize("abi, says", [("2.10", "does not load here"), ("99.0", "stable ABI from torch 99.0 on")])
def test_a_failed_load_says_built_against_versus_found(tmp_path, abi, says):
    (tmp_path / "_kernels.so").write_bytes(b"not a library")
    record = {"torch": "2.99.1", "torch_cuda": None, "abi": abi, "cuda": "12.9", "architectures": "8.0"}
    (tmp_path / "_kernels.json").write_text(json.dumps(record))
    failed = kernels.load(tmp_path / "_kernels.so")
    assert failed.failed and failed.path is None and not failed.cuda
    assert says in failed.reason
    assert "built against torch 2.99.1 with CUDA 12.9" in failed.reason and f"found torch {torch.__version__}" in failed.reason
    (tmp_path / "_kernels.json").unlink()
    assert "no readable record" in kernels.load(tmp_path / "_kernels.so").reason


@pytest.mark.parametrize(
    "backend, lacks, expected", [("nccl", "", "compiled"), ("gloo", "", "torch"), ("nccl", "nvcc failed (1)", "torch")]
)
def test_auto_takes_compiled_kernels_over_nccl_where_all_ranks_have_them(backend, lacks, expected, rank):
    with (
        mock.patch.object(sp_group_module, "backend_of", lambda group, device: backend),
        mock.patch.object(ops, "lacks_compiled", side_effect=lambda build: lacks if rank else "") as asked,
        mock.patch.object(sp_group_module, "warn_once") as warned,
    ):
        sp_group = SPGroup(torch.distributed.group.WORLD, "c10d")
        sp_group.prepare()
        sp_group.prepare()
    assert sp_group.kernels == expected and asked.call_count == (backend == "nccl")
    said = [call.args[0] for call in warned.call_args_list]
    assert len(said) == bool(lacks) and all(f"(sp rank 1: {lacks})" in line for line in said)


def test_a_build_that_fails_is_a_reason_and_is_not_tried_again(monkeypatch):
    tried = []

    def first_use():
        tried.append(1)
        raise PermissionError("no place to write")

    monkeypatch.setattr(kernels, "_built_here", None)
    monkeypatch.setattr(kernels, "_installed", lambda: kernels.Library(reason="none were built"))
    monkeypatch.setattr(kernels, "_first_use", first_use)
    for _ in range(2):
        assert ops.lacks_compiled(build=True).startswith("none were built, and building them failed: no place to write; build them")
    assert tried == [1]


def refused(rank, whole_model, devices, library):
    """Call a layer, or enable a model, with compiled kernels; return its refusal.

    devices    whether each rank has a CUDA device
    library    whether each rank has the library
    """
    group = torch.distributed.group.WORLD
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: devices[rank]),
        mock.patch.object(ops.kernels, "demanded", kernels.library if library[rank] else lambda: kernels.Library(reason="none")),
    ):
        if whole_model:
            model = torch.nn.Sequential(deepspeed.sequence.layer.DistributedAttention(lambda q, k, v: q, group))
            return ranks.refusal(ds_sp_overlap.enable, model, {"kernels": "compiled"}, group)
        layer = ds_sp_overlap.DistributedAttention(lambda q, k, v: q, group, config={"kernels": "compiled"})
        return ranks.refusal(layer, *(torch.randn(4, 1, 2, 8) for _ in range(3)), 1)


@needs_library
@pytest.mark.parametrize("whole_model", [True, False])
@pytest.mark.parametrize("devices", [(False, False), (True, False)])
def test_compiled_kernels_without_a_cuda_device_are_refused_on_every_rank(devices, whole_model, rank):
    """The CPU kernels would give right results, but slowly."""
    missing = f'sp_overlap.kernels: "compiled", but torch {torch.__version__} sees no CUDA device here; say "auto" or "torch"'
    kind, message = refused(rank, whole_model, devices, (True, True))
    assert kind == "ValueError" and message.endswith(missing) and ("sp rank 1: " in message) == devices[0]


@needs_library
@pytest.mark.parametrize("whole_model", [True, False])
def test_a_rank_without_the_demanded_kernels_is_refused_on_every_rank(whole_model, rank):
    said = refused(rank, whole_model, (True, True), (True, False))
    ranks.assert_error(said, 'sp rank 1: sp_overlap.kernels: "compiled", but none; build them')


def test_the_spill_check_sees_a_spill_and_a_report_that_is_missing():
    """Checks how lines of ptxas are read; without nvcc, ptxas itself can't be run."""
    line = "ptxas info    : Function properties for {}\n    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    assert check_cubins.faults(line.format("a", 0, 0, 0)) == (1, [])
    assert check_cubins.faults(line.format("a", 0, 0, 0) + line.format("b", 8, 12, 16))[1] == [
        "b: stack 8, spill stores 12, loads 16 bytes"
    ]
    assert check_cubins.faults("") == (0, [])
