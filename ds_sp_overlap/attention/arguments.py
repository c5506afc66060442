"""Binds a local attention to its extra arguments, and finds the attention's modules and tensors.

An extra argument is any argument beside q, k and v.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ..exchange.layout import Range
from .runtime.execution import Call


@dataclass(frozen=True)
class PerHead:
    """Wraps an argument of local attention that has a slice for each query head (slopes, sinks).

    `bind_arguments` gives each call of the local attention the slices of the call's heads.

    Attributes:
        tensor: [h, ..]. The slices of all query heads.
    """

    tensor: Tensor

    def check(self, heads: int) -> None:
        """Check that the tensor has a slice for each of ``heads`` heads.

        Raises:
            ValueError: if the tensor has another number of slices.
        """
        if self.tensor.dim() == 0 or len(self.tensor) != heads:
            raise ValueError(
                f"PerHead: a tensor of {list(self.tensor.shape)} for {heads} query heads; "
                f"give [{heads}, ..]"
            )


@dataclass(frozen=True)
class ForAllHeads:
    """Wraps an argument of local attention that applies to all heads, whatever its shape.

    If a dimension of a bare tensor is as long as a rank's number of heads, the tensor may have a
    slice for each head, so the layer runs in one head group (`call_geometry`). A wrapped tensor
    does not have this effect. The local attention receives the wrapper and reads its ``tensor``.

    Attributes:
        tensor: A tensor of any shape, or None.
    """

    tensor: Tensor | None


def bind_arguments(
    local_attention: Callable[..., Any], args: tuple, kwargs: dict[str, Any], call: Call
) -> Callable[..., Any]:
    """Bind the arguments of a local attention beside q, k and v.

    Returns:
        An `execution.Attend`, which passes the bound arguments to the local attention. In place of
        a `PerHead`, the local attention gets the slices of the group's heads.
    """
    geometry = call.geometry
    has_slices = any(isinstance(x, PerHead) for x in (*args, *kwargs.values()))
    if geometry.shares == 1 and not has_slices:
        return lambda group, q, k, v: local_attention(q, k, v, *args, **kwargs)

    def attend(group: int, q: Tensor, k: Tensor, v: Tensor, *queries: Range) -> Any:
        heads = slice(*geometry.query_range(geometry.sp_rank, group))
        own_args = [_sliced(x, heads) for x in args]
        own = {key: _sliced(x, heads) for key, x in kwargs.items()}
        if queries:
            own["queries"] = queries[0]
        return local_attention(q, k, v, *own_args, **own)

    return attend


def _sliced(x: Any, heads: slice) -> Any:
    """Return the slices of ``heads`` if ``x`` is a `PerHead`; otherwise return ``x``."""
    return x.tensor[heads] if isinstance(x, PerHead) else x


def takes(local_attention: Any, name: str) -> bool:
    """Return whether a local attention has a parameter called ``name``.

    ``**kwargs`` does not count, since the attention might ignore the value.
    """
    attend = local_attention.forward if isinstance(local_attention, nn.Module) else local_attention
    try:
        return name in inspect.signature(attend).parameters  # guard: no keyword is swallowed
    except (TypeError, ValueError):
        return False


def modules_of(attend: Any) -> list[nn.Module]:
    """Return the modules that an attention is or holds, as far as they can be found.

    Looks into modules, partials, closures, and the object of a bound method.
    """
    modules: list[nn.Module] = []
    for x in _made_of(attend):
        if isinstance(x, nn.Module):
            modules += x.modules()
    return modules


def tensors_of(attend: Any, without: Iterable[nn.Module] = ()) -> list[Tensor]:
    """Return the tensors that an attention may read beside its arguments, if they can be found.

    These are: parameters, buffers and attributes of its modules (`modules_of`); tensors in its
    partials and closures; attributes of the objects in its partials and closures, and of the
    callable itself.

    Args:
        attend: The local attention.
        without: Modules whose parameters are left out: the layer's projections and norms. Local
            attention does not read these, even if one of its closures holds the whole layer.
    """
    held: list[Any] = []
    for x in _made_of(attend):
        if isinstance(x, ModuleType):  # `__self__` of a function written in C is its module
            continue
        held.append(x)
        for inner in x.modules() if isinstance(x, nn.Module) else (x,):
            for name in ("_parameters", "_buffers", "__dict__"):
                values = getattr(inner, name, None)
                held += values.values() if isinstance(values, dict) else ()
    own = {id(parameter) for module in without for parameter in module.parameters()}
    tensors = {id(x): x for x in held if isinstance(x, Tensor) and id(x) not in own}
    return list(tensors.values())


def _made_of(attend: Any) -> Iterator[Any]:
    """Yield the callables of an attention, and the objects that they hold or are bound to."""
    if isinstance(attend, functools.partial):
        for x in (attend.func, *attend.args, *attend.keywords.values()):
            yield from _made_of(x)
        return
    yield attend
    yield getattr(attend, "__self__", None)
    for cell in getattr(attend, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a closure's variable may have no value yet
            yield cell.cell_contents
