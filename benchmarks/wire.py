"""A real slow link between processes of one machine: network namespaces on a bridge, each behind a token bucket.

    with Wire(2) as wire:
        wire.limit(200)                      # Mbit/s, each rank, each way
        result = wire.run(["link.py", ...])  # the script once a rank, with --rank and --ranks, and the result of rank 0

Needs root (network namespaces, tc). Each rank has a core of its own where there are enough.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORT = 29577
PAYLOAD = 1448 / 1514  # of an Ethernet frame of 1500 bytes that TCP with time stamps fills


class Wire:
    """``ranks`` namespaces, ``eth0`` in each, joined by a bridge in one more; removed again whatever happens."""

    def __init__(self, ranks: int):
        if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
            sys.exit(f"{sys.argv[0]}: network namespaces need root and the commands ip and tc (package iproute2)")
        self.ranks = ranks
        self.spaces = [f"dssp{os.getpid()}-{rank}" for rank in range(ranks)]
        self.bridge = f"dssp{os.getpid()}-bridge"

    @staticmethod
    def _ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True)

    def __enter__(self) -> Wire:
        try:
            self._ip(f"netns add {self.bridge}")
            self._ip(f"-n {self.bridge} link add bridge0 type bridge")
            self._ip(f"-n {self.bridge} link set bridge0 up")
            for rank, space in enumerate(self.spaces):
                self._ip(f"netns add {space}")
                self._ip(f"link add eth0 netns {space} type veth peer name port{rank} netns {self.bridge}")
                self._ip(f"-n {self.bridge} link set port{rank} master bridge0 up")
                self._ip(f"-n {space} addr add {self.host(rank)}/24 dev eth0")
                self._ip(f"-n {space} link set lo up")
                self._ip(f"-n {space} link set eth0 up")
                # Else TCP starts slowly after each compute phase, and exchanges would be slower than the link.
                self._ip(f"netns exec {space} sysctl -qw net.ipv4.tcp_slow_start_after_idle=0")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for space in (*self.spaces, self.bridge):
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)

    @staticmethod
    def host(rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def limit(self, mbit: float) -> None:
        """What each rank may send from now on, Mbit/s of Ethernet frames."""
        for space in self.spaces:
            self._ip(
                f"netns exec {space} tc qdisc replace dev eth0 root tbf rate {round(mbit * 1000)}kbit burst 128kb latency 400ms"
            )

    def run(self, words: list[str]) -> dict:
        """Run a script on every rank of the link as it is now; what rank 0 printed as its last line, a JSON."""
        cores = sorted(os.sched_getaffinity(0))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "DS_ACCELERATOR": "cpu",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        workers = []
        for rank, space in enumerate(self.spaces):
            pinned = f"ip netns exec {space} taskset -c {cores[rank % len(cores)]}".split()
            words_of_rank = [sys.executable, *words, "--rank", str(rank), "--ranks", str(self.ranks)]
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            workers.append(subprocess.Popen([*pinned, *words_of_rank], env=env, stdout=out))
        out, _ = workers[0].communicate()
        if any([worker.wait() for worker in workers]):
            sys.exit(f"{sys.argv[0]}: a rank failed, see above")
        return json.loads(out.splitlines()[-1])


class _Works:
    """Sends and receives of one exchange."""

    def __init__(self, works: list):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


_exchanges = itertools.count()


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    """``torch.distributed.all_to_all_single`` over gloo, with every receive posted before the first send.

    gloo's own posts the send first. Its permission to send ("receive ready") then queues behind two megabytes of data on the
    same connection whenever one rank comes a moment late, so that one direction of the link waits for the other: measured here,
    a random third of exchanges takes exactly twice as long. All variants of all benchmarks exchange through this one.
    """
    import torch.distributed as dist

    group = group or dist.group.WORLD
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sizes = lambda splits, x: splits or [x.shape[0] // size] * size  # noqa: E731
    to, of = input.split(sizes(input_split_sizes, input)), output.split(sizes(output_split_sizes, output))
    tag = next(_exchanges)  # the same on every rank: all of them launch the same exchanges
    peers = [peer % size for peer in range(rank + 1, rank + size)]
    works = [dist.irecv(of[p], group=group, group_src=p, tag=tag) for p in reversed(peers) if of[p].numel()]
    works += [dist.isend(to[p], group=group, group_dst=p, tag=tag) for p in peers if to[p].numel()]
    of[rank].copy_(to[rank])
    if async_op:
        return _Works(works)
    _Works(works).wait()


def join(rank: int, ranks: int) -> None:
    """Become ``rank`` of the process group of a `Wire`: gloo over the link, DeepSpeed's communication on top."""
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.all_to_all_single = all_to_all_single
    dist.init_process_group("gloo", init_method=f"tcp://{Wire.host(0)}:{PORT}", rank=rank, world_size=ranks)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # there is nothing to share, and it takes a build
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
