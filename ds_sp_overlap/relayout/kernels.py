"""The compiled operators: find the library, load it, build it at first use, and say why where there is none."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from . import build

REMEDY = (
    "build them with `python -m ds_sp_overlap build cuda` (needs nvcc and a C++ compiler), or reinstall with "
    "`DS_SP_OVERLAP_BUILD=cuda pip install --no-build-isolation --force-reinstall --no-deps .`"
)


@dataclass(frozen=True)
class Library:
    """The state of the compiled operators in this process.

    path    the library that is loaded, None if there is none
    built   what it was built against: torch, torch_cuda, abi, cuda, architectures; None without a path
    reason  why there are no compiled operators, or none for CUDA; empty if there are
    failed  whether there is a library that does not load
    """

    path: Path | None = None
    built: dict[str, str | None] | None = None
    reason: str = ""
    failed: bool = False

    @property
    def cuda(self) -> bool:
        return self.built is not None and self.built["cuda"] is not None

    def __str__(self) -> str:
        if self.built is None:
            return f"none ({self.reason})"
        kinds = f"CUDA {self.built['cuda']} for {self.built['architectures']}, and CPU" if self.cuda else "CPU only"
        return f"compiled ({kinds}; built against torch {self.built['torch']}, loads from {self.built['abi']} on)"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


def load(path: Path) -> Library:
    """Load a library; a failure is a value that says built-against versus found."""
    try:
        built = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError) as error:
        return Library(reason=f"{path.name} has no readable record of what it was built against ({error})", failed=True)
    versus = (
        f"built against torch {built['torch']} with CUDA {built['cuda'] or 'none'} for the stable ABI from torch {built['abi']} "
        f"on, found torch {torch.__version__} with CUDA {torch.version.cuda or 'none'}"
    )
    if _version(torch.__version__) < _version(built["abi"]):
        return Library(reason=f"{path.name} does not load here: {versus}", failed=True)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return Library(reason=f"{path.name} does not load here: {versus} ({error})", failed=True)
    return Library(path, built, "" if built["cuda"] else f"{path.name} holds CPU kernels only")


_built_here: Library | None = None


@functools.cache
def _installed() -> Library:
    if build.wish() == "0":
        return Library(reason="DS_SP_OVERLAP_BUILD is 0")
    path = build.PACKAGE / build.NAME
    if not path.is_file():
        return Library(reason="this package was installed without compiled kernels")
    return load(path)


def library() -> Library:
    """The compiled operators of this process: those of the first-use build, or the installed ones, loaded once."""
    return _built_here or _installed()


def absent(which: str) -> str:
    """What to say where ``sp_overlap.kernels`` would allow compiled kernels and there are none for the GPU; else empty."""
    if which == "torch" or not torch.cuda.is_available() or library().cuda:
        return ""
    return f"no compiled kernels for the GPU ({library().reason}), PyTorch's copies pack and unpack; {REMEDY}"


def _first_use() -> Library:
    """Build into torch's extensions folder (TORCH_EXTENSIONS_DIR), once a machine, and load.

    Raises build.BuildError where there is no compiler, or the build fails.
    """
    from torch.utils import cpp_extension  # slow to import, and not needed by a process that has a binary
    from torch.utils.file_baton import FileBaton

    kind = build.wish() or ("cuda" if build.nvcc() else "cpu")
    folder = Path(cpp_extension._get_build_directory(f"ds_sp_overlap_kernels_torch{torch.__version__.split('+')[0]}_{kind}", False))
    path = folder / build.NAME
    newest = max(source.stat().st_mtime for source in build.sources().iterdir())
    baton = FileBaton(str(folder / "lock"))
    if baton.try_acquire():
        try:
            if not path.is_file() or path.stat().st_mtime < newest:
                build.build(folder, build.wish())
        finally:
            baton.release()
    else:
        baton.wait()  # another rank of this machine is building
    if not path.is_file():
        raise build.BuildError("another process of this machine tried and failed; its message says why")
    return load(path)


def demanded() -> Library:
    """The same, built now if the package was installed without; the build's failure is the reason given."""
    global _built_here
    now = library()
    if now.path is not None or now.failed or build.wish() == "0":
        return now
    try:
        _built_here = _first_use()
    except build.BuildError as error:
        _built_here = Library(reason=f"{now.reason}, and building them failed: {error}", failed=True)
    return _built_here
