"""Compile csrc/ into one shared library, with plain nvcc and the C++ compiler. Standard library only: setup.py runs it.

    python ds_sp_overlap/relayout/build.py [cpu | cuda]

The library depends on torch's stable ABI alone (torch/csrc/stable, from ABI on) and carries the CUDA runtime inside, so one
binary serves every later torch, with CUDA or without. What is compiled never depends on a GPU being present: CUDA kernels
where nvcc is found, CPU kernels alone where it is not.

    DS_SP_OVERLAP_BUILD    0: build nothing; cpu, cuda: that and nothing less; unset: the most there are compilers for
    TORCH_CUDA_ARCH_LIST   as torch reads it, for instance "8.0;9.0+PTX" (the default)
    CUDA_HOME, CXX         where nvcc is, and which C++ compiler
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ABI = "2.10"  # of torch; newer ones load it too
ARCHITECTURES = "8.0;9.0+PTX"
NAME = "_kernels.so"
PACKAGE = Path(__file__).resolve().parents[1]  # where the library lies


class BuildError(RuntimeError):
    """Why there is no library."""


def wish() -> str:
    """DS_SP_OVERLAP_BUILD: "0", "cpu", "cuda" or "" (the most there are compilers for). Raises BuildError for others."""
    value = os.environ.get("DS_SP_OVERLAP_BUILD", "").strip().lower()
    if value not in ("", "0", "cpu", "cuda"):
        raise BuildError(f"DS_SP_OVERLAP_BUILD must be 0, cpu or cuda, got {value!r}")
    return value


def sources() -> Path:
    """csrc/, inside the package where it was installed and beside it in a checkout."""
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (folder / "ops.cpp").is_file():
            return folder
    raise BuildError(f"no csrc folder in or beside {PACKAGE.name}")


def nvcc() -> str | None:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    for candidate in [
        *(f"{home}/bin/nvcc" for home in homes if home),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ]:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "") or "c++") or shutil.which("g++")


def torch_root() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed here; install it first and build with pip's --no-build-isolation")
    root = Path(spec.origin).parent
    if not (root / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError(f"this torch has no stable ABI headers; torch >= {ABI} has")
    return root


def _torch_version(root: Path) -> dict[str, str | None]:
    text = (root / "version.py").read_text()
    found = {name: re.search(rf"^{name}\b[^=]*= *'([^']+)'", text, re.M) for name in ("__version__", "cuda")}
    return {
        "torch": found["__version__"] and found["__version__"].group(1),
        "torch_cuda": found["cuda"] and found["cuda"].group(1),
    }


def gencode(architectures: str) -> list[str]:
    """Flags of nvcc for a TORCH_CUDA_ARCH_LIST."""
    flags = []
    for item in filter(None, re.split(r"[;,\s]+", architectures)):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if match is None:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST: {item!r} is not of the form 9.0 or 9.0+PTX (in {architectures!r})")
        number = match[1] + match[2] + match[3]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def _flags(root: Path) -> list[str]:
    major, minor = (int(part) for part in ABI.split("."))
    target = f"-DTORCH_TARGET_VERSION=0x{(major << 56) | (minor << 48):016x}"
    return ["-std=c++17", "-O3", target, f"-I{root / 'include'}"]


def cuda_compile(root: Path, architecture_flags: list[str]) -> list[str]:
    """Command, without its output, that compiles the CUDA kernels."""
    return [nvcc() or "nvcc", *_flags(root), "-DDS_SP_OVERLAP_CUDA", *architecture_flags, str(sources() / "kernels.cu")]


def linker(cuda: str | None, cxx: str) -> list[str]:
    """Who links: nvcc with the CUDA runtime inside, or the C++ compiler where there are no CUDA kernels."""
    return [cxx] if cuda is None else [cuda, "-cudart", "static"]


def link(by: list[str], root: Path, objects: list[str], library: str) -> list[str]:
    """Command by which ``by`` links ``objects`` into ``library``.

    ops.cpp takes torch's current CUDA stream from a function of libtorch_cuda, which need not be where it is built. torch loads
    its libraries locally, so a library finds there only what it depends on, and a weak symbol that isn't found is null. libtorch
    is in every torch, and depends on libtorch_cuda in those with CUDA. Nothing of it is used by name: without --no-as-needed
    many linkers leave it out. (-Xlinker, since nvcc takes no -Wl.)
    """
    libraries = ["-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    return [*by, "-shared", *objects, "-o", library, f"-L{root / 'lib'}", *libraries]


def _run(commands: list[list[str]]) -> None:
    """Run side by side; BuildError with the output of the first that fails."""
    running = [(c, subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)) for c in commands]
    results = [(command, *process.communicate(), process.returncode) for command, process in running]
    for command, output, _, code in results:
        if code:
            raise BuildError(f"{Path(command[0]).name} failed ({code}):\n{' '.join(command)}\n{output}")


def build(folder: Path = PACKAGE, kind: str = "") -> Path:
    """Build the library into ``folder`` beside a JSON of what it was built against; returns its path.

    kind   "cpu", "cuda" or "" (CUDA kernels where nvcc is found)

    Raises BuildError, with the reason.
    """
    root, cxx, cuda = torch_root(), compiler(), nvcc()
    if kind == "cuda" and cuda is None:
        raise BuildError("nvcc not found (looked at CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)")
    if cxx is None:
        raise BuildError("no C++ compiler found (looked at CXX, c++ and g++)")
    with_cuda = cuda is not None and kind != "cpu"
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or ARCHITECTURES
    hidden = ["-fPIC", "-fvisibility=hidden"]
    with tempfile.TemporaryDirectory() as scratch:
        objects = [f"{scratch}/ops.o"]
        define = ["-DDS_SP_OVERLAP_CUDA"] if with_cuda else []
        commands = [[cxx, *_flags(root), *hidden, *define, "-c", str(sources() / "ops.cpp"), "-o", objects[0]]]
        if with_cuda:
            objects.append(f"{scratch}/kernels.o")
            compile_ = [*cuda_compile(root, gencode(architectures)), "--threads", "2", "-Xcompiler", ",".join(hidden)]
            commands.append([*compile_, "-c", "-o", objects[1]])
        _run(commands)
        _run([link(linker(cuda if with_cuda else None, cxx), root, objects, f"{scratch}/{NAME}")])
        version = None
        if with_cuda:
            assert cuda is not None
            version = re.search(r"release ([\d.]+)", subprocess.run([cuda, "--version"], capture_output=True, text=True).stdout)
        built = {
            **_torch_version(root), "abi": ABI, "cuda": version and version.group(1),
            "architectures": architectures if with_cuda else None,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_kernels.json").write_text(json.dumps(built, indent=2) + "\n")
        partial = folder / f"{NAME}.{os.getpid()}"
        shutil.copy(f"{scratch}/{NAME}", partial)
        partial.replace(folder / NAME)  # a process that has the old one loaded keeps it
    return folder / NAME


if __name__ == "__main__":
    try:
        print(build(kind=sys.argv[1] if len(sys.argv) > 1 else wish()))
    except BuildError as error:
        sys.exit(f"build: {error}")
