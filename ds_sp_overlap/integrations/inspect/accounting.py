"""Accounts for everything that could change what a layer's code computes.

`Code` finds the functions that a forward may run, all of them transformers'. `Accounting`
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

import dis
import enum
import logging
import math
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .library import MISSING, attention_functions, defined_in, renames_cache

# Operations that move numbers, and compute nothing with them.
MOVES = frozenset(
    "view reshape transpose permute contiguous flatten unflatten unsqueeze squeeze split "
    "split_with_sizes chunk tensor_split narrow select unbind cat concat stack expand expand_as "
    "repeat_interleave movedim moveaxis swapaxes swapdims view_as reshape_as mT T clone repeat "
    "__getitem__ dim ndim __len__".split()
)


# Modules that code may use; beginnings of the names of functions by which torch tells its state; and
# names by which code reaches what it doesn't name.
_MODULES = {math, torch, torch.functional, nn, nn.functional}
_QUESTIONS = "is_", "are_", "get_"
_INDIRECT = frozenset("super __class__ globals vars eval exec __import__".split())
_STATEMENTS = {dis.opmap["IMPORT_NAME"], dis.opmap["STORE_GLOBAL"]}


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

    def refuse(self, *_: Any) -> Any:
        """Fail; stands for all attributes and operators of a number but ``__index__``."""
        fail = self.accounting.fail
        return fail("computes with a size of its tensors")  # guard: nothing goes by a size


# Operators that every object has, and a number has of its own.
_OF_OBJECTS = "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __str__ __repr__ __format__"
for _name in {*dir(int)} - {*dir(object), "__index__"} | {*_OF_OBJECTS.split()}:
    setattr(Size, _name, Size.refuse if _name.startswith("__") else property(Size.refuse))


def is_plain(value: Any) -> bool:
    """Return whether a value is a constant, or a tuple of constants, which nobody can change."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    if value is None or value is ...:
        return True
    constants = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype)
    return isinstance(value, constants) and not isinstance(value, Size)


class Code:
    """The functions that a layer's forward may run, found by the names in their code.

    No function is run. Whatever could change what they compute is an argument, an attribute of the
    layer, or one of ``loaded_globals``.

    Args:
        kind: The class of the layer.

    Attributes:
        forward: The forward of the class. A decorator that only renames the argument of a KV cache
            is taken off.
        functions: All functions, each of them transformers'.
        loaded_globals: The globals that they name, but for modules, by the id of the namespace and
            the name. The owner of a reading compares them in later calls.
        words: The strings in their code. Code that looks for a keyword by name contains that name.

    Raises:
        Unknown: if a function is not transformers', or uses anything but arguments, attributes,
            constants, torch's operations and other such functions.
    """

    def __init__(self, kind: type):
        if not kind.__module__.startswith("transformers."):  # guard: no code of one's own
            raise Unknown(f"{kind.__name__} is no class of transformers")
        self.forward: Any = kind.forward  # type: ignore[attr-defined]
        while renames_cache(self.forward):
            self.forward = self.forward.__wrapped__
        self.functions: set[types.FunctionType] = set()
        self.loaded_globals: dict[tuple[int, str], LoadedGlobal] = {}
        self.words: set[str] = set()
        left: list[tuple[str, Any]] = [("forward", self.forward)]
        while left:
            name, function = left.pop()
            # The package kernels makes a module of a function, whose forward it may replace.
            if isinstance(function, nn.Module) and type(function).__module__.startswith("kernels."):
                loaded = LoadedGlobal(vars(function), "forward", MISSING)
                self.loaded_globals[id(function), "forward"] = loaded
            elif not _is_plain_function(function):  # guard: no function of one's own
                raise Unknown(f"its forward uses {name} (no constant or function of transformers)")
            elif function not in self.functions:
                self.functions.add(function)
                for code in _codes_in(function.__code__):
                    left += self._named_in(code, function.__globals__, kind)

    def _named_in(
        self, code: types.CodeType, names: dict[str, Any], kind: type
    ) -> Iterator[tuple[str, Any]]:
        """Yield what some code with the globals ``names`` names: methods of the layer, and globals.

        Modules, constants, loggers and the registry of attention functions are left out.
        """
        self.words.update(x for x in code.co_consts if isinstance(x, str) and x.isidentifier())
        if _STATEMENTS.intersection(code.co_code[::2]):  # guard: all globals are seen
            raise Unknown(f"its forward may run {code.co_name}, which imports or sets a global")
        for name in code.co_names:
            if name in _INDIRECT or _asks_torch(name):  # guard: torch is asked nothing
                raise Unknown(f"its forward asks for {name}")
            # ``to`` of a tensor is a method of nn.Module as well, of which a trace runs none.
            method, of_any_module = getattr(kind, name, None), getattr(nn.Module, name, None)
            if isinstance(method, types.FunctionType) and method is not of_any_module:
                yield name, method
            value = names.get(name, MISSING)
            if value is MISSING or isinstance(value, types.ModuleType) and value in _MODULES:
                continue
            self.loaded_globals[id(names), name] = LoadedGlobal(names, name, value)
            is_registry = value is attention_functions()
            if not (is_plain(value) or is_registry or isinstance(value, logging.Logger)):
                yield name, value


def _is_plain_function(function: Any) -> bool:
    """Return whether a function is transformers', undecorated and without state of its own."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return False
    defaults = function.__defaults__, *(function.__kwdefaults__ or {}).values()
    is_stateless = function.__closure__ is None and is_plain(defaults)
    return is_stateless and defined_in(function).startswith("transformers.")


def _asks_torch(name: str) -> bool:
    """Return whether code that has ``name`` may ask torch about its state.

    By a function, or by a module such as ``torch.backends``.
    """
    for module in _MODULES:
        value = getattr(module, name, None)
        is_module = isinstance(value, types.ModuleType) and value not in _MODULES
        if is_module or value is not None and name.startswith(_QUESTIONS):
            return True
    return False


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
