"""Compares mixers that keep each rank's own tokens, or are cut by channels, with transformers' model on the whole sequence.

In fp64 (`in_double`). Packed documents and padding are compared with each document run alone.
"""

import contextlib
import functools
import operator
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard

import ds_sp_overlap
from ds_sp_overlap.integrations.transformers import mixers
from ds_sp_overlap.integrations.transformers.mixers_by_states import Mamba2
from ds_sp_overlap.schedule import by_head_groups, order
from tests.harness import whole
from tests.harness.cases import full
from tests.harness.families import draw, tiny_model
from tests.harness.guards import Watched, notices
from tests.harness.listening import listening
from tests.harness.models import FP64, worst
from tests.harness.ranks import assert_small, leaves, refusal
from tests.harness.sweep import in_double
from tests.harness.transports import Recording

STRICT = {"on_unsupported": "error"}
SHORT = ("lfm2", "lfm2_moe", "lfm3", "zaya")
STATES = ("nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "zamba2", "mamba2", "minimax", "recurrent_gemma")
CHANNELS = ("mamba", "falcon_mamba", "jamba", "zamba")
# PEFT does not adapt out_proj of Nemotron-H.
ADAPTED = {"mamba": "in_proj,x_proj", "nemotron_h": "q_proj,k_proj,v_proj,o_proj,in_proj", "lfm2": "in_proj,out_proj"}


def model_of(kind, **options):
    """Make a tiny model whose states last for many tokens, and whose time steps are clamped on both sides."""
    model = tiny_model(kind, **options)
    for module in model.modules():
        if hasattr(module, "A_log"):
            module.A_log.data.sub_(3)
            module.time_step_limit = (0.5, 2.0)
        elif hasattr(module, "recurrent_param"):
            module.recurrent_param.data.sub_(3)
        elif kind == "granitemoehybrid" and hasattr(module, "k_proj"):
            module.k_proj.bias.requires_grad_(False)  # its gradient is 0
    return model


def is_mixer(module):
    return hasattr(module, "A_log") or hasattr(module, "rg_lru") or "ShortConv" in type(module).__name__


# Equality with the whole sequence.


SAYS = "tokens before|states"


FEW_HEADS = dict(mamba_num_heads=2, n_groups=1)  # fewer heads than ranks


@pytest.mark.parametrize(
    "kinds, lengths, options, section",
    [
        (SHORT[:1] + STATES[:1], [16, 16], {}, {"check": True}),
        full(SHORT[1:], [16, 16], {}, {}),
        (STATES[1:], [1, 30], {}, {}),
        (("lfm2", "nemotron_h", "minimax"), [9, 2, 21], {}, {"head_groups": 1}),
        (("lfm2", "nemotron_h"), [20, 1, 1, 10], {}, {}),  # two adjacent ranks have fewer tokens than the convolution has taps
        (("nemotron_h",), [9, 2, 1, 20], FEW_HEADS, {}),
        (CHANNELS, [1, 30], {}, {"check": True}),
        (("mamba",), [9, 2, 21], {}, {"head_groups": 3}),
        (("zamba",), [9, 2, 21], {}, {"head_groups": 1}),  # two of its heads share a rank
        full(("jamba", "falcon_mamba"), [9, 2, 1, 20], {}, {"head_groups": 1}),
    ],
)
def test_loss_and_every_gradient_equal_the_whole_sequences(kinds, lengths, options, section, rank):
    cases = [(kind, options, lengths, [section]) for kind in kinds]
    assert_small(whole.against_whole(rank, model_of, cases, SAYS, options == FEW_HEADS), FP64)


ROWS = [
    [[10, 6, 16], [10, 6, 16]],
    [[2, 29, 1], [32]],  # one document spans all ranks
    [[1, 1, 1, 29], [3, 1, 1, 27]],
    [[1, 2, 1, 1, 2, 1, 1, 2, 4, 1, 16], [16, 16]],  # the last short piece is scanned in one call with others
]


@pytest.mark.parametrize("lengths", [[16, 16], [9, 2, 21]])
@pytest.mark.parametrize(
    "kind",
    ["lfm2", "nemotron_h", "recurrent_gemma", "mamba", *map(full, ("falcon_h1", "mamba2", "minimax", "zaya", "jamba", "zamba"))],
)
def test_a_packed_document_begins_with_an_empty_state(kind, lengths, rank):
    assert_small(whole.documents(rank, model_of, kind, lengths, ROWS, {}), FP64)


@pytest.mark.parametrize(
    "kind, lengths",
    [("lfm2", [1, 31]), ("nemotron_h", [16, 16]), ("recurrent_gemma", [16, 16]), ("falcon_mamba", [16, 16]), full("zaya", [1, 31])],
)
def test_padding_leaves_no_trace(kind, lengths, rank):
    assert_small(whole.padding(rank, model_of, kind, lengths, {}), FP64)


# Kernels of Mamba 2 whose final state can't be used.


def stateless(y, state):
    return y


def detached(y, state):
    return y, state.detach()


def forgetful(y, state):
    """Return the results of a kernel whose backward ignores the gradient of the state."""
    return y, state.detach() + 0 * state


@contextlib.contextmanager
def kernel(kind, result):
    """Let a model's kernel return ``result(y, state)`` instead of y and the final state."""
    file = sys.modules[type(next(filter(is_mixer, model_of(kind).modules()))).__module__]
    scan = file.mamba2_chunk_scan

    def other(*args, return_final_states=False, **options):
        y = scan(*args, return_final_states=return_final_states, **options)
        return result(*y) if return_final_states else y

    with mock.patch.object(file, "mamba2_chunk_scan", other):
        yield


@pytest.mark.parametrize(
    "kind, result, lengths, options",
    [
        ("nemotron_h", stateless, [1, 31], {}),
        ("nemotron_h", detached, [9, 2, 21], {}),
        ("nemotron_h", forgetful, [9, 2, 21], {"n_groups": 1}),
        ("falcon_h1", stateless, [9, 2, 21], {}),
        *(full(kind, detached, [9, 2, 21], {}) for kind in ("granitemoehybrid", "bamba", "zamba2", "mamba2")),
    ],
)
def test_without_a_final_state_that_learns_whole_sequences_of_heads_are_scanned(kind, result, lengths, options, rank):
    with kernel(kind, result), listening() as said:
        one = whole.against_whole(rank, model_of, [(kind, options, lengths, [{"check": True}])], SAYS, evaluated=True)
        several = whole.documents(rank, model_of, kind, lengths, ROWS[2:], {})
    assert_small((one, several), FP64)
    assert sum("which the ranks behind need; whole sequences" in message for message in said) == 1


@pytest.mark.parametrize(
    "ranks, options, words",
    [
        (range(4), FEW_HEADS, "so that 2 ranks would share query heads; but its scan without"),
        ([2], {}, "scan without final states by heads"),
    ],
)
@pytest.mark.ranks(4)
def test_too_few_heads_and_ranks_with_other_kernels_are_refused_on_all_ranks(ranks, options, words, rank):
    with kernel("nemotron_h", stateless) if rank in ranks else contextlib.nullcontext():
        said = refusal(whole.against_whole, rank, model_of, [("nemotron_h", options, [8] * 4, [{}])], SAYS)
    assert said is not None and said[0] == "ValueError" and words in said[1], said


# Frozen parameters, adapters and precision.


LEARNING = {
    "mamba": [("conv",), ("A_log", "lm_head"), ("dt_proj",)],
    "nemotron_h": [("conv",), ("A_log", "lm_head"), ("lm_head",)],
    "lfm2": [("conv",)],
}


@pytest.mark.parametrize("kind, words", [(kind, words) for kind, each in LEARNING.items() for words in each])
def test_what_is_frozen_stays_so_and_the_rest_is_right(kind, words, rank):
    assert_small(whole.partly_trained(rank, model_of, kind, words, {}), FP64)


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_learn(kind, rank):
    assert_small(whole.adapters_trained(rank, model_of, kind, ADAPTED[kind].split(","), {}), FP64)


def test_in_bf16_and_under_autocast_rounding_is_that_of_one_rank():
    """The planted fault is at least ten roundings of bf16 (0.4 %)."""
    kinds, taps = ("nemotron_h", "lfm2", "recurrent_gemma", "jamba"), ("conv.weight", "conv1d.weight")
    whole.assert_rounds_as_one_rank(model_of, kinds, {}, taps, 1.2, (False, True))


# The schedule.


def order_of(rank, kind, section, names):
    """Return the order of a layer's exchanges and projections, in forward and in backward.

    names   {name of a projection: function of the layer that returns the projection's number of rows}
    """
    model, mover = model_of(kind), Recording()
    layer = next(module for module in model.modules() if hasattr(module, "A_log"))
    linear, names = torch.nn.functional.linear, {of(layer): name for name, of in names.items()}

    def noting(x, weight, bias=None):
        y = linear(x, weight, bias)
        name = names.get(len(weight), "out")
        mover.log.append(name)
        y.register_hook(lambda _: mover.log.append(f"d{name}"))
        return y

    return whole.recorded(rank, model, section, layer, mover, mock.patch("torch.nn.functional.linear", noting))


def rows_of(*names):
    return {name: operator.attrgetter(of) for name, of in names}


def test_dt_is_projected_under_the_tokens_before_and_z_under_the_states(rank):
    rows = rows_of(("z", "intermediate_size"), ("x", "conv1d.in_channels"), ("dt", "num_heads"))
    forward, backward = order_of(rank, "bamba", {}, rows)
    assert forward == ["x", ">x", "dt", "<x", ">s", "z", "<s", "out"]
    assert backward == ["dout", ">ds", "dz", "<ds", ">dx", "ddt", "<dx", "dx"]


def test_z_is_projected_while_channels_travel(rank):
    made = by_head_groups(("qkv", "q"))  # all channels share B and C, so the second group sends none
    rows = rows_of(("in", "intermediate_size"), ("latent", "x_proj.out_features"))
    forward, backward = order_of(rank, "mamba", {"head_groups": 2}, rows)
    expected = order(made, made.forward)
    at = expected.index("<q0")
    assert forward == ["in", ">x", "<x", "latent", *expected[:at], "in", *expected[at:], "out"]
    expected = order(made, made.backward)
    at = expected.index("<dq1")
    assert backward == ["dout", *expected[:at], "din", *expected[at:], "dlatent", ">dx", "<dx", "din"]


# Checkpoints, evaluation, caches, refusals.


@pytest.mark.parametrize(
    "kind, reentrant",
    [("nemotron_h", True), ("nemotron_h", False), ("mamba", False)]
    + [full("mamba", True), full("lfm2", True), full("lfm2", False), full("recurrent_gemma", False)],
)
def test_a_checkpoint_runs_a_layer_again_with_the_documents_of_its_forward(kind, reentrant, rank):
    assert_small(whole.checkpointed(rank, model_of, kind, reentrant, STRICT), FP64)


@pytest.mark.parametrize("kind", ["lfm2", "nemotron_h", "mamba2", "mamba"])
def test_the_report_names_the_layers_evaluation_is_parallel_and_disable_restores(kind, rank):
    with in_double():
        model, tokens = model_of(kind), whole.tokens_of(32)
        filled = model.eval()(input_ids=tokens, use_cache=True).cache

        def said(model, inputs):
            layer = next(filter(is_mixer, model.modules()))
            return {
                "layer": refusal(layer, torch.zeros(2, 16, model.config.hidden_size)),
                "missing": refusal(model, input_ids=inputs["input_ids"]),
                "empty": refusal(model, **whole.inputs_of(tokens, [32, 0], rank)[0]),
                "cache": refusal(model, **inputs, cache=filled),
                "seq_idx": refusal(model, **inputs, seq_idx=torch.full((2, 16), rank, dtype=torch.int32)),
            }

        report, off, said, same = whole.on_and_off(rank, model.train(), {"check": True}, said)
    assert "tokens before, in_proj under them" in report
    assert ("states, tokens before" in report) == (kind in STATES)
    assert ("selective scan, G by timing in the first 16 steps, tokens before" in report) == (kind in CHANNELS)
    assert len(off) == 6 and max(off) < FP64
    for name, words in (("layer", "needs position_ids"), ("missing", "needs position_ids"), ("empty", "sp rank 1 has no tokens"),
                        ("cache", "generation with a KV cache"), ("seq_idx", "position_ids don't tell")):  # fmt: skip
        assert words in said[name][1], name
    assert same


def test_code_that_is_not_known_is_refused_by_name(rank):
    model, adapted = model_of("nemotron_h"), model_of("mamba")
    layer = next(filter(is_mixer, model.modules()))
    layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
    get_peft_model(adapted, LoraConfig(r=4, target_modules=["dt_proj"]))
    for each, words in (
        (model, "mixer (NemotronHMamba2Mixer) mixes tokens without"),
        (adapted, "MambaMixer: its dt_proj is a Linear, whose"),
    ):
        assert words in refusal(ds_sp_overlap.enable, each, {}, dist.group.WORLD)[1]


# Training.


@pytest.mark.parametrize("kind", ["nemotron_h", full("lfm2"), full("recurrent_gemma"), full("zaya"), full("jamba")])
def test_training_under_zero_is_that_of_the_whole_sequence(kind, rank):
    stages = [(0, False), (1, False), (2, False), (3, True)][: 3 if kind == "zaya" else 4]  # experts differ: stage 3 raises
    assert_small(whole.trained(rank, kind, stages, {}), whole.FP32)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nemotron_h", "lfm2", "recurrent_gemma"])
@pytest.mark.ranks(4)
def test_thirty_steps_of_four_ranks_stay_as_near_to_one_as_weights_one_rounding_off(kind, rank):
    """Mamba 2 amplifies rounding: at ten times the learning rate, both runs would be 0.9 % apart from one rank."""
    steps = 30

    def nudged(model):
        for p in draw(model).parameters():
            p.data.mul_(1 + 2**-23)
        return model

    with mock.patch("tests.harness.whole.RATE", 0.002):
        one, *_ = whole.training(rank, kind, 0, None, steps)
        four, *_ = whole.training(rank, kind, 0, {}, steps, size=4)
        with mock.patch("tests.harness.whole.draw", nudged):
            off, *_ = whole.training(rank, kind, 0, None, steps)
    four, off = (max(abs(a - b) / b for a, b in zip(other, one, strict=True)) for other in (four, off))
    assert one[-1] < 0.9 * one[0] and four < 2 * off < 1e-6


@pytest.mark.parametrize("kind", ["nemotron_h", "lfm2", "mamba"])
def test_under_fsdp2_gradients_are_those_of_the_whole_sequence(kind, rank):
    with in_double():
        model = model_of(kind)
        expected = whole.on_one_rank(model)
        for layer in getattr(model, "backbone", model.base_model).layers:
            fully_shard(layer)
        fully_shard(model)
        ds_sp_overlap.enable(model, {}, dist.group.WORLD)
        whole.share(model, *whole.inputs_of(whole.tokens_of(32), [16, 16], rank)).backward()
        ds_sp_overlap.disable(model)
        del expected["loss"]
        assert worst({name: 2 * p.grad.full_tensor() for name, p in model.named_parameters()}, expected) < FP64


# Guards and planted faults.


def of_states(rank):
    return whole.against_whole(rank, model_of, [("nemotron_h", {}, [16, 16], [{}])], SAYS)


class Twice(Mamba2):
    """Plants a fault: D is added twice."""

    def scan(self, x, dt):
        y, state = super().scan(x, dt)
        return y + self.layer.D[:, None] * self.parts(x)[0], state


def test_a_fault_of_the_scan_is_seen(rank):
    with mock.patch.dict(mixers.KNOWN, {key: Twice for key, mixer in mixers.KNOWN.items() if mixer is Mamba2}):
        assert min(leaves(of_states(rank))) > FP64


of_documents = functools.partial(whole.documents, make=model_of, kind="nemotron_h", lengths=[9, 2, 21], rows=ROWS, section={})
of_checkpoints = functools.partial(whole.checkpointed, make=model_of, kind="mamba", reentrant=False, section=STRICT)

test_the_suite_notices_without_the_guard = notices(
    Watched("the step that the scan takes", "pass", of_states),
    Watched("a document that begins lacks nothing", "if False:", of_documents, ranks=3),
    Watched("a state stays in its document", "if False:", of_documents, ranks=3),
    Watched("mixers find their sequence", "if False:", of_checkpoints, raises=True),  # as recurrent layers do
)
