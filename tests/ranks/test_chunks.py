"""Exchanges of chunks of every rank's tokens: bit for bit what one exchange of all tokens moves."""

import functools
import itertools

import pytest
import torch

from ds_sp_overlap.exchange.chunks import ChunkedExchange
from ds_sp_overlap.exchange.exchange import Exchange, Half, run_halves
from ds_sp_overlap.exchange.geometry import Geometry
from ds_sp_overlap.exchange.layout import chunk_of
from ds_sp_overlap.exchange.sp_group import SPGroup
from tests.harness import transports
from tests.harness.cases import pairs
from tests.harness.guards import Guard, Watched, must_notice
from tests.harness.ranks import no_faults, on_ranks, refusal

HEADS = [(4, 4, 1), (4, 4, 2), (8, 2, 2), (6, 3, 1), (7, 7, 1), (4, 1, 2)]  # query heads, KV heads, head groups
LENGTHS = [(6, 6), (5, 3), (1, 2), (4, 0)]


def geometries(size, rank, lengths):
    layouts = (1, True), (1, False), (3, True), (3, False)
    cases = pairs(itertools.product([of for of in HEADS if of[2] <= of[0] // size], lengths, layouts))
    return [
        Geometry(size, rank, of, batch, heads, kv_heads, groups, batch_first)
        for (heads, kv_heads, groups), of, (batch, batch_first) in cases
    ]


def moved(sp_group, geometry, group, chunks, dims, checked=False):
    """q, k and v of a group to the global side and o back, in one piece if ``chunks`` is 0; outputs and the inputs' gradients."""
    kinds, seq = geometry.kinds[group], geometry.seq_dim
    local = geometry.exchange(kinds, group, dims[: len(kinds)])
    generator = torch.Generator().manual_seed(geometry.sp_rank)
    random = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    xs = [random(each.source.shape).requires_grad_() for each in local.each]

    def exchange(layout, what):
        return Exchange(sp_group, layout, "layer", what, checked)

    ranges = [chunk_of(geometry.seq_lens[geometry.sp_rank], chunk, chunks) for chunk in range(chunks)]
    if chunks:
        sent = [exchange(geometry.exchange(kinds, group, dims[: len(kinds)], c, chunks), f"{kinds}.{c}") for c in range(chunks)]
        parts = [[x.narrow(seq, start, stop - start) for x in xs] for start, stop in ranges]
        tokens = [each.start(*part) for each, part in zip(sent, parts)]
        (ys,) = run_halves([Half(ChunkedExchange(sent), tuple(tokens))])
    else:
        whole = exchange(local, kinds)
        (ys,) = run_halves([Half(whole, (whole.start(*xs),))])
    o = ys[0] * 3  # a rank that gets no KV head with this group has nothing else
    if chunks:
        back = [exchange(geometry.exchange("o", group, dims[:1], c, chunks), f"o.{c}") for c in range(chunks)]
        (tokens,) = run_halves([Half(ChunkedExchange(back), (o, *ys), starts=True)])
        out = torch.cat([each.finish(token) for each, token in zip(back, tokens)], seq)
    else:
        whole = exchange(geometry.exchange("o", group, dims[:1]), "o")
        out = whole.finish(whole.start(o, *ys))
    targets = [out, *ys[1:]]
    return [*ys, out, *torch.autograd.grad(targets, xs, [random(y.shape) for y in targets])]


def moved_otherwise(rank, size, lengths, transport=None):
    """Whatever a chunked exchange moves that one exchange of all tokens does not, and the other way about."""
    found = []
    plain = SPGroup(torch.distributed.group.WORLD, transport() if transport else None)
    for geometry in geometries(size, rank, lengths):
        for group in range(geometry.groups):
            expected = moved(plain, geometry, group, 0, (8, 8, 4))
            for chunks in (1, 2, 4):
                mover = transport() if transport else None
                got = moved(SPGroup(torch.distributed.group.WORLD, mover), geometry, group, chunks, (8, 8, 4))
                bad = [i for i, (x, y) in enumerate(zip(got, expected, strict=True)) if not torch.equal(x, y)]
                bad += mover.faults + mover.unfinished() if mover else []
                found += [f"{geometry}, group {group}, C = {chunks}: {bad}"] * bool(bad)
    return found


def test_chunks_move_what_one_exchange_moves():
    no_faults(2, moved_otherwise, 2, LENGTHS)


def test_so_they_do_between_four_ranks():
    """With KV heads that several ranks need."""
    no_faults(4, moved_otherwise, 4, [(2, 2, 2, 2), (3, 1, 2, 5)])


def spoiled(rank):
    with transports.spoiled_buffers():
        return moved_otherwise(rank, 2, LENGTHS[:2], transports.Late)


def test_no_buffer_is_read_too_early_or_after_its_use():
    no_faults(2, spoiled)


def checked(rank, transport=None):
    """What ``sp_overlap.check`` says of chunks."""
    sp_group, geometry = SPGroup(torch.distributed.group.WORLD, transport), Geometry(2, rank, (5, 3), 2, 8, 2, 2)
    return refusal(moved, sp_group, geometry, 0, 2, (8, 8, 4), True)


def test_check_mode_compares_what_a_chunk_wrote():
    assert on_ranks(2, checked) == [None, None]
    for kind, message in on_ranks(2, checked, transports.Corrupting("dqkv.1")):
        assert kind == "RuntimeError" and "layer dqkv.1: sp_overlap.check: the overlapped exchange differs" in message


def order(rank):
    mover = transports.Recording()
    moved(SPGroup(torch.distributed.group.WORLD, mover), Geometry(2, rank, (4, 4), 1, 4, 4), 0, 3, (8, 8, 4))
    expected = ">qkv.0 >qkv.1 >qkv.2 <qkv.0 <qkv.1 <qkv.2 >o.0 >o.1 >o.2 <o.0 <o.1 <o.2"
    expected += " >do.2 >do.1 >do.0 <do.2 <do.1 <do.0 >dqkv.2 >dqkv.1 >dqkv.0 <dqkv.2 <dqkv.1 <dqkv.0"
    return [] if mover.log == expected.split() else [" ".join(mover.log)]


def test_the_last_chunk_of_a_gradient_travels_first():
    no_faults(2, order)


def test_chunks_of_any_length_lie_end_to_end():
    for length in (0, 1, 3, 10, 64):
        for chunks in (1, 2, 4, 7):
            edges = [edge for chunk in range(chunks) for edge in chunk_of(length, chunk, chunks)]
            assert edges == sorted(edges) and edges[::2] == [0, *edges[1:-1:2]] and edges[-1] == length
            assert length < chunks or all(start < stop for start, stop in zip(edges[::2], edges[1::2]))


WATCHED = [
    Watched(
        Guard(
            "the last chunk first",
            without="for exchange in self.exchanges:",
        ),
        order,
    )
]


@pytest.mark.parametrize("watched", WATCHED, ids=str)
def test_the_suite_notices_without_the_guard(watched):
    must_notice(watched)
