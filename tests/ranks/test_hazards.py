"""Tests that results don't change with transports that deliver late, and with buffers spoiled after their use (`transports`).

Each test names its guards. At the end of the file, guards are removed one by one, and these checks must fail.
"""

import contextlib
import functools
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.harness import dropin, layers, transports
from tests.harness.dropin import Case
from tests.harness.guards import Watched, notices, removed
from tests.harness.layers import Shape
from tests.harness.moving import kinds, moving
from tests.harness.ranks import refusal
from tests.harness.uses import (
    adapted_query_and_output,
    grad_of_input_then_backward,
    reentrant,
    second_backward,
    strided_inputs_and_cotangent,
    twice_before_backward,
)

SHAPES = [
    Shape(
        heads, kv_heads, 4, batch, lengths, batch_first, True, batch_first, bias=fused, fused=fused, config={"head_groups": groups}
    )
    for heads, kv_heads, lengths in ((4, 4, (3, 3)), (8, 2, (3, 2)), (6, 3, (1, 1)))
    for batch, batch_first, fused in ((1, True, False), (2, True, True), (2, False, False))
    for groups in (1, 2)
]
CASES = [
    Case(heads, kv_heads, 8, 8, batch, lengths, batch_first, rotary_dims, flat, {"head_groups": groups})
    for heads, kv_heads, lengths in ((4, 4, (3, 3)), (8, 2, (3, 2)), (7, 7, (1, 1)))
    for batch, batch_first, rotary_dims, flat in ((1, True, 8, False), (2, True, 0, True), (2, False, 8, False))
    for groups in (1, 2)
]


WINDOWED = [
    replace(shape, heads=8, kv_heads=4 if shape.heads == 4 else 2, rotary=True, config={"head_groups": 4, "window": window})
    for shape in SHAPES[:12:2]
    for window in (1, 2)
]


def spoiled(rank, transport, shapes, cases):
    """List the faults of shapes and cases while buffers are spoiled."""
    with transports.spoiled_buffers():
        return layers.faults_of_all(rank, shapes, transport) + dropin.faults_of_all(rank, cases, transport)


def spoiled_with_control(rank, transport, shapes, cases, kernels="torch", direct=False):
    """List the faults as `spoiled` does, and "BLIND" for each fault of `PLANTED` that this run does not find.

    The planted faults read buffers that the package has released.
    """
    control = [Shape(lengths=(3,) * torch.distributed.get_world_size())]
    with moving(kernels, direct):
        found = spoiled(rank, transport, shapes, cases)
        for what, guard in PLANTED.items():
            with removed(guard.marker, guard.without):
                if not spoiled(rank, transport, control, []):
                    found.append(f"BLIND: {what} was not seen")
    return found


@pytest.mark.parametrize("transport", [transports.Late, transports.Delayed])
def test_results_do_not_depend_on_when_the_bytes_move(transport, rank):
    """Guards waits and buffers:

    - each half of an exchange waits before it reads;
    - send buffers are kept until then, and no code writes to them;
    - receive buffers are not read again after unpack;
    - every element of an output is written.
    """
    assert spoiled_with_control(rank, transport, SHAPES, CASES) == []


@pytest.mark.parametrize("transport", [transports.Late, transports.Delayed])
def test_nor_do_those_of_a_window(transport, rank):
    assert spoiled_with_control(rank, transport, WINDOWED, []) == []


@pytest.mark.singles
@kinds
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("transport", [transports.Late, transports.Delayed])
def test_nor_where_kernels_rotate_and_the_gemm_writes_the_send_buffers(transport, direct, kind, rank):
    assert spoiled_with_control(rank, transport, SHAPES[:12], CASES[:6], kind, direct) == []


def counts(rank, what, direct, kernels):
    """Return the acts of `spoiled_buffers` in one forward and backward, and the operators that moved the data."""
    run = layers.faults_of_all if isinstance(what, Shape) else dropin.faults_of_all
    with moving(kernels, direct) as operators, transports.spoiled_buffers() as armed:
        assert run(rank, [what], transports.Late) == []
    return armed.acted, set(operators)


