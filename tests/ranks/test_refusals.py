"""Tests that bad input raises on every rank before any exchange, and that errors during an exchange name the exchange."""

import re
from functools import partial
from unittest import mock

import pytest
import torch
from deepspeed.sequence.layer import DistributedAttention as Upstream
from torch import nn

import ds_sp_overlap
from benchmarks.variants import Silent
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.exchange.sp_group import SPGroup
from tests.harness import dropin, layers, models, reference
from tests.harness.dropin import Case
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.ranks import assert_error, refusal
from tests.harness.transports import Corrupting, Failing, Recording


class Counting(Silent):
    """A transport that moves no data, and counts launches."""

    def __init__(self):
        self.launched = 0

    def launch(self, *arguments):
        self.launched += 1
        return super().launch(*arguments)


TOGETHER = "; give them one batch and sequence, query and key one head dim, key and value one number of heads"
SHAPES = "query [2, 6, 4, 8], key [2, 6, 4, 8], value [2, 6, 4, 8]"
DIM_IDX = "batch_dim_idx must be 0 (batch first) or 1 (sequence first), got "

REFUSED = {  # (changes, words of the error); for ``changes`` see the test below
    "mixed dtypes": (
        {"all": {"k": ("float",)}},
        "query is torch.float64, key torch.float32, value torch.float64; give all three one dtype",
    ),
    "a query in three dimensions": (
        {"all": {"q": ("flatten", 2)}},
        "query, key and value must be 4-D, [s/P, b, h, d] or [b, s/P, h, d], got " + SHAPES.replace("4, 8", "32", 1),
    ),
    "a key of another sequence": (
        {"all": {"k": ("narrow", 1, 0, 5)}},
        "query, key and value don't belong together: query [2, 6, 4, 8], key [2, 5, 4, 8], value [2, 6, 4, 8]" + TOGETHER,
    ),
    "num_kv_heads that the key has not": (
        {"module": {"num_kv_heads": 2}},
        f"num_kv_heads is 2, but key has 4 heads before the exchange ({SHAPES}); pass num_kv_heads=4, or leave it out",
    ),
    "a sequence length that is not this rank's": (
        {"call": {"sequence_lengths": [7, 7]}},
        "sp rank 0: sequence_lengths: 7 for sp rank 0, whose local sequence has 6 tokens; give every rank's own; "
        "sp rank 1: sequence_lengths: 7 for sp rank 1, whose local sequence has 6 tokens; give every rank's own",
    ),
    "a fault of one rank only": (
        {1: {"v": ("float",)}},
        "sp rank 1: query is torch.float64, key torch.float64, value torch.float32; give all three one dtype",
    ),
    "no batch dimension but another": ({"call": {"batch_dim_idx": 2}}, DIM_IDX + "2"),
    # Megatron-DeepSpeed without flash attention passes the mask as batch_dim_idx (FACTS).
    "a mask in its place": ({"call": {"batch_dim_idx": torch.ones(2, 1, 3, 3)}}, DIM_IDX + "a tensor of shape [2, 1, 3, 3]"),
    "a mask of one number": ({"call": {"batch_dim_idx": torch.ones(1)}}, DIM_IDX + "a tensor of shape [1]"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_dropin_refuses_on_every_rank_before_the_first_exchange(changes, message, rank):
    """``changes`` is {a rank or "all": {q, k or v: (method, *its arguments)}, "call": arguments, "module": arguments}."""
    case = Case()
    tensors = dict(zip("qkv", (dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case))))
    for name, change in changes.get(rank, changes.get("all", {})).items():
        tensors[name] = getattr(tensors[name], change[0])(*change[1:])
    mover = Counting()
    options = dict(changes.get("call", {}))
    module = dropin.module(case, mover, **changes.get("module", {}))
    got = refusal(module, *tensors.values(), options.pop("batch_dim_idx", 0), **options)
    assert got == ("ValueError", f"attention: {message}") and mover.launched == 0


@pytest.mark.parametrize(
    "arguments,got",
    [({"scatter_idx": 1, "gather_idx": 2}, "1 and 2"), ({"scatter_idx": 3}, "3 and 0"), ({"gather_idx": 2}, "2 and 2")],
)
def test_other_scatter_and_gather_dimensions_are_refused(arguments, got):
    message = (
        f"attention: scatter_idx must be 2 (heads) and gather_idx 0 or 1 (sequence), got {got}; the exchange back to local "
        "sequences is part of this module"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ds_sp_overlap.DistributedAttention(nn.Identity(), None, **arguments)


@pytest.mark.parametrize(
    "name,values,seen",
    [
        ("batch", (2, 3), ("batch 2", "batch 3")),
        ("lengths", ((6, 6), (6, 5)), ("local sequence 6", "local sequence 5")),
        ("head_dim", (8, 4), ("'torch.float64', [8, 8", "'torch.float64', [4, 4")),
        ("kv_heads", (4, 2), ("4 query and 4 KV heads", "4 query and 2 KV heads")),
        ("config", ({"head_groups": 1}, {"head_groups": 2}), ("1 head groups", "2 head groups")),
    ],
)
def test_ranks_that_disagree_are_told_so_on_every_rank_with_both_shapes(name, values, seen, rank):
    """Guards `SPGroup.agree`, which compares the ranks before they exchange: each rank's shapes are valid, but they don't match."""
    case, mover = Case(**{"lengths": (6, 6), name: values[rank]}), Counting()
    q, k, v = (dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case)[:3])
    said = refusal(dropin.module(case, mover), q, k, v, 0)
    assert_error(said, "attention: the ranks of the sp group are about to exchange different things (sp rank 0: ")
    assert mover.launched == 0
    before, after = said[1].split("sp rank 1: ")
    assert seen[0] in before and seen[1] in after and "; give every rank the same model, config, batch and dtype" in after


def test_a_fault_of_another_kind_on_one_rank_is_raised_on_every_rank_too(rank):
    """On rank 1, q is None, which raises an AttributeError inside of the package; rank 0 must not wait for rank 1."""
    q, k, v = (dropin.my_slice(Case(), rank, t) for t in dropin.whole_inputs(Case())[:3])
    assert_error(refusal(dropin.module(Case(), Counting()), None if rank == 1 else q, k, v, 0), "attention: sp rank 1: ")


def test_a_refused_call_changes_nothing(rank):
    """A valid call of the module afterwards must equal a call of a new module."""
    case = Case()
    inputs = [dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case)[:3]]
    module = dropin.module(case)
    assert refusal(module, inputs[0].float(), *inputs[1:], 0) is not None
    assert torch.equal(module(*inputs, 0), dropin.module(case)(*inputs, 0))


