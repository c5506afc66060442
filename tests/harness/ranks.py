"""Runs functions on gloo ranks. Starting ranks takes seconds, so ranks are kept between tests.

For each number of ranks, there is one pool of workers. A worker is one rank of a process group, and runs the functions that tests
send to the pool. If a worker fails or does not answer in time, its pool is closed, and the next test gets a new pool. A pool with
many threads is closed, too: engines of DeepSpeed that outlive their test hold process groups, whose threads wake up often.
"""

import atexit
import faulthandler
import gc
import os
import queue
import signal
import tempfile
import time
import traceback

import torch
import torch.multiprocessing
from _pytest.assertion import install_importhook
from _pytest.config import get_config
from torch.distributed.distributed_c10d import _world

_context = torch.multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([
    "torch", "deepspeed", "ds_sp_overlap", "tests.harness.models",
    "deepspeed.runtime.zero.muon.muon_optimizer", "transformers.models.llama.modeling_llama",  # else each rank imports for seconds
])  # fmt: skip
_pools: dict[int, "Pool"] = {}
MOST_THREADS = 60
OVER = "over"  # sent once all ranks are done: if a rank destroyed its groups earlier, another rank might still be making them


class RankError(AssertionError):
    """Holds the errors of the ranks: ``kinds`` and ``messages``, in rank order, with None for a rank without an error."""

    def __init__(self, failures):
        self.kinds = [None if failure is None else failure[0] for failure in failures]
        self.messages = [None if failure is None else failure[1] for failure in failures]
        super().__init__("\n".join(f"--- rank {r}\n{f[2]}" for r, f in enumerate(failures) if f is not None))


def _work(rank, size, store, tasks, results):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_SIZE=str(size), OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", CROSS_RANK="0", CROSS_SIZE="1",
    )  # fmt: skip
    stacks = open(f"{store}.stacks{rank}", "w")  # not closed: on SIGUSR1, faulthandler writes the stack to it
    faulthandler.register(signal.SIGUSR1, file=stacks)
    torch.set_num_threads(1)
    install_importhook(get_config())  # a failed assert shows the values that it compared
    import deepspeed

    from ds_sp_overlap.attention import layer
    from ds_sp_overlap.exchange.calls import Calls

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else each pool would build this op, behind a file lock
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    gc.freeze()  # tests collect garbage often: leave libraries out
    linear, of_deepspeed = torch.nn.functional.linear, dict(vars(deepspeed.utils.groups))
    while (task := tasks.get()) is not None:
        if task == OVER:
            made = [group for group in _world.pg_map if group is not torch.distributed.group.WORLD]
            for group in made:  # each group has threads that wake up often
                torch.distributed.destroy_process_group(group)
            if made:
                vars(deepspeed.utils.groups).update(of_deepspeed)
                gc.collect()
            continue
        try:
            function, args, os.environ["PYTEST_CURRENT_TEST"] = task  # `mutants` records which test reaches a line
            torch.manual_seed(0)
            torch.nn.functional.linear = linear  # ZeRO-3 replaces this function for the rest of the process
            layer._policies.clear(), layer._told.clear()  # forget policies of layers that an earlier task made
            Calls._of_groups.clear()  # count from 0, so that no call is compared with a call of an earlier task
            results.put((rank, None, function(rank, *args)))
        except BaseException as error:  # sent to the test
            results.put((rank, (type(error).__name__, str(error), traceback.format_exc()), None))


