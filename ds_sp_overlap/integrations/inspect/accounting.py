"""Accounts for everything that could change what a layer's code computes.

`Code` finds the functions that a forward may run, all of them torch's or transformers'. `Accounting`
sees every operation on a tensor, and every use of a tensor's size, dtype or device. See Note
[Operations, not numbers].

Note [Operations, not numbers]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Running a forward on some numbers and looking at the results proves little: a clamp at 8, a
temperature of 1 and a gate of 0 leave small numbers as they are. So an operation is judged by its
name. An operation that is not allowed makes the code unknown. So does a comparison of sizes or
dtypes, by which the code could compute something else in another call. Code of somebody's own, which
could also go by anything else and write anywhere, is not run at all.
"""

from __future__ import annotations

import enum
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .library import defined_in, is_library_function, renames_cache

# Stands for the value of an attribute or a global that does not exist.
MISSING: Any = object()

# Operations that move numbers, and compute nothing with them.
MOVES = frozenset(
    "view reshape transpose permute contiguous flatten unflatten unsqueeze squeeze split "
    "split_with_sizes chunk tensor_split narrow select unbind cat concat stack expand expand_as "
    "repeat_interleave movedim moveaxis swapaxes swapdims view_as reshape_as mT T clone repeat "
    "__getitem__ dim ndim __len__".split()
)


# Packages whose classes code may use; and functions that ask torch about its state, by their
# beginnings.
_PACKAGES = sys.stdlib_module_names | {"torch", "transformers", "typing_extensions"}
_QUESTIONS = "is_grad_", "is_autocast_", "is_inference_"


class Unknown(Exception):
    """The reason why it is not known what some code computes."""


def free_primes(fixed_sizes: Collection[int]) -> list[int]:
    """Return primes, in ascending order, to use as batch size and sequence length of a run.

    None divides one of a layer's ``fixed_sizes``, so that it can't be mistaken for one, or for a
    factor of one. They must hold no 0, which every prime divides.
    """
    primes = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)
    return [prime for prime in primes if all(size % prime for size in fixed_sizes)]


class LoadedGlobal(NamedTuple):
    """A global that code names.

    Attributes:
        namespace: The dict that holds the global.
        name: Its name.
        value: Its value when the code was read; `MISSING` without one.
    """

    namespace: dict[str, Any]
    name: str
    value: Any

    def has_changed(self) -> bool:
        """Return whether it has another value now."""
        return self.namespace.get(self.name, MISSING) is not self.value


class Size(int):
    """A size of a tensor that varies between calls: of the batch or the sequence, or a multiple.

    Code may give another tensor this size. Everything else fails.
    """

    accounting: Accounting


def _refuse_arithmetic(size: Size, *_: Any) -> Any:
    """Fail; stands for all operators of a `Size`."""
    fail = size.accounting.fail
    return fail("computes with a size of its tensors")  # guard: nothing goes by a size


for _name in (
    "eq ne mul rmul add radd sub rsub floordiv rfloordiv truediv rtruediv mod rmod pow rpow neg pos abs divmod "
    "rdivmod round floor ceil trunc lt le gt ge bool int float hash lshift rlshift rshift rrshift "
    "and rand or ror xor rxor invert str repr format"
).split():
    setattr(Size, f"__{_name}__", _refuse_arithmetic)
for _name in "bit_length bit_count to_bytes as_integer_ratio is_integer conjugate".split():
    setattr(Size, _name, _refuse_arithmetic)
for _name in "real imag numerator denominator".split():
    setattr(Size, _name, property(_refuse_arithmetic))


def is_plain(value: Any) -> bool:
    """Return whether a value is a constant, or a tuple of constants, which nobody can change."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    if value is None or value is ...:
        return True
    constants = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype)
    return isinstance(value, constants) and not isinstance(value, Size)


def forward_of(kind: type) -> Callable:
    """Return the forward that runs when a module of class ``kind`` is called.

    A decorator that only renames the argument of a KV cache is taken off.

    Raises:
        Unknown: if the forward has another decorator, for instance ``no_grad``.
    """
    forward: Any = kind.forward  # type: ignore[attr-defined]
    while renames_cache(forward):
        forward = forward.__wrapped__
    is_plain_function = isinstance(forward, types.FunctionType)
    if not is_plain_function or hasattr(forward, "__wrapped__"):  # guard: what is done around it
        where = defined_in(forward) or type(forward).__name__
        raise Unknown(f"its forward is wrapped by {where}")
    return forward


class Code:
    """The functions that a layer's forward may run, found by the names in their code.

    No function is run.

    Args:
        kind: The class of the layer.

    Attributes:
        loaded_globals: The globals that they name, but for modules and classes, by the id of the
            namespace and the name. The owner of a reading compares them in later calls.
        words: The strings in their code. Code that looks for a keyword by name contains that name.

    Raises:
        Unknown: if a function or class is neither torch's nor transformers', computes its own
            gradient, or asks torch about its state.
    """

    def __init__(self, kind: type):
        if not kind.__module__.startswith("transformers."):  # guard: no code of one's own
            raise Unknown(f"{kind.__name__} is no class of transformers")
        self.loaded_globals: dict[tuple[int, str], LoadedGlobal] = {}
        self.words: set[str] = set()
        seen = set[types.CodeType]()
        left: list[tuple[str, Any]] = [("forward", forward_of(kind))]
        while left:
            name, function = left.pop()
            if isinstance(function, type):
                package, differentiates = function.__module__.split(".")[0], torch.autograd.Function
                if package not in _PACKAGES or issubclass(function, differentiates):
                    raise Unknown(f"its forward uses {name}")
                continue
            # The package kernels makes a module of a function, whose forward it may replace.
            if isinstance(function, nn.Module) and type(function).__module__.startswith("kernels."):
                loaded = LoadedGlobal(vars(function), "forward", MISSING)
                self.loaded_globals[id(function), "forward"] = loaded
                continue
            if not is_library_function(function):  # guard: no function of one's own
                raise Unknown(f"its forward may run a {name} that is not transformers'")
            function = inspect.unwrap(function)
            if defined_in(function).startswith("transformers.") and function.__code__ not in seen:
                seen.add(function.__code__)
                left += self._named_in(function, kind)

    def _named_in(self, function: types.FunctionType, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield the functions and classes that a function names: methods of the layer, and globals."""
        for code in _codes_in(function.__code__):
            self.words.update(x for x in code.co_consts if isinstance(x, str) and x.isidentifier())
            for name in code.co_names:
                is_of_layer = function.__module__ == kind.__module__
                if is_of_layer and name.startswith(_QUESTIONS):  # guard: torch is asked nothing
                    raise Unknown(f"its forward asks for {name}")
                method = getattr(kind, name, None)
                if isinstance(method, types.FunctionType):
                    yield name, method
                if name not in (names := function.__globals__):
                    continue
                value = names[name]
                if not isinstance(value, (types.ModuleType, type)):
                    self.loaded_globals[id(names), name] = LoadedGlobal(names, name, value)
                if callable(value) and not isinstance(value, types.BuiltinFunctionType):
                    yield name, value


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


