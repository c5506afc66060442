"""Binds a local attention to its extra arguments, and finds the attention's modules and tensors.

An extra argument is any argument beside q, k and v.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..exchange.geometry import Geometry
from ..exchange.layout import Range


@dataclass(frozen=True)
class PerHead:
    """Wraps an argument of local attention that has a slice for each query head (slopes, sinks).

    `LocalAttention` gives each call of the local attention the slices of the call's heads.

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


class LocalAttention:
    """Holds a local attention with its extra arguments, for one call of a layer.

    Args:
        attention: The local attention.
        args: The extra positional arguments.
        kwargs: The extra keyword arguments.

    Attributes:
        seq_dim: The dimension of the sequence in q, k, v and o. This and the following attributes
            are set by `begin`.
        where: Name of the layer, for errors.
        tensors: The tensors among the arguments, and the tensors that the attention held at the
            start of the call. These references cost no memory: others hold the tensors anyhow.
        modules: The modules that the attention is or holds, as far as they can be found.
        training: For each of ``modules``, whether it was in training mode at the start of the call.
        learned: All tensors among the arguments, and all parameters of ``modules``, that require a
            gradient.
    """

    def __init__(self, attention: Callable[..., Any], args: tuple, kwargs: dict[str, Any]):
        self.attention, self.args, self.kwargs = attention, args, kwargs

    @property
    def extra(self) -> tuple:
        """Return the extra arguments."""
        return self.args + tuple(self.kwargs.values())

    def bind(self, geometry: Geometry) -> Callable[..., Any]:
        """Return an `execution.Attend`, which passes the extra arguments to the local attention.

        In place of a `PerHead`, the local attention gets the slices of the group's heads.
        """
        attention, args, kwargs = self.attention, self.args, self.kwargs
        if geometry.shares == 1 and not any(isinstance(x, PerHead) for x in self.extra):
            return lambda group, q, k, v: attention(q, k, v, *args, **kwargs)
        return functools.partial(self._attend, geometry)

    def _attend(
        self, geometry: Geometry, group: int, q: Tensor, k: Tensor, v: Tensor, *queries: Range
    ) -> Any:
        first, last = geometry.query_range(geometry.sp_rank, group)
        heads = slice(first, last)  # guard: rows of its heads
        args = [_sliced(x, heads) for x in self.args]
        kwargs = {key: _sliced(x, heads) for key, x in self.kwargs.items()}
        if queries:
            kwargs["queries"] = queries[0]
        return self.attention(q, k, v, *args, **kwargs)

    def arguments(self) -> list[Tensor]:
        """Return the tensors among the extra arguments, also those in dicts, lists and wrappers."""
        tensors = []
        for leaf in tree_leaves((self.args, self.kwargs)):
            tensor = leaf.tensor if isinstance(leaf, (ForAllHeads, PerHead)) else leaf
            if isinstance(tensor, Tensor):
                tensors.append(tensor)
        return tensors

    def begin(self, seq_dim: int, where: str, without: Sequence[nn.Module]) -> None:
        """Set the attributes at the start of a call whose backward may recompute attention.

        Args:
            seq_dim: The dimension of the sequence.
            where: Name of the layer.
            without: The layer's projections and norms. Local attention does not read their
                parameters, even if one of its closures holds the whole layer.
        """
        self.seq_dim, self.where, self._without = seq_dim, where, without
        arguments = self.arguments()
        self.tensors = arguments + self._held()
        self._begun = _versions(self.tensors)
        self.modules: list[nn.Module] = []
        for x in _made_of(self.attention):
            if isinstance(x, nn.Module):
                self.modules += x.modules()
        self.training = [module.training for module in self.modules]
        # Compare by identity, since a parameter may also be given as an argument.
        may_learn = set(map(id, arguments))
        for module in self.modules:
            may_learn.update(map(id, module.parameters(recurse=False)))
        learned = {id(x): x for x in self.tensors if x.requires_grad and id(x) in may_learn}
        self.learned = list(learned.values())

    def is_as_begun(self) -> bool:
        """Return whether attention holds the tensors that it held at the start, all unchanged."""
        # ``tensors`` keeps the first tensors alive, so no newer tensor has the id of one of them.
        return _versions(self.arguments() + self._held()) == self._begun

    def _held(self) -> list[Tensor]:
        """Return the tensors that the attention may read beside its arguments, as far as known.

        These are: parameters, buffers and attributes of its modules; tensors in its partials and
        closures; attributes of the objects in its partials and closures, and of the callable
        itself.
        """
        held = []
        for x in _made_of(self.attention):
            if isinstance(x, ModuleType):  # `__self__` of a function written in C is its module
                continue
            held.append(x)
            for inner in x.modules() if isinstance(x, nn.Module) else (x,):
                for name in ("_parameters", "_buffers", "__dict__"):
                    values = getattr(inner, name, None)
                    held += values.values() if isinstance(values, dict) else ()
        own = {id(parameter) for module in self._without for parameter in module.parameters()}
        tensors = {id(x): x for x in held if isinstance(x, Tensor) and id(x) not in own}
        return list(tensors.values())


def _versions(tensors: list[Tensor]) -> list[tuple[int, int | None]]:
    """Return the id of each tensor and its version, which an in-place change increases.

    The version is None for tensors that were made in inference mode.
    """
    return [(id(x), None if x.is_inference() else x._version) for x in tensors]


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