class Pool:
    def __init__(self, size):
        self.size = size
        self.folder = tempfile.TemporaryDirectory(prefix="ds_sp_overlap_")
        store = self.store = f"{self.folder.name}/store"
        self.results = _context.Queue()
        self.tasks = [_context.Queue() for _ in range(size)]
        self.workers = [
            _context.Process(target=_work, args=(rank, size, store, self.tasks[rank], self.results), daemon=True)
            for rank in range(size)
        ]
        for worker in self.workers:
            worker.start()

    def run(self, function, args, timeout_s):
        for tasks in self.tasks:
            tasks.put((function, args, os.environ.get("PYTEST_CURRENT_TEST", "")))
        failures, returned = [None] * self.size, [None] * self.size
        for _ in range(self.size):
            try:
                rank, failure, value = self.results.get(timeout=timeout_s if not any(failures) else min(timeout_s, 20))
            except queue.Empty:
                hangs = [("Timeout", "no answer", f"no answer: a hang in\n{stack}") for stack in self.stacks()]
                self.close()
                raise RankError([failure or hang for failure, hang in zip(failures, hangs)]) from None
            failures[rank], returned[rank] = failure, value
        if any(failures):
            self.close()
            raise RankError(failures)
        for tasks in self.tasks:
            tasks.put(OVER)
        return returned

    def threads(self):
        """Return the number of threads of the first worker."""
        return len(os.listdir(f"/proc/{self.workers[0].pid}/task"))

    def stacks(self):
        """Return the stack of each worker."""
        for worker in self.workers:
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return [open(f"{self.store}.stacks{rank}").read() for rank in range(self.size)]

    def close(self):
        for worker in self.workers:
            worker.kill()
            worker.join()
        self.folder.cleanup()
        _pools.pop(self.size, None)


def refusal(function, *args, **kwargs):
    """Return ``(kind, message)`` of the error that ``function`` raises, or None. The rank goes on after the error."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def on_ranks(size, function, *args, timeout_s=180):
    """Run ``function(rank, *args)`` on each of ``size`` ranks; return the results in rank order.

    ``function`` must be importable. Raises `RankError` if a rank raises, or doesn't answer within ``timeout_s``.
    """
    pool = _pools.get(size)
    if pool is not None and pool.threads() > MOST_THREADS:
        pool.close()
        pool = None
    if pool is None:
        pool = _pools[size] = Pool(size)
    return pool.run(function, args, timeout_s)


def run_test(rank, test, arguments):
    """Run a test of pytest that takes ``rank`` on this rank; see `pytest_pyfunc_call` in conftest.py."""
    test(**arguments, rank=rank)


def soon(happened):
    """Return whether ``happened()`` becomes true within a few seconds.

    A thread of gloo may report late, or may hold a sent tensor for a moment.
    """
    until = time.monotonic() + 5
    while not (has := happened()) and time.monotonic() < until:
        time.sleep(0.01)
    return has


def leaves(found):
    """Return a flat list of the values in nested dicts, lists and tuples."""
    if isinstance(found, dict):
        return leaves(list(found.values()))
    return [leaf for each in found for leaf in leaves(each)] if isinstance(found, (list, tuple)) else [found]


def assert_small(errors, limit):
    """Assert that all ``errors`` in nested dicts, lists and tuples are below ``limit``, and that there is at least one."""
    every = leaves(errors)
    assert every and all(error < limit for error in every), f"errors should be below {limit:g}: {errors}"


def assert_error(said, words, kind="ValueError"):
    """Assert that ``said``, a result of `refusal`, is an error of ``kind`` whose message contains ``words``."""
    assert isinstance(said, tuple) and said[0] == kind and words in said[1], f"expected {kind} with {words!r}, got {said}"


def assert_refused(said, messages, kind="ValueError"):
    """Assert that each case in ``messages`` raised an error of ``kind`` with its words, and that no other case raised.

    said       {case: result of `refusal`}
    messages   {case: words in the message}
    """
    assert messages.keys() <= said.keys(), f"{messages.keys() - said.keys()} were not tried"
    for name, error in said.items():
        if name in messages:
            assert_error(error, messages[name], kind)
        assert error is None or name in messages, f"{name}: expected no error, got {error}"


@atexit.register
def _close_all():
    for pool in list(_pools.values()):
        pool.close()
