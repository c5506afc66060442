"""Runs foreign code, and accounts for everything that could change what the code computes.

`Accounting` sees every operation on a tensor, every use of a tensor's size, dtype or device, and
every global name that the code loads. See Note [Operations, not numbers].

Note [Operations, not numbers]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Running a forward on some numbers and looking at the results proves little: a clamp at 8, a
temperature of 1 and a gate of 0 leave small numbers as they are. So an operation is judged by its
name. An operation that is not allowed makes the code unknown. So does everything by which the code
could compute something else in another call: a comparison of sizes or dtypes, a question to torch
about its state, a global whose value may be changed.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import gc
import logging
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .library import defined_in, renames_cache

# Stands for the value of an attribute or a global that does not exist.
MISSING: Any = object()

# Operations that move numbers, and compute nothing with them.
MOVES = frozenset(
    "view reshape transpose permute contiguous flatten unflatten unsqueeze squeeze split "
    "split_with_sizes chunk tensor_split narrow select unbind cat concat stack expand expand_as "
    "repeat_interleave movedim moveaxis swapaxes swapdims view_as reshape_as mT T clone repeat "
    "__getitem__ dim ndim __len__".split()
)
_BUILTINS = frozenset(
    "abs all any bool callable dict enumerate float getattr hasattr int isinstance issubclass len "
    "list map max min reversed round set slice sorted str sum super tuple zip".split()
)
# Modules and classes of these packages may be loaded as globals.
PACKAGES = frozenset(
    "torch transformers typing typing_extensions math collections builtins types warnings".split()
)
# Functions of these packages may look at anything: only their operations on tensors count. For
# torch see `TORCH` as well.
_LIBRARIES = sys.stdlib_module_names | {"torch", "ds_sp_overlap", "peft"}
# Python functions of these modules of torch may be called. Those of other modules might change
# torch's state, or ask about it.
TORCH = (
    "torch._tensor",
    "torch.functional",
    "torch.nn.functional",
    "torch.overrides",
    "torch._jit_internal",
    "torch._VF",
)
# Attributes through which code reaches any object.
_STATE = {"__class__", "__dict__", "__globals__", "__closure__", "__code__"}
# Builtins that look an attribute up by name; and instructions that may stand between an object and
# the look at its attribute.
_BY_NAME = ("getattr", "hasattr")
_BETWEEN = ("EXTENDED_ARG", "COPY", "DUP_TOP", "PUSH_NULL", "CACHE", "NOP")


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
    """A global, or a variable of an enclosing function, that code loaded.

    Attributes:
        namespace: The dict that holds the global; the cell that holds the variable.
        name: Its name.
        value: The value that was loaded.
    """

    namespace: dict[str, Any] | types.CellType
    name: str
    value: Any

    def value_now(self) -> Any:
        """Return the value that it has now; `MISSING` without one."""
        if isinstance(self.namespace, dict):
            return self.namespace.get(self.name, MISSING)
        try:
            return self.namespace.cell_contents
        except ValueError:  # the variable was deleted
            return MISSING

    def has_changed(self) -> bool:
        """Return whether it has another value now."""
        return self.value_now() is not self.value


class Size(int):
    """A size of a tensor that varies between calls: of the batch or the sequence, or a multiple.

    Code may give another tensor this size, multiply the size, or compare it with an equal one.
    Everything else fails.
    """

    accounting: Accounting

    def __mul__(self, other: Any) -> int:
        """Return the product, which varies as well."""
        self.accounting.sizes.add(product := int.__mul__(self, other))
        return self.accounting.wrap_size(product)

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        """Return True for an equal `Size`; fail for anything else, so never return False."""
        same = isinstance(other, Size) and int.__eq__(self, other)
        if not same:  # guard: sizes that differ may be equal in another call
            self.accounting.fail("compares a size of its tensors")
        return True

    def __ne__(self, other: object) -> bool:
        return not self == other


def _refuse_arithmetic(size: Size, *_: Any) -> Any:
    """Fail; stands for all operators of a `Size` but ``*``, ``==`` and ``!=``."""
    fail = size.accounting.fail
    return fail("computes with a size of its tensors")  # guard: nothing goes by a size


for _name in (
    "add radd sub rsub floordiv rfloordiv truediv rtruediv mod rmod pow rpow neg pos abs divmod "
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
        Unknown: if the forward is wrapped by torch, for instance by ``no_grad``.
    """
    forward: Any = kind.forward  # type: ignore[attr-defined]
    while renames_cache(forward):
        forward = forward.__wrapped__
    where = defined_in(forward)
    is_function = isinstance(forward, types.FunctionType)
    # A Python function that any other module put around the forward is accounted for with it.
    if not is_function or where.split(".")[0] == "torch":  # guard: what torch does around it
        raise Unknown(f"its forward is wrapped by {where or type(forward).__name__}")
    return forward


