"""Compares models with gated delta nets and attention layers, overlapped, with transformers' model on the whole sequence.

All is in fp64, also norms, decays and the delta rule, which models compute in fp32 (`in_double`). So only roundings differ.
"""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

import ds_sp_overlap
import ds_sp_overlap.autotune.policy
from ds_sp_overlap.integrations.inspect.library import names_around
from ds_sp_overlap.integrations.sequence.positions import GlobalSequence
from ds_sp_overlap.schedule import by_head_groups, order
from tests.harness import whole
from tests.harness.cases import full
from tests.harness.families import tiny_config, tiny_model
from tests.harness.guards import Watched, notices
from tests.harness.listening import listening
from tests.harness.models import FP64, forgetting, packed, sequence_parallel, worst
from tests.harness.ranks import assert_refused, assert_small, refusal
from tests.harness.sweep import in_double
from tests.harness.transports import Recording

KINDS = ("qwen3_next", "qwen3_5_text", "olmo_hybrid")
ONE, TWO = {"head_groups": 1}, {"head_groups": 2}


def heads(value, key):
    return dict(linear_num_value_heads=value, linear_num_key_heads=key)


# Equality with the whole sequence.


def wide(kind, **options):
    return tiny_model(kind, **{"num_attention_heads": 8, "num_key_value_heads": 4, **options})


CASES = {
    2: [(kind, heads(4, 2), [16, 16], [ONE, TWO]) for kind in KINDS]
    + [
        ("qwen3_next", heads(6, 3), [16, 16], [ONE, TWO, {"head_groups": 3}]),  # ranks share key heads, unevenly
        ("qwen3_5_text", heads(4, 1), [16, 16], [ONE, TWO]),
        ("olmo_hybrid", dict(**heads(4, 4), linear_allow_neg_eigval=False), [16, 16], [ONE, TWO]),
        ("olmo_hybrid", dict(**heads(4, 4), linear_allow_neg_eigval=True), [16, 16], [ONE, TWO]),
        ("qwen3_next", heads(4, 2), [100, 70], [TWO]),  # several chunks of the delta rule, cut between ranks
        ("qwen3_5_text", dict(**heads(4, 2), linear_key_head_dim=4, linear_value_head_dim=12), [1, 30], [TWO]),
        ("olmo_hybrid", heads(5, 5), [30, 2], [ONE, TWO]),  # a rank has fewer tokens than the convolution has taps
    ],
    4: [
        ("qwen3_next", heads(8, 2), [8, 8, 8, 8], [ONE, TWO]),  # fewer key heads than ranks
        ("qwen3_5_text", heads(6, 3), [9, 2, 1, 20], [ONE]),
        ("olmo_hybrid", heads(8, 8), [8, 8, 8, 8], [TWO]),
    ],
}
OTHERS = {
    2: [
        ("kimi_linear", {}, [16, 16], [ONE, TWO]),
        ("kimi_linear", dict(layer_types=["linear_attention"] * 2), [16, 16], [TWO]),  # a model without attention layers
        ("bailing_hybrid", {}, [1, 30], [TWO]),
    ],
    4: [("kimi_linear", {}, [9, 2, 1, 20], [ONE])],
}


@pytest.mark.parametrize("size", CASES)
def test_loss_and_every_gradient_equal_the_whole_sequences(size, rank):
    assert_small(whole.against_whole(rank, wide, CASES[size], "delta rule"), FP64)
    assert_small(whole.against_whole(rank, tiny_model, OTHERS[size], "delta rule"), FP64)


UNTOLD = (
    "edges",
    "edges on one rank",
    "edges of one rank alone",
    "edges of all ranks",
    "index",
    "index of ranks",
    "more edges",
    "more in the index",
)