@pytest.mark.parametrize("name, rows, columns, size", [("q_proj", 64, 32, "out_features"), ("o_proj", 32, 64, "in_features")])
def test_projections_of_another_size_are_refused(name, rows, columns, size):
    projections = layers.projections(Shape())
    projections[name] = torch.nn.Linear(columns, rows)
    message = f"layer: {name}.{size} is 64, but 4 query and 4 KV heads of 8 make it 32; mend the layer, or num_heads="
    with pytest.raises(ValueError, match=re.escape(message)):
        layers.block(Shape(), projections, None)


def returns_a_pair(q, k, v):
    return q, None


def drops_a_token(q, k, v):
    return q[:, 1:]


def drops_a_head(q, k, v):
    return q[:, :, :-1]


OTHER_SHAPE = (
    "local attention of query [2, 12, 2, 8] must return that shape (another head dim is fine), or the same with heads and head dim "
    "flattened, got "
)


@pytest.mark.parametrize("attention, flattened, message", [
    (None, True, "hidden_states must be 3-D, [b, s/P, m] or [s/P, b, m], got [12, 32]"),
    (returns_a_pair, False, "local attention must return one tensor, got tuple"),
    (drops_a_token, False, OTHER_SHAPE + "[2, 11, 2, 8]"),
    (drops_a_head, False, OTHER_SHAPE + "[2, 12, 1, 8]"),
])  # fmt: skip
def test_hidden_states_or_what_local_attention_returns_of_another_shape_are_refused(attention, flattened, message, rank):
    _, attend, x, _ = layers.mine(rank, Shape(rope=False, config={"head_groups": 1}), local_attention=attention)
    assert refusal(attend, x.flatten(0, 1) if flattened else x) == ("ValueError", f"layer: {message}")


