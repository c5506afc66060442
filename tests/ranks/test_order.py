"""Tests that exchanges start and finish in the order of the schedule."""

import functools
import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

import ds_sp_overlap
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.schedule import by_head_groups, by_window, order, without_o
from tests.harness import dropin, layers, models, reference
from tests.harness.guards import Watched, notices
from tests.harness.layers import Shape
from tests.harness.listening import listening
from tests.harness.ranks import on_ranks
from tests.harness.transports import Recording

HIDDEN, HEADS, DIM = 20, 4, 8  # no two matrix products of the layer have the same shape


def drawn(kinds):
    """Return the order of exchanges in (forward, backward) by the schedule; ``kinds`` are the tensors sent for each group."""
    made = by_head_groups(kinds)
    return order(made, made.forward), order(made, made.backward)


class Products(TorchDispatchMode):
    """Logs matrix products that are weight gradients; recognises them by their shape."""

    def __init__(self, log, rows):
        super().__init__()
        self.log, self.rows = log, rows

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            if result.shape[0] == HIDDEN and result.shape[1] in self.rows:
                self.log.append("dWo")
            elif result.shape[1] == HIDDEN and result.shape[0] in self.rows:
                self.log.append("dW")
        return result


def recorded(rank, size, kv_heads, config, compute=False, local=reference.attention, heads=HEADS):
    """Run a new block; return the logs of exchanges in (forward, backward), with weight gradients if ``compute``."""
    torch.manual_seed(1)
    mover = Recording()
    linear = lambda n, m: torch.nn.Linear(n, m, bias=False)  # noqa: E731
    attend = ds_sp_overlap.SelfAttention(
        local_attention=local,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        config=config,
        q_proj=linear(HIDDEN, heads * DIM),
        k_proj=linear(HIDDEN, kv_heads * DIM),
        v_proj=linear(HIDDEN, kv_heads * DIM),
        o_proj=linear(heads * DIM, HIDDEN),
        transport=mover,
        sequence_process_group=torch.distributed.group.WORLD if size > 1 else None,
        heads_alike=True,
    )
    y = attend(torch.randn(1, 7, HIDDEN, requires_grad=True))
    forward, mover.log[:] = list(mover.log), []
    if compute:
        with Products(mover.log, {DIM * n for n in range(1, HEADS + 1)}):
            y.sum().backward()
    else:
        y.sum().backward()
    return forward, list(mover.log)


def on(size, *args):
    """Return the results of `recorded` on every rank of an sp group of ``size``."""
    return [recorded(0, 1, *args)] if size == 1 else on_ranks(size, recorded, size, *args)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kinds", [("qkv",), ("qkv",) * 2, ("qkv",) * 4, ("qkv", "q", "qkv", "q")], ids="-".join)
