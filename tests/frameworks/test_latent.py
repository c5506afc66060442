"""Compares latent attention (DeepSeek's MLA), overlapped by exchanging latents, with transformers' model on the whole sequence.

All is in fp64, also parts that models compute in fp32 (`in_double`). So only roundings differ.
"""

import functools
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import ds_sp_overlap
from ds_sp_overlap.attention.latent import latents_pay
from ds_sp_overlap.integrations.transformers.latent import is_latent, why_not
from ds_sp_overlap.schedule import by_head_groups, order
from tests.harness import flash, whole
from tests.harness.families import tiny_model
from tests.harness.guards import Watched, notices
from tests.harness.models import FP64, worst
from tests.harness.ranks import assert_small, refusal
from tests.harness.sweep import in_double
from tests.harness.transports import Recording

KINDS = (
    "deepseek_v3",
    "deepseek_v2",
    "minicpm3",
    "longcat_flash",
)  # all have different forwards; youtu and glm4_moe_lite have that of the first
ONE, TWO = {"head_groups": 1, "on_unsupported": "error"}, {"head_groups": 2, "on_unsupported": "error"}
CHECKED = TWO | {"check": True}
LATENT, ROTATED, K, V = 24, 8, 16, 8  # sizes of `tiny_config`: latent, rotated part of a head, head dim, head dim of v


def heads(count, **more):
    return dict(num_attention_heads=count, num_key_value_heads=count, **more)


def attention_of(model):
    return next(module for module in model.modules() if hasattr(module, "kv_b_proj"))


def enabled(model):
    """Overlap ``model``; assert that its latents are exchanged; return it."""
    report = ds_sp_overlap.enable(model, TWO, dist.group.WORLD)
    assert all(layer.got.startswith("latent attention, ") for layer in report.layers), report
    return model


# Equality with the whole sequence.


CASES = {
    2: [(kind, heads(4), [16, 16], [ONE, CHECKED]) for kind in KINDS]
    + [
        ("deepseek_v3", heads(4, q_lora_rank=None, rope_interleave=False), [16, 16], [CHECKED]),
        # Five heads: one rank has more than the other.
        ("deepseek_v3", heads(5, qk_nope_head_dim=20, v_head_dim=12, hidden_size=40), [30, 2], [ONE, CHECKED]),
        ("deepseek_v2", heads(6, hidden_size=48), [1, 31], [{"head_groups": 3}]),
    ],
    4: [("deepseek_v3", heads(8), [8, 8, 8, 8], [ONE, CHECKED]), ("minicpm3", heads(6, hidden_size=48), [9, 2, 1, 20], [ONE])],
}
SAYS = r"layers\) overlapped: latent attention, "


@pytest.mark.parametrize("size", CASES)
def test_loss_and_every_gradient_equal_the_whole_sequences(size, rank):
    assert_small(whole.against_whole(rank, tiny_model, CASES[size], SAYS), FP64)


def flashing(kind):
    model = tiny_model(kind, **heads(4))
    model.config._attn_implementation = flash.NAME
    return model


def test_a_flash_attention_gets_the_expanded_heads(rank):
    with flash.flash_attention() as calls:
        assert_small(whole.against_whole(rank, flashing, [("deepseek_v3", {}, [16, 16], [ONE, TWO])], SAYS), FP64)
        assert calls


ROWS = [[[10, 6, 16], [10, 6, 16]], [[2, 29, 1], [13, 19]], [[1, 1, 1, 29], [3, 1, 1, 27]], [[32], [7, 25]]]


def test_packed_documents_are_kept_apart(rank):
    assert_small(whole.documents(rank, tiny_model, "deepseek_v3", [20, 12], ROWS, TWO), FP64)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_runs_a_layer_again_with_the_documents_of_its_forward(reentrant, rank):
    assert_small(whole.checkpointed(rank, tiny_model, "youtu", reentrant, TWO), FP64)


# The exchanged tensors.


class Sizes(Recording):
    def __init__(self):
        super().__init__()
        self.received = {}

    def launch(self, send, recv, send_sizes, recv_sizes, group, name):
        self.received[name.split()[-1]] = sum(recv_sizes)
        return super().launch(send, recv, send_sizes, recv_sizes, group, name)