@pytest.mark.parametrize(
    "what,direct,owned,unpacked",
    [
        (Case(batch=2), False, 12, 12),
        # With one batch element, q, k, v and do of the first group are not unpacked, and o and dq, dk, dv are not packed. But this
        # attention's dk isn't contiguous, so the package sends its own copy.
        (Case(batch=1), False, 8, 7),
        (Shape(batch=1), False, 8, 7),
        (Shape(batch=1), True, 8, 7),
        (Shape(batch=2), True, 12, 12),
        (Shape(batch=1, lengths=(1, 1)), False, 3, 2),
    ],
    ids=str,
)
def test_every_buffer_that_may_be_reused_is_spoiled(what, direct, owned, unpacked, rank):
    """Two head groups have twelve exchanges. Two of these move q, k and v, or their gradients, together.

    Only these two pack into memory that was allocated before. Every other pack or unpack is one copy, which allocates its result.
    """
    acted, _ = counts(rank, what, direct, "torch")
    assert acted == Counter(delayed=12, owned=owned, spoiled=owned, filled=2, poisoned=unpacked)


@kinds
def test_and_so_with_kernels_that_rotate(kind, rank):
    """q and k of the first group are packed, though a GEMM could write their send buffers; v and do are not packed.

    Kernels pack q, k and dk, and unpack o and the first group's dq, dk and dv. All their results are memory allocated before.
    """
    acted, operators = counts(rank, Shape(batch=1), True, kind)
    assert acted == Counter(delayed=12, owned=8, spoiled=8, filled=2 + 3 + 5, poisoned=7)
    assert operators == {"rotate_pack", "pack", "unpack_rotate_back", "unpack"}