@pytest.mark.parametrize(
    "given", [("q_proj", "k_proj"), (), ("q_proj", "qkv_proj"), ("q_proj", "k_proj", "v_proj", "qkv_proj")], ids=str
)
def test_projections_are_separate_or_fused_and_complete(given):
    modules = {name: nn.Linear(4, 4) for name in given}
    got = ", ".join(given) or "none"
    with pytest.raises(ValueError, match=f"^layer: give q_proj, k_proj and v_proj, or qkv_proj alone, got {got}$"):
        ds_sp_overlap.SelfAttention(local_attention=None, o_proj=None, num_heads=2, head_dim=2, name="layer", **modules)


def test_a_process_group_of_others_is_refused(rank):
    said = refusal(SPGroup, torch.distributed.new_group([0]))
    if rank == 0:
        assert said is None
    else:
        assert_error(said, "this process is not a member of it")


# The sp group.


@pytest.mark.parametrize("kind, says", [
    ("block", "layer: no sp group in a world of 2 ranks; "), ("drop-in", "attention: no sp group in a world of 2 ranks; "),
    ("DeepSpeed's class", "sp_overlap: no "), ("transformers", "sp_overlap: no "),
])  # fmt: skip
def test_a_missing_group_is_refused_where_the_world_is_larger_than_one(kind, says, rank):
    shape, mover = Shape(rope=False), Counting()
    if kind == "block":
        attend = layers.block(shape, layers.projections(shape), None, mover)
        got = refusal(attend, layers.my_slice(shape, rank, layers.whole_inputs(shape)[0]))
    elif kind == "drop-in":  # made before the world, as in a script that makes its model first
        with mock.patch.object(torch.distributed.distributed_c10d._world, "_default_pg", None):
            module = ds_sp_overlap.DistributedAttention(dropin.local_attention(Case()), None, transport=mover)
        got = refusal(module, *(dropin.my_slice(Case(), rank, t) for t in dropin.whole_inputs(Case())[:3]), 0)
    else:
        model = nn.Sequential(Upstream(nn.Identity(), None)) if kind == "DeepSpeed's class" else models.tiny()
        got = refusal(ds_sp_overlap.enable, model, {})
    assert_error(got, says)
    assert_error(got, "torch.distributed.group.WORLD for all")
    assert mover.launched == 0


def test_a_module_of_another_group_than_the_one_given_is_refused(rank):
    alone = [torch.distributed.new_group([r]) for r in range(2)][rank]
    said = refusal(ds_sp_overlap.enable, nn.Sequential(Upstream(nn.Identity(), alone)), {}, torch.distributed.group.WORLD)
    assert_error(said, "sp rank 1: 0 was made with an sp group of ranks [1], and enable() is to use ranks [0, 1]")


# Rotary tables.


WIDE = "rotary tables are {0} (cos) and {1} (sin) wide for heads of 8"


@pytest.mark.parametrize(
    "kind,given,message",
    [
        ("block", None, "layer: position_embeddings are missing, and without them RoPE would be left out"),
        ("normed", None, "layer: position_embeddings are missing, and without them RoPE would be left out"),
        ("block", (4, 4), "layer: " + WIDE.format(4, 4)),
        ("block", (16, 16), "layer: " + WIDE.format(16, 16)),
        ("partial", (3, 3), "layer: " + WIDE.format(3, 3)),
        ("block", (8, 1), "layer: " + WIDE.format(8, 1)),
        ("drop-in", (3, 3), "attention: " + WIDE.format(3, 3)),
    ],
    ids=str,
)
def test_rotary_tables_that_would_not_rotate_the_heads_are_refused(kind, given, message, rank):
    """They are refused in the first call of the block or of the drop-in."""
    shape, case, mover = Shape(rotary=True), Case(), Counting()
    tables = None if given is None else tuple(torch.ones(6, width, dtype=torch.float64) for width in given)
    if kind == "drop-in":
        inputs = [dropin.my_slice(case, rank, t) for t in dropin.whole_inputs(case)[:3]]
        got = refusal(dropin.module(case, mover), *inputs, 0, [t[:, None, None] for t in tables])
    else:
        _, attend, x, _ = layers.mine(rank, shape, mover)
        attend.inputs.rope = ds_sp_overlap.Rotary(attend.inputs.rope.tables, partial=kind == "partial")
        attend._norms = {"q": nn.Identity() if kind == "normed" else None, "k": None}
        got = refusal(attend, x, position_embeddings=tables)
    assert_error(got, message)
    assert mover.launched == 0


