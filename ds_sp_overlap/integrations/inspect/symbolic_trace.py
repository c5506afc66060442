"""The symbolic trace of an attention layer's forward, for layers as transformers writes them.

The forward runs on labels: whole numbers, each of which occurs once. Its inputs are labels.
Stand-ins for projections, norms, rotary functions and the attention function return new labels.
Only operations that move numbers are allowed (`accounting`), so the places where the labels end up
tell how they were moved. The trace computes with no weight and calls no module.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .accounting import Accounting, Code, Unknown, free_primes, is_plain
from .library import CACHES, MISSING, attention_functions, own_class, replaced
from .rotary_function import Table
from .tensor_parallel import out_features
from .tokenwise import has_own_call

# Arguments that layers mostly ignore in training, and are read without.
UNUSED = (*CACHES, "cache_position", "use_cache", "output_attentions")
# The path to a layer's class, and the functions of the class that run when a module is called.
CLASS, RUNS = ("__class__",), ("forward", "__call__")

# An attribute that a forward looked up: its path from the layer on, and its value.
Lookup = tuple[tuple[str, ...], Any]


@dataclass(frozen=True)
class Case:
    """A way to call a forward. `CASES` are those in which it must give the same reading.

    With a mask the sequence has another length than without one. With optional arguments the batch
    size is more than 1, and else 1.

    Attributes:
        training: Whether the layer is in training.
        masked: Whether a mask is given.
        gives_optional: Whether optional arguments are given, such as positions.
        gives_tables: Whether the tables of RoPE are given.
    """

    training: bool
    masked: bool
    gives_optional: bool
    gives_tables: bool = True


CASES = [Case(*values) for values in product((True, False), (True, False), (False, True))]


class TracedOutput:
    """The labels that a stand-in returned.

    Args:
        name: The name of the module or function.
        input: The labels that it was given.
        shape: The shape of its output.
        trace: Makes the labels.

    Attributes:
        labels: The labels, ``count`` whole numbers from ``first`` on.
    """

    def __init__(self, name: str, input: Tensor, shape: tuple[int, ...], trace: Trace):
        self.name, self.input = name, input
        self.labels = trace.new_labels(*shape)
        self.first, self.count = int(self.labels.flatten()[0]), self.labels.numel()

    def find(self, x: Tensor) -> Tensor:
        """Return the flat index of each number of ``x`` among the labels; -1 for other numbers."""
        index = x - self.first
        return torch.where((index >= 0) & (index < self.count), index, -1)

    def rows_of(self, x: Tensor) -> Tensor | None:
        """Return the row of the output that each row of ``x`` [.., d] is, as an index [..].

        None unless each row of ``x`` is a whole row of the output, in order, and the call returned
        as many numbers as it was given.
        """
        index, width = self.find(x), self.labels.shape[-1]
        rows = index[..., 0] // width
        whole = rows[..., None] * width + torch.arange(width)
        if x.shape[-1] != width or self.count != self.input.numel() or (index < 0).any():
            return None
        return rows if torch.equal(index, whole) else None

    def input_rows(self, rows: Tensor) -> Tensor:
        """Return the rows [.., d] of the input that lie where ``rows`` [..] lie in the output."""
        # Both hold the rows one after another.
        return self.input.reshape(-1, self.labels.shape[-1])[rows]


class Opaque:
    """Stands for something that may be passed on or compared with None, and nothing else.

    Args:
        fail: `Accounting.fail`, called if the code does more.
    """

    what = "an argument"

    def __init__(self, fail: Callable[[str], NoReturn]):
        self._fail = fail

    def _refuse(self, *_: Any) -> Any:
        return self._fail(f"looks at {self.what}")

    def __eq__(self, other: object) -> bool:
        """Return True for this object; fail for any other."""
        return other is self or self._refuse()

    __bool__ = __getattr__ = _refuse
    __hash__ = object.__hash__


class HiddenDtype(Opaque):
    """Stands for the dtype or device of a tensor; may be passed on to another tensor."""

    what = "the dtype or device of a tensor"


class Tables(tuple):
    """Position embeddings: (cos, sin), which a forward may unpack and move to another device."""

    def to(self, target: Any) -> Tables:
        """Return the tables as they are; fail for a dtype that is written in the forward."""
        if not isinstance(target, HiddenDtype):
            raise Unknown("its forward casts position embeddings")
        return self


class Proxy:
    """Stands for a layer, its config or an object in them while a forward runs.

    It records the attributes that the forward looks up. For a child module the forward gets what
    the trace makes to stand for it (`Trace.child`).

    Args:
        value: The object.
        path: The path to the object from the layer on.
        trace: The running trace.
    """

    def __init__(self, value: Any, path: tuple[str, ...], trace: Trace):
        vars(self).update(_value=value, _path=path, _trace=trace)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the object, or what stands for it."""
        trace = self._trace
        with torch._C.DisableTorchFunction():
            value = getattr(self._value, name, MISSING)
        if value is MISSING:
            # Somebody may set the attribute before a later call.
            trace.lookups.append(((*self._path, name), MISSING))
            raise AttributeError(name)
        is_layer = not self._path
        # The mode of the case, whatever mode the layer is in.
        if is_layer and name == "training":
            return trace.training
        if is_layer and isinstance(value, nn.Module):
            return ChildProxy(value, (name,), trace)
        function: Any = getattr(type(self._value), name, None)
        if is_layer and inspect.ismethod(value) and value.__func__ is function:
            if function not in trace.code.functions:
                trace.fail(f"looks up {name} by no name in its code")
            # Bound to this proxy, so that its code runs on stand-ins, too.
            trace.lookups.append(((name, "__func__"), function))
            return types.MethodType(function, self)
        # Later calls can compare constants and tensors.
        if is_plain(value) or isinstance(value, Tensor):
            trace.lookups.append(((*self._path, name), value))
            return value
        # What is looked up in any other object is recorded by its proxy.
        return Proxy(value, (*self._path, name), trace)

    def __setattr__(self, name: str, value: Any) -> None:
        self._trace.fail(f"sets {name}")

    def _class(self) -> Any:
        """Return the class of the object, and record it."""
        kind = own_class(type(self._value))
        self._trace.lookups.append(((*self._path, *CLASS), kind))
        return kind

    # For isinstance: a proxy of a layer is an instance of the layer's class.
    __class__ = property(_class)

    def _refuse(self, *_: Any) -> Any:
        """Fail; stands for everything else that code may do with an object."""
        return self._trace.fail(f"looks into {'.'.join(self._path)}")

    __eq__ = __len__ = __iter__ = __contains__ = __bool__ = __getitem__ = _refuse
    __setitem__ = __delattr__ = _refuse
    __call__: Any = _refuse


