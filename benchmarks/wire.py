"""Makes a real slow link between processes of one machine: network namespaces on a bridge, each behind a token bucket.

    with Wire(2) as wire:
        wire.limit(200)                      # Mbit/s of each rank in each direction
        result = wire.run(["link.py", ...])  # runs the script on each rank, with --rank and --ranks; returns the result of rank 0

With ``per_node`` ranks in a namespace, these share its link, and don't use it among themselves, as in a node. Needs root (network
namespaces, tc). Each rank has its own core if there are enough cores.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
PORT = 29577
PAYLOAD = 1448 / 1514  # share of payload in an Ethernet frame of TCP with time stamps, at an MTU of 1500


class Wire:
    """A context in which every ``per_node`` ranks have a network namespace; a bridge in another one joins their ``eth0``."""

    def __init__(self, ranks: int, per_node: int = 1):
        if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
            sys.exit(f"{sys.argv[0]}: network namespaces need root and the commands ip and tc (package iproute2)")
        self.ranks, self.per_node = ranks, per_node
        self.spaces = [f"dssp{os.getpid()}-{node}" for node in range(ranks // per_node)]
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
                # Else TCP would start slowly after each compute phase, and exchanges would be slower than the link.
                self._ip(f"netns exec {space} sysctl -qw net.ipv4.tcp_slow_start_after_idle=0")
                # BBR, a frequent default, would mistake the pauses between exchanges for a slow link, and send tiny segments.
                self._ip(f"netns exec {space} sysctl -qw net.ipv4.tcp_congestion_control=reno")
        except BaseException:
            self.__exit__()
            raise
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        return self

    def __exit__(self, *_) -> None:
        for space in (*self.spaces, self.bridge):
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)

    @property
    def kind(self) -> str:
        """Return the kind of the figures, for their table."""
        cores = len(os.sched_getaffinity(0))
        shared = f" on {cores} cores: no claim about time" if self.ranks > cores else ""
        nodes = f" in {len(self.spaces)} nodes" if self.per_node > 1 else ""
        return f"rate-limited link (veth and token bucket), {self.ranks} ranks{nodes}{shared}"

    @staticmethod
    def host(rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def limit(self, mbit: float) -> None:
        """Limit the rate at which each namespace sends, in Mbit/s of Ethernet frames."""
        for space in self.spaces:
            self._ip(
                f"netns exec {space} tc qdisc replace dev eth0 root tbf rate {round(mbit * 1000)}kbit burst 128kb latency 400ms"
            )

    def run(self, words: list[str]) -> dict:
        """Run a script on every rank, at the present limit of the link; return the JSON in the last line that rank 0 prints."""
        cores = sorted(os.sched_getaffinity(0))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "DS_ACCELERATOR": "cpu",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            # Keep freed memory, as a device's allocator does. Else glibc returns some of it to the kernel, and some variants
            # fault in thousands of pages in each step (up to 2 % of its time), others none.
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        }
        workers = []
        for rank in range(self.ranks):
            space = self.spaces[rank // self.per_node]
            pinned = f"ip netns exec {space} taskset -c {cores[rank % len(cores)]}".split()
            words_of_rank = [sys.executable, *words, "--rank", str(rank), "--ranks", str(self.ranks)]
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            workers.append(subprocess.Popen([*pinned, *words_of_rank], env=env, stdout=out))
        try:
            out, _ = workers[0].communicate()
            if any([worker.wait() for worker in workers]):
                sys.exit(f"{sys.argv[0]}: a rank failed, see above")
        finally:
            for worker in workers:
                worker.kill()
        return json.loads(out.splitlines()[-1])


class Streams:
    """Makes all-to-alls over one TCP connection for each direction of each pair of ranks, in threads of their own.

    Replaces gloo's all-to-all for all variants, since gloo has two problems on such a link. It posts a send before the permission
    to receive, which then queues behind megabytes of data; in a random third of exchanges, one direction waits for the other. And
    with many exchanges in flight, its thread wakes for every segment, and takes the core from the arithmetic, which no network card
    does. Here, all ranks launch the same exchanges, so bytes need neither headers nor permission.
    """

    def __init__(self, rank: int, ranks: int, per_node: int):
        self.rank, self.ranks = rank, ranks
        self.peers = [peer % ranks for peer in range(rank + 1, rank + ranks)]
        listener = socket.create_server((Wire.host(rank // per_node), PORT + 1 + rank), backlog=ranks)
        dist.barrier()  # now all ranks listen
        self.sends = {peer: queue.SimpleQueue() for peer in self.peers}
        self.receives = {peer: queue.SimpleQueue() for peer in self.peers}
        for peer in self.peers:
            out = socket.create_connection((Wire.host(peer // per_node), PORT + 1 + peer))
            out.sendall(bytes([rank]))
            threading.Thread(target=self._send, args=(out, self.sends[peer]), daemon=True).start()
        for _ in self.peers:
            come, _ = listener.accept()
            peer = come.recv(1)[0]
            threading.Thread(target=self._receive, args=(come, self.receives[peer]), daemon=True).start()

    @staticmethod
    def _send(out: socket.socket, jobs: queue.SimpleQueue) -> None:
        while True:
            view, done = jobs.get()
            out.sendall(view)
            done.set()

    @staticmethod
    def _receive(come: socket.socket, jobs: queue.SimpleQueue) -> None:
        while True:
            view, done = jobs.get()
            while len(view):
                count = come.recv_into(view, len(view), socket.MSG_WAITALL)
                if not count:
                    return
                view = view[count:]
            done.set()

    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        """Replace ``torch.distributed.all_to_all_single``, over all ranks."""
        ends = ((output, output_split_sizes), (input, input_split_sizes))
        outputs, inputs = (x.split(sizes or [x.shape[0] // self.ranks] * self.ranks) for x, sizes in ends)
        return self.all_to_all(outputs, inputs, group, async_op)

    def all_to_all(self, output_tensor_list, input_tensor_list, group=None, async_op=False):
        """Replace ``torch.distributed.all_to_all``, over all ranks; tensors must be contiguous."""
        work = _Work()
        for tensors, jobs in ((output_tensor_list, self.receives), (input_tensor_list, self.sends)):
            for peer in self.peers:
                view = memoryview(tensors[peer].detach().view(-1).view(torch.uint8).numpy())
                jobs[peer].put((view, work.more()))
        output_tensor_list[self.rank].copy_(input_tensor_list[self.rank])
        if async_op:
            return work
        work.wait()


class _Work:
    """The sends and receives of one exchange."""

    def __init__(self):
        self.events: list[threading.Event] = []

    def more(self) -> threading.Event:
        self.events.append(threading.Event())
        return self.events[-1]

    def wait(self) -> None:
        for event in self.events:
            event.wait()


def join(rank: int, ranks: int, per_node: int = 1) -> None:
    """Join the process group of a `Wire`: gloo over the link, `Streams` for exchanges; then start DeepSpeed's communication."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{Wire.host(0)}:{PORT}", rank=rank, world_size=ranks)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not needed here, and it would be compiled
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    sys.setswitchinterval(1e-4)  # switch threads often, since threads of `Streams` need the GIL only for moments
    streams = Streams(rank, ranks, per_node)
    dist.all_to_all_single, dist.all_to_all = streams.all_to_all_single, streams.all_to_all
