"""The timeline: what is recorded is what was exchanged, the rows are those of the drawing, nothing runs when it is off."""

import csv
import functools
import json
import logging
import re
import sys
import types
from itertools import groupby
from xml.etree import ElementTree

import pytest
import torch

import ds_sp_overlap
from ds_sp_overlap.exchange import in_flight
from ds_sp_overlap.exchange.sp_group import SPGroup
from ds_sp_overlap.profiling import timeline
from ds_sp_overlap.profiling.timed import TimedCall
from ds_sp_overlap.profiling.timeline import Row, Timeline, Track, computing
from ds_sp_overlap.schedule import by_head_groups, by_window, without_o
from ds_sp_overlap.tools import cli, picture
from tests.harness import layers, models
from tests.harness.layers import Shape
from tests.harness.listening import listening
from tests.harness.ranks import on_ranks, refusal, soon


class Numbers:
    """A clock whose marks are written down beforehand."""

    @staticmethod
    def between_ms(begin, end):
        return end - begin


def stopped(lines):
    """The rows of a timeline that is not to write them."""
    lines._stop()
    timeline._open.pop(lines.folder, None)
    return lines.left


def recorded(**marks):
    """The rows of one exchange with these marks, in a step and a layer of their own."""
    lines = Timeline("nowhere", (0, 0), rank=1, size=1)
    lines.clock = Numbers()
    track = Track(lines.clock, 0, "layers.7 q0", 1000)
    track.at = marks
    lines.tracks.append(track)
    rows = lines.rows()
    lines.close()
    return rows


ON_HOST = dict(issued=0, packed=2, started=2, launched=3, wait=10, arrived=14, unpacking=15, done=19)
ON_DEVICE = dict(issued=0, packed=2, launched=2, started=4, wait=5, arrived=10, unpacking=10, done=13)


@pytest.mark.parametrize(
    "marks,exchange_ms,exposed_ms,relayout_ms",
    [
        (ON_HOST, 2 + 12 + 4, 2 + 9, 6),  # the host packs, waits and unpacks
        ({**ON_HOST, "arrived": 6}, 2 + 4 + 4, 10, 6),  # it waited no longer than there was to do: never more than all of it
        (ON_DEVICE, 2 + 6 + 3, 2 + 8, 5),  # another one was under way when it was launched
        ({**ON_DEVICE, "wait": 30, "unpacking": 30, "done": 33}, 11, 5, 5),  # but for its relayout it is hidden
    ],
)
def test_what_is_exposed_is_what_the_compute_row_stood_still(marks, exchange_ms, exposed_ms, relayout_ms):
    ((key, values),) = picture.costs(recorded(**marks)).items()
    assert key == (0, "layers.7", "q0")
    assert values == (1, 1000, exchange_ms, exposed_ms, exchange_ms - exposed_ms, relayout_ms)


def test_an_exchange_that_was_never_finished_is_left_out():
    assert recorded(**{event: at for event, at in ON_HOST.items() if event != "done"}) == []


def schedule_of(groups, window=None):
    if window is None:
        return by_head_groups(("qkv",) * groups)
    return without_o(by_window(("qkv",) * groups, tuple(range(groups)), window))  # of attention that is run again


def played(made):
    """The compute row of a schedule, forward and backward: what is done between two stops, adjacent bars of one name as one."""
    rows = []
    for program in (made.forward, made.backward):
        between = [
            dict.fromkeys(map(made.label, steps)) for stops, steps in groupby(program, lambda step: step.on_wire) if not stops
        ]
        rows.append([name for name, _ in groupby(", ".join(labels) for labels in between)])
    return rows


def rows_of_a_block(rank, size, groups, folder, window=None):
    """Rows of one forward and backward of a block."""
    config = {"head_groups": groups, "window": window, "timeline": {"path": folder, "steps": [0, 0]}}
    shape = Shape(config=config, lengths=(6,) * size)
    layer, group = layers.projections(shape), torch.distributed.group.WORLD if size > 1 else None
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    attend = layers.block(shape, layer, group)
    layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
    lines = attend.layer.sp_group.timeline
    return [tuple(row) for row in stopped(lines)]


