"""Tests the choice of the transport, refusals and fallbacks, and that each transport moves the right bytes.

Tests can't use several GPUs. Stand-ins for NCCL and fast-ulysses have the interfaces that the package calls, and move data by gloo.
So these tests show choice, refusal and layout, but nothing about the libraries themselves.
"""

import contextlib
import os
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

import ds_sp_overlap
from ds_sp_overlap import launch_order
from ds_sp_overlap.config import SpOverlapConfig
from ds_sp_overlap.exchange import copy_engines, transport
from ds_sp_overlap.exchange import sp_group as sp_group_module
from ds_sp_overlap.exchange.sp_group import SPGroup, by_name
from ds_sp_overlap.exchange.transport import C10d, OneRank, backend_of
from ds_sp_overlap.tools import doctor
from ds_sp_overlap.warn import warn_once
from tests.harness import layers, models
from tests.harness.layers import Shape
from tests.harness.listening import listening
from tests.harness.ranks import refusal
from tests.harness.streams import Backend


class Options:
    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream, self.config = is_high_priority_stream, types.SimpleNamespace()


class Nccl:
    """Stands in for the interfaces of NCCL and symmetric memory that the package calls; records the calls."""

    def __init__(self, cta_policy=True, version=(2, 28, 9), new_group_error=None, groups_made=lambda: 1, backends="cuda:nccl"):
        self.groups_made, self.backends = groups_made, backends
        self.made, self.rendezvous, self.exchanges, self.error = [], [], [], new_group_error
        self.version = version
        self.group_class = type("ProcessGroupNCCL", (), {"Options": Options, **({"NCCL_CTA_POLICY_ZERO": 2} if cta_policy else {})})

    def new_group(self, ranks, **options):
        if self.error is not None:
            raise self.error
        self.made.append((ranks, options))
        self.exchanges.append("new group")
        return dist.group.WORLD

    @contextlib.contextmanager
    def __call__(self, hosts=None):
        transport._communicators.clear()
        exchange = dist.all_to_all_single

        def all_to_all_single(output, input, *args, **options):
            self.exchanges.append("split" if args or options.get("output_split_sizes") else "even")
            return exchange(output, input, *args, **options)

        with contextlib.ExitStack() as stack:
            for patch in (
                mock.patch.object(dist, "get_backend", lambda group=None: self.backends.removeprefix("cuda:")),
                mock.patch.object(dist, "get_backend_config", lambda group=None: self.backends),
                mock.patch.object(transport, "DEVICE", "cpu"),
                mock.patch.object(torch.cuda, "synchronize", lambda: self.exchanges.append("synchronize")),
                mock.patch.object(dist, "ProcessGroupNCCL", self.group_class, create=True),
                mock.patch.object(dist, "new_group", self.new_group),
                mock.patch.object(transport, "_groups_made", self.groups_made),
                mock.patch.object(dist, "all_to_all_single", all_to_all_single),
                mock.patch.object(torch.cuda.nccl, "version", lambda: self.version),
                mock.patch.object(symmetric, "set_backend", lambda name: self.rendezvous.append(name)),
                mock.patch.object(symmetric, "empty", lambda *size, **options: torch.full(size, torch.nan, **options)),
                mock.patch.object(symmetric, "rendezvous", lambda x, group: self.rendezvous.append(x.numel())),
                *([mock.patch.object(sp_group_module, "hostname", lambda: hosts[dist.get_rank()])] if hosts else []),
            ):
                stack.enter_context(patch)
            yield self
        transport._communicators.clear()


