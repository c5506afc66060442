"""Trains on separate ranks, with a fault planted in the last rank: it dies, raises, hangs or differs, as ranks of a cluster may.

    outcomes = run(folder, {"a name": Fault("killed", "dk1"), ...})

`run` runs all trainings at once, and returns for each name the `Outcome` of every rank. Ranks are processes of the fork server,
which start fast. A rank writes its error to a file. `run` adds how and when the rank ended, and whether child processes are left.
"""

import contextlib
import ctypes
import json
import os
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ds_sp_overlap.exchange.transport import C10d
from tests.harness import layers, reference
from tests.harness.layers import Shape
from tests.harness.ranks import _context
from tests.harness.uses import RaisesInBackward

TIMEOUT_S = 8.0  # timeout of the process groups, once all ranks have started
MARGIN_S = 30.0  # time that a rank may take to end, on two cores that many processes share; a rank that hangs never ends
STEPS = 4
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """Describes a training, and the fault of its last rank.

    how       "killed", "stuck", "raises", "waits" (until the parent calls `Job.go`) or "nothing"
    what      the fault acts just before this part of ``layer`` in ``step``: an exchange such as "k0", or "attention"
    train     the function that trains: "blocks", or "llama" through deepspeed.initialize
    other     arguments of this function on the last rank alone
    more      arguments of this function on every rank
    """

    how: str = "nothing"
    what: str = "k0"
    layer: int = 1
    step: int = 1
    train: str = "blocks"
    ranks: int = 2
    other: dict = field(default_factory=dict, hash=False)
    more: dict = field(default_factory=dict, hash=False)


@dataclass
class Outcome:
    """Describes how a rank ended.

    status    the exit status; for a killed rank, minus the number of the signal
    after_s   time from the fault to the end of this rank; without a fault, from the first end of a rank
    error     kind and message of the error; None if there was none, or if the rank could not write it
    losses    the losses of the finished steps
    left      whether child processes outlived the rank
    """

    status: int
    after_s: float
    error: tuple | None
    losses: list
    left: bool
    output: str


# Exceptions.


@contextlib.contextmanager
def attention_raises(call, backward=False):
    """Make call number ``call`` of attention raise while the body runs; expect the body to end with the exception.

    With ``backward``, the backward of that call raises instead.
    """
    attention, calls = F.scaled_dot_product_attention, []

    def attend(*args, **options):
        calls.append(None)
        if len(calls) - 1 != call:
            return attention(*args, **options)
        if backward:
            return RaisesInBackward.apply(attention(*args, **options))
        raise ArithmeticError("planted")

    with mock.patch.object(F, "scaled_dot_product_attention", attend), pytest.raises(ArithmeticError):
        yield


# One rank.


class Progress:
    """Tracks the progress of a rank, triggers its fault, and writes its result to a file."""

    def __init__(self, folder, rank, fault):
        self.file, self.fault = folder / f"result{rank}", fault
        self.met, self.go = folder / "met", folder / "go"
        self.here = fault.how != "nothing" and rank == fault.ranks - 1
        self.step, self.losses = 0, []

    def write(self, error=None):
        self.file.write_text(json.dumps({"error": error, "losses": self.losses}))

    def passes(self, where, what):
        """Trigger the fault if it is planted at ``what`` in the layer ``where``. Call this just before ``what`` begins."""
        fault = self.fault
        if not self.here or (self.step, what) != (fault.step, fault.what) or f"layers.{fault.layer}" not in where:
            return
        self.here = False
        if fault.how != "waits":
            time.sleep(1)
        self.met.touch()
        if fault.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.how == "waits":
            while not self.go.exists():
                time.sleep(0.01)
        elif fault.how == "stuck":
            time.sleep(3600)
        elif fault.how == "raises":
            raise ArithmeticError("planted")


def plant(progress):
    launch = C10d.launch

    def launching(self, send, recv, send_sizes, recv_sizes, group, name):
        progress.passes(*name.rsplit(" ", 1))
        return launch(self, send, recv, send_sizes, recv_sizes, group, name)

    C10d.launch = launching


