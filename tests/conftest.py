"""Chooses the tests that pytest leaves out, and runs tests on several ranks.

By default, leaves out tests marked ``full``, ``sweep`` or ``clients``. Of a test marked ``singles`` or ``pairs``, runs only the
cases that are needed to cover every option, or every pair of options (`cases.beyond`). With ``--all``, leaves out only the model
types that are marked as ``beyond`` the sample of the sweep. With ``--all -m sweep``, all model types run.
"""

import gc
import inspect
import os

# Several tests run at the same time. Waiting threads of one test would spin, and take the cores of other tests.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from ds_sp_overlap.relayout import build
from tests.harness import cases, ranks


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every case, as `make test-all` does")


def pytest_configure(config):
    os.environ.pop(cases.ALL, None)
    if config.getoption("--all"):
        os.environ[cases.ALL] = "1"
    if not hasattr(config, "workerinput"):
        compile_kernels()


def compile_kernels():
    """Compile csrc/ into the package, unless the compiled kernels are up to date; some tests skip without kernels."""
    if build.compiler() is None or build.wish() == "0" or build.is_current(kind=build.wish()):
        return
    print("compiling the kernels of csrc/, once ...", flush=True)
    try:
        build.build(kind=build.wish())
    except build.BuildError as error:
        pytest.exit(f"csrc/ does not compile: {error}", returncode=1)


def pytest_collection_modifyitems(config, items):
    left_out, products = {item for item in items if any(map(item.get_closest_marker, ("full", "sweep", "clients")))}, {}
    if cases.everything():
        swept = "sweep" in config.option.markexpr
        left_out = {item for item in left_out if not swept and (mark := item.get_closest_marker("sweep")) and mark.kwargs["beyond"]}
    for item in items if not cases.everything() else ():
        for together, mark in enumerate(("singles", "pairs"), 1):
            if item.get_closest_marker(mark):
                products.setdefault((item.nodeid.partition("[")[0], together), []).append(item)
    for (_, together), product in products.items():
        left_out |= {product[at] for at in cases.beyond([item.callspec.params for item in product], together)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def rank():
    """Make the test run on several gloo ranks; `pytest_pyfunc_call` passes each rank its number as ``rank``."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that takes `rank` on several ranks; the test passes if it passes on every rank.

    The number of ranks is the argument of the mark ``ranks``; else the test's ``size``; else the length of ``lengths``; else two.
    """
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    if arguments.pop("rank", 0) is not None:
        return None
    mark = pyfuncitem.get_closest_marker("ranks")
    size = mark.args[0] if mark else arguments.get("size") or len(arguments.get("lengths", (0, 1)))
    ranks.on_ranks(size, ranks.run_test, pyfuncitem.obj, arguments)
    return True


def pytest_collection_finish(session):
    gc.freeze()  # tests collect garbage often: leave out the objects of libraries, which stay alive anyway
