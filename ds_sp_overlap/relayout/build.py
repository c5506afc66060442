"""Compiles csrc/ into one shared library, with plain nvcc and the C++ compiler.

The library depends only on torch's stable ABI (torch/csrc/stable), which torch has from version
`ABI` on; the CUDA runtime is linked into the library. So one binary works with every later torch,
with CUDA or without. The build needs no GPU. It compiles CUDA and CPU kernels if nvcc is found,
else CPU kernels only. Environment variables:

    DS_SP_OVERLAP_BUILD    the kernels that are built at first use. 0: none; cpu, cuda: exactly
                           these, or an error; unset: all kernels for which there is a compiler
    TORCH_CUDA_ARCH_LIST   the GPU architectures, in torch's format; default "8.0;9.0+PTX"
    CUDA_HOME, CXX         the folder of nvcc, and the C++ compiler
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

# The oldest torch that loads the library.
ABI = "2.10"
ARCHITECTURES = "8.0;9.0+PTX"
NAME = "_kernels.so"
# The folder of the library.
PACKAGE = Path(__file__).resolve().parents[1]
TORCH = Path(torch.__file__).parent
# The flags for nvcc and for the C++ compiler. The macro TORCH_TARGET_VERSION makes torch's headers
# declare only the functions that torch `ABI` has.
_MAJOR, _MINOR = map(int, ABI.split("."))
_TARGET = f"-DTORCH_TARGET_VERSION=0x{(_MAJOR << 56) | (_MINOR << 48):016x}"
FLAGS = ["-std=c++17", "-O3", _TARGET, f"-I{TORCH / 'include'}"]


class BuildError(RuntimeError):
    """Says why the library can't be built."""


def wish() -> str:
    """Return DS_SP_OVERLAP_BUILD: "0", "cpu", "cuda" or "" (all kernels with a compiler).

    Raises:
        BuildError: for other values.
    """
    # Except "0", each value is valid as the argument ``kind`` of `build`.
    value = os.environ.get("DS_SP_OVERLAP_BUILD", "").strip().lower()
    if value not in ("", "0", "cpu", "cuda"):
        raise BuildError(f"DS_SP_OVERLAP_BUILD must be 0, cpu or cuda, got {value!r}")
    return value


def sources() -> Path:
    """Return the folder csrc/: inside the package if it is installed, beside it in a checkout.

    Raises:
        BuildError: if there is no such folder.
    """
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (folder / "ops.cpp").is_file():
            return folder
    raise BuildError(f"no csrc folder in or beside {PACKAGE.name}")


def nvcc() -> str | None:
    """Return the path of nvcc; None if there is none."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [f"{home}/bin/nvcc" for home in homes if home]
    for candidate in (*candidates, shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


def compiler() -> str | None:
    """Return the path of the C++ compiler, ``CXX`` or c++ or g++; None if there is none."""
    return shutil.which(os.environ.get("CXX", "") or "c++") or shutil.which("g++")


def gencode(architectures: str) -> list[str]:
    """Return the flags of nvcc for a TORCH_CUDA_ARCH_LIST such as "8.0;9.0+PTX"."""
    flags = []
    for item in filter(None, re.split(r"[;,\s]+", architectures)):
        number = item.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if item.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def cuda_compile(architecture_flags: list[str]) -> list[str]:
    """Return the command that compiles the CUDA kernels; the caller adds "-c" and an output."""
    # No fused multiply-add: products are rounded before the addition, as in PyTorch's kernels.
    flags = FLAGS + ["-DDS_SP_OVERLAP_CUDA", "-fmad=false"] + architecture_flags
    return [nvcc() or "nvcc"] + flags + [str(sources() / "kernels.cu")]


def linker(cuda: str | None, cxx: str) -> list[str]:
    """Return the linker and its first options, for `link`; ``cuda`` is nvcc's path or None."""
    # nvcc links the CUDA runtime into the library.
    return [cxx] if cuda is None else [cuda, "-cudart", "static"]