class ChildProxy(Proxy):
    """Stands for a child of the layer; returns labels when it is called."""

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return new labels in the shape of the child's output; those of ``x`` for an identity."""
        trace, (name,) = self._trace, self._path
        if args or kwargs or not isinstance(x, Tensor):
            trace.fail(f"gives {name} more than one tensor")
        if self._is_identity():
            return x
        width = trace.widths.get(name)
        with torch._C.DisableTorchFunction():
            # A child that tells no width, such as a norm, returns the shape that it is given.
            shape = tuple(x.shape) if width is None else (*x.shape[:-1], width)
            output = TracedOutput(name, x, shape, trace)
        trace.outputs.append(output)
        return output.labels

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        self._trace.fail(f"reads {self._path[0]}.{name}")

    def _is_identity(self) -> bool:
        """Return whether the child is ``nn.Identity``, or a dropout that drops nothing.

        What this depends on is recorded among the lookups. Fails the trace for a dropout that
        drops.
        """
        trace, (name,), module = self._trace, self._path, self._value
        if has_own_call(module):
            trace.fail(f"calls {name} ({type(module).__name__}), which has a __call__ of its own")
        # Not for projections: adapters may wrap one between calls, which each call looks at by
        # itself.
        kind = own_class(type(module))
        if getattr(module, "out_features", None) is None:
            if "forward" in vars(module):
                trace.fail(f"calls {name} ({kind.__name__}), whose forward was replaced")
            trace.lookups.append(((name, *CLASS, "forward"), self._class().forward))
        if kind is not nn.Dropout or not isinstance(module, nn.Dropout):
            return kind is nn.Identity
        trace.lookups.append(((name, "p"), module.p))
        if trace.training and module.p > 0:
            trace.fail(f"calls {name}, which drops out")
        return True


