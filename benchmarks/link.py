"""Time one attention layer over a real slow link: two ranks in network namespaces, joined by a rate-limited veth pair.

    sudo python benchmarks/link.py --rates 200 800

Method. Each rank has one core and one thread. A step is the forward and backward of one layer (projections, exchanges,
causal attention, output projection). All variants run in turn inside one run, each step after a barrier, and a step
takes as long as its slower rank. Before anything is timed every variant must give DeepSpeed's output and gradients.

    compute only    the layer of G = 1 over a transport that moves nothing
    exchange only   the eight exchanges, one after another, on buffers that are packed already
    DeepSpeed       deepspeed.sequence.layer.DistributedAttention between whole projections
    G = n           ds_sp_overlap.SelfAttention with n head groups

exposed = step - compute only; limit = max(compute only, exchange only). Rate-limited figures: the wire is emulated by a
token bucket, so they compare variants and say nothing about any fabric.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

HOSTS = ("10.77.0.1", "10.77.0.2")
SPACES = ("dssp0", "dssp1")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[200, 800], help="link rates, Mbit/s each way")
    parser.add_argument("--seq", type=int, default=1024, help="global sequence, tokens")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write a CSV here, beside a JSON of the environment")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


# The link.


@contextlib.contextmanager
def link():
    """Two namespaces, ``veth0`` in each; removed again whatever happens."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        sys.exit("benchmarks/link.py: network namespaces need root and the commands ip and tc (package iproute2)")

    def run(*words):
        subprocess.run(words, check=True)

    try:
        for space in SPACES:
            run("ip", "netns", "add", space)
        run("ip", "link", "add", "veth0", "netns", SPACES[0], "type", "veth", "peer", "name", "veth0", "netns", SPACES[1])
        for space, host in zip(SPACES, HOSTS):
            run("ip", "-n", space, "addr", "add", f"{host}/24", "dev", "veth0")
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "link", "set", "veth0", "up")
            # Else TCP starts slowly after each compute phase, and exchanges would be slower than the link.
            run("ip", "netns", "exec", space, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False)


def limit(rate: int) -> None:
    for space in SPACES:
        words = f"tc -n {space} qdisc replace dev veth0 root tbf rate {rate}mbit burst 128kb latency 400ms"
        subprocess.run(words.split(), check=True)


def launch(args: argparse.Namespace) -> dict:
    """Run both ranks on the link as it is now; rank 0's result."""
    workers = []
    for rank, space in enumerate(SPACES):
        words = ["ip", "netns", "exec", space, "taskset", "-c", str(rank), sys.executable, *sys.argv, "--rank", str(rank)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "veth0", "DS_ACCELERATOR": "cpu"}
        workers.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL))
    out, _ = workers[0].communicate()
    if any(worker.wait() for worker in workers):
        sys.exit("benchmarks/link.py: a rank failed, see above")
    return json.loads(out.splitlines()[-1])


# One rank.


class Nothing:
    """A transport that moves nothing: the cost of computing alone."""

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        recv.zero_()
        return self

    def wait(self):
        pass