def test_a_latent_travels_once_and_k_and_v_of_heads_never(rank):
    """Counts the elements that this rank receives in each exchange."""
    model, mover = tiny_model("deepseek_v3"), Sizes()
    made, tokens = by_head_groups(("qkv", "q")), 2 * 32
    given = lambda x, positions: (model.model.rotary_emb(x, positions), None)
    forward, backward = whole.recorded(rank, model, TWO, attention_of(model), mover, given=given)
    assert forward == order(made, made.forward) and backward == order(made, made.backward)
    assert {name: count // tokens for name, count in mover.received.items()} == {
        **{"q0": K, "k0": LATENT, "v0": ROTATED, "q1": K, "o0": V, "o1": V},  # o: twice the heads of half the tokens
        **{"dq0": K, "dk0": LATENT, "dv0": ROTATED, "dq1": K, "do0": V, "do1": V},
    }


@pytest.mark.parametrize("size, pay", [(1, False), (2, True), (64, True), (72, False), (128, False), (129, False)])
def test_latents_pay_while_a_rank_has_more_heads_numbers(size, pay):
    assert latents_pay(size, 128, 512, 64, 128 + 64 + 128) == pay  # DeepSeek-V3


# Models whose latents are not exchanged.


def test_a_layer_whose_latents_are_no_smaller_or_whose_projection_is_replaced_stays_at_its_attention_function(rank):
    with in_double():
        for model, why in (
            (tiny_model("deepseek_v3", kv_lora_rank=48), "latents of 56 numbers a token are no smaller than a rank's k and v, 48"),
            (whole.adapted(tiny_model("deepseek_v3"), "kv_b_proj"), "latents are expanded whole: kv_b_proj (LoRA)"),
        ):
            report = " ".join(str(ds_sp_overlap.enable(model, {"head_groups": 2}, dist.group.WORLD)).split())
            assert why in report and "attention function, G = 2" in report and "latent attention" not in report
            assert whole.against_itself(rank, model) < FP64


def test_the_reason_on_more_ranks_than_heads_is_not_the_size_of_latents():
    layer = tiny_model("deepseek_v3").model.layers[0].self_attn
    assert why_not(layer, 2) == "" and why_not(layer, 4).startswith("latents of 32 numbers a token are no smaller")
    assert why_not(layer, 8) == "no latents travel where ranks share heads, here 8 ranks 4 heads"


def test_a_hook_on_the_projection_on_one_rank_alone_has_the_latents_travel_on_none(rank):
    with in_double():
        expected, model = whole.on_one_rank(tiny_model("deepseek_v3")), enabled(tiny_model("deepseek_v3"))
        for step in range(2):
            if step and rank == 0:
                model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda module, args, y: None)
            assert worst(whole.on_all_ranks(rank, model), expected) < FP64
        ds_sp_overlap.disable(model)


def adapted_afterwards(rank):
    with in_double():
        return whole.against_itself(rank, whole.adapted(enabled(tiny_model("deepseek_v3")), "kv_b_proj", "o_proj"))


def test_an_adapter_that_is_put_on_the_projection_afterwards_learns(rank):
    assert_small(adapted_afterwards(rank), FP64)


@pytest.mark.parametrize("name", ["forward", "expand_kv"])
def test_a_class_that_is_patched_afterwards_is_refused(name, rank):
    with in_double():
        model = enabled(tiny_model("deepseek_v3"))
        kind, (mine, _) = type(attention_of(model)), whole.inputs_of(whole.tokens_of(32), [16, 16], rank)
        own, other = getattr(kind, name), attention_of(tiny_model("deepseek_v3"))  # a layer that must not be affected
        assert is_latent(other)
        with mock.patch.object(kind, name, lambda self, *args, **kwargs: [2 * x for x in own(self, *args, **kwargs)]):
            said = refusal(model, **mine, use_cache=False)
            assert not is_latent(other)
    assert said is not None and "since its class was given another forward or expand_kv" in said[1]