class _AttentionFunctions:
    """Stands for transformers' registry of attention functions; has one function for all names."""

    def __init__(self, attend: Callable):
        self._attend = attend

    def get_interface(self, *_: Any) -> Callable:
        return self._attend

    __getitem__ = get_interface


class Trace:
    """One run of a layer's forward on labels, which the constructor makes.

    Args:
        module: The layer.
        case: The way to call it.
        code: The functions that its forward may run.
        keywords: Names of further keywords that it is given if it accepts any, beside "sp_overlap",
            which no forward knows.

    Attributes:
        x: [b, s, m]. The hidden states that it was given.
        mask: Stands for the mask; None without one.
        tables: The position embeddings, (cos, sin), each labels of [b, s, 2].
        position_ids: Stands for the positions.
        further_keywords: The further keywords; empty if the forward accepts none.
        widths: How many features each child returns; None for a child that doesn't tell.
        outputs: What the children returned, in the order of their calls.
        rotations: The calls of rotary functions: the function, its arguments as `rotary_of` takes
            them, and its keywords.
        rotated: What the rotary functions returned.
        q, k, v: [b, h, s, d]. What the attention function was given.
        options: Its keywords.
        o: [b, s, h, d]. What the attention function returned.
        weights: Stands for the attention weights, which it returned as well.
        returned: What the forward returned.
        lookups: What the forward looked up.

    Raises:
        Unknown: if the forward does what is not accounted for.
    """

    def __init__(self, module: Any, case: Case, code: Code, keywords: set[str]):
        self.module, self.training, self.case, self.code = module, case.training, case, code
        self.outputs: list[TracedOutput] = []
        self.rotations: list[tuple[Callable, tuple, tuple]] = []
        self.rotated: list[TracedOutput] = []
        kind = own_class(type(module))
        self.lookups: list[Lookup] = [((*CLASS, name), getattr(kind, name)) for name in RUNS]
        self._label_count = 0
        self.further_keywords: dict[str, Opaque] = {}
        self.layer = Proxy(module, (), self)
        # Looked up before anything is accounted for, since ZeRO-3 runs code of its own where a
        # weight is looked up.
        children = module._modules.items()
        self.widths = {name: out_features(child) for name, child in children if child is not None}
        config = module.config
        used: set[int] = set()
        # Without zeros, which every prime divides, and without the number that ZeRO-3 gives each
        # module: those of a layer with adapters leave no prime.
        for holder in (vars(config), *map(vars, module.modules())):
            held = (x for name, x in holder.items() if name != "ds_id")
            used.update(x for x in held if isinstance(x, int) and x)
        batch, *lengths = free_primes(used)
        self.batch, self.seq = batch if case.gives_optional else 1, lengths[not case.masked]
        self.x = self.new_labels(self.batch, self.seq, config.hidden_size)
        cos, sin = (self.new_labels(self.batch, self.seq, 2) for _ in range(2))
        self.tables = Tables((cos, sin))
        self.weights, self.position_ids = Opaque(self.fail), Opaque(self.fail)
        self.mask = Opaque(self.fail) if case.masked else None
        self.o: Any = None
        sizes = {self.batch, self.seq, self.batch * self.seq}
        self.accounting = Accounting((), sizes)
        # Labels are integers, whatever the hidden states of a call are.
        self.accounting.hidden = HiddenDtype(self.fail)
        arguments = self._arguments(code.forward, keywords)
        with contextlib.ExitStack() as stack:
            for namespace, name, value in code.loaded_globals.values():
                if (stand_in := self._stand_in(name, value)) is not None:
                    stack.enter_context(replaced(namespace, name, stand_in))
            stack.enter_context(self.accounting)
            self.returned = code.forward(self.layer, **arguments)
        if self.o is None:
            raise Unknown("its forward calls no attention function")

    def fail(self, reason: str) -> NoReturn:
        """Raise Unknown; see `Accounting.fail`."""
        self.accounting.fail(reason)

    def new_labels(self, *shape: int) -> Tensor:
        """Return labels, whole numbers of which none was returned before, in this shape."""
        count = torch.Size(shape).numel()
        self._label_count += count
        return torch.arange(self._label_count - count, self._label_count).view(shape)

    def _arguments(self, forward: Callable, keywords: set[str]) -> dict[str, Any]:
        """Return the arguments of the forward in this case, by name.

        Raises:
            Unknown: if the forward has a parameter that is not known here.
        """
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        known: dict[str, Any] = dict.fromkeys(UNUSED)
        known |= dict(
            hidden_states=self.x,
            attention_mask=self.mask,
            position_embeddings=self.tables if self.case.gives_tables else None,
            position_ids=None,
        )
        if self.case.gives_optional:
            known |= {name: Opaque(self.fail) for name in UNUSED if name not in CACHES}
            known["position_ids"] = self.position_ids
        arguments = {}
        for name in names:
            if name not in known:
                raise Unknown(f"its forward takes {name}")
            arguments[name] = known[name]
        # The forward takes any keywords.
        if len(names) < len(parameters):
            further = {"sp_overlap", *keywords} - {*names}
            self.further_keywords = {name: Opaque(self.fail) for name in further}
        return arguments | self.further_keywords

    def _stand_in(self, name: str, value: Any) -> Any:
        """Return what replaces a global of the layer's code; None if it stays.

        Replaced are the registry of attention functions, and functions that the code knows by a
        name with "rotary" in it.
        """
        if value is attention_functions():
            return _AttentionFunctions(self._attend)
        if "rotary" in name and callable(value):
            return functools.partial(self._rotate, value)
        return None

    def _rotate(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Record a call of a rotary function, for `rotary_function.rotary_of`.

        Returns labels for each positional tensor that is no table, in their order.
        """
        tables = dict(zip(map(id, (self.tables, *self.tables)), Table))
        sizes = {self.batch: "batch", self.seq: "seq"}
        recorded, outputs = [], []
        with torch._C.DisableTorchFunction():
            for argument in args:
                # No labels are returned for a `Table`.
                argument = tables.get(id(argument), argument)
                if isinstance(argument, Tensor):
                    shape = tuple(argument.shape)
                    outputs.append(TracedOutput("", argument, shape, self))
                    argument = tuple(sizes.get(size, size) for size in shape)
                recorded.append(argument)
        self.rotations.append((function, tuple(recorded), tuple(kwargs.items())))
        self.rotated += outputs
        labels = tuple(output.labels for output in outputs)
        return labels[0] if len(labels) == 1 else labels

    def _attend(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple:
        """Record the call of the attention function, and return labels for o [b, s, h, d].

        Stands for every attention function. Behind o it returns what stands for the weights.
        """
        if self.o is not None or module is not self.layer or attention_mask is not self.mask:
            self.fail(
                "calls its attention more than once, or with a mask that is not as it is given"
            )
        self.q, self.k, self.v, self.options = q, k, v, options
        with torch._C.DisableTorchFunction():
            self.o = self.new_labels(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        return self.o, self.weights
