"""Tests every type of causal language model in transformers, also with odd configs: it must be right with the overlap, or refused.

Every run tests eleven types, and ``pytest --all`` a quarter of all types. ``pytest --all -m sweep tests/frameworks/test_sweep.py``
tests all types, and writes docs/sweep.md and docs/sweep.csv.
"""

import pickle

import pytest

from tests.harness.cases import full
from tests.harness.families import TYPES
from tests.harness.odd import judge_misread, judge_odd, odd_verdict
from tests.harness.ranks import RankError, on_ranks
from tests.harness.sweep import FAILURES, Verdict, judge, overlaps, verdict
from tests.harness.sweep_page import rows_of, write

EVERY_RUN = {
    "falcon": "refused",
    "doge": "refused",
    "gpt_oss": "refused",  # since it has no sdpa; test_transformers.py tests it with flash attention
    "jamba": "whole and selective scan",
    "qwen3_next": "attention function and delta rule",
    "bitnet": "attention function",
    "deepseek_v3": "latent attention",
    "llama4_text": "whole and attention function",
    "qwen2_moe": "whole",
    "phimoe": "whole",
    "gemma3_text": "whole",
    "cohere2": "whole",
    "hunyuan_v1_dense": "whole",
    "smollm3": "whole",
    "gpt_neox": "whole",
    "olmo2": "whole",
    "phi3": "whole",
}
# {type: [(field, value, parts that are overlapped)]}: with these values, lines of a forward take effect that had none by default.
ODD = {
    "olmo": [("clip_qkv", 8.0, "attention function")],
    "dbrx": [("attn_config.clip_qkv", 4.0, "attention function")],
    "llama4_text": [("floor_scale", 2, "whole and attention function"), ("attn_temperature_tuning", False, "whole")],
    "granite": [("attention_multiplier", 0.5, "whole"), ("residual_multiplier", 0.5, "whole")],
    "gemma3_text": [("query_pre_attn_scalar", 128, "whole"), ("attn_logit_softcapping", 2.0, "whole")],
}


def judged(kind, small):
    try:
        return verdict(on_ranks(2, judge, kind, small, timeout_s=300))
    except RankError as error:
        return Verdict("hangs" if "Timeout" in error.kinds else "crashes", str(error).strip().splitlines()[-1])


@pytest.mark.parametrize("kind", [*list(EVERY_RUN)[:-6], *map(full, list(EVERY_RUN)[-6:])])
def test_a_type_is_right_or_refused(kind):
    found = judged(kind, small=True)
    assert found.word == EVERY_RUN[kind], found


@pytest.mark.parametrize("kind", [*list(ODD)[:3], *map(full, list(ODD)[3:])])
def test_an_odd_config_is_right(kind):
    trials = on_ranks(2, judge_odd, kind, [(name, value) for name, value, _ in ODD[kind]])
    found = odd_verdict(trials)
    assert found.right == 1 + len(ODD[kind]), found
    for name, value, word in ODD[kind]:
        assert overlaps(trials[0][f"{name} = {value}"]) == word


def test_a_clamp_that_is_let_through_is_seen():
    wrong = odd_verdict(on_ranks(2, judge_misread, "olmo", [("clip_qkv", 8.0)])).wrong
    assert "please report" in wrong["clip_qkv = 8.0"] and "off by" not in wrong["clip_qkv = 8.0"], wrong
    assert "off by" in wrong["clip_qkv = 8.0, unseen"], wrong


@pytest.fixture
def record(tmp_path_factory, worker_id):
    """Return a function that stores a verdict; the worker that stores the last verdict of all types writes the page."""
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent  # the folder that all workers of pytest-xdist share

    def keep(found, of, kind):
        unfinished = folder / f"{kind}.{of}.unfinished"
        unfinished.write_bytes(pickle.dumps(found))
        unfinished.rename(folder / f"{kind}.{of}")
        files = {of: sorted(folder.glob(f"*.{of}")) for of in ("verdict", "odd")}
        if all(len(each) == len(TYPES) for each in files.values()):
            verdicts, odd = ({file.stem: pickle.loads(file.read_bytes()) for file in each} for each in files.values())
            write(rows_of(verdicts, odd))

    return keep


every_type = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.sweep(beyond=at % 4 > 0)) for at, kind in enumerate(TYPES)]
)


@every_type
def test_every_type_is_right_or_refused(kind, record):
    found = judged(kind, small=False)
    record(found, "verdict", kind)
    assert found.word not in FAILURES, found


@every_type
def test_every_type_is_right_or_refused_with_odd_configs(kind, record):
    found = odd_verdict(on_ranks(2, judge_odd, kind, timeout_s=600))
    record(found, "odd", kind)
    assert not found.wrong, found
