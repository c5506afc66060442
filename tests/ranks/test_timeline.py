"""Tests the timeline: torch.profiler records the given steps, and the table lists every exchange of these steps."""

import contextlib
import csv
import functools
import gzip
import json
import logging
import sys

import pytest
import torch

import ds_sp_overlap
from ds_sp_overlap.exchange.sp_group import SPGroup
from ds_sp_overlap.profiling import timeline
from ds_sp_overlap.profiling.timeline import Timeline
from ds_sp_overlap.schedule import by_head_groups, by_window, without_o
from ds_sp_overlap.tools import cli
from tests.harness import layers, models
from tests.harness.layers import Shape
from tests.harness.listening import listening
from tests.harness.ranks import assert_error, on_ranks, refusal
from tests.harness.whole import training

# Exchanges of forward; in backward, those of their gradients.
EXCHANGES = "q", "k", "v", "o"


def table(folder):
    with open(folder / "exchanges.csv") as file:
        return list(csv.DictReader(file))


def trained(rank, section, steps, **more):
    """Train a model of two layers; return the timelines that are still open afterwards."""
    models.train_run(rank, 2, section, steps=steps, accumulation=2, **more)
    return list(timeline._open)


@pytest.mark.parametrize("stage", [0, 3])
def test_every_exchange_of_the_steps_is_in_the_table_of_every_rank(stage, tmp_path):
    folder = tmp_path / "new" / "timeline"
    section = {"head_groups": 1, "timeline": {"path": str(folder), "steps": [1, 2]}}
    more = {"zero_optimization": {"stage": 3, "sub_group_size": 100}} if stage == 3 else {}  # the optimizer steps 16 times a step
    assert on_ranks(2, functools.partial(trained, stage=stage, more_config=more), section, 5) == [[], []]
    assert {path.name for path in folder.iterdir()} == {"rank0.json.gz", "rank1.json.gz", "exchanges.csv", "timeline.png"}
    of_rank_0 = table(folder)
    assert cli.main(["timeline", str(folder)]) == 0, "later, and of all ranks"
    lines = table(folder)
    assert of_rank_0 == [line for line in lines if line["rank"] == "0"]
    expected = {
        (rank, step, f"model.layers.{layer}.self_attn", d + what)
        for rank in "01" for step in "12" for layer in "01" for d in ("", "d") for what in EXCHANGES
    }  # fmt: skip
    assert {(line["rank"], line["step"], line["layer"], line["exchange"]) for line in lines} == expected
    assert len(lines) == len(expected) and {line["calls"] for line in lines} == {"2"}, "two microbatches"
    assert all(float(line["transfer_ms"]) > 0 and float(line["exposed_ms"]) > 0 for line in lines)
    assert (folder / "timeline.png").read_bytes()[1:4] == b"PNG"


HYBRIDS = {
    "nemotron_h": {"model.layers.0.mixer": ("x", "s"), "model.layers.2.mixer": EXCHANGES},
    "jamba": {"model.layers.0.mamba": ("x", *EXCHANGES), "model.layers.1.self_attn": EXCHANGES},
}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_exchanges_of_a_hybrids_mixers_are_beside_those_of_attention(kind, tmp_path):
    section = {"head_groups": 1, "timeline": {"path": str(tmp_path), "steps": [1, 1]}}
    on_ranks(2, functools.partial(training, kind=kind, stage=0, section=section, steps=2))
    assert cli.main(["timeline", str(tmp_path)]) == 0
    counted = {(line["rank"], line["layer"], line["exchange"]): line["calls"] for line in table(tmp_path)}
    assert counted == {
        (rank, layer, d + what): "1"
        for rank in "01" for layer, exchanges in HYBRIDS[kind].items() for what in exchanges for d in ("", "d")
    }  # fmt: skip


def test_what_was_recorded_is_written_when_training_ends_before_the_last_step(tmp_path):
    section = {"head_groups": 1, "timeline": {"path": str(tmp_path), "steps": [1, 90]}}
    assert on_ranks(2, trained, section, 3) == [[], []]
    assert {line["step"] for line in table(tmp_path)} == {"1", "2"}


def layer_of_ones_own(rank, folder, profiled=False):
    """Train a layer without a model for two steps, the second of which is recorded; return messages and open timelines."""
    shape = Shape(config={"head_groups": 2, "window": 1, "timeline": {"path": folder, "steps": [1, 1]}})
    layer, attend, x, dy = layers.mine(rank, shape)
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    profile = torch.profiler.profile() if profiled else contextlib.nullcontext()
    with listening() as messages, profile:
        for _ in range(2):
            layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
            optimizer.step()
            optimizer.step()  # without a forward before, this counts as no step
    if profiled:
        profile.export_chrome_trace(f"{folder}/own{rank}.json")
    return messages, list(timeline._open)


