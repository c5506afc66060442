"""Loads the compiled operators, builds them at first use, or says why there are none."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ..warn import inform
from . import build

REMEDY = "build them with `python -m ds_sp_overlap build cuda` (needs nvcc and a C++ compiler)"


@dataclass(frozen=True)
class Library:
    """The state of the compiled operators in this process.

    Attributes:
        path: The library that is loaded; None if there is none.
        built: Versions that the library was built against, by name: torch, torch_cuda, abi, cuda,
            architectures. None without a library.
        reason: Why there are no compiled operators, or none for CUDA; empty if there are.
        failed: Whether there is a library that does not load.
    """

    path: Path | None = None
    built: dict[str, str | None] | None = None
    reason: str = ""
    failed: bool = False

    @property
    def cuda(self) -> bool:
        """Return whether there are compiled operators for CUDA."""
        return self.built is not None and self.built["cuda"] is not None

    def __str__(self) -> str:
        if self.built is None:
            return f"none ({self.reason})"
        kinds = "CPU only"
        if self.cuda:
            kinds = f"CUDA {self.built['cuda']} for {self.built['architectures']}, and CPU"
        return (
            f"compiled ({kinds}; built against torch {self.built['torch']}, "
            f"loads from {self.built['abi']} on)"
        )


def load(path: Path) -> Library:
    """Load a library; a failure is no exception.

    The ``reason`` of the result then says which versions the library was built against, and which
    versions are here.
    """
    try:
        built = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError) as error:
        return Library(
            reason=f"{path.name} has no readable record of what it was built against ({error})",
            failed=True,
        )
    reason = (
        f"{path.name} does not load here: built against torch {built['torch']} with CUDA "
        f"{built['cuda'] or 'none'} for the stable ABI from torch {built['abi']} on, "
        f"found torch {torch.__version__} with CUDA {torch.version.cuda or 'none'}"
    )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return Library(reason=f"{reason} ({error})", failed=True)
    return Library(path, built, "" if built["cuda"] else f"{path.name} holds CPU kernels only")


# What `demanded` has built and loaded, or why it failed; None before.
_built_here: Library | None = None


@functools.cache
def _installed() -> Library:
    """Load the library in the folder of the package, once; say why if there is none."""
    if build.wish() == "0":
        return Library(reason="DS_SP_OVERLAP_BUILD is 0")
    path = build.PACKAGE / build.NAME
    if not path.is_file():
        return Library(reason="none were built")
    return load(path)


def library() -> Library:
    """Return the compiled operators of this process, loaded once; builds nothing.

    Those that were built at first use come before those in the folder of the package.
    """
    return _built_here or _installed()


def _first_use() -> Library:
    """Build the library in torch's extensions folder (TORCH_EXTENSIONS_DIR) and load it.

    One process of a machine builds; the others wait.

    Raises:
        build.BuildError: where there is no compiler, or the build fails.
    """
    # Slow to import, and not needed by a process that has a library.
    from torch.utils import cpp_extension
    from torch.utils.file_baton import FileBaton

    kind = build.wish() or ("cuda" if build.nvcc() else "cpu")
    name = f"ds_sp_overlap_kernels_torch{torch.__version__.split('+')[0]}_{kind}"
    folder = Path(cpp_extension._get_build_directory(name, False))
    path = folder / build.NAME
    baton = FileBaton(str(folder / "lock"))
    if baton.try_acquire():
        try:
            if not build.is_current(folder, kind):
                inform(f"sp_overlap: compiling kernels, once, into {folder} (about a minute)")
                build.build(folder, build.wish())
        finally:
            baton.release()
    else:
        # Another rank of this machine is building.
        inform(
            "sp_overlap: another process compiles the kernels, wait for it; if none does, "
            f"remove {baton.lock_file_path}"
        )
        baton.wait()
    if not path.is_file():
        raise build.BuildError(
            "another process of this machine tried and failed; its message says why"
        )
    return load(path)


def demanded() -> Library:
    """Return `library`, built now if nobody built compiled operators before.

    If the build fails, the library's reason says why.
    """
    global _built_here
    installed = library()
    if installed.path is not None or installed.failed or build.wish() == "0":
        return installed
    try:
        _built_here = _first_use()
    except (build.BuildError, OSError) as error:
        # A library that failed is returned by the next call: this process does not try again.
        reason = f"{installed.reason}, and building them failed: {error}"
        _built_here = Library(reason=reason, failed=True)
    return _built_here
