"""transformers: which rotary embedding a function carries out, found out by trying it on random
numbers.

All that it does is accounted for (`accounting`): it adds, multiplies and moves, so that what holds
for some numbers holds for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ...rotary import Rotary
from .accounting import Accounting, Unknown

# How (cos, sin) [.., 1, d_rot] come from position embeddings.


def as_given(tables: Any) -> tuple[Tensor, Tensor]:
    cos, sin = tables
    return cos.unsqueeze(2), sin.unsqueeze(2)


def backwards(tables: Any) -> tuple[Tensor, Tensor]:
    cos, sin = tables
    return cos.unsqueeze(2), -sin.unsqueeze(2)


def half_twice(tables: Any) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat((table, table), -1).unsqueeze(2) for table in tables)
    return cos, sin


def each_twice(tables: Any) -> tuple[Tensor, Tensor]:
    cos, sin = (table.repeat_interleave(2, -1).unsqueeze(2) for table in tables)
    return cos, sin


def first_half_each_twice(tables: Any) -> tuple[Tensor, Tensor]:
    return each_twice(tuple(table[..., : table.shape[-1] // 2] for table in tables))


def of_complex(table: Any) -> tuple[Tensor, Tensor]:
    return each_twice((table.real, table.imag))


WIDE, NARROW = (
    (as_given, backwards, first_half_each_twice),
    (half_twice, each_twice),
)  # tables of d_rot and of d_rot / 2
ROUNDINGS = "promoted", "kept", "fp32"


class Table(Enum):
    """Arguments that stand for position embeddings."""

    WHOLE, COS, SIN = range(3)


ARITHMETIC = "mul add sub neg rsub __rsub__ __rmul__ __radd__ to float type type_as view_as_complex view_as_real real imag".split()


@functools.lru_cache(maxsize=256)
def rotary_of(
    function: Callable, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> dict[str, Any]:
    """Keywords of the `Rotary` that does what a call of ``function`` does to q and k.

    args   each a `Table`; the shape of q or k as a tuple with "batch" and "seq" in it, heads before
           or behind; or the argument itself

    Raises LookupError where there is none, which says why.
    """
    dims = max(x[-1] for x in args if isinstance(x, tuple))
    differs = functools.partial(_differs, functools.partial(function, **dict(kwargs)), args)
    is_complex = Table.WHOLE in args
    widths: dict[Callable, int] = (
        {of_complex: dims // 2}
        if is_complex
        else {**dict.fromkeys(WIDE, dims), **dict.fromkeys(NARROW, dims // 2)}
    )

    def fits(width: int, rotary: Rotary) -> bool:
        try:
            return not differs(width, rotary, torch.float32, torch.float32, tolerance=1e-5)
        except (RuntimeError, ValueError, TypeError):  # of tables that it isn't made for
            return False

    found = {
        (tables, neighbours, partial)
        for tables, width in widths.items()
        for neighbours in (False, True)
        for partial in (False, True)
        if fits(width - 2 * partial * width // dims, Rotary(tables, partial, neighbours))
    }
    kinds = {kind[:2] for kind in found}
    if len(kinds) != 1:
        raise LookupError
    ((tables, neighbours),) = kinds
    rotary = functools.partial(
        Rotary, tables, partial=(tables, neighbours, True) in found, neighbours=neighbours
    )
    low, single, double = torch.bfloat16, torch.float32, torch.float64
    dtypes = [(low, single), (double, single)] + (
        [] if is_complex else [(low, low), (torch.float16, torch.float16)]
    )  # of q and k, of the tables
    for rounding in ROUNDINGS:
        if not any(
            differs(widths[tables], rotary(rounding=rounding), *pair, tolerance=0)
            for pair in dtypes
        ):
            return {"tables": tables, **rotary.keywords, "rounding": rounding}
    raise LookupError


def _differs(
    function: Callable,
    args: tuple,
    width: int,
    rotary: Rotary,
    dtype: torch.dtype,
    of_tables: torch.dtype,
    tolerance: float,
) -> bool:
    """Whether ``function``, with tables of ``width``, gives something else than ``rotary``. Raises
    what ``function`` raises.
    """
    generator = torch.Generator().manual_seed(0)
    used = {size for x in args if isinstance(x, tuple) for size in x if isinstance(size, int)} | {
        width
    }
    batch, seq = [
        size for size in (3, 5, 7, 11, 13, 17, 19, 23, 29) if all(each % size for each in used)
    ][:2]
    sizes = {"batch": batch, "seq": seq}

    def random(shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.randn([sizes.get(size, size) for size in shape], generator=generator).to(dtype)

    moving = {at: random(x, dtype) for at, x in enumerate(args) if isinstance(x, tuple)}
    cos, sin = (random((batch, seq, width), of_tables) for _ in range(2))
    whole: Any = torch.complex(cos, sin) if rotary.tables is of_complex else (cos, sin)
    tables = {Table.WHOLE: whole, Table.COS: cos, Table.SIN: sin}
    accounting = Accounting(ARITHMETIC, sizes.values())
    with accounting:
        given = function(
            *(moving.get(at, tables[x] if isinstance(x, Table) else x) for at, x in enumerate(args))
        )
    if state := next(
        (name for _, name, value in accounting.names if isinstance(value, (bool, int, float))), ""
    ):
        raise Unknown(f"it uses the global {state}")
    for (at, x), y in zip(
        moving.items(), (given,) if isinstance(given, Tensor) else given, strict=True
    ):
        heads_first = args[at][1] != "seq"
        expected = rotary(x.transpose(1, 2) if heads_first else x, whole)
        expected = expected.transpose(1, 2) if heads_first else expected
        if y.dtype != expected.dtype or y.shape != expected.shape:
            return True
        if not torch.allclose(y, expected, rtol=tolerance, atol=tolerance):
            return True
    return False
