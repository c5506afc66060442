"""Binds the arguments of a local attention beside q, k and v, and looks for what else it reads."""

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
    """An argument of local attention that has a slice for each query head: slopes, biases, sinks.

    `bind_arguments` cuts it. `call_geometry` checks its length, and `heads` cuts its probe.
    `SelfAttention.local_of` takes the tensor out, for its gradient.

    Attributes:
        tensor: [h, ..]. The slices of all heads. Every call of the local attention gets the slices
            of the heads that it is called with.
    """

    tensor: Tensor

    def check(self, heads: int) -> None:
        """Check that there is a slice for each of ``heads`` heads.

        Raises:
            ValueError: if there isn't.
        """
        if self.tensor.dim() == 0 or len(self.tensor) != heads:
            raise ValueError(
                f"PerHead: a tensor of {list(self.tensor.shape)} for {heads} query heads; "
                f"give [{heads}, ..]"
            )


@dataclass(frozen=True)
class ForAllHeads:
    """An argument of local attention that is one for all heads, whatever its shape.

    Other tensors are suspected to have a slice for each head if a dimension is as long as the
    number of heads of a rank (`call_geometry`). The local attention takes ``tensor`` out itself.

    Attributes:
        tensor: Of any shape; None for none.
    """

    tensor: Tensor | None


def bind_arguments(
    local_attention: Callable[..., Any], call: Call, args: tuple, kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Bind the arguments of a local attention beside q, k and v.

    Returns:
        An `execution.Attend`, which gives the attention the slices of each `PerHead` that belong to
        the heads of the group.
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
    """Return the slices of some query heads of a `PerHead`, or any other argument as it is."""
    return x.tensor[heads] if isinstance(x, PerHead) else x


def takes(local_attention: Any, name: str) -> bool:
    """Return whether a local attention has a parameter, for instance ``queries``.

    ``**kwargs`` does not count, since the value might be ignored.
    """
    attend = local_attention.forward if isinstance(local_attention, nn.Module) else local_attention
    try:
        return name in inspect.signature(attend).parameters  # guard: no keyword is swallowed
    except (TypeError, ValueError):
        return False


def modules_of(attend: Any) -> list[nn.Module]:
    """Return the modules that an attention is or is made of, as far as they can be found.

    Looks into modules, partials, the object of a bound method, and closures.
    """
    modules: list[nn.Module] = []
    for x in _made_of(attend):
        if isinstance(x, nn.Module):
            modules += x.modules()
    return modules


def tensors_of(attend: Any, without: Iterable[nn.Module] = ()) -> list[Tensor]:
    """Return the tensors that an attention may read beside its arguments, as far as found.

    Those are parameters, buffers and attributes of its modules (`modules_of`), tensors in its
    partials and closures, and attributes of objects that are in there or called.

    Args:
        attend: The local attention.
        without: Modules whose parameters are left out: an attention that reaches the whole layer,
            by a closure for instance, reads nothing of its projections and norms.
    """
    held: list[Any] = []
    for x in _made_of(attend):
        if isinstance(x, ModuleType):  # a function of C belongs to one
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
    """Yield what an attention is made of: what is called, and what that holds or is bound to."""
    if isinstance(attend, functools.partial):
        for x in (attend.func, *attend.args, *attend.keywords.values()):
            yield from _made_of(x)
        return
    yield attend
    yield getattr(attend, "__self__", None)
    for cell in getattr(attend, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a variable that has no value now
            yield cell.cell_contents
