"""transformers: which rotary embedding a function carries out, found out by trying it on random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..rotary import Rotary

# How (cos, sin) [.., d_rot] come from position embeddings, all of them with a dimension for the heads.


def _as_given(tables: Any) -> tuple[Tensor, Tensor]:
    cos, sin = tables
    return cos.unsqueeze(2), sin.unsqueeze(2)


def _backwards(tables: Any) -> tuple[Tensor, Tensor]:
    cos, sin = tables
    return cos.unsqueeze(2), -sin.unsqueeze(2)


def _half_twice(tables: Any) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat((table, table), -1).unsqueeze(2) for table in tables)
    return cos, sin


def _each_twice(tables: Any) -> tuple[Tensor, Tensor]:
    cos, sin = (table.repeat_interleave(2, -1).unsqueeze(2) for table in tables)
    return cos, sin


def _first_half_each_twice(tables: Any) -> tuple[Tensor, Tensor]:
    return _each_twice(tuple(table[..., : table.shape[-1] // 2] for table in tables))


def _complex(table: Any) -> tuple[Tensor, Tensor]:
    return _each_twice((table.real, table.imag))


WIDE, NARROW = (_as_given, _backwards, _first_half_each_twice), (_half_twice, _each_twice)
ROUNDINGS = "promoted", "kept", "fp32"


class _Call:
    """A call of a rotary function, with random numbers for q, k and the tables.

    function, args, kwargs   the call as it was seen
    tables                   what stood for the position embeddings in it
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict[str, Any], tables: tuple, batch: int, seq: int):
        self.function, self.args, self.kwargs, self.tables = function, args, kwargs, tables
        self.batch, self.seq = batch, seq
        self.dims = max(x.shape[-1] for x in args if isinstance(x, Tensor) and self._name(x) is None)

    def _name(self, x: Any) -> Any:
        names = [self.tables, *self.tables]
        return next((at for at, table in enumerate(names) if x is table), None)

    def differs(self, width: int, rotary: Rotary, dtype: torch.dtype, of_tables: torch.dtype, tolerance: float) -> bool:
        """Whether the function, with tables of a width, gives something else than ``rotary``. Raises what it raises."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        tables = [random(self.batch, self.seq, width, dtype=of_tables) for _ in range(2)]
        whole: Any = torch.complex(*tables) if rotary.tables is _complex else tuple(tables)
        args, moving = [], []
        for x in self.args:
            name = self._name(x)
            if name is None and isinstance(x, Tensor):
                x = random(*x.shape, dtype=dtype)
                moving.append(x)
            args.append(x if name is None else (whole, *tables)[name])
        given = self.function(*args, **self.kwargs)
        for x, y in zip(moving, (given,) if isinstance(given, Tensor) else given, strict=True):
            swap = x.shape[1] != self.seq  # [b, h, s, d]
            expected = rotary(x.transpose(1, 2) if swap else x, whole)
            expected = expected.transpose(1, 2) if swap else expected
            if y.dtype != expected.dtype or y.shape != expected.shape:
                return True
            if not torch.allclose(y, expected, rtol=tolerance, atol=tolerance):
                return True
        return False

    def rotary(self) -> dict[str, Any]:
        """Keywords of the `Rotary` that does the same. Raises LookupError where there is none."""
        is_complex = any(x is self.tables for x in self.args)
        kinds = (
            [(_complex, self.dims // 2)] if is_complex else [(t, self.dims) for t in WIDE] + [(t, self.dims // 2) for t in NARROW]
        )
        found = [
            (tables, neighbours, partial)
            for tables, width in kinds
            for neighbours in (False, True)
            for partial in (False, True)
            if self._fits(width - 2 * partial * width // self.dims, Rotary(tables, partial, neighbours))
        ]
        alike = {kind[:2] for kind in found}
        if len(alike) != 1:
            raise LookupError
        tables, neighbours = alike.pop()
        options: dict[str, Any] = dict(tables=tables, partial=any(kind[2] for kind in found), neighbours=neighbours)
        width = dict(kinds)[tables]
        half = torch.float32 if is_complex else torch.bfloat16
        for rounding in ROUNDINGS:
            rotary = Rotary(**options, rounding=rounding)
            if not any(self.differs(width, rotary, torch.bfloat16, of_tables, 0) for of_tables in {half, torch.float32}):
                return {**options, "rounding": rounding}
        raise LookupError

    def _fits(self, width: int, rotary: Rotary) -> bool:
        try:
            return not self.differs(width, rotary, torch.float32, torch.float32, 1e-5)
        except (RuntimeError, ValueError, TypeError):  # of tables that it isn't made for
            return False


def rotary_of(calls: list[tuple[Callable, tuple, dict[str, Any]]], tables: tuple, batch: int, seq: int) -> dict[str, Any]:
    """Keywords of the `Rotary` that does what all ``calls`` do; their numbers are not looked at, but their shapes.

    Raises LookupError where there is none.
    """
    first, *others = (_Call(*call, tables, batch, seq).rotary() for call in calls)
    if any(other != first for other in others):
        raise LookupError
    return first