class Accounting(TorchFunctionMode):
    """Accounts for the code that runs in the body; see Note [Operations, not numbers].

    Whatever is not allowed calls `fail`.

    Args:
        allowed: Names of the operations on tensors that are allowed besides `MOVES`.
        sizes: The sizes that vary between calls. Multiples of a size above 2 vary as well, since
            code may join dims.

    Attributes:
        fault: The reason why the code is unknown; empty if it is not.
        hidden: Stands for the dtypes and devices of tensors; None to show them.

    Raises:
        Unknown: if the code does anything that is not accounted for, even if the code itself
            catches the exception.
    """

    def __init__(self, allowed: Iterable[str] = (), sizes: Collection[int] = ()):
        super().__init__()
        self.allowed, self.sizes = MOVES.union(allowed), set(sizes) - {0, 1}
        self.fault = ""
        self.hidden: Any = None

    def fail(self, reason: str) -> NoReturn:
        """Raise Unknown, and remember the first reason, with which `__exit__` raises it again."""
        self.fault = self.fault or reason
        raise Unknown(f"its forward {self.fault}")

    def __exit__(self, *raised: Any) -> None:
        """End the account; raise Unknown if the code failed, also where it caught that itself."""
        super().__exit__(*raised)
        if self.fault:
            raise Unknown(f"its forward {self.fault}") from raised[1]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Judge an operation by its name, and return its result; torch calls this for each one."""
        name, kwargs = getattr(function, "__name__", str(function)), kwargs or {}
        # An attribute of a tensor, such as ``x.shape``.
        if name == "__get__":
            name = function.__self__.__name__
        if name in ("shape", "size", "numel"):
            result = function(*args, **kwargs)
            if isinstance(result, int):
                return self.wrap_size(result)
            return tuple(map(self.wrap_size, result))
        # ``len()`` returns a plain int, which no longer tells that it is a `Size`.
        if name == "__len__" and isinstance(self.wrap_size(args[0].shape[0]), Size):
            self.fail("asks for the len() of a tensor")
        if name in ("dtype", "device"):
            return getattr(args[0], name) if self.hidden is None else self.hidden
        if name == "dropout":
            return self._dropout(*args, **kwargs)
        if name == "__getitem__" and not self._is_constant_index(args[1]):
            self.fail("looks up numbers by a tensor or a list")  # which may differ in another call
        if name not in self.allowed:  # guard: only known operations
            self.fail(f"computes what is not known here: {name}")
        has_size = any(isinstance(x, Size) for x in (*args, *kwargs.values()))
        if name not in MOVES and has_size:  # guard: sizes are no numbers
            self.fail("computes with a size of its tensors")
        return function(*args, **kwargs)

    def wrap_size(self, count: int) -> int:
        """Return ``count``; as a `Size` if it varies between calls (see ``sizes``)."""
        joined = any(count % size == 0 for size in self.sizes if size > 2)
        if count not in self.sizes and not joined:  # guard: joined dims too
            return count
        size = Size(count)
        size.accounting = self
        return size

    def _is_constant_index(self, index: Any) -> bool:
        """Return whether an index holds no tensor or list, whose numbers depend on the call."""
        if isinstance(index, slice):
            edges = index.start, index.stop, index.step
            return all(x is None or isinstance(x, int) for x in edges)
        if isinstance(index, tuple):
            return all(map(self._is_constant_index, index))
        return index is None or index is ... or type(index) in (int, Size)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Return the input of a dropout that drops nothing; fail for any other dropout."""
        if p == 0 or not training:
            return input
        self.fail("computes what is not known here: dropout")
