"""Leave out by default what is marked ``full``, ``sweep`` or ``clients``, and of ``singles`` and ``pairs`` what `cases.beyond` names; with
``--all`` leave out the types of the sweep that are ``beyond`` its sample, and nothing with ``-m sweep`` besides."""

import gc
import inspect
import os

# Tests run side by side: threads of one that spin while they wait take the cores of the others. And each has blocks of attention.
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
    """Compile csrc/ into the package, where nobody did since it changed: some tests skip without, and ranks load what is there."""
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
    """Have a test run on each of several gloo ranks, of which this is one there."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that takes `rank` on as many ranks as its mark ``ranks``, its ``size`` or its ``lengths`` say, else on two.

    It passes where it passes on each of them.
    """
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    if arguments.pop("rank", 0) is not None:
        return None
    mark = pyfuncitem.get_closest_marker("ranks")
    size = mark.args[0] if mark else arguments.get("size") or len(arguments.get("lengths", (0, 1)))
    ranks.on_ranks(size, ranks.run_test, pyfuncitem.obj, arguments)
    return True


def pytest_collection_finish(session):
    gc.freeze()  # libraries stay; a collection, of which tests ask for many, looks at what came after them