def edges(rank, kinds=("qwen3_next",)):
    """Return {(kind, way): refusal} for each kind of model, and each way to give documents besides position_ids."""
    said, tokens = {}, whole.tokens_of(32, rows=1)
    two = packed([[20, 12]])
    given = {
        "edges": (None, dict(cu_seq_lens_q=[0, 10, 16])),
        "edges on one rank": (None, dict(cu_seq_lens_q=[0, 10, 16] if rank else [0, 16])),
        "edges of one rank alone": (None, dict(cu_seqlens=[0, 10, 16]) if rank else {}),
        "edges of all ranks": (None, dict(cu_seq_lens_q=[0, 10, 32])),
        "index": (None, dict(seq_idx=[[0] * 10 + [1] * 6])),
        "index of ranks": (None, dict(seq_idx=[[rank] * 16])),
        "more edges": (two, dict(cu_seq_lens_q=[0, 8, 20, 32])),
        "more in the index": (two, dict(seq_idx=[[0] * 10 + [1] * 6])),
        "known": (None, dict(cu_seq_lens_q=[0, 16], seq_idx=[[0] * 16])),
        "known edges": (two, dict(cu_seq_lens_q=[0, 4, 16], seq_idx=[[0] * 4 + [1] * 12]) if rank else dict(cu_seq_lens_q=[0, 16])),
        "known edges of all ranks": (two, dict(cu_seq_lens_q=[0, 20, 32])),
        "known padding": (packed([[16, 16]]), dict(seq_idx=[[rank] * 16], attention_mask=[[1 - rank] * 16])),
    }
    for kind in kinds:
        model = tiny_model(kind)
        ds_sp_overlap.enable(model, {}, dist.group.WORLD)
        for name, (positions, more) in given.items():
            inputs, _ = whole.inputs_of(tokens, [16, 16], rank, positions)
            more = {key: torch.tensor(x, dtype=torch.int32) for key, x in more.items()}
            said[kind, name] = refusal(model, **inputs, **more, use_cache=False)
        ds_sp_overlap.disable(model)
    return said


def test_documents_that_position_ids_do_not_tell_are_refused_on_every_rank(rank):
    """transformers' mixers follow these arguments. If the package ignored them, documents would mix."""
    kinds = "qwen3_next", "nemotron_h", "lfm2", "mamba", "minimax"
    assert_refused(
        edges(rank, kinds), dict.fromkeys(itertools.product(kinds, UNTOLD), "tell documents that position_ids don't tell")
    )


def misses_edges(rank):
    return [name for (_, name), error in edges(rank).items() if not name.startswith("known") and error is None]


# Documents and padding.

ROWS = [[[10, 6, 16], [10, 6, 16]], [[2, 29, 1], [13, 19]], [[16, 16], [12, 20]], [[1, 1, 1, 29], [3, 1, 1, 27]], [[32], [7, 25]]]


