"""Compiles csrc/ into one shared library, with plain nvcc and the C++ compiler.

Imports the standard library only, and runs by itself, too:

    python ds_sp_overlap/relayout/build.py [cpu | cuda]

The library depends on torch's stable ABI alone (torch/csrc/stable, from torch `ABI` on) and carries
the CUDA runtime inside. So one binary serves every later torch, with CUDA or without. No GPU has to
be present: CUDA kernels are compiled where nvcc is found, CPU kernels alone where nvcc is missing.

    DS_SP_OVERLAP_BUILD    what is built at first use. 0: nothing; cpu, cuda: exactly these kernels,
                           or an error; unset: all kernels that there are compilers for
    TORCH_CUDA_ARCH_LIST   as torch reads it, for instance "8.0;9.0+PTX" (the default)
    CUDA_HOME, CXX         the folder of nvcc, and the C++ compiler
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# The oldest torch that loads the library.
ABI = "2.10"
ARCHITECTURES = "8.0;9.0+PTX"
NAME = "_kernels.so"
# The folder of the library.
PACKAGE = Path(__file__).resolve().parents[1]


class BuildError(RuntimeError):
    """The reason why there is no library."""


def wish() -> str:
    """Return DS_SP_OVERLAP_BUILD: "0", "cpu", "cuda" or "" (all that there are compilers for).

    Raises:
        BuildError: for other values.
    """
    # The ``kind`` of `build`, but for "0".
    value = os.environ.get("DS_SP_OVERLAP_BUILD", "").strip().lower()
    if value not in ("", "0", "cpu", "cuda"):
        raise BuildError(f"DS_SP_OVERLAP_BUILD must be 0, cpu or cuda, got {value!r}")
    return value


def sources() -> Path:
    """Return the folder csrc/: inside of an installed package, beside the package in a checkout.

    Raises:
        BuildError: where there is none.
    """
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (folder / "ops.cpp").is_file():
            return folder
    raise BuildError(f"no csrc folder in or beside {PACKAGE.name}")


def nvcc() -> str | None:
    """Return the path of nvcc; None where there is none."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [f"{home}/bin/nvcc" for home in homes if home]
    for candidate in (*candidates, shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


def compiler() -> str | None:
    """Return the path of the C++ compiler, ``CXX`` or c++ or g++; None where there is none."""
    return shutil.which(os.environ.get("CXX", "") or "c++") or shutil.which("g++")


def torch_root() -> Path:
    """Return the folder of torch.

    Raises:
        BuildError: where torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed here; install it first")
    return Path(spec.origin).parent


def gencode(architectures: str) -> list[str]:
    """Return the flags of nvcc for a TORCH_CUDA_ARCH_LIST such as "8.0;9.0+PTX"."""
    flags = []
    for item in filter(None, re.split(r"[;,\s]+", architectures)):
        number = item.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if item.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def _flags(root: Path) -> list[str]:
    """Return the flags of both compilers, given torch's folder ``root``."""
    # torch's headers then declare only what torch `ABI` has.
    major, minor = (int(part) for part in ABI.split("."))
    target = f"-DTORCH_TARGET_VERSION=0x{(major << 56) | (minor << 48):016x}"
    return ["-std=c++17", "-O3", target, f"-I{root / 'include'}"]


def cuda_compile(root: Path, architecture_flags: list[str]) -> list[str]:
    """Return the command that compiles the CUDA kernels; the caller adds "-c" and an output."""
    return [
        nvcc() or "nvcc",
        *_flags(root),
        "-DDS_SP_OVERLAP_CUDA",
        # Products are rounded before they are added, as by PyTorch's rotation: the same bits.
        "-fmad=false",
        *architecture_flags,
        str(sources() / "kernels.cu"),
    ]


def linker(cuda: str | None, cxx: str) -> list[str]:
    """Return the beginning of the command that links, for `link`; ``cuda`` as in `_wanted`."""
    # nvcc puts the CUDA runtime inside.
    return [cxx] if cuda is None else [cuda, "-cudart", "static"]


def link(by: list[str], root: Path, objects: list[str], library: str) -> list[str]:
    """Return the command by which ``by`` links ``objects`` into ``library``."""
    # ops.cpp takes torch's current CUDA stream from a function of libtorch_cuda. The machine that
    # builds need not have that library, so the function is a weak symbol, null where it is not
    # found. torch loads its libraries locally: our library finds symbols only in libraries that it
    # depends on. Hence it depends on libtorch, which every torch has, and which depends on
    # libtorch_cuda in a torch with CUDA. No symbol of libtorch itself is used, so many linkers
    # would leave libtorch out without --no-as-needed. (-Xlinker, since nvcc takes no -Wl.)
    libraries = ["-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    return [*by, "-shared", *objects, "-o", library, f"-L{root / 'lib'}", *libraries]


def _run(commands: list[list[str]]) -> None:
    """Run commands side by side, and wait for all of them.

    Raises:
        BuildError: if some failed, with the output of the one that stands first in ``commands``.
    """
    # What a command prints as errors goes where its output goes.
    options: dict = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    processes = [subprocess.Popen(command, **options) for command in commands]
    outputs = [process.communicate()[0] for process in processes]
    for command, process, output in zip(commands, processes, outputs):
        if process.returncode:
            raise BuildError(
                f"{Path(command[0]).name} failed ({process.returncode}):\n"
                f"{' '.join(command)}\n{output}"
            )


def _wanted(root: Path, cuda: str | None) -> dict[str, str | None]:
    """Return what decides whether a library must be built again, for its JSON file.

    Args:
        root: The folder of torch.
        cuda: The path of nvcc; None for a library without CUDA kernels.
    """
    digest = hashlib.sha256()
    for source in sorted(sources().iterdir()):
        if source.suffix in (".h", ".cpp", ".cu"):
            digest.update(source.read_bytes())
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or ARCHITECTURES
    # torch's version.py, without torch.
    versions = runpy.run_path(str(root / "version.py"))
    return {
        "torch": versions["__version__"],
        "torch_cuda": versions["cuda"],
        "abi": ABI,
        "architectures": None if cuda is None else architectures,
        "sources": digest.hexdigest(),
    }


def is_current(folder: Path = PACKAGE, kind: str = "") -> bool:
    """Return whether the library in ``folder`` is the one that `build` would make.

    Arguments are those of `build`. Called at first use (`kernels`) and by the tests.

    Raises:
        BuildError: as `torch_root` and `sources` do.
    """
    try:
        built = json.loads((folder / "_kernels.json").read_text())
    except (OSError, ValueError):
        return False
    wanted = _wanted(torch_root(), None if kind == "cpu" else nvcc())
    # Another nvcc is no reason to build again: its version ("cuda") is not compared.
    return (folder / NAME).is_file() and built == {**wanted, "cuda": built.get("cuda")}


def build(folder: Path = PACKAGE, kind: str = "") -> Path:
    """Build the library, and write beside it a JSON file with the versions that it was built for.

    Args:
        folder: The folder of the library.
        kind: "cpu", "cuda" or "" (CUDA kernels where nvcc is found).

    Returns:
        The path of the library.

    Raises:
        BuildError: with the reason, where there is no compiler or the build fails.
    """
    root, cxx, cuda = torch_root(), compiler(), None if kind == "cpu" else nvcc()
    if kind == "cuda" and cuda is None:
        raise BuildError(
            "nvcc not found (looked at CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)"
        )
    if cxx is None:
        raise BuildError("no C++ compiler found (looked at CXX, c++ and g++)")
    wanted, version, hidden = _wanted(root, cuda), None, ["-fPIC", "-fvisibility=hidden"]
    with tempfile.TemporaryDirectory() as scratch:
        objects = [f"{scratch}/ops.o"]
        # Products are rounded as by nvcc (`cuda_compile`).
        flags = [*_flags(root), *hidden, "-ffp-contract=off"]
        commands = [[cxx, *flags, "-c", str(sources() / "ops.cpp"), "-o", objects[0]]]
        if cuda is not None:
            commands[0].append("-DDS_SP_OVERLAP_CUDA")
            objects.append(f"{scratch}/kernels.o")
            by_nvcc = cuda_compile(root, gencode(wanted["architectures"] or ""))
            options = ["--threads", "2", "-Xcompiler", ",".join(hidden)]
            commands.append([*by_nvcc, *options, "-c", "-o", objects[1]])
            said = subprocess.run([cuda, "--version"], capture_output=True, text=True).stdout
            version = re.search(r"release ([\d.]+)", said)
        _run(commands)
        _run([link(linker(cuda, cxx), root, objects, f"{scratch}/{NAME}")])
        built = {**wanted, "cuda": version and version.group(1)}
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{NAME}.{os.getpid()}"
        shutil.copy(f"{scratch}/{NAME}", partial)
        # Replaced, not overwritten: a process that has loaded the old library keeps it.
        partial.replace(folder / NAME)
        # Last, so that a build that was killed does not pass for a current one.
        (folder / "_kernels.json").write_text(json.dumps(built, indent=2) + "\n")
    return folder / NAME


if __name__ == "__main__":
    try:
        print(build(kind=sys.argv[1] if len(sys.argv) > 1 else wish()))
    except BuildError as error:
        sys.exit(f"build: {error}")
