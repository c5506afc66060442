"""First-use build by DeepSpeed's op builder convention, for a package that was installed without binaries."""

from __future__ import annotations

from pathlib import Path

import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from . import build, kernels


class RelayoutBuilder(CUDAOpBuilder):
    """``load()`` builds into torch's extensions folder (TORCH_EXTENSIONS_DIR), once a machine, and loads.

    ``jit_load`` is our own: DeepSpeed's drops CUDA sources where no GPU is visible, needs ninja, and expects a Python
    module, while the library is plain stable ABI and the same everywhere.
    """

    BUILD_VAR = "DS_SP_OVERLAP_BUILD"
    NAME = "ds_sp_overlap_kernels"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return "ds_sp_overlap._kernels"

    def sources(self):
        names = ["ops.cpp"] if build.nvcc() is None else ["ops.cpp", "kernels.cu"]
        return [str(build.sources() / name) for name in names]

    def include_paths(self):
        return [str(build.torch_root() / "include")]

    def is_compatible(self, verbose=False):
        try:
            build.torch_root()
            build.sources()
        except build.BuildError as error:
            self.error_log = str(error)
            return False
        return build.compiler() is not None

    def jit_load(self, verbose=True):
        """Raises build.BuildError where there is no compiler, or the build fails."""
        key = (
            f"{self.NAME}_torch{torch.__version__.split('+')[0]}_{build.wish() or ('cuda' if build.nvcc() else 'cpu')}"
        )
        folder = Path(cpp_extension._get_build_directory(key, verbose))
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
        return kernels.load(path)
