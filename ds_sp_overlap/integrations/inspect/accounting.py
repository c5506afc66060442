"""Checks everything on which the result of a layer's code could depend.

`Code` finds the functions that a forward may run, and accepts only transformers' functions.
`Accounting` sees every operation on a tensor, and every use of a tensor's size, dtype or device.
See Note [Operations, not numbers].

Note [Operations, not numbers]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The results of a forward for some numbers prove little: for instance, a clamp at 8, a temperature of
1 and a gate of 0 don't change small numbers. So operations are judged by their names. One operation
that is not allowed makes the code unknown. So does a comparison of sizes or dtypes, since the code
may then compute something else in another call. Third-party code never runs: its result could
depend on anything, and the code could write anywhere.
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

# Operations that move numbers without changing them.
MOVES = frozenset(
    "view reshape transpose permute contiguous flatten unflatten unsqueeze squeeze split "
    "split_with_sizes chunk tensor_split narrow select unbind cat concat stack expand expand_as "
    "repeat_interleave movedim moveaxis swapaxes swapdims view_as reshape_as mT T clone repeat "
    "__getitem__ dim ndim __len__".split()
)


# In this order: modules that code may use; prefixes of the names of torch's functions that return
# torch's state; names by which code can reach objects that it does not name; opcodes that import or
# set a global.
_MODULES = {math, torch, torch.functional, nn, nn.functional}
_QUESTIONS = "is_", "are_", "get_"
_INDIRECT = frozenset("super __class__ globals vars eval exec __import__".split())
_STATEMENTS = {dis.opmap["IMPORT_NAME"], dis.opmap["STORE_GLOBAL"]}


class Unknown(Exception):
    """Says why it is not known what some code computes."""


def free_primes(fixed_sizes: Collection[int]) -> list[int]:
    """Return primes, in ascending order, to use as batch size and sequence length of a run.

    The result has no prime that divides one of a layer's ``fixed_sizes``. So a prime can't be
    mistaken for such a size or for its factor. Every prime divides 0, so ``fixed_sizes`` must not
    contain 0.
    """
    primes = [n for n in range(3, 72) if all(n % divisor for divisor in range(2, n))]
    return [prime for prime in primes if all(size % prime for size in fixed_sizes)]


class LoadedGlobal(NamedTuple):
    """Describes a global variable that some code refers to.

    Attributes:
        namespace: The dict that holds the variable.
        name: The name of the variable.
        value: The value that `Code` found; `MISSING` if the variable did not exist.
    """

    namespace: dict[str, Any]
    name: str
    value: Any

    def has_changed(self) -> bool:
        """Return whether the variable now has another value."""
        return self.namespace.get(self.name, MISSING) is not self.value


class Size(int):
    """Replaces a size that varies between calls: of the batch, the sequence, or a multiple of one.

    Code may use a `Size` only as the size of another tensor. Every other use fails.
    """

    accounting: Accounting

    def refuse(self, *_: Any) -> Any:
        """Fail; this replaces all attributes and operators of ``int`` except ``__index__``."""
        fail = self.accounting.fail
        return fail("computes with a size of its tensors")  # guard: nothing goes by a size


# Operators that ``object`` defines and ``int`` overrides.
_OF_OBJECTS = "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __str__ __repr__ __format__"
for _name in {*dir(int)} - {*dir(object), "__index__"} | {*_OF_OBJECTS.split()}:
    setattr(Size, _name, Size.refuse if _name.startswith("__") else property(Size.refuse))


def is_plain(value: Any) -> bool:
    """Return whether a value is an immutable constant, or a tuple of such constants."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    none = (types.NoneType, types.EllipsisType)
    constants = (int, float, complex, str, bytes, enum.Enum, torch.dtype, *none)
    return isinstance(value, constants) and not isinstance(value, Size)


class Code:
    """Finds the functions that a layer's forward may run, by the names in their code.

    None of these functions runs here. Their results depend only on arguments, on attributes of the
    layer, and on ``loaded_globals``.

    Args:
        kind: The class of the layer.

    Attributes:
        forward: The forward of the class, without a decorator that only renames the argument of a
            KV cache.
        functions: All functions that may run.
        loaded_globals: The globals that the functions name, except modules. The keys are the id of
            the namespace and the name. Later calls check that no global has changed.
        words: The string constants of the functions that are identifiers. If code looks up a
            keyword by its name, the name is among these words.

    Raises:
        Unknown: if a function is not transformers' own, or uses anything but arguments, attributes,
            constants, torch's operations and other functions of transformers.
    """

    def __init__(self, kind: type):
        if not kind.__module__.startswith("transformers."):  # guard: no code of one's own
            raise Unknown(f"{kind.__name__} is no class of transformers")
        self.forward = kind.forward  # type: ignore[attr-defined]
        while renames_cache(self.forward):
            self.forward = self.forward.__wrapped__
        self.functions: set[types.FunctionType] = set()
        self.loaded_globals: dict[tuple[int, str], LoadedGlobal] = {}
        self.words: set[str] = set()
        left = [("forward", self.forward)]
        while left:
            name, function = left.pop()
            # The package ``kernels`` wraps a function in a module whose forward it may replace.
            if isinstance(function, nn.Module) and type(function).__module__.startswith("kernels."):
                loaded = LoadedGlobal(vars(function), "forward", MISSING)
                self.loaded_globals[id(function), "forward"] = loaded
            elif not _is_plain_function(function):  # guard: no function of one's own
                raise Unknown(f"its forward uses {name} (no constant or function of transformers)")
            elif function not in self.functions:
                self.functions.add(function)
                left += self._named_in(function.__code__, function.__globals__, kind)

    def _named_in(
        self, code: types.CodeType, names: dict[str, Any], kind: type
    ) -> Iterator[tuple[str, Any]]:
        """Yield the methods of the layer and the globals that some code names, each with its name.

        Modules, constants, loggers and the registry of attention functions are left out.

        Args:
            code: The code.
            names: The globals of the code.
            kind: The class of the layer.
        """
        if _STATEMENTS.intersection(code.co_code[::2]):  # guard: all globals are seen
            raise Unknown(f"its forward may run {code.co_name}, which imports or sets a global")
        for name in code.co_names:
            if name in _INDIRECT or _asks_torch(name):  # guard: torch is asked nothing
                raise Unknown(f"its forward asks for {name}")
            # Skip methods of nn.Module, such as ``to``: a trace calls them on tensors only.
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
        for x in code.co_consts:
            if isinstance(x, str) and x.isidentifier():
                self.words.add(x)
            # The functions defined inside the code.
            if isinstance(x, types.CodeType):
                yield from self._named_in(x, names, kind)