@pytest.mark.parametrize("words", [("conv1d",), ("A_log", "q_norm"), ("lm_head",), ("in_proj_b", "b_proj", "in_proj_ba")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_stays_so_and_the_rest_is_right(kind, words, rank):
    assert_small(whole.partly_trained(rank, tiny_model, kind, words, TWO), FP64)


@pytest.mark.parametrize("kind", KINDS)
def test_lora_on_every_projection_is_right(kind, rank):
    linear = [name for name, m in tiny_model(kind).named_modules() if isinstance(m, torch.nn.Linear) and "linear_attn" in name]
    assert_small(whole.adapters_trained(rank, tiny_model, kind, linear, TWO), FP64)


def test_in_bf16_rounding_is_that_of_one_rank():
    """Errors of two ranks and of one rank differ by 1 to 2 %. The planted fault is more than ten roundings of bf16 (0.4 %)."""
    whole.assert_rounds_as_one_rank(tiny_model, KINDS, TWO, ("conv1d",), 1.1)


def let_run_on(kind):
    """Return the error of transformers' own path, which carries the state from one document to the next."""
    with in_double():
        model, tokens = tiny_model(kind), whole.tokens_of(32)
        together = whole.found(model, [whole.share(model, *whole.inputs_of(tokens, [32], 0, packed(ROWS[0])))])
        return worst(together, whole.found(model, whole.each_alone(model, tokens, ROWS[0])))


@pytest.mark.parametrize("kind", [KINDS[0], full(KINDS[1]), KINDS[2], "kimi_linear"])
def test_a_packed_document_begins_with_an_empty_state(kind, rank):
    assert let_run_on(kind) > 1e-3, "the two are told apart"
    assert_small(whole.documents(rank, tiny_model, kind, [16, 16], ROWS, TWO), FP64)


@pytest.mark.parametrize("kind, lengths", [("qwen3_next", [16, 16]), ("qwen3_5_text", [1, 31])])
def test_padding_leaves_no_trace(kind, lengths, rank):
    """Includes a rank with one token, for which transformers makes no mask."""
    assert_small(whole.padding(rank, tiny_model, kind, lengths, TWO), FP64)


def test_padding_takes_no_document_a_token():
    mask = torch.stack([torch.arange(32) >= 20, torch.arange(32) < 25]).numpy()
    sequence = GlobalSequence((mask.cumsum(1) - 1).clip(0), [16, 16], mask, torch.device("cpu"), "model")
    assert sequence.bounds.tolist() == [[0, 0, 20], [0, 20, 32], [1, 0, 32]]


# The schedule.


def test_z_is_projected_while_the_others_travel_and_its_gradient_while_theirs_do(rank):
    """The order is that of the schedule. All exchanges of o finish before the norm, so that do of all groups starts together."""
    model, mover = tiny_model("qwen3_5_text"), Recording()
    layer = next(module for module in model.modules() if hasattr(module, "A_log"))
    layer.in_proj_z.register_forward_hook(lambda module, args, z: mover.log.append("z"))
    layer.in_proj_z.register_forward_hook(lambda module, args, z: z.register_hook(lambda _: mover.log.append("dz")) and None)
    forward, backward = whole.recorded(rank, model, TWO, layer, mover)
    made = by_head_groups(("qkv", "q"))  # two groups share the key head of a rank
    for name, log, steps, under in (("z", forward, made.forward, "<q0"), ("dz", backward, made.backward, "<dq1")):
        expected = order(made, steps)
        expected.insert(expected.index(under), name)
        assert log == expected


# Checkpoints, evaluation, caches.


@pytest.mark.singles
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_runs_a_layer_again_with_the_documents_of_its_forward(kind, reentrant, rank):
    assert_small(whole.checkpointed(rank, tiny_model, kind, reentrant, TWO), FP64)


def refused_alone(model, inputs):
    """Call a layer alone, and the model without positions; return both refusals."""
    layer = next(module for module in model.modules() if hasattr(module, "A_log"))
    return refusal(layer, torch.zeros(2, 16, model.config.hidden_size)), refusal(model, input_ids=inputs["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_names_the_layers_evaluation_is_parallel_and_disable_restores(kind, rank):
    with in_double():
        model = tiny_model(kind)
        names = names_around(next(module for module in model.modules() if hasattr(module, "A_log")))
        asked = names["create_recurrent_attention_mask"]
        section = {"head_groups": 2, "check": True}
        report, off, (by_itself, without), same = whole.on_and_off(rank, model, section, refused_alone)
        assert asked is names["create_recurrent_attention_mask"]
    assert "2 of 2 layers overlapped" in report and "linear_attn" in report and "delta rule, G = 2" in report
    assert ("the projection of z under them" in report) == (kind != "qwen3_next")
    assert "its projections are called whole" in report
    assert len(off) == 6 and max(off) < FP64
    assert by_itself is not None and "sequence parallelism needs position_ids" in by_itself[1], by_itself
    assert without is not None and "sequence parallelism needs position_ids" in without[1]
    assert same


def test_evaluation_is_left_alone_where_stock_leaves_it_alone(rank):
    with in_double():
        model, tokens = tiny_model("qwen3_next"), whole.tokens_of(32)
        inputs, _ = whole.inputs_of(tokens, [16, 16], rank)
        alone, together = model(**inputs).logits, model(input_ids=tokens).logits.split(16, 1)[rank]
        with forgetting():
            sequence_parallel(model, 2, disable_in_eval=True)
            ds_sp_overlap.enable(model, {"head_groups": 1})
            with torch.no_grad():
                for training, expected in ((False, alone), (True, together)):
                    assert (model.train(training)(**inputs, use_cache=False).logits - expected).abs().max() < FP64, training
            ds_sp_overlap.disable(model)
    assert (alone - together).abs().max() > 1e-3 or rank == 0


DELTA_NET = "linear_attn (Qwen3NextGatedDeltaNet)"
REFUSED = {
    "few": f"{DELTA_NET}: its delta rule needs all queries at once; use sp size 2",
    "many": "head_groups must be between 1 and 2 for 8 heads at sp size 4, got 3",
    "strange": f"{DELTA_NET} mixes tokens without",
}


@pytest.mark.ranks(4)
def test_heads_that_cant_be_split_and_code_that_isnt_known_are_refused_with_name_and_numbers(rank):
    said, many = {}, {"head_groups": 3}
    for name, options, section in (("few", heads(2, 2), {}), ("enough", heads(4, 4), {}), ("many", heads(8, 2), many)):
        config = tiny_config("qwen3_next", num_attention_heads=16, num_key_value_heads=4, **options)
        config._attn_implementation = "sdpa"
        model = type(tiny_model("qwen3_next"))(config)
        said[name] = refusal(ds_sp_overlap.enable, model, section, dist.group.WORLD)
    layer = next(module for module in model.modules() if hasattr(module, "A_log"))
    layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
    said["strange"] = refusal(ds_sp_overlap.enable, model, {}, dist.group.WORLD)
    assert_refused(said, REFUSED)


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3", "bitnet"])
def test_a_rank_without_tokens_is_refused_on_all_ranks_where_its_own_code_would_fail(kind, rank):
    model = tiny_model(kind)
    ds_sp_overlap.enable(model, {"head_groups": 1}, dist.group.WORLD)
    said = refusal(whole.share, model, *whole.inputs_of(whole.tokens_of(16), [16, 0], rank))
    ds_sp_overlap.disable(model)
    assert said is not None and said[0] == "ValueError" and "sp rank 1 has no tokens (local lengths [16, 0])" in said[1]


# Training.


@pytest.mark.parametrize("kind", [*map(full, KINDS[:-1]), KINDS[-1]])
def test_training_under_zero_is_that_of_the_whole_sequence(kind, rank):
    """Includes parameters that are cut by heads, and parameters that are read outside of a module's call, which ZeRO-3 gathers."""
    stages = [(0, False), (1, False), (3, kind != "qwen3_next")]
    assert_small(whole.trained(rank, kind, stages, TWO), whole.FP32)


@pytest.mark.parametrize("kind, kv_heads", [("qwen3_5_text", 2), ("youtu", 1)])
def test_g_is_chosen_by_timing(kind, kv_heads, rank):
    with listening() as said:
        off = whole.trained(rank, kind, [(0, False)], {"head_groups": "auto", "policy": {"warmup_steps": 8}}, steps=14)
    assert any(f"4 query and {kv_heads} KV heads" in line and "kept: G = " in line for line in said), said
    assert max(off.values()) < whole.FP32, off


# Guards.


of_cuts = functools.partial(
    whole.against_whole, make=wide, cases=[("qwen3_next", heads(6, 3), [16, 16], [ONE, TWO])], says="delta rule"
)
of_documents = functools.partial(whole.documents, make=tiny_model, kind="olmo_hybrid", lengths=[16, 16], rows=ROWS, section=TWO)
of_checkpoints = functools.partial(whole.checkpointed, make=tiny_model, kind="qwen3_5_text", reentrant=False, section=TWO)

test_the_suite_notices_without_the_guard = notices(
    Watched("documents are known", "if False:", misses_edges),
    Watched("rows of their own", "pass", of_cuts),
    Watched("an empty state", "return mix(q, k, v)", of_documents),
    # A checkpoint runs the layer again outside of the model's forward.
    Watched("recurrent layers are told", "pass", of_checkpoints, raises=True),
)