@pytest.mark.parametrize("size, groups", [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("window", [None, 1, 2])
def test_the_compute_row_is_the_one_that_the_schedule_plays(window, groups, size, tmp_path):
    args = size, groups, str(tmp_path), window
    for rows in [rows_of_a_block(0, *args)] if size == 1 else on_ranks(2, rows_of_a_block, *args):
        rows = [Row(*row) for row in rows]
        names = {"forward": [], "backward": []}
        spans = {row.kind: row for row in rows if row.kind in names}
        for row in sorted((row for row in rows if row.kind == "compute"), key=lambda row: row.begin):
            kind = next(kind for kind, span in spans.items() if span.begin <= row.begin and row.end <= span.end)
            if names[kind][-1:] != [row.what]:
                names[kind].append(row.what)
        assert [names["forward"], names["backward"]] == played(schedule_of(groups, window))


def test_what_lies_between_two_stops_is_the_same_in_forward_and_backward_of_a_window():
    """q, k and v are exchanged in both: the row that is named by its stops is not confused."""
    for kinds in (("qkv",) * 4, ("qkv", "q", "qkv", "q"), ("qkv", "q", "q", "q")):
        for last in ((0, 1, 2, 3), (1, 1, 3, 3), (3, 1, 2, 3)):
            for window in (1, 2, 3):
                whole = by_window(kinds, tuple(max(g, n) if "k" in kinds[g] else g for g, n in enumerate(last)), window)
                for made in (whole, without_o(whole)):
                    exchanged = {made.name(step) for step in (*made.forward, *made.backward) if step.on_wire}
                    forward, backward = (timeline._between(made, program, exchanged) for program in (made.forward, made.backward))
                    shared = {stops for stops in forward.keys() & backward.keys() if stops != ("[", "]")}
                    assert {stops: forward[stops] for stops in shared} == {stops: backward[stops] for stops in shared}


def test_what_a_kept_window_recomputes_is_named():
    rows = [Row(0, "layer", "layer", "forward", 0, 2)]  # no exchange in it
    computed = computing(rows, 0, {(0, "layer"): by_window(("qkv", "qkv"), (0, 1), 1)})
    assert [(row.what, row.begin, row.end) for row in computed] == [("Wo0, Wo1", 0, 2)]


EXCHANGES = {1: ("q", "k", "v", "o"), 2: ("q0", "k0", "v0", "qkv1", "o0", "o1")}  # and in backward those of their gradients


@pytest.mark.parametrize("groups", [1, 2])
def test_every_exchange_is_there_with_the_bytes_that_went_to_others(groups, tmp_path):
    shape = Shape()
    whole = shape.lengths[0] * shape.batch * shape.heads * shape.head_dim * 8  # of one of q, k, v, o on a rank, in fp64
    for rows in on_ranks(2, rows_of_a_block, 2, groups, str(tmp_path)):
        costs = picture.costs([Row(*row) for row in rows])
        names = {f"{d}{what}" for d in ("", "d") for what in EXCHANGES[groups]}
        assert {(step, layer) for step, layer, _ in costs} == {(0, "layer")}
        assert {what for *_, what in costs} == names
        for (*_, what), (calls, sent, exchange_ms, exposed_ms, hidden_ms, relayout_ms) in costs.items():
            assert (calls, sent) == (1, whole / 2 / groups * (3 if "qkv" in what else 1))
            assert 0 <= exposed_ms <= exchange_ms and 0 < relayout_ms <= exchange_ms
            assert exposed_ms + hidden_ms == pytest.approx(exchange_ms)


def arrivals(rank, folder):
    """Marks of the arrival that the transfers themselves made; of how many exchanges."""
    shape = Shape(config={"head_groups": 1, "timeline": {"path": folder, "steps": [0, 0]}})
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    attend = layers.block(shape, layers.projections(shape), torch.distributed.group.WORLD)
    layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
    lines = attend.layer.sp_group.timeline
    soon(lambda: all("arrived" in track.at for track in lines.tracks))
    found = [track.what for track in lines.tracks if "arrived" in track.at]
    stopped(lines)
    return found


def test_on_cpu_a_transfer_marks_its_own_arrival(tmp_path):
    assert on_ranks(2, arrivals, str(tmp_path)) == [["q", "k", "v", "o", "do", "dv", "dk", "dq"]] * 2


def trained(rank, section, steps):
    """Train a model; the marks that were made in each step, and the hooks that are left."""
    made, mark = [], Track.mark

    def counting(self, event):
        made.append(self.step)
        mark(self, event)

    Track.mark = counting
    try:
        models.train_run(rank, 2, section, steps=steps, accumulation=2)
    finally:
        Track.mark = mark
    return made, list(timeline._open)


def test_files_are_written_once_the_last_step_is_over_with_the_rows_of_every_rank(tmp_path):
    folder = tmp_path / "new" / "timeline"
    section = {"head_groups": 2, "timeline": {"path": str(folder), "steps": [1, 2]}}
    for made, left in on_ranks(2, trained, section, 5):
        assert set(made) == {1, 2} and left == []
    assert {path.name for path in folder.iterdir()} == {
        "timeline.txt", "exchanges.csv", "trace.json", "timeline.html", "timeline.png",
    }  # fmt: skip
    with open(folder / "exchanges.csv") as file:
        lines = list(csv.DictReader(file))
    assert {line["sp_rank"] for line in lines} == {"0", "1"} and {line["step"] for line in lines} == {"1", "2"}
    assert {line["layer"] for line in lines} == {f"model.layers.{i}.self_attn" for i in (0, 1)}
    assert {line["calls"] for line in lines} == {"2"}, "two microbatches"
    names = {line["exchange"] for line in lines}
    assert len(lines) == 2 * 2 * 2 * len(names) and {"q0", "q1", "o0", "do1", "dq0", "dk0", "dv0"} <= names
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    named = {event["name"] for event in events}
    assert {"model.layers.1.self_attn dv0", "model.layers.0.self_attn attention 1"} <= named
    words = {(event["pid"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert {(rank, name) for rank in (0, 1) for name in (f"sp rank {rank}", "compute", "side")} <= words
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    for thread in {(event["pid"], event["tid"]) for event in events if event.get("cat") == "transfer"}:
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == thread)
        assert all(end <= begin + 1e-6 for (_, end), (begin, _) in zip(row, row[1:])), "bars of a row overlap"
    page = (folder / "timeline.html").read_text()
    (drawing,) = re.findall(r"<svg.*</svg>", page, re.DOTALL)
    drawn = [text.text for text in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
    assert {"step 2", "rank 1 side", "in flight"} <= set(drawn), "text stays text"
    assert drawing.count("<path") > 3 * 16 and "per layer" in page, "a bar for each exchange and more, three times"
    page = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)  # names, not addresses
    assert not re.search(r"https?://|<script|<link|src=|@import", page), "one file, no network"
    assert (folder / "timeline.png").read_bytes()[1:4] == b"PNG"
    assert "model.layers.0.self_attn" in (folder / "timeline.txt").read_text()


def test_what_was_recorded_is_written_when_training_ends_before_the_last_step(tmp_path):
    section = {"head_groups": 1, "timeline": {"path": str(tmp_path), "steps": [1, 90]}}
    for made, left in on_ranks(2, trained, section, 3):
        assert set(made) == {1, 2} and left == []
    with open(tmp_path / "exchanges.csv") as file:
        lines = list(csv.DictReader(file))
    assert {line["sp_rank"] for line in lines} == {"0"} and {line["step"] for line in lines} == {"1", "2"}


def other_steps(rank, folder):
    with listening(logging.WARNING) as messages:
        for steps in ([5, 6], [5, 6], [2, 3]):
            shape = Shape(config={"timeline": {"path": folder, "steps": steps}})
            layers.block(shape, layers.projections(shape), torch.distributed.group.WORLD)
    timeline._open[folder].close()
    return messages


def test_a_second_timeline_of_one_folder_has_the_steps_of_the_first_and_says_so(tmp_path):
    (messages,) = on_ranks(1, other_steps, str(tmp_path))
    assert len(messages) == 1 and "steps 5 to 6" in messages[0] and "steps 2 to 3 are not" in messages[0]


def stepped_apart(rank, folder):
    """Rank 0 is a step further than rank 1 in the second of four calls; which folders are open behind each."""
    shape = Shape(config={"timeline": {"path": folder, "steps": [0, 0]}})
    layer = layers.projections(shape)
    attend, open_after = layers.block(shape, layer, torch.distributed.group.WORLD), []
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    for call in range(4):
        layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
        open_after.append(folder in timeline._open)
        torch.distributed.barrier()
        if call >= rank:
            optimizer.step()
    return open_after


def test_ranks_whose_optimizers_step_apart_wait_for_nobody(tmp_path):
    # Rank 1 leaves its rows in the third call, rank 0 finds them there or in the fourth.
    first, second = on_ranks(2, stepped_apart, str(tmp_path), timeout_s=60)
    assert first[:2] == [True, True] and first[3] is False and second == [True, True, False, False]
    with open(tmp_path / "exchanges.csv") as file:
        lines = list(csv.DictReader(file))
    assert {line["sp_rank"] for line in lines} == {"0", "1"} and {line["step"] for line in lines} == {"0"}


def untracked(rank):
    seen, finish = [], in_flight.InFlight.finish

    def watching(self):
        seen.append(self.track)
        return finish(self)

    in_flight.InFlight.finish = watching
    try:
        shape = Shape()
        layer = layers.projections(shape)
        x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
        attend = layers.block(shape, layer, torch.distributed.group.WORLD)
        layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
        return attend.layer.sp_group.timeline is None, all(track is None for track in seen), len(seen)
    finally:
        in_flight.InFlight.finish = finish


def test_exchanges_that_are_made_again_are_counted_with_the_first(tmp_path):
    whole = 6 * 2 * 4 * 8 * 8  # one of q, k, v, o on a rank, in bytes
    for rows in on_ranks(2, rows_of_a_block, 2, 2, str(tmp_path), 1):
        costs = picture.costs([Row(*row) for row in rows])
        assert {what: values[:2] for (*_, what), values in costs.items()} == {
            **{f"{kind}{group}": (2, whole / 2) for kind in "qkv" for group in (0, 1)},
            **{f"{kind}{group}": (1, whole / 4) for kind in ("o", "do", "dq", "dk", "dv") for group in (0, 1)},
        }


def test_without_the_key_nothing_is_marked():
    assert on_ranks(2, untracked) == [(True, True, 12)] * 2


def off_layer(rank, folder):
    """A layer that the policy leaves alone, in a recorded step."""
    lines = Timeline(folder, (0, 0), rank=0, size=1)
    x = torch.ones(2, requires_grad=True)
    run = TimedCall((x,))
    run.timed(lines.layer("layers.0", x.device))
    run.end(run.inputs[0] * 2).sum().backward()
    return [(row.layer, row.kind) for row in stopped(lines)]


def test_a_layer_without_exchanges_is_there_all_the_same(tmp_path):
    assert off_layer(0, str(tmp_path)) == [("layers.0", "forward"), ("layers.0", "backward")]


def test_what_overlaps_is_drawn_in_lanes_of_its_own():
    rows = [Row(0, "l", what, "transfer", *span) for what, span in (("a", (0, 4)), ("b", (1, 3)), ("c", (3, 5)), ("d", (5, 6)))]
    assert [(lane, row.what) for lane, row in picture.lanes(rows)] == [(0, "a"), (1, "b"), (1, "c"), (0, "d")]


def test_nothing_is_computed_between_layers():
    rows = [Row(0, f"layers.{i}", f"layers.{i}", "forward", 10 * i, 10 * i + 5) for i in range(2)]
    rows += [Row(0, f"layers.{i}", "q", "issue", 10 * i + 3, 10 * i + 3) for i in range(2)]
    schedules = {(0, f"layers.{i}"): by_head_groups(("qkv",)) for i in range(2)}
    assert [(row.layer, row.what, row.begin, row.end) for row in computing(rows, 0, schedules)] == [
        ("layers.0", "Wq", 0, 3),
        ("layers.1", "Wq", 10, 13),
    ]
    rows.append(Row(0, "layers.1", "do", "issue", 30, 30))  # of a layer whose input needs no gradient: its backward has no begin
    assert [row.end for row in computing(rows, 0, schedules)] == [3, 13]
    rows = [Row(0, "layers.0", "layers.0", kind, begin, begin + 5) for kind, begin in (("forward", 0), ("backward", 9))]
    assert computing(rows, 0, schedules) == [], "a layer that ran without exchanges"


def test_without_matplotlib_the_pictures_are_missing_and_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with listening() as messages:
        picture.write(str(tmp_path), [recorded(**ON_HOST)])
    assert messages == [f"sp_overlap: timeline in {tmp_path}; pip install matplotlib for timeline.html and timeline.png"]
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.txt", "exchanges.csv", "trace.json"}


# Refusals.


def refused_by_enable(rank, folder):
    with models.sequence_parallel_model(2) as (model, _):
        said = refusal(ds_sp_overlap.enable, model, {"timeline": {"path": folder}})
        return said, models.overlapped_layers(model), list(timeline._open)


def test_a_folder_that_cant_be_made_is_refused_on_every_rank_before_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for said, bound, left in on_ranks(2, refused_by_enable, str(tmp_path / "file" / "timeline")):
        assert said[0] == "ValueError" and bound == [] and left == []
        assert "sp_overlap.timeline.path: can't write into" in said[1] and "give a folder that can be made" in said[1]


# Profilers.


def ranges(rank, **window):
    shape = Shape(config={"head_groups": 2, **window})
    layer = layers.projections(shape)
    x, dy = (layers.my_slice(shape, rank, t) for t in layers.whole_inputs(shape))
    attend = layers.block(shape, layer, torch.distributed.group.WORLD)
    with torch.profiler.profile() as profile:
        layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
    return sorted({event.key for event in profile.key_averages() if event.key.startswith("layer ")})


def test_profilers_see_ranges_with_the_names_of_the_drawing():
    exchanges = [d + what for d in ("", "d") for what in EXCHANGES[2]]
    expected = [f"layer {what} {half}" for what in exchanges for half in ("start", "finish")]
    expected += [f"layer {what}{group}" for what in ("Wq", "Wk", "Wv", "Wo", "attention ") for group in (0, 1)]
    expected += [
        f"layer {what}{group} backward" for what in ("Wq", "Wk", "Wv") for group in (0, 1)
    ]  # of attention autograd has its own
    expected += ["layer Wo0 dgrad", "layer Wo1 dgrad", "layer Wo wgrad"]
    assert on_ranks(2, ranges) == [sorted(expected)] * 2


@pytest.mark.parametrize("window", [1, 2])
def test_and_of_the_drawing_of_a_window(window):
    made = schedule_of(2, window)
    program = (*made.forward, *made.backward)
    expected = {f"layer {made.name(step)} {step.op.value}" if step.on_wire else f"layer {made.label(step)}" for step in program}
    assert {"layer Wq1 backward", "layer Wo wgrad", "layer attention 0 backward", "layer do1 start", "layer q1 finish"} <= expected
    assert on_ranks(2, functools.partial(ranges, window=window)) == [sorted(expected)] * 2


# The command line.


def test_the_command_line_records_without_editing_the_config(tmp_path, monkeypatch):
    from ds_sp_overlap.integrations.deepspeed import initialize as integration
    from ds_sp_overlap.tools import cli

    script = tmp_path / "script.py"
    script.write_text("import ds_sp_overlap.integrations.deepspeed.initialize as d; seen = dict(d.from_command_line)")
    given = {}
    monkeypatch.setattr(integration, "from_command_line", given)
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["run", "--timeline", "here", "--timeline-steps", "3", "4", str(script)]) == 0
    assert given == {"timeline": {"path": "here", "steps": [3, 4]}}
    bound = types.SimpleNamespace(deepspeed_config=None)
    with pytest.raises(ValueError, match="run --timeline: the DeepSpeed config has no sp_overlap section; add one"):
        ds_sp_overlap.integrations.deepspeed.initialize.deepspeed.initialize(args=bound, model=torch.nn.Linear(1, 1), config={})


def test_steps_without_a_folder_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "--timeline-steps", "3", "4", "script.py"])
    assert "--timeline-steps needs --timeline FOLDER" in capsys.readouterr().err


def test_one_rank_alone_has_a_timeline_too():
    config = ds_sp_overlap.SpOverlapConfig.parse({"timeline": {"path": "one", "steps": [0, 1]}})
    first, second = Timeline.of(config, SPGroup(None)), Timeline.of(config, SPGroup(None))
    assert first is second, "layers of a process that name one folder share it"
    first.close()
    assert timeline._open == {}
