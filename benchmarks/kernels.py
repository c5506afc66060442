"""Measure the bandwidth of the relayout kernels, and whether a projection should write the send buffer itself.

    python benchmarks/kernels.py --out benchmarks/results/kernels        CSV and JSON of this machine
    python benchmarks/kernels.py --exercise                              run every kernel once, small: for compute-sanitizer
    python benchmarks/kernels.py --require                               fail below 85 % of a copy's bandwidth

Method. Parity comes first: a variant that gives other values is not timed. Bytes are those that must be moved: each input is read
once, and each output written once; with rotations, cos and sin count, too. All variants of a row run in turn inside one loop, on
random data, over several input sets that together are four times as large as the caches. Calls are timed by events on CUDA, by the
clock on a CPU; rows have median, least and most of the repetitions. The plain copy of as many bytes is timed twice in each loop;
the difference of the two is the noise.

    copy         out.copy_(x), contiguous, the same bytes
    ours         the compiled operator
    naive        view, permute, contiguous; with RoPE after torch's rotation

CPU rows have the label CPU. They show that the script works; the CPU kernels exist to test index maps, not to be fast.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import platform
import statistics
import sys
import time
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if importlib.util.find_spec("deepspeed") is None:
    # The kernels need torch alone, but the package's own __init__ imports DeepSpeed.
    package = types.ModuleType("ds_sp_overlap")
    package.__path__ = [str(ROOT / "ds_sp_overlap")]
    package.__spec__ = importlib.machinery.ModuleSpec("ds_sp_overlap", None, is_package=True)
    sys.modules["ds_sp_overlap"] = package
from benchmarks.record import Rows  # noqa: E402
from ds_sp_overlap.attention.runtime.slices import Run, by_rank, cut_ranges  # noqa: E402
from ds_sp_overlap.relayout import kernels  # noqa: E402
from ds_sp_overlap.rotary import rotate  # noqa: E402
from tests.harness import relayout  # noqa: E402

compiled = torch.ops.ds_sp_overlap
THRESHOLD, THRESHOLD_BYTES = 0.85, 64 * 2**20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 80, 128, 256])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--heads-per-rank", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 64, 256], help="of q; decides the tokens")
    parser.add_argument("--model-dim", type=int, default=4096, help="m of the GEMM table")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tables", nargs="+", choices=["moves", "gemm"], default=["moves", "gemm"])
    parser.add_argument("--require", action="store_true")
    parser.add_argument("--exercise", action="store_true")
    return parser.parse_args()


class Clock:
    """Times calls; on CUDA with events, which are read after the last call."""

    def __init__(self, device: str):
        self.cuda = torch.device(device).type == "cuda"

    def time(self, variants: dict, sets: int, repeat: int) -> dict[str, list[float]]:
        """Return {variant: milliseconds of each repetition}; ``variants[name](i)`` runs a variant on input set i."""
        for name in variants:
            for i in range(sets):
                variants[name](i)
        marks: dict[str, list] = {name: [] for name in variants}
        if self.cuda:
            torch.cuda.synchronize()
        for step in range(repeat):
            if self.cuda:
                torch.cuda._sleep(2_000_000)  # so that the host queues all variants before the first runs
            for name, variant in variants.items():
                if self.cuda:
                    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    before.record()
                    variant(step % sets)
                    after.record()
                    marks[name].append((before, after))
                else:
                    start = time.perf_counter()
                    variant(step % sets)
                    marks[name].append((time.perf_counter() - start) * 1e3)
        if not self.cuda:
            return marks
        torch.cuda.synchronize()
        return {name: [before.elapsed_time(after) for before, after in pairs] for name, pairs in marks.items()}


def cache_bytes(device: str) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if torch.device(device).type == "cuda" else 8 * 2**20


def balanced(heads: int, ranks: int) -> tuple[list[int], list[int]]:
    return [heads * r // ranks for r in range(ranks)], [heads * (r + 1) // ranks for r in range(ranks)]


class Row:
    """Holds one geometry: tensors of several input sets, and the variants that run on them."""

    def __init__(self, args, head_dim, ranks, heads_per_rank, megabytes):
        self.dtype, self.device = getattr(torch, args.dtype), args.device
        self.P, self.d, self.h = ranks, head_dim, ranks * heads_per_rank
        self.tokens = max(1, megabytes * 2**20 // (self.h * head_dim * self.dtype.itemsize))
        self.starts, self.stops = balanced(self.h, ranks)
        self.columns = dict(head_dim=head_dim, P=ranks, heads_per_rank=heads_per_rank, tokens=self.tokens)

    def random(self, *shape):
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def sets(self, size_bytes: int) -> int:
        return max(1, min(8, -(-4 * cache_bytes(self.device) // size_bytes)))

    def moves(self):
        """Yield (kernel, bytes, variants, parity) for pack of q and unpack of o; dq is unpacked like o."""
        shape, P = (self.tokens, self.h, self.d), self.P
        size = 2 * self.tokens * self.h * self.d * self.dtype.itemsize
        n = self.sets(size)
        x, wire = (
            [self.random(*shape) for _ in range(n)],
            [self.random(self.tokens * self.h * self.d) for _ in range(n)],
        )

        def cut(t):
            return t.view(self.tokens, P, -1).transpose(0, 1)

        def uncut(t):
            return t.view(P, self.tokens, -1).transpose(0, 1)

        pack = {
            "copy": lambda i: wire[i].copy_(x[i].view(-1)),
            "ours": lambda i: compiled.pack(x[i], 1, self.starts, self.stops, wire[i]),
            "naive": lambda i: cut(x[i]).contiguous(),
            "copy again": lambda i: wire[i].copy_(x[i].view(-1)),
        }
        expected = torch.empty_like(wire[0]).fill_(float("nan"))
        relayout.pack(x[0], 1, self.starts, self.stops, expected)
        wire[0].fill_(float("nan"))
        pack["ours"](0)
        yield "pack q", size, pack, torch.equal(wire[0], expected)
        unpack = {
            "copy": lambda i: x[i].view(-1).copy_(wire[i]),
            "ours": lambda i: compiled.unpack(wire[i], 1, self.starts, self.stops, x[i]),
            "naive": lambda i: uncut(wire[i]).contiguous(),
            "copy again": lambda i: x[i].view(-1).copy_(wire[i]),
        }
        expected = torch.empty_like(x[0])
        relayout.unpack(wire[0], 1, self.starts, self.stops, expected)
        x[0].fill_(float("nan"))
        unpack["ours"](0)
        yield "unpack o", size, unpack, torch.equal(x[0], expected)

    def rotated(self):
        """Yield (kernel, bytes, variants, parity) for q, rotated and packed, and for dq, unpacked and rotated back."""
        shape, parts, rot = (self.tokens, self.h, self.d), (self.starts, self.stops), self.d - self.d % 32
        size = 2 * self.tokens * (self.h * self.d + rot) * self.dtype.itemsize
        n = self.sets(size)
        x = [self.random(*shape) for _ in range(n)]
        wire = [self.random(x[0].numel()) for _ in range(n)]
        plain = [self.random(2, size // 2 // self.dtype.itemsize) for _ in range(n)]
        angles = torch.rand(n, self.tokens, rot, device=self.device)
        sets = list(zip(angles.cos().to(self.dtype), angles.sin().to(self.dtype)))
        tables = sets[0]
        of_heads = [table.unsqueeze(1) for table in tables]

        def copy(i):
            plain[i][0].copy_(plain[i][1])

        def parity(op, reference, args, out):
            results = []
            for function in (op, reference):
                out.fill_(float("nan"))
                function(*args, *tables, *parts, out)
                results.append(out.clone())
            return torch.equal(*results)

        pack = {
            "copy": copy,
            "ours": lambda i: compiled.rotate_pack(x[i], *sets[i], *parts, wire[i]),
            "naive": lambda i: rotate(x[i], *of_heads).view(self.tokens, self.P, -1).transpose(0, 1).contiguous(),
            "copy again": copy,
        }
        yield "rotate_pack q", size, pack, parity(compiled.rotate_pack, relayout.rotate_pack, (x[0],), wire[0])
        unpack = {
            "copy": copy,
            "ours": lambda i: compiled.unpack_rotate_back(wire[i], *sets[i], *parts, x[i]),
            "naive": lambda i: rotate(wire[i].view(self.P, self.tokens, -1).transpose(0, 1).reshape(shape), *of_heads, back=True),
            "copy again": copy,
        }
        yield (
            "unpack_rotate_back dq",
            size,
            unpack,
            parity(compiled.unpack_rotate_back, relayout.unpack_rotate_back, (wire[0],), x[0]),
        )

    def gemms(self, m: int):
        """Yield (GEMM, variants, input sets, parity, ...): a batched GEMM that writes the send buffer, against GEMM and pack.

        The GEMMs are the projection of q and the dgrad of the output projection; for all heads, and for one of two head groups,
        whose rows or columns of the weight are not adjacent.
        """
        pack = compiled.pack if self.device != "cpu" else relayout.pack  # as the package does on this device
        for groups in (1, 2) if self.h // self.P > 1 else (1,):
            kept = [(start, start + (stop - start) // groups) for start, stop in zip(self.starts, self.stops)]
            part = ((0, self.h * self.d),) if groups == 1 else tuple((a * self.d, b * self.d) for a, b in kept)
            heads = sum(b - a for a, b in kept)
            parts = balanced(heads, self.P)
            rows = self.h * self.d
            size = (self.tokens * m + rows * m + self.tokens * rows) * self.dtype.itemsize
            n = self.sets(size)
            x = [self.random(self.tokens, m) for _ in range(n)]
            eps = torch.finfo(self.dtype).eps
            for name, dim in (("projection", 0), ("output dgrad", 1)):
                weight = self.random(*((rows, m) if dim == 0 else (m, rows))) / m**0.5

                def plain(i, dim=dim, weight=weight, part=part):
                    w = cut_ranges(weight, dim, part)
                    return torch.nn.functional.linear(x[i], w) if dim == 0 else x[i] @ w

                def batch(i, dim=dim, weight=weight, part=part):
                    return by_rank(x[i], Run.dealt(part, self.P).view(weight, dim))

                def gemm_and_pack(i, plain=plain, heads=heads, parts=parts):
                    y = plain(i).view(self.tokens, heads, self.d)
                    send = y.new_empty(y.numel())
                    pack(y, 1, *parts, send)
                    return send

                variants = {
                    "batched": batch,
                    "GEMM + pack": gemm_and_pack,
                    "GEMM alone": plain,
                    "GEMM + pack again": gemm_and_pack,
                }
                got, expected = batch(0).movedim(-2, 0).reshape(-1), gemm_and_pack(0)
                # Both sum the same m products in different orders. Elements have magnitude 1, and products 1/sqrt(m).
                right = torch.allclose(got, expected, rtol=4 * eps, atol=4 * eps)
                yield f"{name} G={groups}", variants, n, right, heads // self.P * self.d


def spread(times: list[float]) -> list[float]:
    return [round(value, 5) for value in (min(times), statistics.median(times), max(times))]


def measure(args) -> list[str]:
    """Measure and write the rows of the two tables; return lines about rows that miss the aim."""
    reached: list[float] = []
    clock, label = Clock(args.device), "CPU" if args.device == "cpu" else torch.cuda.get_device_name(args.device)
    moves, gemms = (Rows(args.out and args.out.with_name(f"{args.out.name}-{name}.csv")) for name in ("moves", "gemm"))
    short = []
    for d in args.head_dim:
        for P in args.ranks:
            for each in args.heads_per_rank:
                for megabytes in args.megabytes:
                    row = Row(args, d, P, each, megabytes)
                    for source in (row.moves, row.rotated) if "moves" in args.tables else ():
                        for kernel, size, variants, right in source():
                            where = f"{kernel} d={d} P={P} h/P={each} {megabytes} MB of q"
                            if not right:
                                short.append(f"{where}: gives other values than the reference")
                                continue
                            times = clock.time(variants, row.sets(size), args.repeat)
                            line = {"machine": label, "kernel": kernel, **row.columns, "bytes": size}
                            for name, each_ms in times.items():
                                low, median, high = spread(each_ms)
                                line |= {f"{name} ms min": low, f"{name} ms": median, f"{name} ms max": high}
                                line[f"{name} GB/s"] = round(size / median / 1e6, 1)
                            line["of copy"] = round(line["copy ms"] / line["ours ms"], 3)
                            moves.append(line)
                            print(
                                f"{label}  {where}: " + ", ".join(f"{name} {line[f'{name} GB/s']} GB/s" for name in times)
                                + f"; {line['of copy']:.0%} of copy",
                                flush=True,
                            )  # fmt: skip
                            if size // 2 >= THRESHOLD_BYTES:
                                reached.append(line["of copy"])
                            if size // 2 >= THRESHOLD_BYTES and line["of copy"] < THRESHOLD:
                                short.append(f"{where}: {line['of copy']:.1%} of a copy, wanted {THRESHOLD:.0%}")
                    for name, variants, sets, right, rows in row.gemms(args.model_dim) if "gemm" in args.tables else ():
                        where = f"{name} d={d} P={P} h/P={each}"
                        if not right:
                            short.append(f"batched {where}: gives other values than GEMM + pack")
                            continue
                        times = clock.time(variants, sets, args.repeat)
                        line = {"machine": label, "GEMM": name, "rows a rank": rows, **row.columns, "m": args.model_dim}
                        for variant, each_ms in times.items():
                            line |= dict(zip((f"{variant} ms min", f"{variant} ms", f"{variant} ms max"), spread(each_ms)))
                        line["batched / GEMM + pack"] = round(line["batched ms"] / line["GEMM + pack ms"], 3)
                        gemms.append(line)
                        print(f"{label}  {where}: " + ", ".join(f"{n} {line[f'{n} ms']} ms" for n in times), flush=True)
    if reached:
        said = f"{min(reached):.0%} to {max(reached):.0%}, median {statistics.median(reached):.0%}"
        print(
            f'reached: {said} of a copy on {label}; decide "kernels": "auto" from it (wanted: {THRESHOLD:.0%}), exactness and memcheck'
        )
    return short


def exercise(args) -> int:
    """Run every kernel once with every width of access and both index types, for compute-sanitizer; return the number of errors."""
    wrong = 0
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        args.dtype = dtype
        for d, P in ((64, 2), (80, 3), (65, 2), (128, 100)):  # 100 ranks: descriptors in device memory
            row = Row(args, d, P, 4, 0)
            row.tokens = 37
            wrong += sum(not right for source in (row.moves, row.rotated) for _, _, _, right in source())
            out, x = row.random(3 * 37 * row.h * d), row.random(37, row.h, d)
            table = row.random(37, d - d % 32)
            compiled.unpack(out, 1, [0] * 3, [row.h] * 3, x)  # replicas
            compiled.unpack_rotate_back(out, table, table, [0] * 3, [row.h] * 3, x)
    if args.device != "cpu":
        torch.cuda.synchronize()
    print(f"exercise on {args.device}: {wrong} results differ from the reference")
    return int(wrong > 0)


def main() -> int:
    args = arguments()
    if kernels.library().path is None:
        sys.exit(f"benchmarks/kernels.py: no compiled kernels: {kernels.library().reason}; {kernels.REMEDY}")
    if args.device != "cpu" and not kernels.library().cuda:
        sys.exit(f"benchmarks/kernels.py: no CUDA kernels: {kernels.library().reason}; {kernels.REMEDY}")
    torch.manual_seed(0)
    if args.exercise:
        return exercise(args)
    short = measure(args)
    if args.out:
        cuda = args.device != "cpu"
        environment = {
            "command": "python benchmarks/kernels.py " + " ".join(sys.argv[1:]),
            "machine": torch.cuda.get_device_name(args.device) if cuda else f"CPU, {torch.get_num_threads()} threads, {platform.machine()}",
            "python": platform.python_version(), "torch": torch.__version__, "torch_cuda": torch.version.cuda,
            "kernels": kernels.library().built, "dtype": args.dtype, "repeat": args.repeat,
        }  # fmt: skip
        Path(f"{args.out}.json").write_text(json.dumps({"environment": environment, "short of the aim": short}, indent=2) + "\n")
    print("\n".join(["", "short of the aim:", *short] if short else ["", "every row reaches the aim"]))
    return int(bool(short) and args.require)


if __name__ == "__main__":
    sys.exit(main())