def link(by: list[str], objects: list[str], library: str) -> list[str]:
    """Return the command that links ``objects`` into ``library``; ``by`` is from `linker`."""
    # ops.cpp gets torch's current CUDA stream from a function of libtorch_cuda. The machine that
    # builds may lack libtorch_cuda, so the function is a weak symbol: null if it is not found.
    # torch loads its libraries locally, so our library finds symbols only in its dependencies. So
    # link libtorch: every torch has libtorch, and in a torch with CUDA, libtorch depends on
    # libtorch_cuda. Without --no-as-needed, many linkers would drop libtorch, since our library
    # uses no symbol of libtorch itself. (-Xlinker, since nvcc has no -Wl.)
    libraries = ["-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    return by + ["-shared"] + objects + ["-o", library, f"-L{TORCH / 'lib'}"] + libraries


def _run(commands: list[list[str]]) -> None:
    """Run commands in parallel, and wait for all of them.

    Raises:
        BuildError: if a command failed. The message has the output of the first command, in the
            order of ``commands``, that failed.
    """
    # Capture stdout and stderr of each command together.
    run = partial(subprocess.run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with ThreadPoolExecutor() as pool:
        for ran in pool.map(run, commands):
            if ran.returncode:
                command, code = ran.args, ran.returncode
                raise BuildError(
                    f"{Path(command[0]).name} failed ({code}):\n{' '.join(command)}\n{ran.stdout}"
                )


def wanted(cuda: str | None) -> dict[str, str | None]:
    """Return the versions and the source hash that identify a build, for the library's JSON file.

    ``cuda`` is the path of nvcc; None for a library without CUDA kernels.
    """
    digest = hashlib.sha256()
    for source in sorted(sources().iterdir()):
        if source.suffix in (".h", ".cpp", ".cu"):
            digest.update(source.read_bytes())
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or ARCHITECTURES
    return {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "abi": ABI,
        "architectures": None if cuda is None else architectures,
        "sources": digest.hexdigest(),
    }


def is_current(folder: Path = PACKAGE, kind: str = "") -> bool:
    """Return whether the library in ``folder`` is up to date; see `build` for the arguments.

    Raises:
        BuildError: if the folder csrc/ is missing.
    """
    try:
        built = json.loads((folder / "_kernels.json").read_text())
    except (OSError, ValueError):
        return False
    # Ignore the version of nvcc ("cuda"): another nvcc needs no new build.
    new = wanted(None if kind == "cpu" else nvcc()) | {"cuda": built.get("cuda")}
    return (folder / NAME).is_file() and built == new


def build(folder: Path = PACKAGE, kind: str = "") -> Path:
    """Build the library, and write the versions that it was built for to a JSON file beside it.

    Args:
        folder: The folder of the library.
        kind: "cpu", "cuda" or "" (CUDA kernels if nvcc is found).

    Returns:
        The path of the library.

    Raises:
        BuildError: with the reason, if there is no compiler or the build fails.
    """
    cxx, cuda = compiler(), None if kind == "cpu" else nvcc()
    if kind == "cuda" and cuda is None:
        raise BuildError(
            "nvcc not found (looked at CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)"
        )
    if cxx is None:
        raise BuildError("no C++ compiler found (looked at CXX, c++ and g++)")
    built, version, hidden = wanted(cuda), None, ["-fPIC", "-fvisibility=hidden"]
    with tempfile.TemporaryDirectory() as scratch:
        objects = [f"{scratch}/ops.o"]
        # No fused multiply-add, as in `cuda_compile`.
        flags = hidden + ["-ffp-contract=off", "-c", str(sources() / "ops.cpp"), "-o", objects[0]]
        commands = [[cxx] + FLAGS + flags]
        if cuda is not None:
            commands[0].append("-DDS_SP_OVERLAP_CUDA")
            objects.append(f"{scratch}/kernels.o")
            options = ["--threads", "2", "-Xcompiler", ",".join(hidden), "-c", "-o", objects[1]]
            commands.append(cuda_compile(gencode(built["architectures"] or "")) + options)
            said = subprocess.run([cuda, "--version"], capture_output=True, text=True).stdout
            version = re.search(r"release ([\d.]+)", said)
        _run(commands)
        _run([link(linker(cuda, cxx), objects, f"{scratch}/{NAME}")])
        built["cuda"] = version and version.group(1)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{NAME}.{os.getpid()}"
        shutil.copy(f"{scratch}/{NAME}", partial)
        # Replace the file and don't overwrite it: other processes may have loaded the old library.
        partial.replace(folder / NAME)
        # Write the JSON file last, so that a killed build does not look up to date.
        (folder / "_kernels.json").write_text(json.dumps(built, indent=2) + "\n")
    return folder / NAME
