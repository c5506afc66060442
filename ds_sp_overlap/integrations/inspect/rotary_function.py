"""Determines which rotary embedding a function of transformers computes, from random inputs.

The function may only add, multiply and move numbers (`accounting`). So if it agrees with a `Rotary`
on random numbers, it agrees on all numbers.
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
from .library import Keywords

CosSin = tuple[Tensor, Tensor]

# The following functions turn position embeddings, [b, s, d_rot] or [b, s, d_rot / 2], into
# (cos, sin) [b, s, 1, d_rot].


def as_given(tables: Any) -> CosSin:
    """Return (cos, sin) with their values as they are, and a dim for heads."""
    cos, sin = tables
    return cos.unsqueeze(2), sin.unsqueeze(2)


def backwards(tables: Any) -> CosSin:
    """Return the tables of a rotation by negative angles."""
    cos, sin = tables
    return as_given((cos, -sin))


def half_twice(tables: Any) -> CosSin:
    """Return each table followed by itself."""
    return as_given([torch.cat((table, table), -1) for table in tables])


def each_twice(tables: Any) -> CosSin:
    """Return tables with each entry repeated: a, a, b, b, .."""
    return as_given([table.repeat_interleave(2, -1) for table in tables])


def first_half_each_twice(tables: Any) -> CosSin:
    """Return tables with each entry of the first half repeated: a, a, b, b, .."""
    return each_twice(tuple(table[..., : table.shape[-1] // 2] for table in tables))


def of_complex(table: Any) -> CosSin:
    """Return real and imaginary part of a complex table, each entry repeated: a, a, b, b, .."""
    return each_twice((table.real, table.imag))


# The functions for tables of width d_rot, and for tables of width d_rot / 2.
WIDE = as_given, backwards, first_half_each_twice
NARROW = half_twice, each_twice
ROUNDINGS = "promoted", "kept", "fp32"


class Table(Enum):
    """Placeholders for arguments with position embeddings: both tables, or one of them."""

    WHOLE, COS, SIN = range(3)


ARITHMETIC = (
    "mul add sub neg rsub __rsub__ __rmul__ __radd__ to float type type_as view_as_complex "
    "view_as_real real imag".split()
)


def rotary_of(
    function: Callable, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Keywords:
    """Return the keywords of the `Rotary` that computes the same as a call of ``function``.

    Args:
        function: The function, which rotates q and k.
        args: Its positional arguments. A `Table` represents position embeddings. A tuple represents
            q or k by its shape, with "batch" and "seq" for these sizes, and the heads before or
            after "seq". Anything else is the argument itself.
        kwargs: Its keyword arguments, as pairs.

    Returns:
        The keywords of the `Rotary`.

    Raises:
        LookupError: if no `Rotary` computes the same, or several do.
        Unknown: if the function uses an operation that is not allowed (`Accounting`).
    """
    call = _Call(functools.partial(function, **dict(kwargs)), args)
    # Assume that a function with both tables in one argument expects complex numbers.
    possible = (of_complex,) if Table.WHOLE in args else WIDE + NARROW
    # For each function of tables and order of dims, the first rounding with which results agree.
    fitting: dict[Any, str] = {}
    for tables, neighbours, rounding in product(possible, (False, True), ROUNDINGS):
        if call.agrees(Rotary(tables, False, neighbours, rounding)):
            fitting.setdefault((tables, neighbours), rounding)
    if len(fitting) != 1:
        raise LookupError
    (((tables, neighbours), rounding),) = fitting.items()
    # A function that agrees with narrower tables, too, supports partial rotation.
    partial = call.agrees(Rotary(tables, True, neighbours, rounding))
    return dict(tables=tables, neighbours=neighbours, rounding=rounding, partial=partial)


class _Call:
    """A call of a rotary function, on random q and k of the recorded shapes.

    Args:
        function: The function, with its keyword arguments.
        args: Its positional arguments, as in `rotary_of`.

    Attributes:
        accounting: Checks the operations of the function in all runs.
    """

    def __init__(self, function: Callable, args: tuple[Any, ...]):
        self.function, self.args = function, args
        shapes = [x for x in args if isinstance(x, tuple)]
        self.dims = max(shape[-1] for shape in shapes)
        # The widths of the tables in all runs, and the fixed sizes of q and k.
        half = self.dims // 2
        used = {self.dims, self.dims - 2, half, half - 1}.union(*shapes) - {0, "batch", "seq"}
        batch, seq = free_primes(used)[:2]
        self.sizes = {"batch": batch, "seq": seq}
        self.accounting = Accounting(ARITHMETIC, self.sizes.values())

    def agrees(self, rotary: Rotary) -> bool:
        """Return whether the function and ``rotary`` agree bit for bit on random q and k.

        Args:
            rotary: The rotary embedding to compare with. If ``rotary`` is partial, the tables are
                narrower, and rotate all dims except the last two.

        Raises:
            Unknown: if the function uses an operation that is not allowed.
        """
        width = (self.dims - 2 * rotary.partial) // (1 if rotary.tables in WIDE else 2)
        low, single = torch.bfloat16, torch.float32
        # Pairs (dtype of q and k, dtype of the tables), which show how the function rounds.
        dtypes = [(low, single), (single, single), (torch.float64, single)]
        if rotary.tables is not of_complex:
            dtypes += [(low, low), (torch.float16, torch.float16)]
        try:
            return width > 0 and all(self._agrees(rotary, width, *pair) for pair in dtypes)
        except (RuntimeError, ValueError, TypeError):  # The function needs tables of another width.
            return False

    def _agrees(
        self, rotary: Rotary, width: int, dtype: torch.dtype, table_dtype: torch.dtype
    ) -> bool:
        """Return whether the results for tables [b, s, width] of these dtypes agree."""
        generator = torch.Generator().manual_seed(0)
        tables = [self._random(("batch", "seq", width), generator, table_dtype) for _ in range(2)]
        whole: Any = tuple(tables)
        if rotary.tables is of_complex:
            # In a product of complex numbers, a CPU may round both terms, or only their sum. Make
            # the terms exact in fp32: by factors of 8 and 11 bits, or by tables of 1 and -1.
            exact = torch.Tensor.half if dtype == torch.bfloat16 else torch.sign
            whole = torch.complex(*[exact(table).to(table_dtype) for table in tables])
        of_table = dict(zip(Table, (whole, *tables)))
        # ``inputs`` are the arguments of the function; ``expected`` are the results of ``rotary``.
        inputs: list[Any] = []
        expected: list[Tensor] = []
        for x in self.args:
            if isinstance(x, tuple):
                inputs.append(self._random(x, generator, dtype))
                # ``rotary`` expects the dim of heads after the sequence.
                at = 2 if x[1] == "seq" else 1
                heads = inputs[-1].transpose(2, at)
                expected.append(rotary(heads, whole).transpose(2, at))
            else:
                inputs.append(of_table[x] if isinstance(x, Table) else x)
        with self.accounting:
            rotated = self.function(*inputs)
        results = (rotated,) if isinstance(rotated, Tensor) else rotated
        pairs = zip(results, expected, strict=True)
        return all(y.dtype == like.dtype and torch.equal(y, like) for y, like in pairs)

    def _random(
        self, shape: tuple[Any, ...], generator: torch.Generator, dtype: torch.dtype
    ) -> Tensor:
        """Return random numbers of ``shape``, in which "batch" and "seq" stand for sizes."""
        sizes = [self.sizes.get(size, size) for size in shape]
        return torch.randn(sizes, generator=generator).to(dtype)