def test_the_report_says_it_evaluation_agrees_and_nothing_is_left(rank):
    with in_double():
        model = tiny_model("youtu")
        without_positions = lambda model, inputs: refusal(model, input_ids=inputs["input_ids"])
        report, off, refused, same = whole.on_and_off(rank, model, TWO, without_positions)
        assert not any("expand_kv" in vars(module) for module in model.modules())
        enabled(model)
    layer = weakref.ref(attention_of(model))
    del model
    gc.collect()
    assert "2 of 2 layers overlapped" in report and "latent attention, G = 2" in report
    assert "its projections are called whole" in report
    assert refused is not None and len(off) == 6 and max(off) < FP64 and same and layer() is None


class Padded(DeepseekV3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        key_states, value_states = self.expand_kv(hidden_states, position_embeddings)
        value_states = torch.nn.functional.pad(value_states, [0, 8])
        return attend(self, hidden_states, key_states, value_states, attention_mask)


class Sometimes(DeepseekV3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        if attention_mask is not None:
            key_states, value_states = self.expand_kv(hidden_states, position_embeddings)
        return attend(self, hidden_states, key_states, value_states, attention_mask)


class Swapped(DeepseekV3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        key_states, value_states = self.expand_kv(hidden_states, position_embeddings)
        return attend(self, hidden_states, value_states, key_states, attention_mask)


class Scaled(DeepseekV3Attention):
    def expand_kv(self, kv_nope, k_rot):
        key_states, value_states = super().expand_kv(kv_nope, k_rot)
        return key_states, value_states * 2


class Renamed(DeepseekV3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        keys, values = self.expand_kv(hidden_states, position_embeddings)
        return attend(self, hidden_states, keys, values, attention_mask)


def attend(*args):
    """Stand for an attention function."""


def known(kind, **own):
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    vars(module).update(own)
    return is_latent(module)


def test_a_layer_is_known_by_its_code():
    assert known(DeepseekV3Attention) and known(Renamed)
    assert not known(DeepseekV3Attention, forward=len) and not known(DeepseekV3Attention, expand_kv=len)
    assert not any(map(known, (Padded, Sometimes, Swapped, Scaled, torch.nn.Linear)))


# Training.


def gathered_in_its_call(rank):
    """Return the error if a projection's weight exists only during its own call, as with ZeRO-3.

    Asserts that each of the two projections is called once.
    """
    calls = []

    def hook(projection):
        weight, data = projection.weight, projection.weight.data

        def fill(module, inputs):
            calls.append(1)
            weight.data = data

        def empty(module, inputs, output):
            weight.data = torch.full_like(data, torch.nan)

        fill.__module__ = empty.__module__ = "deepspeed."
        empty(None, None, None)
        return projection.register_forward_pre_hook(fill), projection.register_forward_hook(empty)

    with in_double():
        model = tiny_model("deepseek_v3")
        expected = whole.on_one_rank(model)
        for layer in enabled(model).model.layers:
            hook(layer.self_attn.kv_b_proj)
        error = worst(whole.on_all_ranks(rank, model), expected)
    assert len(calls) == 2, f"called {len(calls)} times"
    return error


def test_the_projection_is_called_once_and_its_weight_used_in_that_call_alone(rank):
    assert_small(gathered_in_its_call(rank), FP64)


def test_training_under_zero_is_that_of_the_whole_sequence(rank):
    """Includes the gradient of the projection that is cut by heads."""
    assert_small(whole.trained(rank, "youtu", [(0, False), (3, False), (3, True)], TWO), whole.FP32)


# Guards.


of_rows = functools.partial(
    whole.against_whole, make=tiny_model, cases=[("deepseek_v3", heads(5), [16, 16], [ONE, TWO])], says=SAYS
)
test_the_suite_notices_without_the_guard = notices(
    Watched("rows of its heads", "heads = slice(0, last - first)", of_rows),
    Watched("its weight is whole", "return body(*tensors)", gathered_in_its_call),
    Watched(
        "latents are expanded as was read",
        "if False:",
        functools.partial(test_a_class_that_is_patched_afterwards_is_refused, name="expand_kv"),
    ),
    Watched("adapters are heard", "return False", adapted_afterwards),
    Watched("only code that is known", "if False:", lambda: ["Scaled"] * known(Scaled)),
    Watched("no other use", "return True", lambda: [x.__name__ for x in (Padded, Swapped) if known(x)]),
)
