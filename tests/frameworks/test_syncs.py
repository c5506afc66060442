"""Tests that the host waits for the device once in a step, when it reads positions, and in no layer.

On a CPU there is no device to wait for, so operations that would wait on a GPU are found by name: see `tests.harness.syncs`.
"""

import contextlib
import functools
from unittest import mock

import numpy as np
import pytest
import torch

import ds_sp_overlap
from ds_sp_overlap.attention.runtime import execution
from ds_sp_overlap.integrations.sequence.documents import to_device
from tests.harness import flash
from tests.harness.cases import full
from tests.harness.guards import Watched, notices
from tests.harness.models import EXACT, batches, cut, outcome, packed, tiny
from tests.harness.syncs import waits

READ = ("cpu", "positions.py:_every")  # reads the positions of all ranks, in one tensor
SENT = ("lift_fresh", "documents.py:to_device")  # does not wait, since the memory is pinned: see below
EARLIER = ("tolist", "calls.py:is_alike")  # once in 32 calls; reads a result that was copied to the host 32 calls before

# The instrument.

MASK = torch.tensor([True, False, True, False])
SEEN = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: range(x.long().sum()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "list": lambda x: torch.tensor([1, 2], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "index by a mask": lambda x: x[MASK],
    "write by a mask": lambda x: x.clone().__setitem__(MASK, 1.0),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "repeats that the host does not know": lambda x: x.repeat_interleave(x.long()),
}
UNSEEN = {
    "arithmetic": lambda x: (2 * x + 1).softmax(0).sum(),
    "index": lambda x: x.index_select(0, torch.arange(2)),
    "mask": lambda x: torch.where(MASK, x, 0.0).masked_fill(MASK, 1.0),
    "made there": lambda x: torch.full((3,), 2.0, device=x.device),
    "type": lambda x: x.to(torch.float64).to(x.device),
    "repeats": lambda x: x.repeat_interleave(2),
}


@pytest.mark.parametrize("what", SEEN)
def test_the_instrument_sees(what):
    with waits() as seen:
        SEEN[what](torch.arange(4.0))
    assert seen and {wait.where for wait in seen} == {"test_syncs.py:<lambda>"}


@pytest.mark.parametrize("what", UNSEEN)
def test_the_instrument_passes_over(what):
    with waits() as seen:
        UNSEEN[what](torch.arange(4.0))
    assert not seen


# Training steps.

ROWS = {
    "one document": [[[32]]] * 4,
    "one document in each of two rows": [[[32], [32]]] * 4,
    "packed": [[[10, 6, 1, 15]], [[32]], [[4, 3, 3, 1, 1, 20]], [[20, 12]]],
    "packed in two rows": [[[10, 22], [3, 13, 1, 15]], [[32], [1, 1, 30]], [[16, 16], [12, 20]], [[5, 27], [32]]],
    "shorter": [[[32]], [[7, 9]], [[16]], [[32]]],
}
IRREGULAR = dict(heads=6, kv_heads=3)  # a rank's three query heads use two KV heads
SHARED = dict(heads=5, kv_heads=1)  # both ranks share the heads, except with a third-party flash attention
MODELS = [IRREGULAR, dict(family="bitnet", **IRREGULAR), dict(family="mistral", sliding_window=5), SHARED]


@contextlib.contextmanager
def overlapped(attention, head_groups, window=None, **options):
    """Yield a model that is overlapped over all ranks, and the list of calls of flash attention."""
    with flash.flash_attention() as calls:
        model = tiny(**options)
        model.config._attn_implementation = attention
        ds_sp_overlap.enable(model, {"head_groups": head_groups, "window": window}, torch.distributed.group.WORLD)
        try:
            yield model, calls
        finally:
            ds_sp_overlap.disable(model)


def steps(rank, attention, head_groups, rows, masked=False, plant=None, **options):
    """Train; return the waits of each step, and the calls of flash attention in each step."""
    seen, called = [], []
    with overlapped(attention, head_groups, **options) as (model, calls):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if plant is not None:
            plant(model)
        for lengths in rows:
            positions = packed(lengths)
            inputs = cut(batches(1, *positions.shape)[0], rank, 2, positions)
            if masked:
                inputs["attention_mask"] = (torch.arange(positions.shape[1]) > 4).expand_as(positions).chunk(2, 1)[rank]
            labels = inputs.pop("labels").flatten()
            calls.clear()
            with waits() as step:
                logits = model(**inputs, use_cache=False).logits
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append([tuple(wait) for wait in step])
            called.append([None if call is None else (call[0].dtype, call[0].tolist(), call[1]) for call in calls])
    return seen, called


def of_layers(rank, **options):
    """Return the waits of all steps after the first, except one wait for positions in each step; for guards."""
    later = steps(rank, **options)[0][1:]
    return [wait for step in later for wait in [*set(step) - {SENT, READ, EARLIER}, *[READ] * (step.count(READ) - 1)]]


@pytest.mark.singles
@pytest.mark.parametrize("head_groups, window", [full(1, None), (2, None), full(2, 1), (2, 2)])
@pytest.mark.parametrize("attention", ["sdpa", flash.NAME])
def test_the_host_waits_once_a_step_and_in_no_layer(attention, head_groups, window, rank):
    """Checks the steps after the first, which compares the ranks and fills caches."""
    cases = [(rows, IRREGULAR, False) for rows in ROWS]
    cases += [("packed in two rows", options, masked) for options in MODELS for masked in (False, True)][1:]
    for case in cases:
        rows, options, masked = case
        (_, *later), _ = steps(rank, attention, head_groups, ROWS[rows], masked, window=window, **options)
        for step in later:
            assert step.count(READ) == 1 and set(step) <= {READ, SENT, EARLIER}, case


def in_forward(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, o: o.sum().item() and None)


def in_backward(model):
    model.model.layers[1].mlp.register_full_backward_hook(lambda module, dx, dy: dy[0].tolist() and None)


@pytest.mark.parametrize("plant, what", [(in_forward, "_local_scalar_dense"), (in_backward, "tolist")])
def test_a_wait_that_is_planted_in_a_layer_is_seen_in_every_step(plant, what, rank):
    seen, _ = steps(rank, "sdpa", 1, ROWS["one document"], plant=plant, **IRREGULAR)
    for step in seen:
        assert [name for name, where in step if where.startswith("test_syncs.py")] == [what]


def test_a_step_that_is_longer_than_all_before_takes_one_more(rank):
    assert [step.count(READ) for step in steps(rank, "sdpa", 1, [[[16]], [[16]], [[32]], [[32]], [[16]]])[0]] == [2, 1, 2, 1, 1]


def test_what_the_host_knows_is_sent_in_one_copy_that_nobody_waits_for():
    """The memory must be pinned, since the host waits for a copy from other memory."""
    arrays = [np.arange(6).reshape(2, 3), np.arange(0), np.arange(2)]
    assert all(np.array_equal(sent.numpy(), array) for sent, array in zip(to_device(arrays, torch.device("cpu")), arrays))
    with mock.patch("torch.from_numpy") as host:
        host().pin_memory().to().split.return_value = []
        host.reset_mock()
        to_device(arrays, torch.device("cuda:0"))
        host.return_value.to.assert_not_called()
        host.return_value.pin_memory.return_value.to.assert_called_once_with(torch.device("cuda:0"), non_blocking=True)


# Flash attention.


def test_flash_attention_is_told_documents_by_edges_and_by_nothing_where_there_are_none(rank):
    """Expects int32 edges over all rows, and the longest length as a Python int, in two layers with two head groups."""
    rows = [[[32]], [[32], [32]], [[10, 6, 16]], [[10, 22], [32]]]
    _, (one, two, packed_row, packed_rows) = steps(rank, flash.NAME, 2, rows)
    assert one == two == [None] * 4
    assert packed_row == [(torch.int32, [0, 10, 16, 32], 16)] * 4
    assert packed_rows == [(torch.int32, [0, 10, 32, 64], 32)] * 4


# Guards.


def faults_of_inference(rank):
    execution._on_device.cache_clear()
    with overlapped("sdpa", 1, **EXACT, **IRREGULAR) as (model, _):
        with torch.inference_mode():
            inputs = cut(batches(1)[0], rank, 2)
            model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False)
        outcome(model, batches(1)[0], rank, 2, None)


def waits_behind_the_first(attention, head_groups, rows, **options):
    return functools.partial(of_layers, attention=attention, head_groups=head_groups, rows=ROWS[rows], **options)


AT = "return attention(q, k, v, position_ids=torch.arange(q.shape[1])[None])"
INDEXED = "places = torch.tensor(index, device=heads.device)"
test_the_suite_notices_without_the_guard = notices(
    Watched("edges, no positions", AT, waits_behind_the_first(flash.NAME, 2, "one document")),
    Watched("indexed without a wait", INDEXED, waits_behind_the_first("sdpa", 1, "one document", **IRREGULAR)),
    Watched("a backward may save it", "with torch.enable_grad():", faults_of_inference, raises=True),
    Watched("documents need no wait", "pass", waits_behind_the_first("sdpa", 1, "one document", **MODELS[2])),
    Watched("travels in one message", "if True:", waits_behind_the_first("sdpa", 1, "packed in two rows")),
)
