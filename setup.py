"""Building of the kernels; what else there is to say of the package is in pyproject.toml. torch must be installed first: ``pip install --no-build-isolation .``

The kernels of csrc/ are built here: for CUDA where nvcc is found (no GPU needed), for the CPU alone where only a C++ compiler
is, not at all where neither is. See ds_sp_overlap/relayout/build.py for DS_SP_OVERLAP_BUILD and TORCH_CUDA_ARCH_LIST.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

here = Path(__file__).parent

# By path: importing the package would need torch and DeepSpeed.
spec = importlib.util.spec_from_file_location(
    "build_kernels", here / "ds_sp_overlap/relayout/build.py"
)
builder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(builder)


class BuildKernels(build_ext):
    """Build the library, or say what is missing and go on: the package works without. A build asked for by name must succeed."""

    def run(self):
        folder = here if self.inplace or self.editable_mode else Path(self.build_lib)
        try:
            wish = builder.wish()
            path = builder.build(folder / "ds_sp_overlap", wish)
            self.built = [str(path), str(path.with_suffix(".json"))]
        except builder.BuildError as error:
            if builder.wish():
                raise SystemExit(
                    f"ds_sp_overlap: DS_SP_OVERLAP_BUILD={builder.wish()}, but {error}"
                ) from None
            print(
                f"ds_sp_overlap: installed WITHOUT compiled kernels, PyTorch's copies serve instead: {error}",
                file=sys.stderr,
            )

    built: list = []

    def get_outputs(self):
        return self.built

    def get_output_mapping(self):
        return {}


setup(
    packages=[*find_packages(include=["ds_sp_overlap*"]), "ds_sp_overlap.csrc"],
    package_dir={"ds_sp_overlap.csrc": "csrc"},  # sources travel along, for a build at first use
    package_data={"ds_sp_overlap": ["py.typed"], "ds_sp_overlap.csrc": ["*.h", "*.cpp", "*.cu"]},
    ext_modules=[] if builder.wish() == "0" else [Extension("ds_sp_overlap._kernels", sources=[])],
    cmdclass={"build_ext": BuildKernels},
)