class Accounting(TorchFunctionMode):
    """Accounts for the code that runs in the body; see Note [Operations, not numbers].

    Operations come in through torch (`__torch_function__`), calls of functions through Python's
    profiler (`_profile`). Whatever is not allowed calls `fail`.

    Args:
        allowed: Names of the operations on tensors that are allowed besides `MOVES`.
        sizes: The sizes that vary between calls. Multiples of a size above 2 vary as well, since
            code may join dims.

    Attributes:
        loaded_globals: The globals and variables of enclosing functions that the code loaded. The
            owner of a reading compares them in later calls.
        codes: The code objects that ran and belong to no library.
        fault: The reason why the code is unknown; empty if it is not.
        torch_modules: The modules of torch whose Python functions the code may call.
        allows_idle_dropout: Whether the code may call a dropout that drops nothing. An owner that
            doesn't look its probability up again in later calls sets it to False.

    Raises:
        Unknown: if the code does anything that is not accounted for, even if the code itself
            catches the exception.
    """

    def __init__(self, allowed: Iterable[str] = (), sizes: Collection[int] = ()):
        super().__init__()
        self.allowed, self.sizes = MOVES.union(allowed), set(sizes) - {0, 1}
        self.loaded_globals: list[LoadedGlobal] = []
        self.codes: set[types.CodeType] = set()
        # The values of variables of enclosing functions that were judged, by code and their ids.
        self._free_values: dict[tuple, dict[str, Any]] = {}
        self.fault = ""
        self.torch_modules: tuple[str, ...] = TORCH
        self.allows_idle_dropout = True

    def fail(self, reason: str) -> NoReturn:
        """Raise Unknown, and remember the first reason, with which `__exit__` raises it again."""
        self.fault = self.fault or reason
        raise Unknown(f"its forward {self.fault}")

    def __enter__(self) -> Accounting:
        super().__enter__()
        self._profile_before, self._gc_was_on = sys.getprofile(), gc.isenabled()
        # The garbage collector could run a finaliser now, which would be taken for the code's.
        gc.disable()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *raised: Any) -> None:
        """End the account; raise Unknown if the code failed, also where it caught that itself."""
        sys.setprofile(self._profile_before)
        if self._gc_was_on:
            gc.enable()
        super().__exit__(*raised)
        if self.fault:
            raise Unknown(f"its forward {self.fault}") from raised[1]

    def possible_keywords(self) -> set[str]:
        """Return the string constants of the code that ran which may be names of keywords.

        Code that looks for a keyword by name contains that name. A later run therefore gives the
        code these keywords, to see whether it uses one instead of passing it on.
        """
        names: set[str] = set()
        for code in self.codes:
            for constant in code.co_consts:
                if isinstance(constant, str) and constant.isidentifier():
                    names.add(constant)
        return names

    def globals_now(self) -> list[LoadedGlobal]:
        """Return ``loaded_globals``, each with the value that it has now.

        The code may have loaded stand-ins, but later calls look at the globals themselves.
        """
        return [loaded._replace(value=loaded.value_now()) for loaded in self.loaded_globals]

    def look_up(self, holder: Any, name: str) -> Any:
        """Return an attribute of ``holder``; `MISSING` if there is none.

        What a property computes needs no account, since its value is compared in later calls.
        """
        sys.setprofile(None)
        try:
            with torch._C.DisableTorchFunction():
                return getattr(holder, name, MISSING)
        finally:
            sys.setprofile(self._profile)

    # Operations on tensors.

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
            return self.dtype_or_device(name, args[0])
        if name == "dropout":
            return self._dropout(*args, **kwargs)
        if name == "__getitem__" and not self._is_constant_index(args[1]):
            self.fail("looks up numbers by a tensor or a list")  # which may differ in another call
        if name not in self.allowed:  # guard: only known operations
            self.fail(f"computes what is not known here: {name}")
        has_size = any(isinstance(x, Size) for x in (*args, *kwargs.values()))
        if name not in MOVES and has_size:  # guard: sizes are no numbers
            self.fail("computes with a size of its tensors")
        return self.execute(name, function, args, kwargs)

    def execute(self, name: str, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Execute an operation that is allowed by its name; subclasses check its arguments."""
        return function(*args, **kwargs)

    def dtype_or_device(self, name: str, x: Tensor) -> Any:
        """Return the dtype or the device of a tensor, as the code sees it."""
        return getattr(x, name)

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
        if self.allows_idle_dropout and (p == 0 or not training):
            return input
        self.fail("computes what is not known here: dropout")

    # Code.

    def _profile(self, frame: types.FrameType, event: str, called: Any) -> None:
        """Judge a call that the code makes; Python's profiler calls this.

        Args:
            frame: The frame that begins to run for ``event`` "call"; for "c_call" the frame that
                calls a builtin.
            event: The profiler's name for what happens. Others than these two are ignored.
            called: The builtin.
        """
        where = _module(frame)
        package, function = where.split(".")[0], frame.f_code.co_name
        if event == "c_call" and package not in _LIBRARIES:
            self._judge_builtin(called)
        elif event == "call" and package == "logging":
            self.fail("logs")
        elif event != "call" or package in _LIBRARIES - {"torch"} or function == "__del__":
            return
        elif package != "torch":
            self._judge_names(frame)
            self._judge_free_names(frame)
        # A Python function of torch that the code itself calls. Those that torch calls in turn are
        # not judged.
        elif frame.f_back is not None:
            caller = _module(frame.f_back).split(".")[0]
            known = where.startswith(self.torch_modules) or function == "is_compiling"
            if caller not in ("torch", "ds_sp_overlap") and not known:
                self.fail(f"calls {where}.{function}")

    def _judge_builtin(self, called: Any) -> None:
        """Fail for a builtin that asks torch about its state, reads the number in a `Size` or warns."""
        module, name = getattr(called, "__module__", None) or "", called.__name__
        known = name in self.allowed or name == "dropout"
        if name == "warn":
            self.fail("warns")
        if module.split(".")[0] == "torch" and not known:  # guard: torch is asked nothing
            self.fail(f"calls {module}.{name}")
        # Other functions of math read the number in a `Size`.
        if module == "math" and name not in ("sqrt", "pow", "exp", "prod"):
            self.fail(f"calls math.{name}")

    def _judge_names(self, frame: types.FrameType) -> None:
        """Judge the names in a function that begins to run, once; record the globals that it loads.

        Fail if the function stores what outlives its call: globals, variables of an enclosing
        function, attributes. Or if it can reach objects that may be changed, now or later: what it
        imports, attributes of functions, attributes of unknown modules and classes that an
        enclosing function holds, and the object whose method it is, unless that is a module.
        """
        code = frame.f_code
        if code in self.codes:
            return
        self.codes.add(code)
        is_method = code.co_varnames[:1] == ("self",) and code.co_argcount > 0
        is_of_library = _module(frame).startswith("transformers.")
        if is_method and not is_of_library and not isinstance(frame.f_locals["self"], nn.Module):
            self.fail(f"calls {code.co_name}")
        loaded, stored = global_names(code)
        if stored or not _STATE.isdisjoint(code.co_names):
            reached = stored or sorted(_STATE.intersection(code.co_names))
            self.fail(f"reaches for {', '.join(reached)}")
        imported, attributes = _reached(code)
        if imported:
            self.fail(f"imports {imported[0]} when it is called")
        for name, attribute in attributes:
            free = name in code.co_freevars
            holder = (frame.f_locals if free else frame.f_globals).get(name)
            is_state = isinstance(holder, types.FunctionType)
            if isinstance(holder, (types.ModuleType, type)):
                # By name, code may ask for what a library does not have, until somebody sets it.
                is_state = attribute in _BY_NAME or free and not _is_known(holder)
            if is_state:
                self.fail(f"reads {name}.{attribute}")
        for name in loaded:
            value = frame.f_globals.get(name, MISSING)
            if value is MISSING:
                # A builtin.
                kind = getattr(builtins, name, None)
                is_exception = isinstance(kind, type) and issubclass(kind, Exception)
                if name not in _BUILTINS and not is_exception:
                    self.fail(f"uses {name} ({code.co_name})")
            elif not _is_known(value):  # guard: only known globals
                self.fail(f"uses the global {name}")
            else:
                self.loaded_globals.append(LoadedGlobal(frame.f_globals, name, value))

    def _judge_free_names(self, frame: types.FrameType) -> None:
        """Judge the variables of enclosing functions in a function that begins to run; record them.

        Once for each function and their values. Those of a function that the code itself made,
        such as a lambda, belong to the call and are not recorded.
        """
        code, values = frame.f_code, {}
        for name in code.co_freevars:
            if name in frame.f_locals and name != "__class__":  # which ``super()`` reads
                values[name] = frame.f_locals[name]
        key = code, *map(id, values.values())
        if key in self._free_values:
            return
        self._free_values[key] = values  # which keeps the ids
        for name, value in values.items():
            if not _is_known(value, free=True):
                self.fail(f"uses {name} of the function around it")
        if not values or any(code in outer.co_consts for outer in self.codes):
            return
        is_found = False
        # A frame doesn't know its function, which holds the variables.
        for function in gc.get_referrers(code):
            if isinstance(function, types.FunctionType) and function.__code__ is code:
                cells = dict(zip(code.co_freevars, function.__closure__ or ()))
                loaded = [LoadedGlobal(cells[name], name, values[name]) for name in values]
                if not any(each.has_changed() for each in loaded):
                    self.loaded_globals += loaded  # guard: variables of closures too
                    is_found = True
        if not is_found:
            self.fail(f"uses {', '.join(values)} of a function that is not found")


def _module(frame: types.FrameType) -> str:
    """Return the name of the module whose code runs in a frame."""
    return frame.f_globals.get("__name__") or ""


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[list[str], list[str]]:
    """Return the names of the globals that code loads; and the names of globals, of variables of an
    enclosing function and of attributes that it stores or deletes.
    """
    loaded: dict[str, None] = {}
    stored = []
    for instruction in dis.get_instructions(code):
        operation, _, kind = instruction.opname.partition("_")
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded[instruction.argval] = None
        elif operation in ("STORE", "DELETE") and (
            kind in ("GLOBAL", "ATTR") or kind == "DEREF" and instruction.argval in code.co_freevars
        ):
            stored.append(instruction.argval)
    return list(loaded), stored


@functools.lru_cache(maxsize=4096)
def _reached(code: types.CodeType) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the modules that code imports, and pairs of a name from outside and its attribute.

    The pairs are of globals and variables of an enclosing function, with an attribute that the
    code looks up in them; or with one of `_BY_NAME` that the code gives them to.
    """
    imported: list[str] = []
    attributes: list[tuple[str, str]] = []
    before: str | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            imported.append(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and before is not None:
            attributes.append((before, instruction.argval))
        if instruction.opname in _BETWEEN:
            continue
        is_from_outside = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
        if is_from_outside and before in _BY_NAME:
            attributes.append((instruction.argval, before))
        before = instruction.argval if is_from_outside else None
    return imported, attributes


def has_plain_defaults(function: types.FunctionType) -> bool:
    """Return whether the defaults of a function are constants, so that it keeps nothing in them."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return all(map(is_plain, defaults))


def _is_known(value: Any, free: bool = False) -> bool:
    """Return whether code may load ``value`` from outside.

    Args:
        value: The value.
        free: Whether it is a variable of an enclosing function, not a global. Tensors, sizes and
            all modules, classes and builtins may be loaded then.
    """
    if free and isinstance(value, (Tensor, Size)):
        return True
    if free and isinstance(value, tuple) and all(_is_known(x, free) for x in value):
        return True
    # No mode of torch sees the operations of a scripted function.
    if isinstance(value, torch.jit.ScriptFunction):
        return False
    if is_plain(value) or isinstance(value, (logging.Logger, typing.TypeVar, enum.EnumMeta)):
        return True
    # The code of a function is judged when it runs, but its defaults are objects of their own.
    if isinstance(value, types.FunctionType):
        return has_plain_defaults(value)
    # As variables of an enclosing function, those of any package may be loaded.
    if isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType)):
        # A method of an object, such as a list, may change the object.
        if not isinstance(getattr(value, "__self__", None), (type(None), types.ModuleType, type)):
            return False
        if isinstance(value, types.ModuleType):
            module = value.__name__
        else:
            module = getattr(value, "__module__", None) or type(value).__module__
        return module.split(".")[0] in PACKAGES or free
    # Other objects by their class, such as a dtype or a generic alias.
    packages = ("ds_sp_overlap", "typing", "torch", "typing_extensions")
    return type(value).__module__.split(".")[0] in packages