def _is_plain_function(function: Any) -> bool:
    """Return whether a function is transformers' own, without decorator and without state."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return False
    defaults = function.__defaults__, *(function.__kwdefaults__ or {}).values()
    is_stateless = function.__closure__ is None and is_plain(defaults)
    return is_stateless and defined_in(function).startswith("transformers.")


def _asks_torch(name: str) -> bool:
    """Return whether ``name`` is a function or module that gives torch's state to code.

    ``torch.backends`` is such a module.
    """
    for module in _MODULES:
        value = getattr(module, name, None)
        is_module = isinstance(value, types.ModuleType) and value not in _MODULES
        if is_module or value is not None and name.startswith(_QUESTIONS):
            return True
    return False


class Accounting(TorchFunctionMode):
    """Checks the code that runs in the body; see Note [Operations, not numbers].

    Calls `fail` for every use of a tensor that is not allowed.

    Args:
        allowed: Names of the operations on tensors that are allowed besides `MOVES`.
        sizes: The sizes that vary between calls, each 1 or from `free_primes`. Multiples of these
            vary as well, since code may merge dims. A size of 1 is not checked.

    Attributes:
        fault: The reason why the code is unknown; empty if no reason was found so far.
        hidden: The object that code gets as the dtype or device of a tensor; None to show the true
            value.

    Raises:
        Unknown: if the code does anything that is not allowed. `__exit__` raises it again, in case
            the code caught it.
    """

    def __init__(self, allowed: Iterable[str], sizes: Collection[int]):
        super().__init__()
        self.allowed, self.sizes = MOVES.union(allowed), set(sizes) - {1}
        self.fault = ""
        self.hidden: Any = None

    def fail(self, reason: str) -> NoReturn:
        """Raise Unknown; record the first reason, with which `__exit__` raises again."""
        self.fault = self.fault or reason
        raise Unknown(f"its forward {self.fault}")

    def __exit__(self, *raised: Any) -> None:
        """Raise Unknown if `fail` was called, even if the code has caught the exception."""
        super().__exit__(*raised)
        if self.fault:
            raise Unknown(f"its forward {self.fault}") from raised[1]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check an operation by its name, and return its result; torch calls this for each."""
        name, kwargs = getattr(function, "__name__", str(function)), kwargs or {}
        # An access to an attribute of a tensor, such as ``x.shape``.
        if name == "__get__":
            name = function.__self__.__name__
        if name in ("shape", "size", "numel"):
            result = function(*args, **kwargs)
            if isinstance(result, int):
                return self.wrap_size(result)
            return tuple(map(self.wrap_size, result))
        # ``len()`` would turn a `Size` into a plain int, whose uses can't be checked.
        if name == "__len__" and isinstance(self.wrap_size(args[0].shape[0]), Size):
            self.fail("asks for the len() of a tensor")
        if name in ("dtype", "device"):
            return getattr(args[0], name) if self.hidden is None else self.hidden
        if name == "dropout":
            return self._dropout(*args, **kwargs)
        if name == "__getitem__" and not self._is_constant_index(args[1]):
            # The numbers in the index may differ in another call.
            self.fail("looks up numbers by a tensor or a list")
        if name not in self.allowed:  # guard: only known operations
            self.fail(f"computes what is not known here: {name}")
        has_size = any(isinstance(x, Size) for x in (*args, *kwargs.values()))
        if name not in MOVES and has_size:  # guard: sizes are no numbers
            self.fail("computes with a size of its tensors")
        return function(*args, **kwargs)

    def wrap_size(self, count: int) -> int:
        """Return ``count``, or a `Size` if the count varies between calls (see ``sizes``)."""
        if all(count % size for size in self.sizes):  # guard: joined dims too
            return count
        size = Size(count)
        size.accounting = self
        return size

    def _is_constant_index(self, index: Any) -> bool:
        """Return whether an index has no tensor or list, whose values may differ between calls."""
        if isinstance(index, slice):
            edges = index.start, index.stop, index.step
            return all(x is None or isinstance(x, int) for x in edges)
        if isinstance(index, tuple):
            return all(map(self._is_constant_index, index))
        return index is None or index is ... or type(index) in (int, Size)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Return ``input`` if the dropout drops nothing; else fail."""
        if p == 0 or not training:
            return input
        self.fail("computes what is not known here: dropout")