def work(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from deepspeed.sequence.layer import DistributedAttention
    from torch import nn

    import ds_sp_overlap

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{HOSTS[0]}:29577", rank=args.rank, world_size=2)
    import deepspeed

    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    group, size = dist.group.WORLD, 2
    heads, d = args.heads, args.head_dim
    kv_heads = args.kv_heads or heads
    width, local_seq = heads * d, args.seq // size
    torch.manual_seed(0)
    layer = nn.ModuleDict(
        {
            f"{kind}_proj": nn.Linear(width, (kv_heads if kind in "kv" else heads) * d, bias=False)
            for kind in "qkvo"
        }
    )
    torch.manual_seed(1 + args.rank)
    x, dy = torch.randn(local_seq, args.batch, width), torch.randn(local_seq, args.batch, width)

    def local(q, k, v):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != heads).permute(2, 0, 1, 3)

    class Local(nn.Module):
        def forward(self, q, k, v):
            return local(q, k, v)

    stock = DistributedAttention(Local(), group)

    def deepspeed_layer(x):
        q, k, v = (layer[f"{kind}_proj"](x).unflatten(-1, (-1, d)) for kind in "qkv")
        return layer["o_proj"](stock(q, k, v, 1).flatten(2))

    def ours(groups, transport=None):
        return ds_sp_overlap.SelfAttention(
            local_attention=local, num_heads=heads, num_kv_heads=kv_heads, head_dim=d, sequence_process_group=group,
            batch_first=False, config={"head_groups": groups}, transport=transport, name="layer", **layer,
        )  # fmt: skip

    def step(run):
        for parameter in layer.parameters():
            parameter.grad = None
        source = x.clone().requires_grad_()
        y = run(source)
        y.backward(dy)
        return y.detach(), source.grad, *(p.grad for p in layer.parameters())

    elements = local_seq * args.batch * d
    sizes = [heads, kv_heads, kv_heads, heads] * 2
    buffers = [(torch.randn(elements * n), torch.empty(elements * n)) for n in sizes]

    def exchanges():
        for send, recv in buffers:
            dist.all_to_all_single(recv, send)

    layers = {f"G = {g}": ours(g) for g in args.groups}
    expected = step(deepspeed_layer)
    for name, run in layers.items():
        for got, want in zip(step(run), expected):
            # fp32: partial sums and another order of the same additions, a few units in the last place of the largest
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.abs().max().item(), msg=lambda m: f"{name}: {m}")

    compute_only = ours(1, Nothing())
    variants = {
        "compute only": lambda: step(compute_only),
        "exchange only": exchanges,
        "DeepSpeed": lambda: step(deepspeed_layer),
        **{name: lambda run=run: step(run) for name, run in layers.items()},
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(args.warmup + args.steps):
        for name, run in variants.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn >= args.warmup:
                times[name].append(took.item() * 1e3)
    dist.barrier()
    if args.rank == 0:
        print(json.dumps({"times_ms": times, "torch": torch.__version__, "deepspeed": deepspeed.__version__}), flush=True)
    dist.destroy_process_group()


# The table.


def rows_of(rate: int, times: dict[str, list[float]]) -> list[dict]:
    median = {name: statistics.median(values) for name, values in times.items()}
    bound = max(median["compute only"], median["exchange only"])
    rows = []
    for name, values in times.items():
        whole = name not in ("compute only", "exchange only")
        rows.append(
            {
                "rate Mbit/s": rate,
                "variant": name,
                "min ms": round(min(values), 1),
                "median ms": round(median[name], 1),
                "max ms": round(max(values), 1),
                "exposed ms": round(median[name] - median["compute only"], 1) if whole else "",
                "exposed share": f"{1 - median['compute only'] / median[name]:.1%}" if whole else "",
                "step / limit": round(median[name] / bound, 3) if whole else "",
                "DeepSpeed / step": round(median["DeepSpeed"] / median[name], 2) if whole else "",
            }
        )
    return rows


def main() -> None:
    args = arguments()
    if args.rank is not None:
        return work(args)
    from tabulate import tabulate

    rows, result = [], {}
    with link():
        for rate in args.rates:
            limit(rate)
            result = launch(args)
            rows += rows_of(rate, result["times_ms"])
    print("rate-limited link (veth + tbf), 2 ranks, fp32")
    print(tabulate(rows, headers="keys", tablefmt="github"))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        environment = {
            "command": "python benchmarks/link.py " + " ".join(sys.argv[1:]),
            "kind": "rate-limited link (veth + tbf), two processes of one core each",
            "torch": result["torch"],
            "deepspeed": result["deepspeed"],
            "python": platform.python_version(),
            "cpu": next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "unknown"),
        }
        args.out.with_suffix(".json").write_text(json.dumps(environment, indent=2) + "\n")


if __name__ == "__main__":
    main()