def test_exchanges_start_and_finish_as_drawn(kinds, size):
    """With four KV heads, two ranks and four groups, every other group needs no new KV head."""
    forward, backward = drawn(kinds)
    assert len(forward) == len(backward) == len(set(forward)) == len(set(backward)) == {1: 8, 2: 12, 4: 20}[len(kinds)]
    heads = size * len(kinds)
    for seen in on(size, heads // (1 + ("q" in kinds)), {"head_groups": len(kinds)}, False, reference.attention, heads):
        assert seen == (forward, backward)


def order_differs(rank, groups):
    """Return a list with the order of exchanges if it differs from the schedule; else an empty list."""
    seen = recorded(rank, 2, HEADS, {"head_groups": groups})
    return [] if seen == drawn(("qkv",) * groups) else [str(seen)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_kv_head_shared_by_two_groups_travels_with_the_first_in_both_directions(size):
    """A rank has one KV head. Group 1 sends only q, and its dk and dv are added to those of group 0 before they are sent."""
    for forward, backward in on(size, size, {"head_groups": 2}):
        assert forward == ">q0 >k0 >v0 >q1 <q0 <k0 <v0 >o0 <q1 >o1 <o0 <o1".split()
        assert backward == ">do1 >do0 <do1 >dq1 <do0 >dv0 >dk0 >dq0 <dq1 <dv0 <dk0 <dq0".split()


@pytest.mark.parametrize("more", [{}, {"head_groups": 4}, {"checkpointing": "keep", "window": 1}], ids=str)
def test_a_layer_that_is_switched_off_waits_for_each_exchange_at_once(more):
    for seen in on(2, HEADS, {"enabled": False, **more}):
        assert seen == (">q <q >k <k >v <v >o <o".split(), ">do <do >dv <dv >dk <dk >dq <dq".split())


def test_a_drop_in_that_is_switched_off_waits_for_each_exchange_at_once_and_is_right(rank):
    mover, case = Recording(), dropin.Case(config={"enabled": False})
    with listening(start_up=True) as said:
        assert dropin.dropin_faults(rank, case, transport=mover) == []
    (line,) = said
    assert line.endswith("KV heads over 2 ranks: off (enabled is false in its config)")
    assert mover.log == ">q <q >k <k >v <v >o <o >do <do >dv <dv >dk <dk >dq <dq".split()


@pytest.mark.parametrize("local", [reference.attention, reference.fused], ids=["run again", "kept"])
@pytest.mark.parametrize("size, groups, kv_heads", [(1, 4, 4), (2, 2, 4), (2, 2, 2), (1, 2, 1), (2, 1, 4)])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("wgrad", [True, False])
def test_a_window_starts_and_finishes_as_its_schedule_says(wgrad, window, size, groups, kv_heads, local):
    """If the backward of local attention reads o, o is sent with do."""
    geometry = Geometry(size, 0, (7,) * size, 1, HEADS, kv_heads, groups)
    made = by_window(geometry.kinds, geometry.last_use, window, wgrad, kv_heads * 4 <= HEADS)
    made = without_o(made) if local is reference.attention else made
    for forward, backward in on(size, kv_heads, {"head_groups": groups, "window": window, "wgrad": wgrad}, False, local):
        assert forward == order(made, made.forward) and backward == order(made, made.backward)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_wgrad_of_the_output_projection_runs_under_the_exchange_of_do(groups, size):
    """Guards the backward of the output projection: it computes wgrad after it has started do of all groups."""
    for _, log in on(size, HEADS, {"head_groups": groups}, True):
        assert wgrad_out_of_place(log, groups) == []


def wgrad_out_of_place(log, groups):
    at = [i for i, what in enumerate(log) if what == "dWo"]
    first, last = (">do", "<do") if groups == 1 else (">do0", "<do1")
    return [] if len(at) == groups and log.index(first) < min(at) and max(at) < log.index(last) else [str(log)]


def wgrad_of_two_groups_out_of_place(rank):
    return wgrad_out_of_place(recorded(rank, 2, HEADS, {"head_groups": 2}, True)[1], 2)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_wgrads_of_the_projections_run_under_the_exchanges_that_are_left(groups, size):
    """Except for the last wgrad of Wq, each wgrad of Wq, Wk and Wv runs while an exchange is in flight."""
    for _, log in on(size, HEADS, {"head_groups": groups}, True):
        wgrads = [i for i, what in enumerate(log) if what == "dW"]
        assert len(wgrads) == 3 * groups
        last = log.index("<dq" if groups == 1 else "<dq0")
        assert [i for i in wgrads if i > last] == [len(log) - 1], log


@pytest.mark.parametrize("groups", [1, 2])
def test_without_the_switch_the_wgrad_runs_with_its_dgrad(groups):
    for _, log in on(2, HEADS, {"head_groups": groups, "wgrad": False}, True):
        at = [i for i, what in enumerate(log) if what == "dWo"]
        assert len(at) == groups and max(at) < log.index(">do" if groups == 1 else ">do0"), log


@pytest.mark.parametrize("groups", [1, 2])
def test_the_order_is_the_same_for_fused_and_whole_projections(groups, rank):
    """In forward, the order is that of the schedule. In backward, a projection that is called whole waits for all its gradients."""
    seen = {}
    for name, change in (("whole", {"projections": False}), ("fused", {})):
        mover = Recording()
        shape = Shape(fused=name == "fused", config={"head_groups": groups, **change})
        _, attend, x, dy = layers.mine(rank, shape, mover)
        y = layers.call_block(shape, attend, rank, x.requires_grad_())
        forward, mover.log[:] = list(mover.log), []
        y.backward(dy)
        seen[name] = forward, list(mover.log)
    assert seen["fused"] == drawn(("qkv",) * groups)
    assert seen["whole"][0] == drawn(("qkv",) * groups)[0]
    assert sorted(seen["whole"][1]) == sorted(drawn(("qkv",) * groups)[1])


def order_of_gradients(rank, family, adapted, windows=(None,)):
    """Return the names of parameters in the order in which they get their gradients, for G = 1, 2, 4 and each window."""
    orders = []
    for groups, window in itertools.product((1, 2, 4), windows):
        with models.sequence_parallel_model(2, family=family, heads=8, kv_heads=8 if family == "gpt_neox" else 4) as (model, group):
            if adapted:
                lora = LoraConfig(target_modules=["q_proj", "o_proj"], r=2, init_lora_weights=False)
                model = get_peft_model(model, lora)
            ds_sp_overlap.enable(model, {"head_groups": groups, "window": window, "on_unsupported": "error"}, group)
            order = []
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))  # noqa: B023
            models.mean_loss(model, models.cut(models.batches(1)[0], rank, 2), group).backward()
            orders.append(order)
    return orders


@pytest.mark.parametrize(
    "family,adapted", [*((f, False) for f in ("llama", "qwen2", "qwen3", "phi3", "gpt_neox")), ("qwen3", True)]
)
def test_parameters_get_their_gradients_in_one_order_for_every_number_of_groups(family, adapted, rank):
    """ZeRO reduces gradients in this order, over replicas that may run different numbers of groups (see `policy`)."""
    one, two, four = order_of_gradients(rank, family, adapted)
    assert len(one) >= 8 and one == two == four


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_and_so_with_a_window(family, rank):
    """The order is the same for every number of groups and every window; it may differ from the order without a window."""
    one, *others = order_of_gradients(rank, family, False, (1, 2))
    assert len(one) >= 8 and len(one) == len(set(one)), "each once"
    assert all(order == one for order in others)


# Guards.

test_the_suite_notices_without_the_guard = notices(
    Watched(
        "starts in the order drawn",
        "program = tuple(sorted(piece.forward, key=lambda step: -step.group))",
        functools.partial(order_differs, groups=2),
    ),
    Watched("in the order drawn", "backward = tuple(step.mirror for step in own)", functools.partial(order_differs, groups=2)),
    Watched(
        "the wgrad comes last",
        'backward = tuple(sorted(section(schedule.backward, name), key=lambda s: (-s.group * (name == "output"), name == "output" and "wgrad dgrad start".index(s.op.value))))',
        wgrad_of_two_groups_out_of_place,
    ),
)
