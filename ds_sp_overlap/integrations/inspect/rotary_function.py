"""transformers: tells which rotary embedding a function computes, by its results on random numbers.

The function may only add, multiply and move numbers (`accounting`). So if the function agrees with
a `Rotary` on random numbers, they agree on all numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...rotary import Rotary
from .accounting import Accounting, free_primes

# How (cos, sin) [b, s, 1, d_rot] follow from position embeddings. The given tables have the shape
# [b, s, d_rot] or [b, s, d_rot / 2].


def as_given(tables: Any) -> tuple[Tensor, Tensor]:
    """Return the tables (cos, sin) as they are, with a dim for heads."""
    cos, sin = tables
    return cos.unsqueeze(2), sin.unsqueeze(2)


def backwards(tables: Any) -> tuple[Tensor, Tensor]:
    """Return the tables of a rotation by negative angles."""
    cos, sin = tables
    return cos.unsqueeze(2), -sin.unsqueeze(2)


def half_twice(tables: Any) -> tuple[Tensor, Tensor]:
    """Return each table followed by itself."""
    cos, sin = (torch.cat((table, table), -1).unsqueeze(2) for table in tables)
    return cos, sin


def each_twice(tables: Any) -> tuple[Tensor, Tensor]:
    """Return tables that have each entry twice in a row."""
    cos, sin = (table.repeat_interleave(2, -1).unsqueeze(2) for table in tables)
    return cos, sin


def first_half_each_twice(tables: Any) -> tuple[Tensor, Tensor]:
    """Return tables that have each entry of the first half twice in a row."""
    return each_twice(tuple(table[..., : table.shape[-1] // 2] for table in tables))


def of_complex(table: Any) -> tuple[Tensor, Tensor]:
    """Return the real and the imaginary part of a complex table, each entry twice in a row."""
    return each_twice((table.real, table.imag))


# For tables of width d_rot, and of width d_rot / 2.
WIDE = as_given, backwards, first_half_each_twice
NARROW = half_twice, each_twice
ROUNDINGS = "promoted", "kept", "fp32"


class Table(Enum):
    """Arguments that stand for position embeddings: both tables in one object, or one table."""

    WHOLE, COS, SIN = range(3)


ARITHMETIC = (
    "mul add sub neg rsub __rsub__ __rmul__ __radd__ to float type type_as view_as_complex "
    "view_as_real real imag".split()
)


def rotary_of(
    function: Callable, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> dict[str, Any]:
    """Tell which `Rotary` computes what a call of ``function`` computes.

    Args:
        function: The function, which rotates q and k.
        args: Its positional arguments. A `Table` stands for position embeddings. A tuple stands for
            q or k: its shape, with "batch" and "seq" in place of those sizes, and the heads in
            front of "seq" or behind it. Anything else is the argument itself.
        kwargs: Its keyword arguments, as pairs.

    Returns:
        The keywords of the `Rotary`.

    Raises:
        LookupError: if no `Rotary` computes the same, or it can't be told which one does.
        Unknown: if the function does what is not accounted for.
    """
    call = _Call(functools.partial(function, **dict(kwargs)), args)
    # A function that is given both tables in one object is taken to expect complex numbers.
    is_complex = Table.WHOLE in args
    low, single, double = torch.bfloat16, torch.float32, torch.float64
    possible = [of_complex] if is_complex else [*WIDE, *NARROW]
    fitting = set()
    for kind in product(possible, (False, True), (False, True)):
        tables, neighbours, partial = kind
        if call.agrees(Rotary(tables, partial, neighbours), single, single, tolerance=1e-5):
            fitting.add(kind)
    # The same function may fit with whole tables and with narrower ones: then it can do both.
    kinds = {(tables, neighbours) for tables, neighbours, _ in fitting}
    if len(kinds) != 1:
        raise LookupError
    ((tables, neighbours),) = kinds
    partial = (tables, neighbours, True) in fitting
    # (dtype of q and k, dtype of the tables): the results must agree bit for bit, which shows how
    # the function rounds.
    dtypes = [(low, single), (double, single)]
    if not is_complex:
        dtypes += [(low, low), (torch.float16, torch.float16)]
    for rounding in ROUNDINGS:
        keywords: dict[str, Any] = dict(tables=tables, neighbours=neighbours, rounding=rounding)
        if all(call.agrees(Rotary(**keywords), *pair, tolerance=0) for pair in dtypes):
            return {**keywords, "partial": partial}
    raise LookupError


class _Call:
    """A call of a rotary function, on random q and k of the shapes that it was given.

    Args:
        function: The function, with its keyword arguments.
        args: Its positional arguments, as in `rotary_of`.

    Attributes:
        accounting: Accounts for the function in all runs.
    """

    def __init__(self, function: Callable, args: tuple[Any, ...]):
        self.function, self.args = function, args
        shapes = [x for x in args if isinstance(x, tuple)]
        self.dims = max(shape[-1] for shape in shapes)
        # The widths of tables that are tried, and the sizes of q and k.
        used = {self.dims, self.dims - 2, self.dims // 2, self.dims // 2 - 1} - {0}
        for shape in shapes:
            used.update(size for size in shape if isinstance(size, int))
        batch, seq = free_primes(used)[:2]
        self.sizes = {"batch": batch, "seq": seq}
        self.accounting = Accounting(ARITHMETIC, self.sizes.values())

    def agrees(
        self, rotary: Rotary, dtype: torch.dtype, table_dtype: torch.dtype, tolerance: float
    ) -> bool:
        """Return whether the function and ``rotary`` agree on random q and k.

        Args:
            rotary: What the function is compared with. A partial one is given narrower tables,
                which rotate all dims but the last two.
            dtype: The dtype of q and k.
            table_dtype: The dtype of the tables.
            tolerance: The relative and absolute tolerance.

        Raises:
            Unknown: if the function does what is not accounted for.
        """
        generator = torch.Generator().manual_seed(0)
        width = (self.dims - 2 * rotary.partial) // (1 if rotary.tables in WIDE else 2)
        if not width:
            return False
        tables = [self._random(("batch", "seq", width), generator, table_dtype) for _ in range(2)]
        if rotary.tables is of_complex:
            # A CPU may round both terms of a product of complex numbers, or their sum alone. So
            # terms must be exact in fp32: of 8 and 11 bits, or by 1 and -1.
            exact = torch.sign if dtype == torch.float64 else torch.Tensor.half
            tables = [exact(table).to(table_dtype) for table in tables]
        whole: Any = torch.complex(*tables) if rotary.tables is of_complex else tuple(tables)
        of_table = dict(zip(Table, (whole, *tables)))
        inputs: list[Any] = []
        # q or k or both, as the function is given them and as ``rotary`` returns them.
        expected: list[Tensor] = []
        try:
            for x in self.args:
                if isinstance(x, tuple):
                    heads = self._random(x, generator, dtype)
                    # ``rotary`` takes the heads behind the sequence.
                    at = 2 if x[1] == "seq" else 1
                    expected.append(rotary(heads.transpose(2, at), whole).transpose(2, at))
                    inputs.append(heads)
                else:
                    inputs.append(of_table[x] if isinstance(x, Table) else x)
            with self.accounting:
                rotated = self.function(*inputs)
            results = (rotated,) if isinstance(rotated, Tensor) else rotated
            for y, of_rotary in zip(results, expected, strict=True):
                if y.dtype != of_rotary.dtype or y.shape != of_rotary.shape:
                    return False
                if not torch.allclose(y, of_rotary, rtol=tolerance, atol=tolerance):
                    return False
        except (RuntimeError, ValueError, TypeError):  # for tables of another width
            return False
        return True

    def _random(
        self, shape: tuple[Any, ...], generator: torch.Generator, dtype: torch.dtype
    ) -> Tensor:
        """Return random numbers; ``shape`` may name "batch" and "seq"."""
        sizes = [self.sizes.get(size, size) for size in shape]
        return torch.randn(sizes, generator=generator).to(dtype)
