"""Loads the compiled operators, or builds them at first use; gives the reason if neither works."""

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
    """Holds the state of the compiled operators in this process.

    Attributes:
        path: The loaded library; None if there is none.
        built: The versions that the library was built against, by name: torch, torch_cuda, abi,
            cuda, architectures. None without a loaded library.
        reason: The reason why there are no compiled operators, or none for CUDA; else empty.
        failed: Whether loading or building a library failed, so that no build is tried.
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
    """Load a library; on failure return a `Library` with ``failed`` instead of raising an error.

    If torch can't load the library, ``reason`` names the versions of torch and CUDA that the
    library was built against, and the versions in this process.
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


# The library that `demanded` has built and loaded, or the failed `Library`; None before the build.
_built_here: Library | None = None


@functools.cache
def _installed() -> Library:
    """Load the library in the package's folder, once; else return a `Library` that says why not."""
    if build.wish() == "0":
        return Library(reason="DS_SP_OVERLAP_BUILD is 0")
    path = build.PACKAGE / build.NAME
    if not path.is_file():
        return Library(reason="none were built")
    return load(path)


def library() -> Library:
    """Return the compiled operators of this process; load them once, but build none.

    A library that was built at first use takes precedence over the library in the package.
    """
    return _built_here or _installed()


def _first_use() -> Library:
    """Build the library in torch's extensions folder (TORCH_EXTENSIONS_DIR) and load it.

    One process of a machine builds; the other processes wait.

    Raises:
        build.BuildError: if there is no compiler, or the build fails.
    """
    # Import these modules only here, since they are slow to import.
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
        # Another process of this machine builds the library.
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
    """Return the compiled operators; build them first, if there are none and no build has failed.

    If the build fails, ``reason`` of the returned `Library` says why.
    """
    global _built_here
    installed = library()
    if installed.path is not None or installed.failed or build.wish() == "0":
        return installed
    try:
        _built_here = _first_use()
    except (build.BuildError, OSError) as error:
        # The next call returns this `Library`, so that this process does not build again.
        reason = f"{installed.reason}, and building them failed: {error}"
        _built_here = Library(reason=reason, failed=True)
    return _built_here
