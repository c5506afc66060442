"""Tests the reader of torch.profiler's traces, with traces written by hand."""

import csv
import gzip
import json
import sys

import pytest

from ds_sp_overlap.tools import cli, timeline
from tests.harness.listening import listening

HOST, BACKWARD, GLOO = 1, 2, 3  # threads
COMPUTE, TRANSFER, OF_NCCL = 7, 20, 24  # streams


def event(category, name, begin, end, thread=HOST, **args):
    """Make an event of a trace; ``begin`` and ``end`` are in ms."""
    return dict(ph="X", cat=category, name=name, pid=1, tid=thread, ts=begin * 1e3, dur=(end - begin) * 1e3, args=args)


def written(path, events, rank=0):
    text = json.dumps({"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1}, *events], "distributedInfo": {"rank": rank}})
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        file.write(text)
    return str(path)


def on_gpu():
    """Return a small trace as of an H100: one step with two exchanges, q0 and dq0.

    compute    | Wk 10..30                 | unpack 50..53 | attention 60..70 |
    NCCL              | q0 20........50 |                       | dq0 65 ....... 80 |
    """
    events = [
        event("user_annotation", "ProfilerStep#7", 0, 100),
        event("user_annotation", "layers.3 q0 start", 1, 4),
        event("cuda_runtime", "cudaLaunchKernelExC", 2, 3, correlation=11),
        event("cuda_runtime", "cudaEventRecord", 3, 3.5, correlation=12),  # launches nothing
        event("cuda_runtime", "cudaLaunchKernel", 5, 6, correlation=13),
        event("user_annotation", "layers.3 q0 finish", 7, 9),
        event("cuda_driver", "cuLaunchKernelEx", 7.5, 8, correlation=14),
        event("cuda_runtime", "cudaLaunchKernel", 10, 11, correlation=15),
        event("user_annotation", "layers.3 dq0 start", 12, 14, thread=BACKWARD),
        event("cuda_runtime", "cudaLaunchKernel", 12.5, 13, correlation=17),  # on another thread, so no part of the exchange
        event("cuda_runtime", "cudaLaunchKernelExC", 13, 13.5, thread=BACKWARD, correlation=16),
        event("user_annotation", "layers.3 dq0 finish", 15, 16, thread=BACKWARD),
        event("user_annotation", "layers.3 dk0 start", 17, 18, thread=BACKWARD),  # an exchange without a finish
        event("kernel", "gemm", 10, 30, stream=COMPUTE, correlation=13),
        event("kernel", "ncclDevKernel_SendRecv", 20, 50, stream=OF_NCCL, correlation=11),
        event("kernel", "unpack", 50, 53, stream=COMPUTE, correlation=14),
        event("kernel", "attention", 60, 70, stream=COMPUTE, correlation=15),
        event("kernel", "ncclDevKernel_SendRecv", 65, 80, stream=OF_NCCL, correlation=16),
        event("kernel", "ncclDevKernel_ReduceScatter", 66, 90, stream=TRANSFER, correlation=17),  # of ZeRO: not compute
        # The profiler also lists ranges on the device, from the first to the last kernel in the range.
        event("gpu_user_annotation", "layers.3 q0 start", 20, 50, stream=OF_NCCL),
        event("gpu_user_annotation", "layers.3 Wk0", 10, 100, stream=COMPUTE),
    ]
    return events[::-1]  # the events of a trace have no fixed order


def on_host():
    """Return a trace as of a CPU: two threads of gloo run the exchanges q and k, and one all-to-all of other code."""
    return [
        event("user_annotation", "ProfilerStep#0", 0, 15),
        event("user_annotation", "layers.0.attn q start", 1, 2),
        event("cpu_op", "c10d::alltoall_base_", 1.5, 1.6),
        event("cpu_op", "c10d::alltoall_base_", 2.5, 2.6),
        event("user_annotation", "layers.0.attn k start", 3, 3.5),
        event("cpu_op", "c10d::alltoall_base_", 3.2, 3.3),
        event("user_annotation", "gloo:all_to_all", 1.7, 6, thread=GLOO),
        event("user_annotation", "gloo:all_to_all", 3.4, 4, thread=GLOO + 1),
        event("user_annotation", "gloo:all_to_all", 4.5, 9, thread=GLOO + 1),
        event("user_annotation", "layers.0.attn q finish", 5, 6.5),
        event("user_annotation", "layers.0.attn k finish", 10, 10.25),
        event("user_annotation", "ProfilerStep#1", 15, 30),
        event("user_annotation", "layers.0.attn q start", 16, 17),
        event("user_annotation", "layers.0.attn q finish", 20, 21),
    ]


def table(folder):
    with open(folder / "exchanges.csv") as file:
        return [
            (int(r), int(s), layer, what, int(n), float(t), float(e)) for r, s, layer, what, n, t, e in list(csv.reader(file))[1:]
        ]


def test_on_a_gpu_exposed_is_relayout_and_transfer_without_computing(tmp_path):
    exchanges = timeline.read(written(tmp_path / "trace.json", on_gpu()))
    assert timeline.costs(exchanges, "step", "layer", "name") == {
        (7, "layers.3", "q0"): [1, 30, 23],
        (7, "layers.3", "dq0"): [1, 15, 10],
    }


def test_on_a_cpu_exposed_are_start_and_finish(tmp_path):
    exchanges = timeline.read(written(tmp_path / "trace.json", on_host()))
    costs = {key: [round(value, 6) for value in row] for key, row in timeline.costs(exchanges, "step", "layer", "name").items()}
    assert costs == {
        (0, "layers.0.attn", "q"): [1, 4.3, 2.5],
        (0, "layers.0.attn", "k"): [1, 4.5, 0.75],
        (1, "layers.0.attn", "q"): [1, 0, 2],
    }


def test_the_command_draws_the_traces_of_a_folder_and_prints_a_step(tmp_path, capsys):
    written(tmp_path / "b.json", on_host())
    written(tmp_path / "a.json.gz", on_host(), rank=1)
    assert cli.main(["timeline", str(tmp_path)]) == 0
    assert [row[:4] for row in table(tmp_path)] == [
        (rank, step, "layers.0.attn", what) for rank in (0, 1) for step, what in ((0, "q"), (0, "k"), (1, "q"))
    ]  # fmt: skip
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    # Means over two steps: two exchanges of q in all, and one of k.
    for row in ("q 1 2.15 2.25", "k 0.5 2.25 0.38", "all 1.5 4.40 2.62"):
        assert row.split() in printed
    assert (tmp_path / "timeline.png").read_bytes()[1:4] == b"PNG"


def test_a_gpus_trace_is_drawn(tmp_path):
    assert cli.main(["timeline", written(tmp_path / "trace.json.gz", on_gpu())]) == 0
    assert (tmp_path / "timeline.png").read_bytes()[1:4] == b"PNG"


def test_without_matplotlib_the_picture_is_missing_and_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with listening() as messages:
        timeline.write([written(tmp_path / "trace.json", on_gpu())])
    assert messages[0] == "sp_overlap: pip install matplotlib for timeline.png"
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "exchanges.csv"}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"traceEvents": [{}]}', None])
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, capsys, text):
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["timeline", str(path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: no trace of torch.profiler" in line


def test_a_folder_without_traces_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["timeline", str(tmp_path)])
    assert f"no *.json or *.json.gz in {tmp_path}" in capsys.readouterr().err