INERT = {  # ways in which `spoiled_buffers` may have no effect: (patch, transport, acts that it reports as missing)
    "no transport of ours": (contextlib.nullcontext, None, "delayed, owned, spoiled"),
    "owned buffers aren't recognised": (
        lambda: mock.patch.object(transports.Armed, "owns", lambda *_: False), transports.Late, "owned, spoiled",
    ),
    "nothing is spoiled": (
        lambda: mock.patch.object(transports, "spoil", lambda buffer: False), transports.Late, "poisoned, spoiled",
    ),
    "memory isn't filled": (
        lambda: mock.patch.object(torch, "use_deterministic_algorithms"), transports.Late, "filled",
    ),
    "nothing is exchanged": (
        lambda: mock.patch.object(layers, "faults_of_all", lambda *_: []), transports.Late, "exchanges",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", INERT)
def test_a_fixture_that_does_not_act_is_blind(how, rank):
    change, transport, _ = INERT[how]

    def run():
        with change(), transports.spoiled_buffers():
            layers.faults_of_all(rank, [Shape()], transport)

    kind, message = refusal(run)
    assert kind == "AssertionError" and message.startswith(f"BLIND: too few {INERT[how][2]}: acted"), message


def test_readers_of_released_buffers_are_seen_by_nobody_who_does_not_spoil_them(rank):
    """Without spoiled buffers, the planted faults give right results, so only spoiling can reveal them."""
    with mock.patch.object(transports, "spoil", lambda buffer: buffer.numel() > 0):  # counts as an act
        found = spoiled_with_control(rank, transports.Late, SHAPES[:1], [])
    assert found == [f"BLIND: {what} was not seen" for what in PLANTED]


@pytest.mark.ranks(4)
def test_four_ranks_do_not_depend_on_it_either(rank):
    """Watches the same guards with replicated KV heads, and with ranks that delay differently."""
    shapes = [Shape(heads=8, kv_heads=2, head_dim=4, lengths=(2, 1, 2, 3)), Shape(kv_heads=1, lengths=(2,) * 4)]
    cases = [
        Case(heads=9, kv_heads=3, lengths=(2,) * 4, batch_first=False),
        Case(heads=4, kv_heads=2, lengths=(1, 2, 3, 4)),
    ]
    assert spoiled_with_control(rank, transports.Delayed, shapes, cases) == []


def spoiled_uses(rank, shape=Shape(kv_heads=2)):
    found = []
    with transports.spoiled_buffers():
        for use in (twice_before_backward, second_backward, reentrant, grad_of_input_then_backward):
            for change in (None, adapted_query_and_output):
                mover = transports.Late()
                found += layers.block_faults(rank, shape, use, mover, change=change) + mover.faults + mover.unfinished()
    return found


def test_repeated_calls_and_backwards_do_not_depend_on_it_either(rank):
    """Watches the same guards with two calls in flight at once, and with calls that run again."""
    assert spoiled_uses(rank) == []
    assert spoiled_uses(rank, Shape(heads=8, kv_heads=4, config={"head_groups": 4, "window": 2})) == []


def test_what_travels_as_it_lies_is_contiguous(rank):
    """Guards `InFlight`: it makes its source contiguous if the source itself is the send buffer.

    This is so for local sequences of one token, even if attention's output has other strides.
    """
    for case in (Case(batch=1, lengths=(1, 1)), Case(batch=2, batch_first=False)):
        assert dropin.dropin_faults(rank, case, strided_inputs_and_cotangent) == [], case


def test_what_is_rotated_on_its_way_is_packed_and_unpacked(rank):
    """Guards `InFlight`: it packs tensors that need a rotation, even if, as here, they are already in the order of the wire."""
    with moving("reference", direct=False):
        assert layers.faults_of_all(rank, [Shape(batch=1, lengths=(1, 1))]) == []


# Guards.

late_delivery = functools.partial(spoiled, transport=transports.Late, shapes=SHAPES[:2], cases=CASES[:6])
late_delivery_of_replicas = functools.partial(
    spoiled, transport=transports.Late, shapes=[Shape(kv_heads=1)], cases=[Case(heads=6, kv_heads=3, config={"head_groups": 1})]
)
PLANTED = {  # faults that read released buffers; their results are right unless these buffers are spoiled
    "a send buffer read after delivery": Watched(
        "sent, not read again",
        "sent, got = self.layout.sources.sizes, self.layout.targets.sizes\n"
        "self.recv.view(-1).split(got)[self.sp_group.rank].copy_(self.send.view(-1).split(sent)[self.sp_group.rank])\n"
        "del self.send",
        late_delivery,
    ),
    "a received buffer read after its unpack": Watched(
        "received, not read again", "return self._unpacked() if self.copies_back.flat is None else self.outs", late_delivery
    ),
    "a received buffer unpacked twice": Watched("unpacked once", "self._unpacked()\nself.outs = self._unpacked()", late_delivery),
}
test_the_suite_notices_without_the_guard = notices(
    Watched("waits before it reads", "pass", late_delivery),
    Watched("what is sent is kept", "side.end(mark)\nself.send = None", late_delivery),
    Watched("a copy, no view", "if False:", late_delivery),
    Watched("lies as it travels", "if True:", test_what_travels_as_it_lies_is_contiguous),
    Watched(
        "memory of its own",
        # Only if replicas are summed; in other cases torch refuses such a copy.
        "new = new_empty(*shape)\nouts.append(new if self.copies_back.disjoint else like[: new.numel()].view(new.shape))",
        late_delivery_of_replicas,
    ),
    *PLANTED.values(),
    Watched("rotated, so packed", "if copies.flat is None:", test_what_is_rotated_on_its_way_is_packed_and_unpacked),
    Watched("rotated, so unpacked", "rotates = False", test_what_is_rotated_on_its_way_is_packed_and_unpacked),
    Watched("repeats are summed", "place = place.amax(run.repeats)", late_delivery_of_replicas),
    Watched("overlaps are summed", "part.copy_(place)", late_delivery_of_replicas),
)
