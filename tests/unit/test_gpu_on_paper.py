"""Tests the planner's simulated GPU: times of a few launches against times computed by hand; a layer's launches; the command."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.simulated import Costs, Rates
from ds_sp_overlap.config import SpOverlapConfig
from ds_sp_overlap.exchange.streams import SideStream
from ds_sp_overlap.integrations.transformers.layers import mixing_layers
from ds_sp_overlap.schedule import Op, by_head_groups
from ds_sp_overlap.tools.cli import main
from ds_sp_overlap.tools.planner.costs import LayerShape, Way
from ds_sp_overlap.tools.planner.gpu.constants import GPUS, gpu
from ds_sp_overlap.tools.planner.gpu.launches import COMPUTE, GATE, TRANSFER, Attention, Gemm, Host, Move, Record, Transfer, Wait
from ds_sp_overlap.tools.planner.gpu.player import Played
from ds_sp_overlap.tools.planner.gpu.recorder import LAYERS, Recorder, record, record_mixer
from tests.harness.families import tiny_config

# A GPU with four SMs. An exchange takes one SM; the host and events take no time. `product`, `attention` and `exchange` make
# launches that take the given time.
FIGURES = {name: 0 for name in GPUS["h100"] if name.endswith("_us")} | dict(
    sms=4, tflops=8e-6, memory_gbs=1, memory_share=1, permute_share=0.5, gemm_share=1, attention_share=1, tile_m=1,
    tile_n=1, attention_tile=1, nccl_ctas=1, wire_gbs=1, cold=1,
)  # fmt: skip


def paper(figures=()):
    return gpu("h100").given("by hand", **{**FIGURES, **dict(figures)})


def product(tiles, us, stream=COMPUTE):
    return Gemm(stream, tiles, 1, us, 1)


def attention(tiles, us, backward=False):
    """Make a launch of attention whose tiles take ``us``, and 2.5 times as long in backward."""
    return Attention(COMPUTE, 1, 1, tiles, us, backward)


def exchange(us, name="q", stream=TRANSFER):
    return Transfer(stream, name, 1000 * us)


def times(played):
    """Return {name of the exchange, or type of the kernel: (start on an SM, end)}."""
    return {getattr(bar.launch, "name", type(bar.launch).__name__): (bar.started, bar.end) for bar in played.bars}


def test_tiles_are_dealt_out_to_the_sms():
    assert Played(paper(), [product(8, 10)]).us == 20
    assert Played(paper(), [product(9, 10)]).us == 30
    assert Played(paper(), [attention(8, 10)]).us == 20
    assert Played(paper(), [attention(8, 10, backward=True)]).us == 50
    assert Played(paper(), [Move(COMPUTE, "copy_", 16000)]).us == 16
    assert Played(paper(), [Move(COMPUTE, "copy_", 16000, permutes=True)]).us == 32


def test_a_product_beside_an_exchange_has_fewer_sms():
    """Twelve tiles of 10 us take 30 us on four SMs, and 40 us on three."""
    assert times(Played(paper(), [product(12, 10)]))["Gemm"] == (0, 30)
    assert times(Played(paper(), [exchange(100), product(12, 10)]))["Gemm"] == (0, 40)


def test_attention_that_holds_its_sms_locks_out_the_exchange_that_waits_behind_another_one():
    """Attention has 40 tiles of 10 us. It gets three SMs at first, and all four from 10 us on, when the first exchange ends.

    At 100 us one tile is left, so only then an SM is free for the second exchange.
    """
    launches = [exchange(10, "q0"), exchange(10, "q1"), attention(40, 10)]
    assert times(Played(paper(), launches)) == {"q0": (0, 10), "q1": (100, 110), "Attention": (0, 110)}


def launched_by_the_package():
    """Launch a product, an exchange of its result by `SideStream`, and attention that should hide the exchange."""
    recorder = Recorder()
    side = SideStream(recorder, torch.device("cpu"))
    recorder.note(product(4, 10))
    mark = side.begin()
    recorder.note(exchange(30))
    side.end(mark)
    recorder.note(attention(40, 10))
    return recorder.launches


def without_gate(launches):
    """Return the launches as they would be if compute did not wait for the launch of exchanges."""
    gates = {each.event for each in launches if isinstance(each, Record) and each.stream == GATE}
    of_compute = [each for each in launches if isinstance(each, Host) or each.stream != GATE]
    return [each for each in of_compute if not isinstance(each, Wait) or each.event not in gates]


def test_without_the_gate_attention_takes_every_sm_before_the_exchange():
    launches = launched_by_the_package()
    # Attention has three SMs from 10 to 40, for 9 of its 40 tiles, and then four SMs, for 31 tiles in eight rounds.
    assert times(Played(paper(), launches)) == {"Gemm": (0, 10), "q": (10, 40), "Attention": (10, 120)}
    ungated = without_gate(launches)
    assert len(ungated) < len(launches)
    assert times(Played(paper(), ungated)) == {"Gemm": (0, 10), "q": (110, 140), "Attention": (10, 110)}


def test_where_the_host_is_slower_the_gpu_waits_for_it():
    played = Played(paper({"gemm_us": 50}), [product(4, 10)] * 5)
    assert (played.us, played.host_us, played.starved_us) == (260, 250, 160)
    played = Played(paper({"gemm_us": 5}), [product(4, 10)] * 5)
    assert (played.us, played.starved_us) == (55, 0)


def test_what_the_host_does_in_between_takes_its_time():
    launches = [Host("call", 3), product(4, 10), Host("view", 2), Host("call", 1), product(4, 10), Host("call", 7)]
    played = Played(paper({"call_us": 10, "view_us": 1, "gemm_us": 4}), launches)
    assert [bar.started for bar in played.bars] == [34, 50] and (played.host_us, played.us) == (120, 120)
    assert Played(paper({"call_us": 10, "view_us": 1, "gemm_us": 4, "cold": 1.5}), launches).host_us == 180


def test_a_stream_goes_on_after_the_event_that_it_waits_for_and_not_before():
    launches = [product(4, 10), Record(COMPUTE, 1), product(3, 10), Wait("other", 1), product(1, 5, stream="other")]
    started = [(bar.launch.stream, bar.started) for bar in Played(paper(), launches).bars]
    assert started == [(COMPUTE, 0), ("other", 10), (COMPUTE, 10)]
    with pytest.raises(RuntimeError, match="never end: .*Wait"):
        Played(paper(), [Wait(COMPUTE, 7), product(1, 1)])


# What a layer launches.

LAYER = LayerShape(width=256, heads=16, kv_heads=8, head_dim=32, seq=2048, sp_size=4)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_layer_launches_the_exchanges_and_products_of_its_schedule(groups):
    launches = record(LAYER, Way(groups)).launches
    rates = Rates(matmul=1.0, attention=1.0, wire=1e3, latency_ms=0.0)
    costs = Costs(LAYER, rates, groups)
    schedule = by_head_groups(costs.geometry.kinds)
    program = (*schedule.forward, *schedule.backward)
    sent = [(schedule.name(step), costs.ms(step)) for step in program if step.op is Op.START]
    assert [(each.name, each.n_bytes) for each in launches if isinstance(each, Transfer)] == sent
    begin = [type(each) for each in launches if isinstance(each, Gemm | Transfer)][:3]
    assert begin == [Gemm, Transfer, Gemm]  # the projection of k runs during the exchange of q
    flops = sum(2 * each.m * each.n * each.k * each.batch for each in launches if isinstance(each, Gemm))
    attended = sum(
        each.seq**2 * each.heads * each.head_dim * (5 if each.backward else 2) for each in launches if isinstance(each, Attention)
    )
    computed = {Op.PROJECT: flops, Op.ATTEND: attended}
    expected = {Op.PROJECT: 0.0, Op.ATTEND: 0.0}
    for step in program:
        if step.op not in (Op.START, Op.FINISH):
            expected[Op.ATTEND if step.op is Op.ATTEND else Op.PROJECT] += costs.ms(step) / 1e3
    assert computed == pytest.approx(expected)


def test_stock_launches_what_deepspeed_s_class_does():
    launches = record(LAYER, Way(0)).launches
    sent = [each for each in launches if isinstance(each, Transfer)]
    assert [each.n_bytes for each in sent] == [
        3 * 512 * 512 * 2 // 4 // (1 + (at % 4 in (1, 2))) for at in (0, 1, 2, 3, 4, 5, 6, 7)
    ]
    assert {each.stream for each in launches if not isinstance(each, Host)} == {COMPUTE}
    # The copies before and after exchanges permute.
    assert sum(isinstance(each, Move) and each.permutes for each in launches) == 8


def test_the_host_is_counted_alike_every_time():
    assert record(LAYER, Way(2)).launches == record.__wrapped__(LAYER, Way(2)).launches


def test_the_host_s_calls_are_counted_without_those_that_a_gpu_has_not():
    def called(x, deep):
        return called(x, deep - 1) if deep else x.t().neg()

    recorder, x = Recorder(), torch.empty(2, 3)
    with recorder:
        sys.setprofile(recorder.count_calls)
        called(called(x, 2), 0)
        sys.setprofile(None)
    neg = Move(COMPUTE, "neg", 48)
    assert recorder.launches == [Host("call", 3), Host("view", 1), neg, Host("call", 1), Host("view", 1), neg]


@pytest.mark.parametrize("permutes", [False, True])
def test_a_copy_permutes_where_its_ends_lie_in_different_orders(permutes):
    x, y = torch.empty(4, 6), torch.empty(4, 9)[:, :6]
    with Recorder() as recorder:
        y.copy_(x.view(6, 4).t() if permutes else x)
    assert recorder.launches[-1] == Move(COMPUTE, "copy_", 192, permutes)


WHOLE = replace(LAYER, intermediate=768)


def products(launches):
    return [each for each in launches if isinstance(each, Gemm)]


@pytest.mark.parametrize("shares", [1, 2])
def test_whole_layers_launch_their_products_and_exchanges(shares):
    launches, tokens = record(replace(WHOLE, shares=shares), Way(1)).launches, LAYER.seq // LAYER.sp_size
    weights = LAYERS * (256 * (2 * 512 + 2 * 256) + 3 * 256 * 768)  # projections of q and o, of k and v, and the MLP
    assert sum(2 * each.m * each.n * each.k * each.batch for each in products(launches)) == 3 * 2 * tokens * weights
    assert sum(isinstance(each, Transfer) for each in launches) == LAYERS * 8


@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_that_share_heads_attend_with_as_many_queries_and_keys_as_others(groups):
    calls = {}
    for shares in (1, 2):
        launches = record(replace(LAYER, shares=shares), Way(groups)).launches
        calls[shares] = [each for each in launches if isinstance(each, Attention) and not each.backward]
    assert all(each.keys == each.seq for each in calls[1])
    assert [(each.seq, each.keys) for each in calls[2][:2]] == [(512, 512), (512, 2048)]  # first and last quarter of queries
    work = {shares: sum(each.seq * (each.keys - each.seq / 2) * each.heads for each in of) for shares, of in calls.items()}
    assert work[1] == work[2]
    whole, pieces = (sum(paper().grid(each).tiles * paper().grid(each).tile_us for each in calls[shares]) for shares in (1, 2))
    assert whole == pytest.approx(pieces)


def moved(launches, name):
    return [each.n_bytes for each in launches if isinstance(each, Move) and each.name == name]


def recorded_mixer(kind):
    config = tiny_config(kind)
    with torch.device("meta"):
        (layers,) = (of for of in mixing_layers(AutoModelForCausalLM.from_config(config)).values() if of[0][1])
    return layers[0][0], record_mixer(replace(LAYER, width=config.hidden_size), *layers[0]).launches


BY_HEADS = ["q", "k", "v", "o", "do", "dv", "dk", "dq"]


@pytest.mark.singles
@pytest.mark.parametrize(
    "kind, exchanges",
    [
        ("recurrent_gemma", ["x", "s", "ds", "dx"]),
        ("jamba", ["x", *BY_HEADS, "dx"]),
        ("qwen3_next", BY_HEADS),
        ("minimax", ["s", "ds"]),
    ],
)
def test_every_way_of_mixing_is_recorded(kind, exchanges):
    assert [each.name for each in recorded_mixer(kind)[1] if isinstance(each, Transfer)] == exchanges


def test_a_mixer_launches_its_exchanges_and_one_kernel_for_its_convolution_and_its_scan():
    """Checks Mamba 2 on rank 0 of 4.

    The rank sends the last three tokens of x, B and C, for the convolution of the next rank. For each head, it sends a state and a
    decay to the three other ranks, in fp32.
    """
    layer, launches = recorded_mixer("nemotron_h")
    before = 2 * (layer.conv_kernel_size - 1) * layer.conv_dim
    states = 4 * 3 * layer.num_heads * (layer.head_dim * layer.ssm_state_size + 1)
    sent = [(each.name, each.n_bytes) for each in launches if isinstance(each, Transfer)]
    assert sent == [("x", before), ("s", states), ("ds", states), ("dx", before)]
    for name in ("convolution", "scan"):
        forward, backward = moved(launches, name)
        assert backward == 2 * forward
    assert moved(launches, "convolution")[0] == 2 * (2 * layer.conv_dim * 512)  # a read and a write; rank 0 has no tokens before
    # First the projection of x, B and C; during the exchange of tokens, that of dt; during the exchange of states, that of z.
    order = [
        getattr(each, "name", each.n if isinstance(each, Gemm) else "") for each in launches if isinstance(each, Gemm | Transfer)
    ]
    assert order[:5] == [layer.conv_dim, "x", layer.num_heads, "s", layer.intermediate_size]


def test_the_number_of_groups_with_which_auto_begins_is_the_best_under_a_persistent_attention():
    """Checks Llama-8B on eight GPUs with a network card each; attention takes the SMs that an exchange frees."""
    layer = LayerShape(width=4096, heads=32, kv_heads=8, head_dim=128, seq=65536, sp_size=8)
    first = SpOverlapConfig().groups_for(layer.heads, layer.sp_size)
    on_paper = gpu("h100").given("test", wire_gbs=45)
    found = {groups: Played(on_paper, record(layer, Way(groups)).launches).us for groups in (1, 2, 4)}
    assert min(found, key=found.__getitem__) == first == 2


PLAN = "plan --hidden 256 --heads 16 --kv-heads 8 --seq 2048 --sp 4"


def test_measured_figures_win_over_the_table(capsys, tmp_path):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"gemm_share": 0.5}))
    assert main(f"{PLAN} --gpu h200 --measured {file}".split()) == 0
    out = capsys.readouterr().out
    assert "on one h200" in out and f"gemm_share 0.5 (measured, {file})" in out
