"""transformers: the forward of an attention layer, run on labels, with an account of all that it
does (`accounting`).

Every number that goes in, and every number that a projection, a norm, a rotation or the attention
function would return, is a label: a whole number that occurs once. Operations that move numbers are
let through, so what they moved is told by where its labels turn up; no other operation is. No
weight is read, and no module is called.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .accounting import MISSING, Accounting, Dtype, Unknown, forward_of, is_plain
from .library import functions_of
from .rotary_function import Table
from .tokenwise import own_call

CACHES = "past_key_values", "past_key_value", "layer_past"
UNUSED = (
    *CACHES,
    "cache_position",
    "use_cache",
    "output_attentions",
)  # arguments that change nothing in training
DTYPES = (
    None,
    torch.float32,
    torch.bfloat16,
    torch.float16,
)  # that labels claim to have; None where nobody may ask


@dataclass(frozen=True)
class Case:
    """How a forward is called: with a mask or none, told what may be left out or not, on tokens
    [batch, seq] of some dtype.
    """

    training: bool
    masked: bool
    told: bool
    batch: int
    place: int
    dtype: torch.dtype | None


def cases(training: bool) -> list[Case]:
    """Those that must give the same reading."""
    kinds = (True, False, 1, 0), (False, True, 2, 1), (False, False, 1, 1), (True, True, 2, 0)
    return [Case(training, *kind, dtype) for kind, dtype in zip(kinds, DTYPES)]


class Out:
    """Labels that something returned, and what it was given."""

    def __init__(self, name: str, given: Tensor, shape: tuple[int, ...], run: Run):
        self.name, self.given = name, given
        self.labels = run.labels(*shape)
        self.first, self.count = int(self.labels.flatten()[0]), self.labels.numel()

    def find(self, x: Tensor) -> Tensor:
        """Where each number of ``x`` is among the labels, flat; -1 where it is none of them."""
        at = x - self.first
        return torch.where((at >= 0) & (at < self.count), at, -1)

    def rows(self, x: Tensor) -> Tensor | None:
        """``x`` with what was given in place of its labels; None unless its last dim is a row of
        what was given, in order.
        """
        at = self.find(x)
        if (
            x.shape[-1] != (width := self.given.shape[-1])
            or self.count != self.given.numel()
            or (at < 0).any()
        ):
            return None
        in_order = (at % width == torch.arange(width)).all() and (
            at // width == at[..., :1] // width
        ).all()
        return self.given.flatten()[at] if in_order else None


class Opaque:
    """An argument that may be handed on, compared with None, and nothing else."""

    def __init__(self, run: Any):
        self._run = run

    def __bool__(self) -> bool:
        return self._run.fail("looks at an argument")

    def __eq__(self, other: object) -> bool:
        return other is self or bool(self)

    __hash__ = object.__hash__


class Tables(tuple):
    """(cos, sin) or complex tables: may be taken apart and moved, not computed with."""

    def to(self, *args: Any, **kwargs: Any) -> Tables:
        if not all(isinstance(x, (Dtype, torch.device)) for x in (*args, *kwargs.values())):
            raise Unknown("its forward casts position embeddings")
        return self


class Looked:
    """The layer, its config or what they hold, as a forward sees it: what it looks at is noted, its
    children return labels.
    """

    def __init__(self, value: Any, path: tuple[Any, ...], run: Any):
        vars(self).update(_value=value, _path=path, _run=run)

    def __getattr__(self, name: str) -> Any:
        run, value = self._run, self._run.look(self._value, name)
        if value is MISSING:
            run.looked.append(((*self._path, name), MISSING))
            raise AttributeError(name)
        if not self._path and name == "training":
            return run.training
        if not self._path and isinstance(value, nn.Module):
            return run.child(name, value)
        if inspect.ismethod(value) and value.__self__ is self._value and not self._path:
            run.looked.append(((name, "__func__"), value.__func__))
            return types.MethodType(value.__func__, self)
        return self._found(name, value)

    def __getitem__(self, at: Any) -> Any:
        if type(at) not in (int, str) or not isinstance(self._value, (list, dict)):
            self._run.fail(f"looks into {'.'.join(map(str, self._path))}")
        return self._found((at,), self._value[at])

    def _found(self, at: Any, value: Any) -> Any:
        run, path = self._run, (*self._path, at)
        if isinstance(value, Tensor) and not run.takes_parameters:
            run.fail(f"reads {'.'.join(map(str, path))}")
        known = is_plain(value) or value is contextlib.nullcontext
        if known or isinstance(value, (Tensor, types.FunctionType)):
            run.looked.append((path, value))
            return value
        return Looked(value, path, run)

    def __setattr__(self, name: str, value: Any) -> None:
        self._run.fail(f"sets {name}")

    __class__ = property(lambda self: type(self._value))  # of isinstance

    def _no(self, *_: Any) -> Any:
        return self._run.fail(f"looks into {'.'.join(map(str, self._path))}")

    __eq__ = __len__ = __iter__ = __contains__ = __bool__ = __setitem__ = __delattr__ = __call__ = (
        _no
    )


class Child:
    def __init__(self, name: str, module: nn.Module, run: Run):
        self._name, self._module, self._run = name, module, run

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        run, module = self._run, self._module
        if args or kwargs or not isinstance(x, Tensor):
            run.fail(f"gives {self._name} more than one tensor")
        if is_identity(self._name, module, run):
            return x
        width = getattr(module, "out_features", None)
        with torch._C.DisableTorchFunction():
            out = Out(
                self._name, x, tuple(x.shape) if width is None else (*x.shape[:-1], width), run
            )
        run.outs.append(out)
        return out.labels

    def __getattr__(self, name: str) -> Any:
        self._run.fail(f"reads {self._name}.{name}")


def is_identity(name: str, module: Any, run: Any) -> bool:
    """Whether a child returns what it is given: a dropout of nothing, which is looked at again.
    Fails of one that drops out.
    """
    if own_call(module):
        run.fail(f"calls {name} ({type(module).__name__}), which has a __call__ of its own")
    if getattr(module, "out_features", None) is None:
        run.looked.append(((name, "__class__"), type(module)))
    if type(module) is nn.Identity:
        return True
    if not isinstance(module, nn.modules.dropout._DropoutNd):
        return False
    run.looked.append(((name, "p"), module.p))
    if run.training and module.p > 0:
        run.fail(f"calls {name}, which drops out")
    return True


class _Functions:
    """In place of transformers' attention functions."""

    def __init__(self, attend: Callable):
        self._attend = attend

    def get_interface(self, *_: Any) -> Callable:
        return self._attend

    def __getitem__(self, _: str) -> Callable:
        return self._attend