class UlyssesGroup:
    """Stands in for ``all_to_all_4d_async`` of fast-ulysses, by its documentation, in mode 1 with even shards."""

    calls = []

    def __init__(self, process_group=None):
        self.pg, self.world_size = process_group, dist.get_world_size(process_group)

    def all_to_all_4d_async(self, x, *, mode, out):
        batch, seq, heads, dim = x.shape
        assert mode == 1 and seq % self.world_size == 0 and not x.requires_grad
        assert out.shape == (batch, seq // self.world_size, heads * self.world_size, dim) and out.is_contiguous()
        assert dim * x.element_size() % 16 == 0
        self.calls.append(tuple(x.shape))
        parts = [torch.empty(batch, seq // self.world_size, heads, dim, dtype=x.dtype) for _ in range(self.world_size)]
        received = torch.empty_like(torch.stack(parts))
        work = dist.all_to_all_single(received, torch.stack(x.chunk(self.world_size, 1)), group=self.pg, async_op=True)

        class Result:
            def wait(self):
                work.wait()
                out.copy_(torch.cat(list(received), 2))
                return out

        return Result()


@contextlib.contextmanager
def fast_ulysses(there=True):
    """Run the body as if fast-ulysses were installed, or not."""
    module = types.ModuleType("fast_ulysses")
    module.UlyssesGroup, UlyssesGroup.calls = UlyssesGroup, []
    found = mock.patch.object(copy_engines.importlib.util, "find_spec", lambda name: object() if there else None)
    with found, mock.patch.dict(sys.modules, {"fast_ulysses": module} if there else {}):
        yield


# The choice.


@pytest.mark.parametrize(
    "name,size,expected", [("auto", 1, OneRank), ("copy_engine", 1, OneRank), ("auto", 2, C10d), ("c10d", 2, C10d)]
)
def test_one_rank_needs_no_transport_and_several_use_c10d(name, size, expected):
    assert type(by_name(name, size)) is expected
    assert getattr(by_name(name, size), "own", None) == (None if size == 1 else name == "auto")


def communicators(rank, name, reversed_ranks=False, error=None, groups_made=lambda: 1, section=None):
    """Prepare two layers of one sp group; return the communicators made, whether each layer uses the sp group, and messages."""
    nccl = Nccl(new_group_error=error, groups_made=groups_made)
    decided = SpOverlapConfig.parse(section or {}).of_sp_group
    sp_groups = [SPGroup(dist.group.WORLD, name, **decided) for _ in range(2)]
    ranks = sorted(range(dist.get_world_size()), reverse=reversed_ranks)
    with nccl(), listening() as messages, mock.patch.object(dist, "get_process_group_ranks", lambda group: ranks):
        for sp_group in sp_groups:
            sp_group.prepare()
            sp_group.prepare()
    made = [
        (ranks, o["backend"], o["use_local_synchronization"], o["pg_options"].is_high_priority_stream, vars(o["pg_options"].config))
        for ranks, o in nccl.made
    ]
    return made, [sp_group.transport.group is None for sp_group in sp_groups], messages


def test_auto_makes_one_nccl_communicator_for_all_layers_with_its_members_alone(rank):
    expected = [([0, 1], "nccl", True, True, {"max_ctas": transport.MAX_CTAS})]
    assert communicators(rank, "auto") == (expected, [False, False], [])


@pytest.mark.parametrize("section,settings", [
    ({"max_ctas": 4, "cga_cluster_size": 0}, {"max_ctas": 4, "cga_cluster_size": 0}),
    ({"min_ctas": 24}, {"max_ctas": 24, "min_ctas": 24}),
    ({"max_ctas": "auto", "min_ctas": None}, {"max_ctas": transport.MAX_CTAS}),
])  # fmt: skip
def test_the_section_decides_how_many_blocks_the_communicator_takes(section, settings, rank):
    ((*_, made),), _, _ = communicators(rank, "auto", section=section)
    assert made == settings


@pytest.mark.parametrize("hosts,section,blocks", [
    (["a", "a", "a", "a"], {}, 16),
    (["a", "a", "b", "b"], {}, 4),  # also on ranks that share a node
    (["a", "b", "a", "a"], {"max_ctas": 12}, 12),
    (["a", "b", "a", "b"], {"min_ctas": 6}, 6),
], ids=str)  # fmt: skip
@pytest.mark.ranks(4)
def test_a_communicator_over_a_network_card_takes_fewer_blocks_on_all_ranks(hosts, section, blocks, rank):
    with mock.patch.object(sp_group_module, "hostname", lambda: hosts[rank]):
        ((*_, made),), _, _ = communicators(rank, "auto", section=section)
    assert made["max_ctas"] == blocks


def test_a_copy_engine_gives_the_rest_to_such_a_communicator():
    assert by_name("copy_engine", 2, {"max_ctas": 4}).rest.settings == {"max_ctas": 4}


# The order of launches.


def test_the_import_asks_for_one_order_of_launches():
    code = f"import os, ds_sp_overlap; print('order', os.environ['{launch_order.LAUNCH_ORDER}'])"
    environment = {name: value for name, value in os.environ.items() if name != launch_order.LAUNCH_ORDER}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "order 1" in ran.stdout, ran.stderr


@pytest.mark.parametrize("value,exists,after", [(None, False, "1"), ("0", False, "0"), (None, True, None)])
def test_the_import_leaves_alone_what_is_decided_or_read_already(monkeypatch, value, exists, after):
    monkeypatch.delenv(launch_order.LAUNCH_ORDER, raising=False)
    if value is not None:
        monkeypatch.setenv(launch_order.LAUNCH_ORDER, value)
    groups = {object(): ("cpu:gloo,cuda:nccl" if exists else "gloo", None)}
    monkeypatch.setattr(dist.distributed_c10d._world, "_default_pg", None)
    monkeypatch.setattr(type(dist.distributed_c10d._world), "pg_map", groups)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: groups[group][0] if exists else "cpu:gloo")
    launch_order.ask_for_launch_order()
    assert os.environ.get(launch_order.LAUNCH_ORDER) == after


@pytest.mark.parametrize("value", [None, "0"])
def test_a_start_up_that_came_too_late_for_the_order_says_so_once(value, rank):
    """Nothing is said if the user has set the variable."""
    with mock.patch.dict(os.environ, {launch_order.LAUNCH_ORDER: value} if value else {}):
        if not value:
            os.environ.pop(launch_order.LAUNCH_ORDER, None)
        warn_once.cache_clear()
        said = [line for line in communicators(rank, "auto")[2] if launch_order.LAUNCH_ORDER in line]
    assert len(said) == (value is None) and all("Import ds_sp_overlap first" in line for line in said)


def test_c10d_uses_the_group_as_it_was_given(rank):
    assert communicators(rank, "c10d") == ([], [True, True], [])


@pytest.mark.parametrize(
    "options, why",
    [
        ({"reversed_ranks": True}, "its ranks [1, 0] are not ascending"),
        ({"error": NotImplementedError("no local synchronization")}, "no local synchronization"),
    ],
)
def test_a_group_that_can_have_no_communicator_is_used_as_it_is_and_it_says_so_once(options, why, rank):
    """Checks a torch that can't make a group by its members alone, and a group whose ranks are not ascending."""
    made, _, (said,) = communicators(rank, "auto", **options)
    assert made == [] and f"no communicator of our own beside the sp group ({why}); it is used as is" in said


def test_enable_makes_and_connects_the_communicator_while_the_device_does_nothing_else_and_layers_make_none(rank):
    nccl = Nccl()
    with models.sequence_parallel_model(2) as (model, group), nccl():
        ds_sp_overlap.enable(model, {"head_groups": 1})
        assert nccl.exchanges == ["synchronize", "new group", "even", "synchronize"]
        nccl.exchanges.clear()
        for tokens in models.batches(2):
            models.mean_loss(model, models.cut(tokens, rank, 2), group)
    assert "split" in nccl.exchanges and "new group" not in nccl.exchanges


def test_of_a_group_of_two_backends_what_lies_on_a_gpu_goes_over_a_communicator_of_our_own_and_the_rest_over_the_group(rank):
    nccl, to = Nccl(backends="cpu:gloo,cuda:nccl"), []
    with (
        nccl(),
        mock.patch.object(sp_group_module, "accelerator", lambda kind: Backend()),
        mock.patch.object(dist, "all_to_all_single", lambda *_, group, async_op=False: to.append((group, async_op))),
    ):
        sp_group = SPGroup(dist.group.WORLD, "auto")
        sp_group.prepare()
        to.clear()
        for on_gpu in (True, False):
            send = torch.zeros(2).as_subclass(OnGpu) if on_gpu else torch.zeros(2)
            sp_group.transport.launch(send, torch.zeros(2), (1, 1), (1, 1), "the sp group", "q")
        assert [(group == "the sp group", async_op) for group, async_op in to] == [(False, False), (True, True)]
        assert len(nccl.made) == 1 and not sp_group.streams(torch.device("cuda")).blocks


def test_buffers_are_flat_for_backends_that_may_mind(rank):
    """For instance, torch's fake process group copies the sent tensor to the received one, so both need one shape."""
    seen, mover = [], C10d()
    group = types.SimpleNamespace(alltoall_base=lambda recv, send, *_: seen.append((recv.dim(), send.dim())))
    for prepare in (False, True):
        if prepare:
            mover.prepare(SPGroup(dist.group.WORLD))
        mover.launch(torch.zeros(2, 3), torch.zeros(2, 1, 3), (3, 3), (3, 3), group, "q")
    assert seen == [(1, 1), (3, 2)]


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("backends", ["gloo", "cpu:gloo,cuda:gloo"])
def test_gloo_is_waited_for_by_the_host_by_whatever_name_it_was_asked_for(backends, rank):
    group = dist.new_group([0, 1], backend=backends)
    assert SPGroup(group).streams(torch.device("cuda")).blocks and backend_of(group, "cuda") == "gloo"


@pytest.mark.parametrize("value,says", [("1", "1"), ("0", "0; set it to 1 for every rank, see"), (None, "not set; set it to 1")])
def test_doctor_says_whether_communicators_launch_in_one_order(monkeypatch, value, says):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.delenv(doctor.LAUNCH_ORDER, raising=False)
    if value is not None:
        monkeypatch.setenv(doctor.LAUNCH_ORDER, value)
    rows = dict(line.split(maxsplit=1) for line in doctor.versions().splitlines()[-2:])
    assert rows["NCCL"] == "2.28.9" and rows[doctor.LAUNCH_ORDER].startswith(says)


# Copy engines.


def chosen(rank, options):
    nccl = dict(options)
    ulysses, hosts = nccl.pop("ulysses", True), nccl.pop("hosts", None)
    there = ulysses if isinstance(ulysses, bool) else rank in ulysses
    with Nccl(**nccl)(hosts), fast_ulysses(there):
        sp_group = SPGroup(dist.group.WORLD, "copy_engine")
        said = refusal(sp_group.prepare)
        return said[1] if said else type(sp_group.transport.engine).__name__


@pytest.mark.parametrize(
    "options,expected",
    [
        ({}, "FastUlysses"),
        ({"backends": "cpu:gloo,cuda:nccl"}, "FastUlysses"),
        ({"ulysses": False}, "ZeroCta"),
        ({"ulysses": [0]}, "ZeroCta"),  # not on every rank
        (
            {"ulysses": False, "version": (2, 27, 3)},
            'sp_overlap.transport: "copy_engine" can\'t work here: fast-ulysses is not installed (pip install fast-ulysses); '
            'NCCL 2.27.3 has no copy-engine all-to-all, which came with 2.28; use "auto"',
        ),
        (
            {"hosts": ["one", "two"]},
            'sp_overlap.transport: "copy_engine" can\'t work here: the sp group spans 2 nodes; copy engines reach one; use "auto"',
        ),
    ],
)
def test_the_first_engine_that_every_rank_has_is_taken_or_all_reasons_are_named(options, expected, rank):
    assert chosen(rank, options) == expected


def test_torch_without_the_policy_is_refused(rank):
    said = chosen(rank, {"ulysses": False, "cta_policy": False})
    assert f"torch {torch.__version__} has no zero-CTA policy of NCCL" in said


def test_on_gloo_copy_engines_are_refused_before_training_with_the_model_unchanged(rank):
    with models.sequence_parallel_model(2) as (model, _):
        said = refusal(ds_sp_overlap.enable, model, {"transport": "copy_engine"})
        assert models.overlapped_layers(model) == []
    message = 'sp_overlap.transport: "copy_engine" can\'t work here: the sp group\'s backend is gloo, not nccl; use "auto"'
    assert said == ("ValueError", message)


@pytest.mark.parametrize("transport", ["copy_engine", copy_engines.CopyEngine()])
def test_a_copy_engine_that_is_given_to_the_layer_is_refused_where_ranks_share_heads(transport, rank):
    """Copy engines move equal parts only; with shares, parts may be equal on some ranks and unequal on others."""

    def attend(q, k, v, queries=None):
        return q

    layer = ds_sp_overlap.DistributedAttention(attend, dist.group.WORLD, transport=transport)
    q = torch.randn(1, 4, 1, 8)
    kind, message = refusal(layer, q, q, q, 0)
    assert kind == "ValueError" and 'transport "copy_engine" moves equal parts only' in message


@pytest.mark.parametrize("faulty", [0, 1])
def test_doctor_sees_a_nan_of_any_rank(faulty, rank):
    call = doctor.SelfAttention.__call__

    def spoiled(self, x):
        y = call(self, x).clone()
        y.data[0, 0, 0] = float("nan") if rank == faulty else y.data[0, 0, 0]
        return y

    with mock.patch.object(doctor.SelfAttention, "__call__", spoiled):
        errors = doctor._errors(rank, 2, torch.device("cpu"), groups=1, faulty=False)
    assert doctor.verdict({"G = 1": errors, "control": {"output": 1.0}}) == "FAIL"


def thrice(call, layer, x, dy):
    for _ in range(3):
        found = layers.backward(call, layer, x, dy)
    return found


def faults_through(rank, engine, shape):
    """Run a layer whose exchanges an engine moves; return faults, numbers of exchanges and rendezvous, and warnings."""
    nccl = Nccl()
    with nccl(), fast_ulysses(engine == "FastUlysses"), listening() as messages:
        faults = layers.block_faults(rank, shape, thrice)
    calls = len(UlyssesGroup.calls) if engine == "FastUlysses" else nccl.exchanges.count("even")
    said = [message for message in messages if "copy" in message]
    return faults, calls, nccl.exchanges.count("split"), len(nccl.rendezvous), said


CONFIG = {"transport": "copy_engine", "head_groups": 2}


@pytest.mark.parametrize("engine", ["FastUlysses", "ZeroCta"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_equal_parts_go_through_the_engine_and_arrive_where_they_belong(engine, batch_first, rank):
    faults, calls, split, rendezvous, said = faults_through(rank, engine, Shape(config=CONFIG, batch_first=batch_first))
    assert faults == [] and said == []
    assert (calls, split) == (3 * 12 + 2 * (engine == "ZeroCta"), 0)  # two communicators were connected
    if engine == "ZeroCta":  # a pair of buffers for each exchange in flight, and one for NCCL itself
        assert rendezvous == 1 + 2 * 4


@pytest.mark.parametrize("engine", ["FastUlysses", "ZeroCta"])
@pytest.mark.parametrize(
    "shape", [Shape(lengths=(5, 7), config=CONFIG), Shape(heads=5, kv_heads=5, config=CONFIG)], ids=["lengths", "heads"]
)
def test_unequal_parts_fall_back_to_c10d_and_it_says_so_once(engine, shape, rank):
    faults, calls, split, _, said = faults_through(rank, engine, shape)
    assert faults == [] and calls < 3 * 12 and split > 0
    assert len(said) == 1 and "such exchanges go through c10d" in said[0]


def test_ranks_with_different_transports_are_refused(rank):
    shape = Shape(config={"transport": ("c10d", "auto")[rank]})
    _, attend, x, _ = layers.mine(rank, shape)
    kind, message = refusal(layers.call_block, shape, attend, rank, x)
    assert kind == "ValueError" and "sp_overlap {'transport': 'c10d'}" in message and "sp_overlap {}" in message
