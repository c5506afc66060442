"""transformers: tells which rotary embedding a function computes, by its results on random numbers.

The function may only add, multiply and move numbers (`accounting`). So if the function agrees with
a `Rotary` on random numbers, they agree on all numbers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...rotary import Rotary
from .accounting import Accounting, LoadedGlobal, Unknown, free_primes, global_names, is_plain

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


def globals_of(function: Callable) -> list[LoadedGlobal]:
    """Return the globals that a function loads, the variables of the functions around it, and what
    functions among these load in turn.

    For example ``rotate_half``, which somebody may patch.
    """
    loaded: list[LoadedGlobal] = []
    found, todo = set(), [function]
    while todo:
        current = todo.pop()
        if hasattr(current, "__wrapped__"):
            todo.append(current.__wrapped__)
        if not isinstance(current, types.FunctionType) or current in found:
            continue
        found.add(current)
        # Functions of torch are taken as they are.
        if (current.__module__ or "").split(".")[0] == "torch":
            continue
        places: list[tuple[Any, str]] = []
        for name in global_names(current.__code__)[0]:
            if name in current.__globals__:  # else a builtin
                places.append((current.__globals__, name))
        places += zip(current.__closure__ or (), current.__code__.co_freevars)
        for namespace, name in places:
            value = LoadedGlobal(namespace, name, None).value_now()
            loaded.append(LoadedGlobal(namespace, name, value))
            if callable(value):
                todo.append(value)
    return loaded


def rotary_of(
    function: Callable, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> dict[str, Any]:
    """Return what `_rotary_of` finds, once for a function and what it loads."""
    values = []
    for loaded in globals_of(function):
        if isinstance(loaded.value, types.FunctionType) or is_plain(loaded.value):
            values.append(loaded.value)
    return _rotary_of(function, args, kwargs, tuple(values))


@functools.lru_cache(maxsize=256)
def _rotary_of(
    function: Callable,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    loaded: tuple[Any, ...],
) -> dict[str, Any]:
    """Return the keywords of the `Rotary` that computes what a call of ``function`` computes.

    Args:
        function: The function, which rotates q and k.
        args: Its positional arguments. A `Table` stands for position embeddings. A tuple stands for
            q or k: its shape, with "batch" and "seq" in place of those sizes, and the heads in
            front of "seq" or behind it. Anything else is the argument itself.
        kwargs: Its keyword arguments, as pairs, so that the call can be a key of the cache.
        loaded: The functions and constants that it loads, for the cache alone.

    Raises:
        LookupError: if no `Rotary` computes the same, or it can't be told which one does.
        Unknown: if the function does what is not accounted for.
    """
    dims = max(shape[-1] for shape in args if isinstance(shape, tuple))
    differs = functools.partial(_differs, functools.partial(function, **dict(kwargs)), args)
    # A function that is given both tables in one object is taken to expect complex numbers.
    is_complex = Table.WHOLE in args
    # For each kind of tables its width: the last dim of what the function is given.
    widths: dict[Callable, int] = {of_complex: dims // 2}
    if not is_complex:
        widths = {**dict.fromkeys(WIDE, dims), **dict.fromkeys(NARROW, dims // 2)}

    def fits(width: int, rotary: Rotary) -> bool:
        """Return whether the function computes what ``rotary`` computes, but for rounding."""
        try:
            return not differs(width, rotary, torch.float32, torch.float32, tolerance=1e-5)
        except (RuntimeError, ValueError, TypeError):  # for tables of another width
            return False

    fitting = set()
    for (tables, width), neighbours, partial in product(
        widths.items(), (False, True), (False, True)
    ):
        # Narrower tables, which rotate the first dims only: all but the last two.
        table_width = width - 2 * width // dims if partial else width
        if fits(table_width, Rotary(tables, partial, neighbours)):
            fitting.add((tables, neighbours, partial))
    # The same function may fit with whole tables and with narrower ones: then it can do both.
    kinds = {(tables, neighbours) for tables, neighbours, _ in fitting}
    if len(kinds) != 1:
        raise LookupError
    ((tables, neighbours),) = kinds
    partial = (tables, neighbours, True) in fitting
    low, single, double = torch.bfloat16, torch.float32, torch.float64
    # (dtype of q and k, dtype of the tables): the results must agree bit for bit, which shows how
    # the function rounds.
    dtypes = [(low, single), (double, single)]
    if not is_complex:
        dtypes += [(low, low), (torch.float16, torch.float16)]
    for rounding in ROUNDINGS:
        keywords: dict[str, Any] = dict(partial=partial, neighbours=neighbours, rounding=rounding)
        rotary = Rotary(tables, **keywords)
        if not any(differs(widths[tables], rotary, *pair, tolerance=0) for pair in dtypes):
            return {"tables": tables, **keywords}
    raise LookupError


def _differs(
    function: functools.partial,
    args: tuple,
    width: int,
    rotary: Rotary,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    tolerance: float,
) -> bool:
    """Return whether ``function`` and ``rotary`` differ on random q and k.

    Args:
        function: The function.
        args: Its arguments as in `rotary_of`.
        width: The last dim of the tables that the function is given.
        rotary: What it is compared with.
        dtype: The dtype of q and k.
        table_dtype: The dtype of the tables.
        tolerance: The relative and absolute tolerance.

    Raises:
        Unknown: if the function does what is not accounted for.
        Exception: whatever the function raises.
    """
    generator = torch.Generator().manual_seed(0)
    used = {width}
    for shape in args:
        if isinstance(shape, tuple):
            used.update(size for size in shape if isinstance(size, int))
    batch, seq = free_primes(used)[:2]
    sizes = {"batch": batch, "seq": seq}

    def random(shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Return random numbers; ``shape`` may name "batch" and "seq"."""
        return torch.randn([sizes.get(size, size) for size in shape], generator=generator).to(dtype)

    # q or k or both, by their places among the arguments.
    heads = {index: random(x, dtype) for index, x in enumerate(args) if isinstance(x, tuple)}
    cos, sin = (random((batch, seq, width), table_dtype) for _ in range(2))
    if rotary.tables is of_complex:
        # A CPU may round both terms of a product of complex numbers, or their sum alone. So terms
        # must be exact in fp32: of 8 and 11 bits, or by 1 and -1.
        exact = torch.sign if dtype == torch.float64 else torch.Tensor.half
        cos, sin = (exact(table).to(table_dtype) for table in (cos, sin))
    whole: Any = torch.complex(cos, sin) if rotary.tables is of_complex else (cos, sin)
    tables = {Table.WHOLE: whole, Table.COS: cos, Table.SIN: sin}
    inputs = []
    for index, x in enumerate(args):
        if isinstance(x, tuple):
            x = heads[index]
        elif isinstance(x, Table):
            x = tables[x]
        inputs.append(x)
    accounting = Accounting(ARITHMETIC, sizes.values())
    with accounting:
        rotated = function(*inputs)
    # The cache goes by what `globals_of` finds. It would keep what another constant gave that has
    # changed since.
    known = {(id(loaded.namespace), loaded.name) for loaded in globals_of(function.func)}
    for namespace, name, value in accounting.loaded_globals:
        if isinstance(value, (bool, int, float)) and (id(namespace), name) not in known:
            raise Unknown(f"it uses the global {name}")
    results = (rotated,) if isinstance(rotated, Tensor) else rotated
    for (index, x), y in zip(heads.items(), results, strict=True):
        heads_first = args[index][1] != "seq"
        expected = rotary(x.transpose(1, 2) if heads_first else x, whole)
        expected = expected.transpose(1, 2) if heads_first else expected
        if y.dtype != expected.dtype or y.shape != expected.shape:
            return True
        if not torch.allclose(y, expected, rtol=tolerance, atol=tolerance):
            return True
    return False