def test_an_exchange_that_is_made_again_is_counted_with_the_first(tmp_path):
    assert [left for _, left in on_ranks(2, layer_of_ones_own, str(tmp_path))] == [[], []]
    calls = {line["exchange"]: line["calls"] for line in table(tmp_path)}
    again = {f"{kind}{group}": "2" for kind in "qkv" for group in (0, 1)}
    assert calls == {**again, **{f"{kind}{group}": "1" for kind in ("o", "do", "dq", "dk", "dv") for group in (0, 1)}}


def test_beside_a_profiler_nothing_is_recorded_and_its_trace_is_drawn(tmp_path):
    (messages, left), _ = on_ranks(2, functools.partial(layer_of_ones_own, profiled=True), str(tmp_path))
    assert left == [] and len(messages) == 1 and "a profiler runs in step 1 already" in messages[0]
    assert not (tmp_path / "exchanges.csv").exists()
    assert cli.main(["timeline", str(tmp_path / "own0.json")]) == 0
    assert {line["calls"] for line in table(tmp_path)} == {"4", "2"}, "twice what one step has"


@pytest.mark.ranks(1)
def test_a_second_timeline_of_one_folder_has_the_steps_of_the_first_and_says_so(tmp_path, rank):
    with listening(logging.WARNING) as messages:
        for steps in ([5, 6], [5, 6], [2, 3]):
            layers.mine(rank, Shape(config={"timeline": {"path": str(tmp_path), "steps": steps}}))
    timeline._open[str(tmp_path)].close()
    assert len(messages) == 1 and "steps 5 to 6" in messages[0] and "steps 2 to 3 are not" in messages[0]


def test_one_rank_alone_has_a_timeline_too(tmp_path):
    config = ds_sp_overlap.SpOverlapConfig.parse({"timeline": {"path": str(tmp_path), "steps": [0, 1]}})
    first, second = Timeline.of(config, SPGroup(None)), Timeline.of(config, SPGroup(None))
    assert first is second, "layers of a process that name one folder share it"
    with listening() as messages:
        first.close()
    assert timeline._open == {} and messages == [f"sp_overlap: no exchange of an overlapped layer in {first.trace}"]
    with gzip.open(first.trace, "rt") as file:
        assert "ProfilerStep#0" in {event.get("name") for event in json.load(file)["traceEvents"]}, "from the first step on"


# Refusals.


def test_a_folder_that_cant_be_made_is_refused_on_every_rank_before_training(tmp_path, rank):
    (tmp_path / "file").write_text("in the way")
    with models.sequence_parallel_model(2) as (model, _):
        said = refusal(ds_sp_overlap.enable, model, {"timeline": {"path": str(tmp_path / "file" / "timeline")}})
        assert models.overlapped_layers(model) == [] and not timeline._open
    assert_error(said, "sp_overlap.timeline.path: can't write into")
    assert_error(said, "give a folder that can be made")


# Profilers.


@pytest.mark.parametrize("window", [None, 1, 2])
def test_profilers_see_ranges_with_the_names_of_the_drawing(window, rank):
    shape, kinds = Shape(config={"head_groups": 2, "window": window}), ("qkv", "qkv")
    _, attend, x, dy = layers.mine(rank, shape)
    with torch.profiler.profile() as profile:
        layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy)
    made = (
        by_head_groups(kinds) if window is None else without_o(by_window(kinds, (0, 1), window))
    )  # without_o: attention runs again in backward
    program = (*made.forward, *made.backward)
    expected = {f"layer {made.name(step)} {step.op.value}" if step.on_wire else f"layer {made.label(step)}" for step in program}
    some = {"layer Wq1 backward", "layer Wo wgrad", "layer Wo0 dgrad", "layer attention 0", "layer do1 start", "layer dq0 finish"}
    assert some <= expected
    if window is None:
        expected -= {"layer attention 0 backward", "layer attention 1 backward"}  # autograd gives these ranges its own names
    assert {event.key for event in profile.key_averages() if event.key.startswith("layer ")} == expected


# The command line.


def test_the_command_line_records_without_editing_the_config(tmp_path, monkeypatch):
    from ds_sp_overlap.integrations.deepspeed import initialize as integration

    script = tmp_path / "script.py"
    script.write_text("import ds_sp_overlap.integrations.deepspeed.initialize as d; seen = dict(d.from_command_line)")
    given = {}
    monkeypatch.setattr(integration, "from_command_line", given)
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["run", "--timeline", "here", "--timeline-steps", "3", "4", str(script)]) == 0
    assert given == {"timeline": {"path": "here", "steps": [3, 4]}}
    with pytest.raises(ValueError, match="run --timeline: the DeepSpeed config has no sp_overlap section; add one"):
        integration._asked_for({})
