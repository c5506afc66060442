"""Runs tests/unit/test_kernels.py with kernels.cu compiled for the host: tests the kernels' index arithmetic without a GPU.

    python -m tests.harness.kernels_on_host LIBRARY [options of pytest]

tests/ranks/test_kernels_on_host.py builds LIBRARY, and runs this command with the sanitizers loaded first.
"""

import ctypes
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

from ds_sp_overlap.relayout import kernels

TESTS = Path(__file__).parents[2] / "unit" / "test_kernels.py"
ABOUT_KERNELS = "not refused and not division and not operators_say"


def memory_of(x):
    """Return the whole storage of ``x`` as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


class Compared:
    """Runs each operator twice, as the kernel and as CPU loops; asserts that both leave the same bits in memory."""

    def __init__(self, library):
        self.library = ctypes.CDLL(str(library))
        self.launches = ctypes.c_bool.in_dll(self.library, "ds_sp_overlap_launches")
        self.calls = 0

    def __getattr__(self, name):
        op = getattr(torch.ops.ds_sp_overlap, name)

        def call(*given):
            *inputs, out = given
            by_loops = out.new_empty(0).set_(out.untyped_storage().clone(), out.storage_offset(), out.shape, out.stride())
            self.launches.value = False
            op(*inputs, by_loops)
            self.launches.value = True
            op(*inputs, out)
            assert torch.equal(memory_of(out), memory_of(by_loops)), f"{name}: the kernel and the CPU loop differ"
            self.calls += 1

        return call


class InPlaceOfTheOperators:
    def __init__(self, compared):
        self.compared = compared

    def pytest_collection_modifyitems(self, items):
        for item in items:
            item.module.compiled = self.compared


def main() -> int:
    library = kernels.load(Path(sys.argv[1]))
    assert library.path is not None, library.reason
    kernels._built_here = library
    hypothesis.settings.register_profile("no shrinking", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
    hypothesis.settings.load_profile("no shrinking")
    compared = Compared(library.path)
    words = ["-x", "-q", "-s", "-p", "no:cacheprovider", "-k", ABOUT_KERNELS, *sys.argv[2:], str(TESTS)]
    status = pytest.main(words, plugins=[InPlaceOfTheOperators(compared)])
    kernels_run = compared.library.ds_sp_overlap_kernels_launched()
    print(f"{compared.calls} calls: {kernels_run} kernels, and the same bits from the loops")
    return status


if __name__ == "__main__":
    sys.exit(main())
