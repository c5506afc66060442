"""kernels.cu itself, compiled for the host and run under the address and undefined-behaviour sanitizers.

Every case of tests/unit/test_kernels.py runs there by the kernels and by the CPU loops, and both must leave the same bits. The
sanitizers see an access past a tensor or its descriptors, an index past a table, a vector off its alignment. What only a
device can show (streams, its own code for a division or a rounding) is left to benchmarks/gpu.sh.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_sp_overlap.relayout import build

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tests/harness/kernels_on_host"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def loaded_first():
    """What a Python that loads a sanitized library must have loaded before all else; None where there is no such thing."""
    if build.compiler() is None:
        return None
    ask = [[build.compiler(), f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    paths = [subprocess.run(words, capture_output=True, text=True).stdout.strip() for words in ask]
    return " ".join(paths) if all(map(os.path.isabs, paths)) else None


pytestmark = pytest.mark.skipif(loaded_first() is None, reason="needs g++ with libasan")


def compiled(source, text, to):
    flags = [*build._flags(build.torch_root()), "-O0", "-g1", *SANITIZE, "-fPIC", f"-I{SHIM}", f"-I{build.sources()}"]
    define = ["-DDS_SP_OVERLAP_CUDA", "-DDS_SP_OVERLAP_ON_HOST"]
    words = [build.compiler(), *flags, *define, "-x", "c++", "-c", "-", "-o", str(to)]
    ran = subprocess.run(words, input=f'#line 1 "{source}"\n{text}', capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return str(to)


@pytest.fixture(scope="module")
def ops_object(tmp_path_factory):
    return compiled("ops.cpp", (build.sources() / "ops.cpp").read_text(), tmp_path_factory.mktemp("on_host") / "ops.o")


def run(folder, ops_object, text, *words):
    """The tests with these kernels; what they print, and their exit status."""
    objects = [compiled("kernels.cu", text, folder / "kernels.o"), ops_object]
    library = folder / build.NAME
    subprocess.run(build.link([build.compiler(), *SANITIZE], build.torch_root(), objects, str(library)), check=True)
    built = {"torch": torch.__version__, "torch_cuda": None, "abi": build.ABI, "cuda": None, "architectures": None}
    library.with_suffix(".json").write_text(json.dumps(built))
    environment = {**os.environ, "LD_PRELOAD": loaded_first(), "ASAN_OPTIONS": "detect_leaks=0"}  # Python keeps what it has
    command = [sys.executable, "-m", "tests.harness.kernels_on_host", str(library), *words]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    return ran.returncode, ran.stdout + ran.stderr


def kernels_in(object_file):
    names = subprocess.run(["nm", "-C", object_file], capture_output=True, text=True, check=True).stdout
    return len(set(re.findall(r" t .*ds_sp_overlap::\(anonymous namespace\)::((?:move|sum|rotate)<.*)", names)))


def test_every_kernel_does_what_the_loops_do_and_touches_nothing_else(tmp_path, ops_object):
    status, said = run(tmp_path, ops_object, (build.sources() / "kernels.cu").read_text())
    assert status == 0, said
    calls, launched = map(int, re.search(r"(\d+) calls: (\d+) kernels, and the same bits", said).groups())
    assert calls > 900, "two searches in test_kernels.py, of 300 and 150 examples, pack and unpack each of them"
    assert launched == kernels_in(str(tmp_path / "kernels.o")) > 0


BROKEN = {  # what stands in kernels.cu, what in its place, what says so
    "an index": ("base + i * kThreads;", "base + i;", "the kernel and the CPU loop differ"),
    "a bound": ("if (unit < total)", "if (unit <= total)", "AddressSanitizer: heap-buffer-overflow"),
    "a size": (
        "descriptors.sources.size() * sizeof", "(descriptors.sources.size() + 1) * sizeof", "AddressSanitizer: heap-buffer-overflow",
    ),
    "a vector": ("if (vector) launch(sum", "if (true) launch(sum", "runtime error: store to misaligned address"),
}  # fmt: skip


@pytest.mark.parametrize("right, wrong, says", BROKEN.values(), ids=BROKEN)
def test_a_broken_kernel_is_seen(tmp_path, ops_object, right, wrong, says):
    text = (build.sources() / "kernels.cu").read_text()
    assert text.count(right) == 1
    status, said = run(tmp_path, ops_object, text.replace(right, wrong), "-k", "more_units or more_parts")
    assert status != 0 and says in said, said