@contextlib.contextmanager
def replaced(module: nn.Module, new: Callable[[str, Any], Any]) -> Iterator[None]:
    """In the body, ``new(name, value)`` stands for the globals of the module's code that it is not
    None for.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    for function in functions_of(type(module)):
        known = function.__globals__
        for name in function.__code__.co_names:
            if name in known and (instead := new(name, known[name])) is not None:
                before.append((known, name, known[name]))
                known[name] = instead
    try:
        yield
    finally:
        for known, name, value in reversed(before):
            known[name] = value


class Run:
    """One run of a layer's forward on labels.

    x, mask, tables, position_ids, more   what its forward was given: hidden states [b, s, m], and
                                          what stands for the rest; ``more`` by further keywords,
                                          empty if it takes none
    outs                                  what its children returned, in the order of their calls
    rotations, rotated                    functions and what they were called with, and what they
                                          returned
    q, k, v, options, o                   what its attention was given and returned, [b, h, s, d]
                                          and [b, s, h, d]
    returned, weights                     what its forward returned, and what stands for the weights
                                          of attention in it
    looked, names                         what it looked at on the way: names from the layer on, and
                                          globals; and what it found
    constants                             strings in its code, which may be keywords

    Raises Unknown.
    """

    takes_parameters = True  # of its own, for attention

    def __init__(self, module: Any, case: Case, keywords: set[str]):
        self.module, self.training, self.case = module, case.training, case
        self.outs: list[Out] = []
        self.rotations: list[tuple[Callable, tuple, tuple]] = []
        self.rotated: list[Out] = []
        self.looked: list[tuple[tuple[Any, ...], Any]] = [
            ((*CLASS, name), getattr(type(module), name)) for name in RUNS
        ]
        self._count = 0
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.constants: set[str] = set()
        self.more: dict[str, Opaque] = {}
        self.layer = Looked(module, (), self)
        config = module.config
        known = {
            x
            for holder in (vars(config), *map(vars, module.modules()))
            for x in holder.values()
            if isinstance(x, int) and x
        }
        primes = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)
        free = [
            size for size in primes if all(x % size for x in known)
        ]  # sizes by which they are told
        self.batch, self.seq = free[0] if case.batch > 1 else 1, free[1 + case.place]
        self.x = self.labels(self.batch, self.seq, config.hidden_size)
        self.tables = Tables(
            (self.labels(self.batch, self.seq, 2), self.labels(self.batch, self.seq, 2))
        )
        self.weights, self.position_ids = Opaque(self), Opaque(self)
        self.mask = Opaque(self) if case.masked else None
        self.o: Any = None
        sizes = {self.batch, self.seq, self.batch * self.seq}
        self.accounting = OfLabels(case.dtype, sizes)
        forward = forward_of(type(module))
        given = self._arguments(forward, keywords)
        with replaced(module, self._instead), self.accounting:
            self.returned = forward(self.layer, **given)
        if self.o is None:
            raise Unknown("its forward calls no attention function")
        self.names = [
            each
            for each in self.accounting.names
            if not isinstance(each[2], _Functions) and not hasattr(each[2], "_rotary")
        ]
        self.constants = (
            self.accounting.strings()
            - set(inspect.signature(forward).parameters)
            - self.options.keys()
        )

    def fail(self, reason: str) -> NoReturn:
        self.accounting.fail(reason)

    def look(self, holder: Any, name: str) -> Any:
        return self.accounting.look(holder, name)

    def labels(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        self._count += count
        return torch.arange(self._count - count, self._count).view(shape)

    def child(self, name: str, module: nn.Module) -> Child:
        return Child(name, module, self)

    def _arguments(self, forward: Callable, keywords: set[str]) -> dict[str, Any]:
        given = dict(
            hidden_states=self.x, attention_mask=self.mask, position_embeddings=self.tables
        )
        given["position_ids"] = self.position_ids if self.case.told else None
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if unknown := next(
            (name for name in names if name not in given and name not in UNUSED), None
        ):
            raise Unknown(f"its forward takes {unknown}")
        self.more = (
            {name: Opaque(self) for name in {"sp_overlap", *keywords}}
            if len(names) < len(parameters)
            else {}
        )
        told = {name: Opaque(self) for name in UNUSED if self.case.told and name not in CACHES}
        return {**{name: given.get(name, told.get(name)) for name in names}, **self.more}

    def _instead(self, name: str, value: Any) -> Any:
        """Rotations and attention functions that return labels."""
        if name == "ALL_ATTENTION_FUNCTIONS":
            return _Functions(self._attend)
        return (
            self._rotary(value)
            if "rotary" in name and callable(value) and not isinstance(value, type)
            else None
        )

    def _rotary(self, function: Callable) -> Callable:
        def rotary(*args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                tables = dict(zip(Table, (self.tables, *self.tables)))
                said = [
                    next((table for table, x in tables.items() if x is given), given)
                    for given in args
                ]
                moving = [x for x in said if isinstance(x, Tensor)]
                outs = [Out(function.__name__, x, tuple(x.shape), self) for x in moving]
                places = {self.batch: "batch", self.seq: "seq"}
                shapes = tuple(
                    tuple(places.get(n, n) for n in x.shape) if isinstance(x, Tensor) else x
                    for x in said
                )
                self.rotations.append((function, shapes, tuple(kwargs.items())))
            self.rotated += outs
            return outs[0].labels if len(outs) == 1 else tuple(out.labels for out in outs)

        vars(rotary)["_rotary"] = True
        return rotary

    def _attend(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple:
        if self.o is not None or module is not self.layer or attention_mask is not self.mask:
            self.fail(
                "calls its attention more than once, or with a mask that is not as it is given"
            )
        self.q, self.k, self.v, self.options = q, k, v, options
        with torch._C.DisableTorchFunction():
            self.o = self.labels(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        return self.o, self.weights


CLASS, RUNS = ("__class__",), ("forward", "__call__")  # what runs when a module is called


class OfLabels(Accounting):
    """Of labels, which claim to have a dtype."""

    def __init__(self, dtype: torch.dtype | None, sizes: set[int]):
        super().__init__(sizes=sizes, hidden=dtype is None)
        self.dtype = dtype

    def kind(self, name: str, x: Tensor) -> Any:
        return self.dtype if name == "dtype" else super().kind(name, x)

    def moves_only(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        given = [
            x
            for x in (*args[1:], *kwargs.values())
            if x is not self.dtype and not isinstance(x, torch.device)
        ]
        return super().moves_only(args[:1] + tuple(given), {})
