"""Finding, loading, building and choosing the compiled operators."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch

from ds_sp_overlap import SpOverlapConfig
from ds_sp_overlap.exchange.channel import Channel
from ds_sp_overlap.exchange.exchange import Exchange
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.relayout import build, kernels, ops

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
needs_library = pytest.mark.skipif(not kernels.library().cuda, reason=f"no compiled CUDA kernels: {kernels.library().reason}")


def python(code, **environment):
    """Output of a fresh process that runs ``code`` with the package that this one tests."""
    path = os.pathsep.join([str(Path(build.__file__).parents[1]), str(Path(__file__).parent)])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": path, **environment}
    ran = subprocess.run(  # elsewhere: -c puts the working directory first in sys.path
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, cwd="/"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_without_the_binary_everything_is_pytorch_and_opcheck_passes():
    code = (
        "import torch, test_kernels as t; from ds_sp_overlap.relayout import ops, kernels\n"
        "print(all(v == 'SUCCESS' for c in t.opchecks('ds_sp_overlap').values() for v in c.values()), kernels.library().path)\n"
        "try: ops.implementation('cuda')\n"
        "except ValueError as error: print(error)"
    )
    last = python(code, DS_SP_OVERLAP_BUILD="0").splitlines()[-2:]
    assert last[0] == "True None"
    assert last[1].startswith('sp_overlap.kernels: "cuda", but DS_SP_OVERLAP_BUILD is 0; build them with `python -m')


@needs_compiler
def test_a_package_without_binaries_builds_them_at_first_use(tmp_path):
    """By the op builder, into torch's extensions folder; a second process finds them there."""
    root = Path(build.__file__).parents[2]
    ignore = shutil.ignore_patterns("_kernels.*", "__pycache__")
    shutil.copytree(root / "ds_sp_overlap", tmp_path / "ds_sp_overlap", ignore=ignore)
    shutil.copytree(build.sources(), tmp_path / "csrc", dirs_exist_ok=True)
    code = (
        "import torch; from ds_sp_overlap.relayout import ops, kernels\n"
        "before = kernels.library().path; now = kernels.demanded()\n"
        "out = torch.full((192,), float('nan')); x = torch.randn(4, 6, 8)\n"
        "torch.ops.ds_sp_overlap_compiled.pack(x, 1, [0, 4], [4, 6], out)\n"
        "assert torch.equal(out, torch.cat((x[:, :4].flatten(), x[:, 4:].flatten())))\n"
        "assert b'\\0libtorch.so\\0' in now.path.read_bytes()\n"  # `link` was used
        "print(before, now.path.parent.name, now.path.stat().st_mtime_ns, now.cuda)"
    )
    environment = dict(DS_SP_OVERLAP_BUILD="cpu", TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"), PYTHONPATH=str(tmp_path))
    first = python(code, **environment).splitlines()[-1]
    assert first.startswith("None ds_sp_overlap_kernels_torch") and first.endswith("False")
    assert python(code, **environment).splitlines()[-1] == first


LIKE_TORCH = {  # library: its source, what it depends on
    "c10": ("int of_c10;", []),
    "torch_cpu": ("int of_cpu;", ["c10"]),
    "torch_cuda": ("int aoti_torch_get_current_cuda_stream(int device, void** stream) { return 0; }", ["c10"]),
    "torch": ("int of_torch;", ["torch_cpu", "torch_cuda"]),
}
PROBE = """extern int aoti_torch_get_current_cuda_stream(int, void**) __attribute__((weak));
int resolved(void) { return aoti_torch_get_current_cuda_stream != 0; }"""


def stream_is_found(folder, by, cuda=True):
    """Whether a library linked as ours sees the stream's function of a torch that is loaded as Python loads it, locally."""
    (folder / "lib").mkdir()
    compiler = [shutil.which("gcc"), "-fPIC", "-xc", "-"]
    for name, (source, needs) in LIKE_TORCH.items():
        if cuda or name != "torch_cuda":
            needs = [f"-l{other}" for other in needs if cuda or other != "torch_cuda"]
            flags = ["-shared", "-Wl,--no-as-needed,-rpath,$ORIGIN", f"-Wl,-soname,lib{name}.so", f"-L{folder}/lib", *needs]
            subprocess.run([*compiler, *flags, "-o", f"{folder}/lib/lib{name}.so"], input=source, text=True, check=True)
    subprocess.run([*compiler, "-c", "-o", f"{folder}/probe.o"], input=PROBE, text=True, check=True)
    left_out = [*by, "-Xlinker", "--as-needed"]  # as many distributions' compilers do by themselves
    subprocess.run(build.link(left_out, folder, [f"{folder}/probe.o"], f"{folder}/probe.so"), check=True)
    code = (
        "import ctypes, sys; _, *paths = sys.argv; print([ctypes.CDLL(path, ctypes.RTLD_LOCAL) for path in paths][-1].resolved())"
    )
    ran = [sys.executable, "-c", code, f"{folder}/lib/libtorch.so", f"{folder}/probe.so"]
    return bool(int(subprocess.run(ran, capture_output=True, text=True, check=True).stdout))


@pytest.mark.skipif(shutil.which("gcc") is None or build.compiler() is None, reason="needs C and C++ compilers")
@pytest.mark.parametrize(
    "linker", ["c++", pytest.param("nvcc", marks=pytest.mark.skipif(build.nvcc() is None, reason="needs nvcc"))]
)
@pytest.mark.parametrize("cuda", [True, False], ids=["torch with CUDA", "torch without"])
def test_the_cuda_stream_is_found_in_a_torch_that_has_one_and_the_library_loads_in_any(tmp_path, linker, cuda):
    by = build.linker(build.nvcc() if linker == "nvcc" else None, build.compiler())
    assert stream_is_found(tmp_path, by, cuda) == cuda


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
    with pytest.raises(build.BuildError, match="'Hopper' is not of the form"):
        build.gencode("8.0;Hopper")


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


def test_the_config_takes_each_kind_of_kernels_and_no_other():
    assert [SpOverlapConfig.parse({"kernels": kind}).kernels for kind in ("auto", "cuda", "torch")] == [
        "auto",
        "cuda",
        "torch",
    ]
    with pytest.raises(ValueError, match='sp_overlap.kernels must be "auto", "cuda" or "torch", got \'triton\''):
        SpOverlapConfig.parse({"kernels": "triton"})


def test_torch_is_the_reference_and_so_is_auto_until_a_gpu_has_run_the_others():
    assert ops.implementation("torch") == ops.implementation("auto")
    assert ops.implementation("torch").pack is ops._copy_out and not ops.implementation("torch").folds
    with pytest.raises(ValueError, match="'best'"):
        ops.implementation("best")


def exchanged(rank, kind):
    """What two ranks receive, forward and backward, with one kind of kernels; and whether those moved it."""
    calls = []
    original = ops.implementation

    def watched(which):
        calls.append(which)
        return original(which)

    ops.implementation = watched
    try:
        geometry = Geometry(2, rank, (5, 3), 2, 3, 1, batch_first=True)
        channel = Channel(torch.distributed.group.WORLD, kernels=kind)
        exchange = Exchange(channel, geometry.exchange("k", 0, 16), "layer", "k")
        torch.manual_seed(rank)
        x = torch.randn(exchange.layout.source.shape, requires_grad=True)
        y = exchange.finish(exchange.start(x))
        y.backward(torch.arange(y.numel(), dtype=y.dtype).view(y.shape))
    finally:
        ops.implementation = original
    return y.detach(), x.grad, set(calls)


@needs_library
def test_an_exchange_moves_the_same_with_either_kind_of_kernels():
    for compiled, plain in zip(*(ranks.on_ranks(2, exchanged, kind) for kind in ("cuda", "torch"))):
        assert torch.equal(compiled[0], plain[0]) and torch.equal(compiled[1], plain[1])
        assert compiled[2] == {"cuda"} and plain[2] == {"torch"}


def refused_layer(rank):
    from ds_sp_overlap import DistributedAttention

    if rank == 1:  # one machine lacks the library
        ops.kernels.demanded = lambda: kernels.Library(reason="this one has none")
    layer = DistributedAttention(lambda q, k, v: q, torch.distributed.group.WORLD, config={"kernels": "cuda"})
    return ranks.refusal(layer, *(torch.randn(4, 1, 2, 8) for _ in range(3)), 1)


@needs_library
def test_a_rank_without_the_demanded_kernels_is_refused_on_every_rank():
    answers = ranks.on_ranks(2, refused_layer)
    assert [kind for kind, _ in answers] == ["ValueError"] * 2
    assert all('sp rank 1: sp_overlap.kernels: "cuda", but this one has none' in message for _, message in answers)


def test_the_spill_check_sees_a_spill_and_a_report_that_is_missing():
    """In the words of ptxas; without nvcc it is only the reading of them that can be tested."""
    spec = importlib.util.spec_from_file_location("check_cubins", build.sources() / "check_cubins.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    line = "ptxas info    : Function properties for {}\n    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    assert check.faults(line.format("a", 0, 0, 0)) == (1, [])
    assert check.faults(line.format("a", 0, 0, 0) + line.format("b", 8, 12, 16))[1] == [
        "b: stack 8, spill stores 12, loads 16 bytes"
    ]
    assert check.faults("") == (0, [])