def hurry():
    """Limit the timeout of all process groups to `TIMEOUT_S`."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)


def blocks(rank, progress, count=2, order=None, dtype="float32", tokens=6, **shape):
    """Train a stack of attention layers over all ranks; nothing useful is learned."""
    shape = Shape(lengths=(tokens,) * dist.get_world_size(), dtype=getattr(torch, dtype), rope=False, **shape)
    modules = [layers.projections(shape, seed=layer) for layer in range(count)]
    stack = []
    for layer in range(count):

        def attend(q, k, v, layer=layer):
            progress.passes(f"layers.{layer}", "attention")
            return reference.attention(q, k, v)

        stack.append(layers.block(shape, modules[layer], dist.group.WORLD, local_attention=attend))
        stack[-1].layer.where = f"layers.{layer}"
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    hurry()
    for progress.step in range(STEPS):
        y = x.clone().requires_grad_()
        for layer in order or range(count):
            y = y + layers.call_block(shape, stack[layer], rank, y)
        loss = (y * dy).sum()
        loss.backward()
        dist.all_reduce(total := loss.detach().clone())
        progress.losses.append(total.item())
        for parameter in (p for module in modules for p in module.parameters()):
            dist.all_reduce(parameter.grad)
            parameter.data -= 1e-3 * parameter.grad
            parameter.grad = None


def llama(rank, progress, section={"head_groups": 2}, count=2, stage=1, folder=None, every=2, resume=False):  # noqa: B006
    """Train a small LLaMA through DeepSpeed, and save a checkpoint in ``folder`` every ``every`` steps."""
    from tests.harness import models  # imports transformers, which `blocks` does not need

    def attend(*args, **options):
        calls.append(None)
        progress.passes(f"layers.{(len(calls) - 1) // groups}", "attention")
        return attention(*args, **options)

    calls, groups, attention = [], section["head_groups"], F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attend
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    size = dist.get_world_size()
    model = models.tiny(layers=count)
    mpu = models.sequence_parallel(model, size)
    engine, *_ = deepspeed.initialize(model=model, config={**models.ds_config(stage), "sp_overlap": section}, mpu=mpu)
    group, first = mpu.get_sequence_parallel_group(), 0
    if resume:
        engine.load_checkpoint(folder)
        first = engine.global_steps
    hurry()
    tokens = models.batches(STEPS).unflatten(0, (STEPS, 1))
    for progress.step in range(first, STEPS):
        calls.clear()
        progress.losses.append(models.step(engine, tokens[progress.step], rank, size, group))
        if folder and not (progress.step + 1) % every:
            engine.save_checkpoint(folder)


def work(folder, rank, fault, space=None):
    """Run the training of one rank, in its own process."""
    os.setsid()
    output = os.open(folder / f"output{rank}", os.O_WRONLY)
    os.dup2(output, 1), os.dup2(output, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(fault.ranks), DS_ACCELERATOR="cpu")
    if space:
        with open(f"/var/run/netns/{space}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    progress = Progress(folder, rank, fault)
    plant(progress)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=fault.ranks)
        train = {"blocks": blocks, "llama": llama}[fault.train]
        train(rank, progress, **{**fault.more, **(fault.other if rank == fault.ranks - 1 else {})})
    except BaseException as error:
        progress.write((type(error).__name__, str(error)))
        raise
    progress.write()


# All ranks.


def start(folder, rank, fault, space=None):
    (folder / f"output{rank}").touch()
    process = _context.Process(target=work, args=(folder, rank, fault, space), daemon=True)
    process.start()
    return process


def left_behind(session):
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


class Job:
    """Runs the ranks of one training."""

    def __init__(self, folder, fault, spaces=None):
        folder.mkdir(parents=True)
        self.folder, self.fault = folder, fault
        self.ranks = [start(folder, rank, fault, spaces and spaces[rank]) for rank in range(fault.ranks)]
        self.began, self.ended = time.time(), {}

    def met(self):
        """Return the time at which the fault was triggered; None if it was not triggered yet."""
        file = self.folder / "met"
        return file.stat().st_mtime if file.exists() else None

    def go(self):
        (self.folder / "go").touch()

    def over(self):
        """Return whether all ranks have ended, except a rank that is stuck on purpose."""
        for rank, process in enumerate(self.ranks):
            if process.exitcode is not None:
                self.ended.setdefault(rank, time.time())
        stuck = {self.fault.ranks - 1} if self.fault.how == "stuck" else set()
        return len(self.ended.keys() | stuck) == self.fault.ranks

    def kill(self):
        """Kill the ranks that have not ended."""
        for process in self.ranks:
            process.kill()
            while process.exitcode is None:
                time.sleep(0.01)

    def outcomes(self):
        """Return the outcomes of the ranks, in order; None for a rank that did not end by itself."""
        since = self.met() or min(self.ended.values(), default=0)
        found = []
        for rank, process in enumerate(self.ranks):
            if rank not in self.ended:
                found.append(None)
                continue
            file = self.folder / f"result{rank}"
            result = json.loads(file.read_text()) if file.exists() else {"error": None, "losses": []}
            error = result["error"] and tuple(result["error"])
            after_s, output = self.ended[rank] - since, (self.folder / f"output{rank}").read_text()
            found.append(Outcome(process.exitcode, after_s, error, result["losses"], left_behind(process.pid), output))
        return found


def run(folder, faults, spaces=None, meanwhile=lambda job: None):
    """Run a job for each fault, all at once; return {name of the fault: outcomes of the ranks, in order}.

    meanwhile   a function that is called with each job repeatedly, until all jobs are over
    """
    jobs = {}
    try:
        for name, fault in faults.items():
            jobs[name] = Job(folder / name, fault, spaces)
            for job in jobs.values():
                job.over()  # notes the end of jobs that end before others have started
        limit = time.time() + 300
        while time.time() < limit and not all([job.over() for job in jobs.values()]):
            for job in jobs.values():
                meanwhile(job)
            time.sleep(0.01)
    finally:
        for job in jobs.values():
            job.kill()
    return {name: job.outcomes() for name, job in jobs.items()}