ROPES = {
    "takes q and k": (lambda q, k, cos, sin: (q, k), "layer: rope= failed ("),
    "takes cos": (lambda x, cos: x * cos.unsqueeze(0), "layer: rope= failed ('tuple' object has no attribute 'unsqueeze'); it"),
    "returns two": (
        lambda x, tables: (x, x),
        "layer: rope= returned tuple for heads [2, 6, 2, 8]; it takes (x, position_embeddings)",
    ),
    "returns half": (lambda x, tables: x[..., :4], "layer: rope= returned a tensor [2, 6, 2, 4] for heads [2, 6, 2, 8]; it takes"),
    "one table": (
        ds_sp_overlap.Rotary(lambda tables: tables[0]),
        "layer: rotary tables must be (cos, sin), two tensors, got Tensor",
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_rope_of_another_kind_is_refused_with_what_it_takes(kind, rank):
    """It is refused when the layer is made, or in its first call."""
    shape, mover, (own, words) = Shape(rotary=False), Counting(), ROPES[kind]
    x = layers.my_slice(shape, rank, layers.whole_inputs(shape)[0])

    def made_and_called():
        attend = ds_sp_overlap.SelfAttention(
            local_attention=reference.attention, num_heads=4, head_dim=8, rope=own, name="layer", transport=mover,
            sequence_process_group=torch.distributed.group.WORLD, **layers.projections(shape),
        )  # fmt: skip
        layers.call_block(shape, attend, rank, x)

    assert_error(refusal(made_and_called), words)
    assert mover.launched == 0


def test_rotary_tables_that_are_missing_in_a_later_call_are_refused_too(rank):
    shape, mover = Shape(), Recording()
    _, attend, x, _ = layers.mine(rank, shape, mover)
    layers.call_block(shape, attend, rank, x)
    mover.log.clear()
    assert "position_embeddings are missing" in refusal(attend, x)[1]
    assert "are 4 (cos)" in refusal(attend, x, position_embeddings=(torch.ones(6, 4).double(),) * 2)[1]
    assert mover.log == []


# Faults during an exchange.


def run_block(rank, shape, transport):
    layer, attend, x, dy = layers.mine(rank, shape, transport)
    return refusal(lambda: layers.call_block(shape, attend, rank, x.requires_grad_()).backward(dy))


@pytest.mark.parametrize("what", ["q0", "o1", "do0", "dqkv1"])
def test_a_collective_that_fails_names_the_layer_and_the_exchange(what, rank):
    assert run_block(rank, Shape(), Failing(what)) == (
        "RuntimeError",
        f"layer {what}: the exchange over the sp group (size 2) failed on sp rank {rank}; look for the first error on the other "
        "ranks: connection reset by peer",
    )


@pytest.mark.parametrize("what", ["q0", "qkv1", "o0", "do1", "dqkv1", "dq0"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_check_mode_finds_a_corrupted_exchange_and_names_it_on_every_rank(what, batch_first, rank):
    """Guards `Expected.compare`: one element is changed by 1e-6 on one rank."""
    shape = Shape(batch_first=batch_first, config={"check": True})
    said = run_block(rank, shape, Corrupting(what))
    differs = "sp_overlap.check: the overlapped exchange differs from the plain one (sp rank 1: off by "
    assert_error(said, f"layer {what}: {differs}", "RuntimeError")
    assert said[1].endswith('try sp_overlap.transport "c10d" and kernels "torch", and report it')


def test_without_check_mode_nothing_is_gathered(rank):
    """Negative control: without check mode, the same corruption is not seen."""
    assert run_block(rank, Shape(), Corrupting("dqkv1")) is None


def test_check_mode_finds_ranks_that_launch_in_another_order(rank):
    from ds_sp_overlap.exchange.exchange import Exchange

    geometry = Geometry(2, rank, (3, 3), 1, 4, 4)
    sp_group = SPGroup(torch.distributed.group.WORLD)
    kind = "kv"[rank]
    exchange = Exchange(sp_group, geometry.exchange(kind, 0, (8,)), "layers.7", kind, checked=True)
    assert refusal(exchange.start, torch.zeros(3, 1, 4, 8)) == (
        "RuntimeError",
        "sp_overlap.check: the ranks launch exchanges that don't fit together (sp rank 0: layers.7 k torch.float32 [3, 1, 4, 8] -> "
        "[6, 1, 2, 8]; sp rank 1: layers.7 v torch.float32 [3, 1, 4, 8] -> [6, 1, 2, 8]); call the same layers in the same order on "
        "every rank, with the same config",
    )


def on_a_destroyed_group(rank, kind):
    """Call a layer or model after its process group was destroyed; return the error."""
    group = torch.distributed.new_group([0, 1])
    if kind == "model":
        with models.sequence_parallel_model(2) as (model, _):
            ds_sp_overlap.enable(model, {}, group)
            inputs = models.cut(models.batches(1)[0], rank, 2)
            call = partial(models.mean_loss, model, inputs, None)
            call()
            torch.distributed.destroy_process_group(group)
            return refusal(call)
    shape = Shape()
    attend = layers.block(shape, layers.projections(shape), group)
    call = partial(layers.call_block, shape, attend, rank, layers.my_slice(shape, rank, layers.whole_inputs(shape)[0]))
    call()
    torch.distributed.destroy_process_group(group)
    return refusal(call)


@pytest.mark.parametrize("kind", ["model", "layer"])
def test_a_destroyed_process_group_is_refused_by_name(kind, rank):
    where = {"model": "LlamaForCausalLM", "layer": "layer"}[kind]
    assert_error(on_a_destroyed_group(rank, kind), f"{where}: the process group of the sp ranks was destroyed", "RuntimeError")


@pytest.mark.parametrize("batch, tokens", [(2, 0), (0, 4)])
def test_a_batch_without_a_token_on_any_rank_is_refused_by_name(batch, tokens, rank):
    words = f"no sp rank has a token (batch {batch}, local lengths {[tokens] * 2}); leave such a batch out on all ranks"
    with models.sequence_parallel_model(2) as (model, _):
        ds_sp_overlap.enable(model)
        nothing = torch.zeros(batch, tokens, dtype=torch.long)
        said = refusal(model, input_ids=nothing, position_ids=nothing, use_cache=False)
    assert said == ("ValueError", f"LlamaForCausalLM: {words}")


# Guards.


a_broken_dropin = test_dropin_refuses_on_every_rank_before_the_first_exchange
differing = test_ranks_that_disagree_are_told_so_on_every_rank_with_both_shapes
no_group = test_a_missing_group_is_refused_where_the_world_is_larger_than_one
no_token = test_a_batch_without_a_token_on_any_rank_is_refused_by_name
wrong_tables = test_rotary_tables_that_would_not_rotate_the_heads_are_refused
CHECKED, NO_TABLES, WIDTH = Shape(config={"check": True}), "position_embeddings are missing", WIDE.format(4, 4)
test_the_suite_notices_without_the_guard = notices(
    Watched(
        "a group that is there",
        "except LookupError as error:",
        partial(on_a_destroyed_group, kind="layer"),
        says="layer: the process group",
    ),
    Watched("somebody has a token", "if False:", partial(no_token, batch=2, tokens=0)),
    Watched(
        "heads rotate whole",
        "if width == sin.shape[-1] and width % 2 == 0 and width <= head_dim:",
        partial(wrong_tables, kind="block", given=(4, 4), message=WIDTH),
    ),
    Watched("RoPE needs its tables", "if False:", partial(wrong_tables, kind="block", given=None, message=NO_TABLES)),
    Watched("ranks need a group", "if False:", partial(no_group, kind="block", says="no sp group")),
    Watched("only the same group", "if False:", test_a_module_of_another_group_than_the_one_given_is_refused),
    Watched("ranks exchange the same", "if False:", partial(differing, name="batch", values=(2, 3), seen=("batch 2", "batch 3"))),
    Watched("one rank's fault is everybody's", "if not answer[0]:", partial(a_broken_dropin, *REFUSED["a fault of one rank only"])),
    Watched(
        "check mode compares", "if False:", partial(run_block, shape=CHECKED, transport=Corrupting("dqkv1")), says="layer dqkv1: "
    ),
    Watched(
        "a failed wait has a name",
        "except LookupError as error:",
        partial(run_block, shape=Shape(), transport=Failing("do0")),
        says="layer do0: ",
    ),
)
