"""Determines which rotary embedding a function of transformers computes, from random inputs.

The function may only add, multiply and move numbers (`accounting`). So if it agrees with a `Rotary`
on random numbers, it agrees on all numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from enum import Enum
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...rotary import Rotary
from .accounting import Accounting, free_primes

CosSin = tuple[Tensor, Tensor]

# The following functions turn position embeddings, [b, s, d_rot] or [b, s, d_rot / 2], into the
# tables (cos, sin) [b, s, 1, d_rot].


def as_given(tables: Any) -> CosSin:
    """Return (cos, sin) with unchanged values and an additional dim for heads."""
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
    """Return tables with only the first half of the entries, each repeated: a, a, b, b, .."""
    return each_twice(tuple(table[..., : table.shape[-1] // 2] for table in tables))


def of_complex(table: Any) -> CosSin:
    """Return a complex table's real and imaginary parts, each entry repeated: a, a, b, b, .."""
    return each_twice((table.real, table.imag))


# The functions that expect tables of width d_rot, and those that expect width d_rot / 2.
WIDE = as_given, backwards, first_half_each_twice
NARROW = half_twice, each_twice
ROUNDINGS = "promoted", "kept", "fp32"


class Table(Enum):
    """Stands for an argument with position embeddings: both tables, or one of them."""

    WHOLE, COS, SIN = range(3)


ARITHMETIC = (
    "mul add sub neg rsub __rsub__ __rmul__ __radd__ to float type type_as view_as_complex "
    "view_as_real real imag".split()
)


def rotary_of(
    function: Callable, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Rotary:
    """Return the `Rotary` that computes the same as a call of ``function``.

    Args:
        function: The function, which rotates q and k.
        args: The positional arguments of the call. A `Table` stands for position embeddings. A
            tuple stands for q or k: it is the shape, with "batch" and "seq" for these sizes, and
            the heads before or after "seq". Anything else is the argument itself.
        kwargs: The keyword arguments of the call, as pairs.

    Raises:
        LookupError: if no `Rotary` or more than one computes the same.
        Unknown: if the function uses an operation that is not allowed (`Accounting`).
    """
    call = _Call(functools.partial(function, **dict(kwargs)), args)
    # If one argument has both tables, assume that the function expects complex numbers.
    possible = (of_complex,) if Table.WHOLE in args else WIDE + NARROW
    # For each function of tables, and each order of dims, with the first rounding that fits.
    fitting: dict[Any, Rotary] = {}
    for tables, neighbours, rounding in product(possible, (False, True), ROUNDINGS):
        rotary = Rotary(tables, False, neighbours, rounding)
        if call.agrees(rotary):
            fitting.setdefault((tables, neighbours), rotary)
    if len(fitting) != 1:
        raise LookupError
    (rotary,) = fitting.values()
    # A function that also agrees with narrower tables supports partial rotation.
    partial = dataclasses.replace(rotary, partial=True)
    return partial if call.agrees(partial) else rotary


class _Call:
    """Calls a rotary function, on random q and k of the recorded shapes.

    Args:
        function: The function, with its keyword arguments bound.
        args: The positional arguments, in the form that `rotary_of` describes.

    Attributes:
        accounting: Checks the function's operations in all calls.
    """

    def __init__(self, function: Callable, args: tuple[Any, ...]):
        self.function, self.args = function, args
        shapes = [x for x in args if isinstance(x, tuple)]
        self.dims = max(shape[-1] for shape in shapes)
        # The widths of tables in all calls, and the fixed sizes of q and k.
        half = self.dims // 2
        used = {self.dims, self.dims - 2, half, half - 1}.union(*shapes) - {0, "batch", "seq"}
        batch, seq = free_primes(used)[:2]
        self.sizes = {"batch": batch, "seq": seq}
        self.accounting = Accounting(ARITHMETIC, self.sizes.values())

    def agrees(self, rotary: Rotary) -> bool:
        """Return whether the function and ``rotary`` agree bit for bit on random q and k.

        Args:
            rotary: The rotary embedding to compare with. A partial ``rotary`` is compared with
                narrower tables, which rotate all dims but the last two.

        Raises:
            Unknown: if the function uses an operation that is not allowed.
        """
        width = (self.dims - 2 * rotary.partial) // (1 if rotary.tables in WIDE else 2)
        low, single = torch.bfloat16, torch.float32
        # Pairs (dtype of q and k, dtype of tables). Together they show how the function rounds.
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
        """Return whether the results agree for tables [b, s, width] and these dtypes."""
        generator = torch.Generator().manual_seed(0)
        tables = [self._random(("batch", "seq", width), generator, table_dtype) for _ in range(2)]
        whole: Any = tuple(tables)
        if rotary.tables is of_complex:
            # In a product of complex numbers, a CPU may round both terms, or only their sum. With
            # factors of 8 and 11 bits, or tables of 1 and -1, the terms are exact in fp32.
            exact = torch.Tensor.half if dtype == torch.bfloat16 else torch.sign
            whole = torch.complex(*[exact(table).to(table_dtype) for table in tables])
        of_table = dict(zip(Table, (whole, *tables)))
        # ``inputs`` are the arguments of the function; ``expected`` are the results of ``rotary``.
        inputs = []
        expected = []
        for x in self.args:
            if isinstance(x, tuple):
                inputs.append(self._random(x, generator, dtype))
                # ``rotary`` expects the dim of heads after that of the sequence.
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
        """Return random numbers of ``shape``, where "batch" and "seq" stand for these sizes."""
        sizes = [self.sizes.get(size, size) for size in shape]
        return torch.randn(sizes, generator=generator).to(dtype)
