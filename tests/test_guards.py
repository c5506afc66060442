"""With any one guard taken out of the code, the check that watches it fails.

The checks are those of the tests that name the guard, and find nothing while it is there.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import layers
import pytest
import test_calls
import test_gradients
import test_hazards
import test_heads
import test_layout
import test_masks
import test_norms
import test_ops
import test_order
import test_policy
import test_policy_attack
import test_refusals
import test_usage
import torch
from guards import Guard, removed
from layers import Shape
from ranks import on_ranks

from ds_sp_overlap.attention.linear import can_split
from ds_sp_overlap.relayout import ops


def key_is_value(rank):
    return test_usage.faults_of(rank, test_usage.layers.backward, test_usage.SHAPES[:1], test_usage.key_is_value)


def hook_raises(rank):
    return test_usage.fails_between_start_and_finish(rank, Shape(), "output hook")


def forwards_inside(rank):
    return test_usage.forwards_inside(rank, Shape())


def hook_sees_all(rank):
    found, seen = test_usage.hooked(rank, Shape(), "q")
    return found + [f"hook saw {seen}"] * (seen != [[2, 12, 32], [2, 6, 32]])


def order_of_two_groups(rank):
    return test_order.order_differs(rank, 2)


def wgrad_in_place(rank):
    return test_order.wgrad_out_of_place(rank, 2)


def fault_of_one_rank(rank):
    case, changes, message = test_refusals.REFUSED["a fault of one rank only"]
    refused = test_refusals.give_dropin(rank, case, changes)
    return [] if refused == ("ValueError", message) else [str(refused)]


def failure_names_the_exchange(rank):
    refused = test_refusals.run_block(rank, Shape(), test_refusals.Failing("do0"))
    return [] if refused and refused[1].startswith("layer do0: ") else [str(refused)]


def two_tokens_of_one_rank(rank):
    return test_usage.of_another_memory_order(rank, (2, 0))


def tables_are_watched(rank):
    return [] if test_usage.tables_changed_before_backward(rank) else ["nobody noticed that they changed"]


def forward_of_a_class():
    return ["taken apart"] * can_split(test_usage.Scaled(2, 2))


def replaced_forward():
    linear = torch.nn.Linear(2, 2)
    linear.forward = lambda x: 2 * torch.nn.Linear.forward(linear, x)
    return ["taken apart"] * can_split(linear)


def unequal_parts():
    """Parts as many times the first one as there are, but not all alike: local sequences of 2, 1 and 3 tokens."""
    x, wire, back = torch.arange(12.0).view(2, 6), torch.empty(12), torch.empty(2, 6)
    parts = [0, 2, 3], [2, 3, 6]
    ops.pack(x, 1, *parts, wire)
    ops.unpack(wire, 1, *parts, back)
    expected = torch.cat([x[:, start:stop].flatten() for start, stop in zip(*parts)])
    return layers.faults(0, pack=(wire, expected), unpack=(back, x))


class Watched(NamedTuple):
    """
    guard    what is taken out
    check    finds nothing while it is there
    ranks    that the check runs on; 0 for one that needs none
    raises   whether all there is to see is an exception; any other guard is seen by a wrong result, or it isn't seen
    """

    guard: Guard
    check: Callable[..., list[str]]
    ranks: int = 2
    raises: bool = False


WATCHED = {
    # Buffers and waiting.
    "a half waits before it reads": Watched(
        Guard("exchange.exchange:_InFlight._receive", "self.handle.wait()", "pass"), test_hazards.late_delivery
    ),
    "the send buffer is kept until the exchange is finished": Watched(
        Guard(
            "exchange.exchange:_InFlight.launch",
            "if not self.side.deferred_unpack:",
            "self.send = None\n        if not self.side.deferred_unpack:",
        ),
        test_hazards.late_delivery,
    ),
    "the source is kept until the exchange is finished": Watched(
        Guard("exchange.exchange:_InFlight.launch", "if self.side.packs_at_once:", "if True:"), test_hazards.held_until_finished
    ),
    "what travels as it lies is contiguous": Watched(
        Guard("exchange.exchange:_as_it_travels", "return x.contiguous().view(-1)", "return x.as_strided((x.numel(),), (1,))"),
        test_hazards.one_position_a_rank,
    ),
    "what was received is unpacked into other memory": Watched(
        Guard(
            "exchange.exchange:_InFlight.finish",
            "self.recv.new_empty(self.layout.target.shape)",
            # Where replicas are summed, else torch itself refuses to copy.
            "self.recv.new_empty(self.layout.target.shape) if self.layout.target.tiles else "
            "self.recv[: self.recv.new_empty(self.layout.target.shape).numel()].view(self.layout.target.shape)",
        ),
        test_hazards.late_delivery_of_replicas,
    ),
    **{
        f"there is no {what.removeprefix('a ')}": Watched(guard, test_hazards.late_delivery)
        for what, guard in test_hazards.PLANTED.items()
    },
    "what is rotated on its way is packed": Watched(
        Guard("exchange.exchange:_InFlight.launch", "source) if self.rope is None else None", "source)"),
        test_hazards.rotated_as_it_lies,
    ),
    "what is rotated on its way back is unpacked": Watched(
        Guard("exchange.exchange:_InFlight.launch", "self.rope_back is not None or not target", "not target"),
        test_hazards.rotated_as_it_lies,
    ),
    "a part travels as it lies only if it has one element": Watched(
        Guard("exchange.exchange:_as_it_travels", "if not side.is_cut_into_slices:", "if len(side.parts) != side.shape[side.dim]:"),
        two_tokens_of_one_rank,
    ),
    "memory of an abandoned exchange returns in order": Watched(
        Guard("exchange.exchange:_InFlight.__del__", "self.side.before_compute(self.side.mark())", "pass"), test_hazards.abandoned
    ),
    "the compute stream waits at finish": Watched(
        Guard("exchange.exchange:_InFlight.finish", "self.side.before_compute(self.received)", "pass"), test_hazards.stream_order
    ),
    "the side stream waits at launch": Watched(
        Guard(
            "exchange.channel:SideStream.after_compute", "self.stream.wait_stream(self.backend.current_stream(self.device))", "pass"
        ),
        test_hazards.stream_order,
    ),
    "the compute stream waits for one exchange, not for later ones": Watched(
        Guard("exchange.channel:SideStream.before_compute", ".wait_event(mark)", ".wait_stream(self.stream)"),
        test_hazards.stream_order,
    ),
    "a mark stands for the unpack too": Watched(
        Guard(
            "exchange.exchange:_InFlight._receive",
            'if self.unpacks:\n        self._unpack()\n    self.track.mark("done")\n    self.received = self.side.mark()',
            'self.received = self.side.mark()\n    if self.unpacks:\n        self._unpack()\n    self.track.mark("done")',
        ),
        test_hazards.marked_too_early,
    ),
    "a finished transfer waits for nothing when it is freed": Watched(
        Guard("exchange.exchange:_InFlight.finish", "self.handle = None", "pass"), test_hazards.stream_order
    ),
    "a finished transfer is let go": Watched(
        Guard(
            "exchange.exchange:Exchange.finish_forward",
            "in_flight, self.forward = self.forward, None",
            "in_flight = self.forward",
        ),
        test_hazards.nothing_stays_in_flight,
    ),
    "a gradient's finished transfer is let go": Watched(
        Guard(
            "exchange.exchange:Exchange.finish_gradient",
            "in_flight, self.gradient = self.gradient, None",
            "in_flight = self.gradient",
        ),
        test_hazards.nothing_stays_in_flight,
    ),
    "overlapping parts are summed": Watched(
        Guard("relayout.ops:_copy_in", "part.add_(segment)", "part.copy_(segment)"), test_hazards.late_delivery_of_replicas
    ),
    "halves are summed in fp32": Watched(
        Guard("relayout.ops:_copy_in", "half = out.dtype in (torch.float16, torch.bfloat16)", "half = False"),
        test_ops.halves_summed_in_fp32,
        ranks=0,
    ),
    "parts are tiles only if they lie in order": Watched(
        Guard("relayout.ops:_are_equal_tiles", "count * size == extent and all", "count * size == extent or False and all"),
        unequal_parts,
        ranks=0,
    ),
    # Gradients that meet.
    "gradients of shared rows are summed": Watched(
        Guard(
            "attention.slices:join_pieces",
            "put_ranges(whole, dim, part, piece, add=not once)",
            "put_ranges(whole, dim, part, piece, add=False)",
        ),
        key_is_value,
    ),
    "only norms that are known are computed again": Watched(
        Guard("attention.linear:can_compute_again", "type(norm).forward not in pure", "False"), test_norms.dropping
    ),
    "a hook on a norm's weight runs once": Watched(
        Guard(
            "attention.linear:can_compute_again", "not any(parameter._backward_hooks for parameter in norm.parameters())", "True"
        ),
        functools.partial(test_norms.faults, kind=test_norms.weight_is_hooked, groups=2),
    ),
    "autocast in backward is that of forward": Watched(
        Guard("attention.nodes:_StartInputs.forward", "enabled=enabled", "enabled=False"),
        test_norms.in_bf16,
    ),
    "rotary tables are saved where autograd watches": Watched(
        Guard("attention.nodes:_StartInputs.forward", "*tables, *normed", "*(table.data for table in tables), *normed"),
        tables_are_watched,
    ),
    "rows without a gradient get zero": Watched(
        Guard("attention.slices:join_pieces", "if once else like.new_zeros(shape)", "if once else like.new_ones(shape)"),
        test_usage.attention_without_keys,
    ),
    "every rank reads each piece of KV heads": Watched(
        Guard(
            "exchange.geometry:Geometry.kv_pieces", 'low < high or (sent == group and "k" in self.kinds_of(group))', "low < high"
        ),
        test_layout.pieces_are_read_where_a_rank_gets_none,
        ranks=0,
    ),
    "o leads to q, k and v whatever attention does": Watched(
        Guard("exchange.exchange:Exchange.start", "_Start.apply(x, self, *of)", "_Start.apply(x, self)"),
        test_gradients.exchanges_of_a_constant,
    ),
    "a backward with a graph is refused": Watched(
        Guard("exchange.exchange:refuse_second_derivatives", "if torch.is_grad_enabled():", "if False:"),
        test_gradients.product_unnoticed,
    ),
    "keys of two groups stay as they are": Watched(
        Guard("attention.execution:_attended", "if (k._version, v._version) != before:", "if False:"),
        test_usage.changed_in_place_though_shared,
    ),
    # Modules that were given.
    "a forward is given back where a hook raises": Watched(
        Guard("attention.linear:call_through", 'vars(first).pop("forward", None)', "pass"), hook_raises
    ),
    "a forward is given back before anything else runs": Watched(
        Guard("attention.linear:call_through", 'del vars(first)["forward"]', "pass"), forwards_inside
    ),
    "a hooked module is called whole": Watched(
        Guard("attention.linear:can_call_through", "tuple(harmless)", '("",)'), hook_sees_all
    ),
    "a replaced forward is called": Watched(
        Guard("attention.linear:can_call_through", '"forward" in vars(module) or ', ""), replaced_forward, ranks=0
    ),
    "a forward of a class of its own is called": Watched(
        Guard("attention.linear:can_split", "type(module).forward not in plain or ", ""), forward_of_a_class, ranks=0
    ),
    "hooks of all modules count": Watched(
        Guard("attention.linear:can_call_through", ", *_EVERYWHERE", ""),
        functools.partial(test_usage.hooked_everywhere, kind="forward"),
    ),
    # What is refused.
    "tables that rotate half of a head are refused": Watched(
        Guard("rotary:check_tables", "(width == head_dim or partial and width < head_dim)", "width <= head_dim"),
        test_refusals.narrow_tables_pass,
    ),
    "RoPE without tables is refused": Watched(
        Guard("rotary:Rotary.of", "if position_embeddings is None:", "if False:"), test_refusals.rope_is_left_out
    ),
    "a block without a group is refused": Watched(
        Guard("attention.layer:Layer._comparable", "if world > 1:", "if False:"), test_refusals.missing_group_passes
    ),
    "a module of another group is refused": Watched(
        Guard("integrations.distributed_attention:find_layers", "if own != channel.ranks:", "if False:"),
        test_refusals.other_group_passes,
    ),
    # What head groups can be made of.
    "attention that needs all heads gets them": Watched(
        Guard("attention.layer:Layer.begin", "and not self._may_divide(call, inputs, local)", "and False"),
        test_heads.misses_slopes,
    ),
    "what one rank has found counts on all": Watched(
        Guard("attention.layer:Layer._may_divide", "enumerate(found)", "enumerate(found[:1])"),
        test_heads.misses_what_the_other_rank_found,
    ),
    "modules are tried out in evaluation": Watched(
        Guard("attention.heads:_evaluating", "module.training = False", "pass"), test_heads.modes_differ
    ),
    "modules train again as they did": Watched(
        Guard("attention.heads:_evaluating", "module.training = training", "module.training = True"), test_heads.modes_differ
    ),
    "trying out takes no random numbers": Watched(
        Guard(
            "attention.heads:fault",
            'torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")',
            "contextlib.nullcontext()",
        ),
        test_heads.random_numbers_differ,
    ),
    # Order.
    "exchanges start in the order drawn": Watched(
        Guard(
            "attention.execution:start_inputs",
            "in call.schedule.inputs",
            "in sorted(call.schedule.inputs, key=lambda step: -step.group)",
        ),
        order_of_two_groups,
    ),
    "gradients start in the order drawn": Watched(
        Guard(
            "exchange.exchange:_Finish.backward",
            "reversed(list(zip(ctx.exchanges, gradients, needed)))",
            "zip(ctx.exchanges, gradients, needed)",
        ),
        order_of_two_groups,
    ),
    "the wgrad waits for the starts": Watched(
        Guard(
            "attention.nodes:_FinishOutput.backward",
            "in call.schedule.backward_of_output",
            'in sorted(call.schedule.backward_of_output, key=lambda step: (-step.group, "wgrad dgrad start".index(step.act)))',
        ),
        wgrad_in_place,
    ),
    "a part that needs no gradient is not exchanged": Watched(
        Guard("attention.nodes:_StartInputs.forward", "if not is_needed(part)))", "if False))"),
        test_usage.exchanges_of_frozen_parts,
    ),
    # The policy.
    "a candidate stays for its backward": Watched(
        Guard("autotune.policy:Policy._look", "or in_backward()", ""),
        test_policy.another_optimizer_before_backward,
    ),
    "the slowest rank counts": Watched(
        Guard("autotune.trial:merged", "[max(times) for times in zip(*every)]", "[min(times) for times in zip(*every)]"),
        test_policy.choices_differ,
    ),
    "replicas choose together": Watched(
        Guard("autotune.policy:Policy._look", "if self.board is None else self.board.told(self.step)", ""),
        test_policy.replicas_differ,
        4,
    ),
    "replicas tell no shapes apart by lengths": Watched(
        Guard("autotune.policy:Policy.trial", "() if self.replicas else (geometry.batch", "(geometry.batch"),
        test_policy.replicas_differ,
        4,
    ),
    "replicas never run stock": Watched(
        Guard("autotune.policy:Policy.trial", "off and not self.replicas", "off"),
        test_policy.replicas_differ_where_one_could_run_stock,
        4,
    ),
    "no candidate loses by evaluations on its turns": Watched(
        Guard("autotune.trial:Trial.milliseconds", "len(forwards) / len(backwards)", "len(each[0]) / len(each[1])"),
        test_policy.evaluations_decide,
        0,
    ),
    "a layer whose input needs no gradient is timed": Watched(
        Guard(
            "autotune.policy:Policy.follow", "if trial.timed and torch", "if trial.timed and run.inputs[0].requires_grad and torch"
        ),
        test_policy_attack.not_timed,
    ),
    # Agreement of the ranks.
    "ranks compare what they are about to exchange": Watched(
        Guard("exchange.channel:Channel.agree", "if not alike:", "if False:"),
        test_refusals.disagreement_goes_unnoticed,
    ),
    "a fault of one rank is everybody's": Watched(
        Guard("exchange.channel:Channel.agree", "if faults:", "if not mine[0]:"), fault_of_one_rank
    ),
    "first calls of other layers are noticed": Watched(
        Guard("attention.layer:Layer._comparable", "{self.where}, call {self.channel.calls.number + 1} over", "over"),
        test_calls.first_calls_unnoticed,
    ),
    "later calls of other layers are noticed": Watched(
        Guard("exchange.calls:Calls.count", "self.names.append(name)", 'self.names.append("")'), test_calls.later_calls_unnoticed
    ),
    "check mode compares": Watched(
        Guard("exchange.exchange:_InFlight.finish", "if self.expected is not None:", "if False:"),
        test_refusals.corruption_goes_unnoticed,
    ),
    "a half out of place is refused": Watched(
        Guard("exchange.exchange:_InFlight.launch", "if x.shape != source.shape:", "if False:"), test_hazards.finished_twice
    ),
    "a launch that fails names its exchange": Watched(
        Guard("exchange.exchange:_InFlight.launch", "except RuntimeError as error:", "except LookupError as error:"),
        test_hazards.launch_that_fails,
    ),
    "a failure names its exchange": Watched(
        Guard("exchange.exchange:_InFlight._receive", "except RuntimeError as error:", "except LookupError as error:"),
        failure_names_the_exchange,
    ),
    # What only the whole sequence tells.
    "a window is read off the mask function": Watched(
        Guard(
            "integrations.masks:_read",
            'said["window"] = min(inside["sliding_window"], said.get("window", inside["sliding_window"]))',
            "pass",
        ),
        test_masks.faults_of_window,
    ),
    "RoPE goes by the longest position of all ranks": Watched(
        Guard("integrations.transformers_forward:stretched", "longest = step.longest.to", "longest = position_ids.max().to"),
        test_masks.faults_of_length,
    ),
    "padding before a document is one of its own": Watched(
        Guard("integrations.positions:Step.__init__", "if mask is not None and not mask.all():", "if False:"),
        test_masks.faults_of_padding,
    ),
    "a layer goes by the step of its own forward": Watched(
        Guard(
            "integrations.masks:Masks.find",
            "self._given.get(mask.untyped_storage()._cdata) if isinstance(mask, Tensor) else None",
            "list(self._given.values())[-1]",
        ),
        test_masks.faults_of_steps,
        raises=True,  # a checkpoint computes another graph than it saved
    ),
}


CRASHED = "crashed: "


def found(rank, name):
    """What a check finds; a failed assertion is its way to say so, any other exception is a crash."""
    try:
        return WATCHED[name].check(*[rank] * (WATCHED[name].ranks > 0))
    except AssertionError as error:
        return [str(error)]
    except Exception as error:
        return [CRASHED + repr(error)]


def found_without(rank, name):
    with removed(WATCHED[name].guard):
        return found(rank, name)


def on(name, function):
    ranks = WATCHED[name].ranks
    return on_ranks(ranks, function, name, timeout_s=60) if ranks else [function(0, name)]


@pytest.mark.parametrize("name", WATCHED)
def test_the_suite_notices_without_the_guard_that(name):
    assert on(name, found) == [[]] * max(1, WATCHED[name].ranks)
    findings = [finding for each in on(name, found_without) for finding in each]
    assert findings, "nobody noticed"
    assert WATCHED[name].raises == any(str(finding).startswith(CRASHED) for finding in findings), findings
    assert on(name, found) == [[]] * max(1, WATCHED[name].ranks), "the guard was not put back"


def test_a_guard_that_the_code_no_longer_holds_is_reported():
    with (
        pytest.raises(LookupError, match="holds 0 times the guard"),
        removed(Guard("relayout.ops:_copy_in", "no such text", "pass")),
    ):
        pass
