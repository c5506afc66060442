"""`plan`: programs played by hand, what must hold for any layer, and what the command refuses."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sp_overlap.schedule import by_head_groups
from ds_sp_overlap.tools.cli import main
from ds_sp_overlap.tools.planner.costs import Costs, LayerShape, Rates
from ds_sp_overlap.tools.planner.plan import BASELINE, UPSTREAM, limit_of, plan
from tests.harness.pages import ROOT, read
from tests.harness.schedules import step_of

# Every projection of a group of one head takes 1 ms, attention of a head 4 ms, the exchange of a head 2 ms.
UNIT = LayerShape(width=4, heads=4, kv_heads=4, head_dim=1, seq=4, sp_size=2, element_bytes=4)
UNIT_RATES = Rates(matmul=2 * 2 * 4 * 2 / 1e-3, attention=2 * 4**2 / 4e-3, wire=2 * 4 / 2e-3, latency_ms=0.0)


def played(schedule, groups=1):
    return Costs(UNIT, UNIT_RATES, groups).simulate(schedule)


def test_costs_are_those_counted_by_hand():
    costs = Costs(UNIT, UNIT_RATES, 2)
    assert costs.ms(step_of("project q 0")) == costs.ms(step_of("merge o 1")) == costs.ms(step_of("wgrad o 1")) == 1.0
    assert costs.ms(step_of("attend o 0")) == 4.0 and costs.ms(step_of("attend do 0")) == 10.0
    # One head of two tokens goes to the other rank, one stays: 8 of the 16 bytes that are held at each end travel.
    assert costs.ms(step_of("start dv 1")) == costs.ms(step_of("start odo 1")) / 2 == 2.0


def test_without_overlap_everything_adds_up():
    result = played(BASELINE)
    # Two heads a rank: 4 projections of 2 ms, three times; attention 8 ms, and 2.5 times that; 8 exchanges of 4 ms.
    assert (result.step_ms, result.compute_ms, result.wire_ms) == (24 + 28 + 32, 52, 32)
    assert result.exposed == pytest.approx(32 / 84)
    assert result.exposed_ms == {what: 4 for what in ("q", "k", "v", "o", "do", "dv", "dk", "dq")}


def test_five_of_eight_is_played_as_by_hand():
    # Forward: Wq 2, q 2-6, k 6-10 under Wk, Wv (to 6), waits to 10, v to 14, attention to 22, o to 26, Wo to 28. Backward: Wo dgrad to 30,
    # do to 34 under the wgrad, attention to 54, dv to 58; dk to 62 under Wv', Wk' to 66, dq to 66, Wq' to 70.
    assert played(UPSTREAM).step_ms == 70


def test_two_groups_are_played_as_by_hand():
    # Forward: Wq0 1, the wire carries q0 k0 v0 qkv1 from 1 to 13; attention 0 from 7 to 11, o0 13-15; attention 1 from 13 to 17, o1 to 19;
    # Wo0 to 18, Wo1 from 19 to 20. Backward: Wo1 dgrad 21, do1 to 23, Wo0 dgrad 22, do0 to 25, wgrads to 24, attention 1 to 34, attention 0 to
    # 44; dqkv1 34-40, dv0 dk0 dq0 44-50; W1' from 44 to 50, then Wv0' Wk0' Wq0' to 56.
    result = played(by_head_groups(("qkv", "qkv")), 2)
    assert (result.step_ms, result.compute_ms, result.wire_ms) == (56, 52, 32)
    # The compute row waits for v0 from 6 to 7, for qkv1 from 11 to 13, and for o1 from 18 to 19.
    assert {what: ms for what, ms in result.exposed_ms.items() if ms} == {"v0": 1, "qkv1": 2, "o1": 1}


def test_limits_are_those_counted_by_hand():
    """One head group: every projection takes 2 ms, attention 8 and 20, an exchange 4."""
    # Forward: Wq 2, q k v to 14, attention to 22, o to 26, Wo to 28. Backward: Wo dgrad 2, do to 6, attention to 26, the first of dq, dk, dv
    # to 30, and then all their dgrads and wgrads to 42.
    assert limit_of(Costs(UNIT, UNIT_RATES, 1)) == 28 + 42


def test_a_kv_head_that_groups_share_travels_once():
    layer = LayerShape(width=8, heads=8, kv_heads=2, head_dim=1, seq=4, sp_size=2)
    assert layer.geometry(4).kinds == ("qkv", "q", "q", "q")


@st.composite
def layers(draw):
    sp_size = draw(st.sampled_from([2, 3, 4, 8]))
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(-(-sp_size // kv_heads), 6 + sp_size))
    intermediate = draw(st.sampled_from([0, 300]))
    return LayerShape(
        64, heads, kv_heads, draw(st.integers(1, 8)), sp_size * draw(st.integers(1, 64)), sp_size, intermediate=intermediate
    )


exponents = st.floats(6, 12)


@settings(max_examples=20, deadline=None)
@given(layer=layers(), matmul=exponents, attention=exponents, wire=exponents, latency=st.sampled_from([0.0, 0.1]))
def test_for_any_layer(layer, matmul, attention, wire, latency):
    rates = Rates(10**matmul, 10**attention, 10**wire, latency)
    found = plan(layer, rates)
    base = found.results["none"]
    close = 1 + 1e-9
    for name, result in found.results.items():
        # Nothing is faster than either row, and nothing slower than one after the other.
        assert max(result.compute_ms, result.wire_ms) <= close * result.step_ms
        assert result.step_ms <= close * (result.compute_ms + result.wire_ms)
        assert found.limits[name] <= close * result.step_ms
        # More groups compute more only where ranks share KV heads, which may then be projected with several groups; a window always.
        more = result.compute_ms > close * base.compute_ms
        assert not more or layer.kv_heads % layer.sp_size or name.startswith("window")
        assert base.compute_ms <= close * result.compute_ms
    assert (
        found.results["eight of eight, G = 1"].step_ms <= close * found.results["five of eight"].step_ms <= close**2 * base.step_ms
    )
    # A faster wire never makes a step longer.
    faster = plan(layer, Rates(10**matmul, 10**attention, 2 * 10**wire, latency))
    for name, result in faster.results.items():
        assert result.step_ms <= close * found.results[name].step_ms
    assert found.best in (1, 2, 4) and found.best <= found.max_groups
    smallest = found.results[found.smallest]
    for result in found.results.values():
        assert smallest.step_ms <= 1.01 * close * result.step_ms
        assert smallest.peak <= result.peak or result.step_ms > smallest.step_ms / 1.01


SEVEN_B = "plan --hidden 4096 --heads 32 --intermediate 11008 --seq 16384 --sp 8 --tflops 600 --attention-tflops 500"


def test_the_command_prints_the_table_and_advice(capsys):
    assert main(f"{SEVEN_B} --bandwidth 45".split()) == 0
    out = capsys.readouterr().out
    assert "times are computed from the rates, not measured" in out
    assert re.search(r"none +\d+\.\d+ +\d+\.\d+ +\d+\.\d+ +3[01]\.\d%", out)  # DESIGN's sources have 30.9 % at rates of their own
    assert out.startswith("worth it: G = 4 saves ")


def test_the_table_of_docs_scaling_is_printed_by_its_commands(capsys):
    page = ROOT / "docs/scaling.md"
    commands = re.findall(r"python -m ds_sp_overlap (plan .*)", page.read_text())
    of_model = {"Llama-8B": commands[0], "Llama-70B": commands[1]}
    (table,) = (rows for _, rows in read(page).tables if rows[0][0].content == "model")
    assert len(table) == 5
    for row in table[1:]:
        model, size, shares, exposed, overlapped, saved = (cell.content for cell in row)
        assert main(re.sub(r"--sp \d+", f"--sp {size}", of_model[model]).split()) == 0
        out = capsys.readouterr().out
        assert f"r = {shares} ranks" in out or shares == "1" and "ranks share" not in out
        none, ours = (re.search(rf"{name} .* ([\d.]+)% +([\d.]+)%", out) for name in ("  none", "eight of eight, G = 1"))
        assert [f"{percent} %" for percent in (none[1], ours[1], ours[2])] == [exposed, overlapped, saved]


@pytest.mark.parametrize(
    "more,words",
    [
        ("--bandwidth 100000", "don't bother: it would save 1."),
        ("--bandwidth 45 --heads 8 --head-dim 512", "a rank has one query head"),
        ("--bandwidth 1e-7", "of what its exchanges take"),
    ],
)
def test_the_command_says_when_not_to_bother_and_why(capsys, more, words):
    assert main(f"{SEVEN_B} {more}".split()) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("within", [False, True], ids=["text model", "with images"])
def test_a_transformers_config_gives_the_shape(within, capsys, tmp_path):
    from transformers import Gemma3Config, LlamaConfig

    sizes = dict(hidden_size=96, num_attention_heads=12, num_key_value_heads=4, head_dim=16, intermediate_size=128)
    config = Gemma3Config(text_config=sizes) if within else LlamaConfig(**sizes)
    config.save_pretrained(tmp_path)
    assert main(f"plan --model {tmp_path} --seq 64 --sp 2 --bandwidth 1 --tflops 1 --heads 8".split()) == 0
    assert "layer with its MLP" in (out := capsys.readouterr().out)
    assert "8 query and 4 KV heads of 16, model dim 96, 64 tokens" in out


@pytest.mark.parametrize(
    "words,message",
    [
        ("--bandwidth 45 --seq 64g", r"--seq: must be a whole number of at least 1, or one such as 64k \(65536\) or 1m, got '64g'"),
        ("--bandwidth 45 --seq k", r"--seq: must be a whole number of at least 1, or one such as 64k \(65536\) or 1m, got 'k'"),
        ("--bandw 45", r"unrecognized arguments: --bandw 45"),
        ("--bandwidth 45 --batc=2", r"unrecognized arguments: --batc=2"),
        ("--bandwidth 45 --sp 0", r"--sp: must be a whole number of at least 1, got '0'"),
        ("--bandwidth 45 --sp 1", r"--sp 1 exchanges nothing; give the ranks of the sp group, at least 2"),
        ("--bandwidth -1", r"--bandwidth: must be a finite number above 0, got '-1'"),
        ("--bandwidth x", r"--bandwidth: must be a finite number above 0, got 'x'"),
        ("--bandwidth nan", r"--bandwidth: must be a finite number above 0, got 'nan'"),
        ("", r"--bandwidth missing; give them, or --measure"),
        ("--bandwidth 45 --sp 5", r"16384 tokens do not divide by sp size 5; take a multiple of it"),
        ("--bandwidth 45 --sp 64 --shares 1", r"32 heads leave a rank of sp size 64 with no head .* use sp size 32 or less"),
        (
            "--bandwidth 45 --sp 64 --shares 3",
            r"sp_overlap.shares must divide sp size 64 and leave each of 32 heads .* take 2, 4, 8, 16, 32, 64",
        ),
        ("--bandwidth 45 --kv-heads 5", r"KV heads must divide the query heads, got 32 query and 5 KV heads"),
        ("--bandwidth 45 --heads 33", r"--hidden 4096 does not divide by --heads 33; give --head-dim"),
        ("--bandwidth 45 --model /nowhere/at/all", r"--model /nowhere/at/all: no transformers config there"),
    ],
)
def test_the_command_refuses(capsys, words, message):
    with pytest.raises(SystemExit) as refused:
        main(f"{SEVEN_B} {words}".split())
    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_the_command_refuses_a_layer_without_a_shape(capsys):
    with pytest.raises(SystemExit):
        main("plan --seq 64 --sp 2 --bandwidth 1 --tflops 1".split())
    assert "--hidden and --heads missing; give them, or --model" in capsys.readouterr().err


MEASURED = "plan --hidden 32 --heads 4 --seq 64 --sp 2 --dtype-bytes 4 --measure"


def test_it_says_which_rates_were_given_and_which_assumed(capsys):
    assert main("plan --hidden 32 --heads 4 --seq 64 --sp 2 --bandwidth 3 --tflops 2".split()) == 0
    assert (
        "rates: 2 TFLOP/s in matrix products (given), 2 in attention (that of matrix products), 3 GB/s on the wire (given), "
        "20 us an exchange (assumed)"
    ) in capsys.readouterr().out


@pytest.mark.parametrize("text,tokens", [("64k", 65536), ("64K", 65536), ("1m", 2**20), ("65536", 65536)])
def test_tokens_are_counted_in_k_and_m(capsys, text, tokens):
    assert main(f"plan --hidden 32 --heads 4 --seq {text} --sp 2 --bandwidth 3 --tflops 2".split()) == 0
    assert f" {tokens} tokens, batch 1" in capsys.readouterr().out


def no_process(*arguments, **options):
    raise torch.multiprocessing.ProcessRaisedException("-- Process 1 failed:\nTraceback\nRuntimeError: no route to host", 1, 2)


def test_a_measurement_that_fails_is_an_error_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "start_processes", no_process)
    with pytest.raises(SystemExit) as refused:
        main(MEASURED.split())
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith(
        "ds-sp-overlap plan: --measure failed: RuntimeError: no route to host; give --bandwidth and --tflops instead"
    )


@pytest.mark.parametrize("alone", ["RANK", "WORLD_SIZE"])
def test_a_variable_of_a_launcher_that_stands_alone_is_no_launcher(capsys, monkeypatch, alone):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(alone, "3")
    assert main("plan --hidden 32 --heads 4 --seq 64 --sp 2 --measure".split()) == 0
    assert "measured" in capsys.readouterr().out


def test_measuring_refuses_another_number_of_ranks_than_the_launcher_started(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        main("plan --hidden 32 --heads 4 --seq 64 --sp 2 --measure".split())
    assert "--sp is 2, but the launcher started 4 ranks; make them the same" in capsys.readouterr().err
