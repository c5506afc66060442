"""Accounting: run somebody's code, and see every operation on a tensor, every size that is looked
at, and every name that is loaded.

What a forward does to the numbers it happens to be given proves little: a clamp at 8, a temperature
of 1 and a gate of 0 leave small numbers as they are. So operations are known by what they are. One
that is not `allowed` makes the code unknown, and so do a comparison of sizes or dtypes, a question
to torch about its state, and a global that may hold anything.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import enum
import functools
import gc
import logging
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MISSING: Any = object()  # what code looked for in vain

MOVES = frozenset(
    "view reshape transpose permute contiguous flatten unflatten unsqueeze squeeze split split_with_sizes chunk tensor_split narrow "
    "select unbind cat concat stack expand expand_as repeat_interleave movedim moveaxis swapaxes swapdims view_as reshape_as mT T "
    "clone repeat __getitem__ dim ndim __len__".split()
)
_BUILTINS = frozenset(
    "abs all any bool callable dict enumerate float getattr hasattr int isinstance issubclass len list map max min print "
    "reversed round set slice sorted str sum super tuple zip".split()
)
PACKAGES = {
    "torch",
    "transformers",
    "typing",
    "typing_extensions",
    "math",
    "collections",
    "builtins",
    "types",
    "warnings",
}
# Whose functions may look at what they like: only what they compute is accounted for.
_LIBRARIES = sys.stdlib_module_names | {"torch", "ds_sp_overlap", "peft"}
TORCH = (
    "torch._tensor",
    "torch.functional",
    "torch.nn.functional",
    "torch.overrides",
    "torch._jit_internal",
    "torch._VF",
)
_STATE = {
    "__class__",
    "__dict__",
    "__globals__",
    "__closure__",
    "__code__",
}  # attributes by which one comes to anything


class Unknown(Exception):
    """Why code is not known."""


class Size(int):
    """A size of a tensor that is not the same in every call: it may say the size of another tensor,
    and be multiplied for it.
    """

    accounting: Accounting

    def __mul__(self, other: Any) -> int:
        self.accounting.sizes.add(product := int.__mul__(self, other))
        return self.accounting.size(product)

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        if not (
            isinstance(other, Size) and int.__eq__(self, other)
        ):  # guard: sizes that differ may be equal in another call
            self.accounting.fail("compares a size of its tensors")
        return True

    def __ne__(self, other: object) -> bool:
        return not self == other


def _computed(size: Size, *_: Any) -> Any:
    return size.accounting.fail(
        "computes with a size of its tensors"
    )  # guard: nothing goes by a size


for _names in (
    "add radd sub rsub floordiv rfloordiv truediv rtruediv mod rmod pow rpow neg abs divmod round floor ceil trunc",
    "lt le gt ge bool int float hash lshift rshift and or xor invert",
):
    for _name in _names.split():
        setattr(Size, f"__{_name}__", _computed)


class Dtype:
    """Stands for the dtype of a tensor, which may be that of another one, and nothing else."""

    def __init__(self, accounting: Accounting):
        self._accounting = accounting

    def __eq__(self, other: object) -> bool:
        return other is self or self._accounting.fail("looks at the dtype or device of a tensor")

    def __getattr__(self, name: str) -> NoReturn:
        self._accounting.fail("looks at the dtype or device of a tensor")

    __hash__ = object.__hash__


def is_plain(value: Any) -> bool:
    """Whether a value is a constant."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return (
        value is None
        or value is ...
        or not isinstance(value, Size)
        and isinstance(value, (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype))
    )


def forward_of(kind: type, beside: str = "") -> Callable:
    """The forward that runs where a module of a class is called; raises Unknown where torch wraps
    it, as in ``no_grad``.

    beside   a module of decorators that are taken off
    """
    forward: Any = kind.forward  # type: ignore[attr-defined]
    while (where := getattr(forward, "__globals__", {}).get("__name__", "")) == beside:
        forward = forward.__wrapped__
    if (
        not isinstance(forward, types.FunctionType) or where.split(".")[0] == "torch"
    ):  # guard: what torch does around it
        raise Unknown(f"its forward is wrapped by {where or type(forward).__name__}")
    return forward


