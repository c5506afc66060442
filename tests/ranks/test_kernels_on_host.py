"""Tests kernels.cu, compiled for the host and run under the address and undefined-behaviour sanitizers.

Every case of tests/unit/test_kernels.py runs with the kernels and with the CPU loops, and both must leave the same bits. The
sanitizers find accesses past a tensor or its descriptors, indices past a table, and misaligned vectors. Faults that only a
device can show (streams, the device's division and rounding) are left to benchmarks/gpu.sh.
"""

import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from ds_sp_overlap.relayout import build
from tests.harness.cases import full

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tests/harness/kernels_on_host"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def loaded_first():
    """Return the libraries that Python must load first (LD_PRELOAD), before a sanitized library; None if they don't exist."""
    if build.compiler() is None:
        return None
    ask = [[build.compiler(), f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    paths = [subprocess.run(words, capture_output=True, text=True).stdout.strip() for words in ask]
    return " ".join(paths) if all(map(os.path.isabs, paths)) else None


pytestmark = pytest.mark.skipif(loaded_first() is None, reason="needs g++ with libasan")


def compiled(source, text, cache):
    """Compile a source file; return the object file, which is cached by its text, headers and flags."""
    flags = [*build.FLAGS, "-O0", "-g1", *SANITIZE, "-fPIC", f"-I{SHIM}", f"-I{build.sources()}"]
    define = ["-DDS_SP_OVERLAP_CUDA", "-DDS_SP_OVERLAP_ON_HOST"]
    headers = [path.read_text() for folder in (SHIM, build.sources()) for path in sorted(folder.glob("*.h"))]
    to = cache.mkdir("on_host") / f"{sha256(repr([text, headers, flags, torch.__version__]).encode()).hexdigest()}.o"
    if not to.exists():
        words = [build.compiler(), *flags, *define, "-x", "c++", "-c", "-", "-o", f"{to}.{os.getpid()}"]
        ran = subprocess.run(words, input=f'#line 1 "{source}"\n{text}', capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        os.replace(words[-1], to)  # atomic, since another test process may compile the same file
    return str(to)


def run(folder, cache, text, *words):
    """Run the tests with these kernels; return what they print, and their exit status."""
    ops = (build.sources() / "ops.cpp").read_text()
    objects = [compiled("kernels.cu", text, cache), compiled("ops.cpp", ops, cache)]
    library = folder / build.NAME
    subprocess.run(build.link([build.compiler(), *SANITIZE], objects, str(library)), check=True)
    built = {"torch": torch.__version__, "torch_cuda": None, "abi": build.ABI, "cuda": None, "architectures": None}
    library.with_suffix(".json").write_text(json.dumps(built))
    environment = {**os.environ, "LD_PRELOAD": loaded_first(), "ASAN_OPTIONS": "detect_leaks=0"}  # Python itself leaks
    command = [sys.executable, "-m", "tests.harness.kernels_on_host", str(library), *words]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    return ran.returncode, ran.stdout + ran.stderr


def kernels_in(object_file):
    names = subprocess.run(["nm", "-C", object_file], capture_output=True, text=True, check=True).stdout
    return len(set(re.findall(r" t .*ds_sp_overlap::\(anonymous namespace\)::((?:move|sum|rotate)<.*)", names)))


KERNELS = (build.sources() / "kernels.cu").read_text()
FEW = "-k", "more_units or more_parts"


def test_some_kernels_do_what_the_loops_do_and_touch_nothing_else(tmp_path, cache):
    status, said = run(tmp_path, cache, KERNELS, *FEW)
    assert status == 0, said


@pytest.mark.full
def test_every_kernel_does_what_the_loops_do_and_touches_nothing_else(tmp_path, cache):
    status, said = run(tmp_path, cache, KERNELS, "--all")
    assert status == 0, said
    calls, launched = map(int, re.search(r"(\d+) calls: (\d+) kernels, and the same bits", said).groups())
    assert calls > 900, "two searches in test_kernels.py, of 300 and 150 examples, pack and unpack each of them"
    assert launched == kernels_in(compiled("kernels.cu", KERNELS, cache)) > 0


BROKEN = {  # {fault: (text of kernels.cu, its replacement, words of the error)}; past the end may be freed memory of another tensor
    "an index": ("const Index unit = base + i * kThreads;", "const Index unit = base + i;", "the kernel and the CPU loop differ"),
    "a bound": ("const Index unit = base + i * kThreads;\n    if (unit < walk.total)", "const Index unit = base + i * kThreads;\n    if (unit <= walk.total)", "AddressSanitizer: heap-"),
    "a size": (
        "descriptors.sources.size() * sizeof", "(descriptors.sources.size() + 1) * sizeof", "AddressSanitizer: heap-",
    ),
    "a vector": ("if (vector) by(", "if (true) by(", "runtime error: store to misaligned address"),
}  # fmt: skip


@pytest.mark.parametrize("what", [full(what) for what in BROKEN])
def test_a_broken_kernel_is_seen(tmp_path, cache, what):
    right, wrong, says = BROKEN[what]
    assert KERNELS.count(right) == 1
    status, said = run(tmp_path, cache, KERNELS.replace(right, wrong), *FEW)
    assert status != 0 and says in said, said