class Accounting(TorchFunctionMode):
    """Run the body, and raise Unknown if it does what is not accounted for, even where the body
    catches that.

    allowed   names of the operations on tensors that are let through, beside `MOVES`
    sizes     sizes of tensors that are not the same in every call; what they divide, but for 2, is
              made of them
    hidden    whether dtypes and devices are hidden
    names     the globals that were loaded and might be something else one day: where they are,
              their names and values
    codes     what ran
    """

    def __init__(
        self, allowed: Iterable[str] = (), sizes: Collection[int] = (), hidden: bool = False
    ):
        super().__init__()
        self.allowed, self.sizes = MOVES.union(allowed), set(sizes) - {0, 1}
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.codes: set[types.CodeType] = set()
        self.fault = ""
        self.of_torch: tuple[str, ...] = TORCH
        self.drops_nothing = True  # where p is looked at again
        self._same = Dtype(self) if hidden else None

    def fail(self, reason: str) -> NoReturn:
        self.fault = self.fault or reason
        raise Unknown(f"its forward {self.fault}")

    def __enter__(self) -> Accounting:
        super().__enter__()
        self._before, self._collects = sys.getprofile(), gc.isenabled()
        gc.disable()  # a finaliser that happens to run is not of the code that is looked at
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *raised: Any) -> None:
        sys.setprofile(self._before)
        if self._collects:
            gc.enable()
        super().__exit__(*raised)
        if self.fault:
            raise Unknown(f"its forward {self.fault}") from raised[1]

    def strings(self) -> set[str]:
        """Strings in what ran that may be keywords."""
        return {
            x
            for code in self.codes
            for x in code.co_consts
            if isinstance(x, str) and x.isidentifier()
        }

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """In the body nothing is accounted for."""
        sys.setprofile(None)
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            sys.setprofile(self._profile)

    def look(self, holder: Any, name: str) -> Any:
        """An attribute, `MISSING` if there is none; what a property does for it is seen when it is
        looked at again.
        """
        with self.looking_away():
            return getattr(holder, name, MISSING)

    # Operations.

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", str(function)), kwargs or {}
        if name == "__get__":
            name = function.__self__.__name__
        if name in ("shape", "size", "numel"):
            found = function(*args, **kwargs)
            return self.size(found) if isinstance(found, int) else tuple(map(self.size, found))
        if name == "__len__" and isinstance(self.size(args[0].shape[0]), Size):
            self.fail("asks for the len() of a tensor")
        if name in ("dtype", "device"):
            return self._same or self.kind(name, args[0])
        if name in ("to", "type_as", "type") and self.moves_only(args, kwargs):
            return args[0]
        if name == "dropout":
            return self._dropout(*args, **kwargs)
        if name == "__getitem__" and not self._is_place(args[1]):
            self.fail("looks up numbers by a tensor or a list")
        if name not in self.allowed:  # guard: only known operations
            self.fail(f"computes what is not known here: {name}")
        if name not in MOVES and any(
            isinstance(x, Size) for x in (*args, *kwargs.values())
        ):  # guard: sizes are no numbers
            self.fail("computes with a size of its tensors")
        return self.done(name, function, args, kwargs)

    def done(self, name: str, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What an operation that is allowed gives."""
        return function(*args, **kwargs)

    def kind(self, name: str, x: Tensor) -> Any:
        """dtype or device of a tensor."""
        return getattr(x, name)

    def moves_only(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a cast is none."""
        given = [*args[1:], *kwargs.values()]
        return (
            all(isinstance(x, (Tensor, bool)) or x is self._same for x in given)
            and "to" not in self.allowed
        )

    def size(self, count: int) -> int:
        if count not in self.sizes and not any(
            count % size == 0 for size in self.sizes if size > 2
        ):  # guard: joined dims too
            return count
        made = Size(count)
        made.accounting = self
        return made

    def _is_place(self, at: Any) -> bool:
        if isinstance(at, slice):
            return all(x is None or isinstance(x, int) for x in (at.start, at.stop, at.step))
        return (
            all(map(self._is_place, at))
            if isinstance(at, tuple)
            else at is None or at is ... or type(at) in (int, Size)
        )

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """A dropout that drops nothing; ``p`` and ``training`` are looked at like all else."""
        if self.drops_nothing and (p == 0 or not training):
            return input
        self.fail("computes what is not known here: dropout")

    # Code.

    def _profile(self, frame: types.FrameType, event: str, called: Any) -> None:
        """Look at a call that the code makes, which Python tells of."""
        where = _module(frame)
        of = where.split(".")[0]
        if event == "c_call" and of not in _LIBRARIES:
            self._look_at_builtin(called)
        elif event != "call" or of in _LIBRARIES - {"torch"} or frame.f_code.co_name == "__del__":
            return
        elif of != "torch":
            self._account(frame)
        elif frame.f_back is not None and _module(frame.f_back).split(".")[0] not in (
            "torch",
            "ds_sp_overlap",
        ):
            if not where.startswith(self.of_torch) and frame.f_code.co_name != "is_compiling":
                self.fail(f"calls {where}.{frame.f_code.co_name}")

    def _look_at_builtin(self, called: Any) -> None:
        of, name = getattr(called, "__module__", None) or "", called.__name__
        if of.split(".")[0] == "torch" and name not in self.allowed | {
            "dropout"
        }:  # guard: torch is asked nothing
            self.fail(f"calls {of}.{name}")
        if of == "math" and name not in (
            "sqrt",
            "pow",
            "exp",
            "prod",
        ):  # others look through a `Size`
            self.fail(f"calls math.{name}")

    def _account(self, frame: types.FrameType) -> None:
        """Look at what the code that begins to run can reach."""
        code = frame.f_code
        if code in self.codes:
            return
        self.codes.add(code)
        loaded, stores = _loaded(code)
        if stores or not _STATE.isdisjoint(code.co_names):
            self.fail(
                f"reaches for {', '.join(stores or sorted(_STATE.intersection(code.co_names)))}"
            )
        for name in loaded:
            value = frame.f_globals.get(name, MISSING)
            if value is MISSING:
                if name not in _BUILTINS and not (
                    isinstance(kind := getattr(builtins, name, None), type)
                    and issubclass(kind, Exception)
                ):
                    self.fail(f"uses {name} ({code.co_name})")
            elif not _is_known(value):  # guard: only known globals
                self.fail(f"uses the global {name}")
            else:
                self.names.append((frame.f_globals, name, value))
        for name in code.co_freevars:
            if name in frame.f_locals and not _is_known(frame.f_locals[name], free=True):
                self.fail(f"uses {name} of the function around it")


def _module(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


@functools.lru_cache(maxsize=4096)
def _loaded(code: types.CodeType) -> tuple[list[str], list[str]]:
    """Names of globals that code loads, and that it changes."""
    steps = list(dis.get_instructions(code))
    stores = [step.argval for step in steps if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")]
    return list(
        dict.fromkeys(step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    ), stores


def _is_known(value: Any, free: bool = False) -> bool:
    """Whether a global holds a constant, a function, or a module or class of a library: nothing
    that is changed on the way.
    """
    if free and (
        isinstance(value, (Tensor, Size))
        or isinstance(value, tuple)
        and all(_is_known(x, free) for x in value)
    ):
        return True
    if isinstance(value, torch.jit.ScriptFunction):  # whose operations no mode of torch sees
        return False
    if is_plain(value) or isinstance(value, (logging.Logger, typing.TypeVar, enum.EnumMeta)):
        return True
    if isinstance(value, types.FunctionType):
        return all(
            map(is_plain, (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
        )
    of = (
        value.__name__
        if isinstance(value, types.ModuleType)
        else getattr(value, "__module__", None) or type(value).__module__
    )
    if isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType)):
        return of.split(".")[0] in PACKAGES or free
    return type(value).__module__.split(".")[0] in (
        "ds_sp_overlap",
        "typing",
        "torch",
        "typing_extensions",
    )
