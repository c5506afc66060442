"""Traces the forward of an attention layer of transformers symbolically.

Instead of data, the forward runs on labels: whole numbers that are all different. The inputs are
labels. Stand-ins for projections, norms, rotary functions and the attention function return new
labels. Only operations that move numbers are allowed (`accounting`). So the final place of a label
shows how the forward moved it. The trace uses no weights and calls no module.
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
from .library import CACHES, MISSING, Keywords, attention_functions, own_class, replaced
from .rotary_function import Table
from .tensor_parallel import out_features
from .tokenwise import has_own_call

# Arguments that layers ignore in training. `Driven` drops these arguments.
UNUSED = (*CACHES, "cache_position", "use_cache", "output_attentions")
# The name of every output of a rotary function. No child has this name.
ROTATION = "rotation()"
# An attribute that a forward looked up: its path, starting at the layer, and its value.
Lookup = tuple[tuple[str, ...], Any]


@dataclass(frozen=True)
class Case:
    """Describes a way to call a forward; the reading must be the same in all `CASES`.

    Cases with a mask have another sequence length than cases without. The batch size is 1 without
    optional arguments, and larger with optional arguments.

    Attributes:
        training: Whether the layer is in training.
        masked: Whether a mask is given.
        gives_optional: Whether optional arguments, such as positions, are given.
        gives_tables: Whether the tables of RoPE are given.
    """

    training: bool
    masked: bool
    gives_optional: bool
    gives_tables: bool = True


CASES = [Case(*values) for values in product((True, False), (True, False), (False, True))]


@dataclass(eq=False)
class TracedOutput:
    """Holds the labels that a stand-in returned.

    Attributes:
        name: The name of the child that the stand-in replaces; `ROTATION` for a rotary function.
        input: The labels that the stand-in received.
        labels: The new labels that the stand-in returned.
    """

    name: str
    input: Tensor
    labels: Tensor

    def rows_of(self, heads: Tensor) -> Tensor | None:
        """Return, for each row of ``heads`` [.., d], the index [..] of the equal row of ``labels``.

        If rows of ``heads`` are wider than rows of ``labels``, only their first elements count.
        Returns None if some row equals no row of ``labels``, or if output and input have different
        numbers of elements.
        """
        labels = self.labels.flatten(0, -2)
        count, width = labels.shape
        rows = ((heads[..., 0] - labels[0, 0]) // width).clamp(0, count - 1)
        is_equal = torch.equal(labels[rows], heads[..., :width])
        return rows if is_equal and self.labels.numel() == self.input.numel() else None

    def before(self, heads: Tensor, rows: Tensor) -> Tensor:
        """Return ``heads`` with the rows of the input instead of these ``rows`` of the output."""
        # Input and output have their rows in the same order.
        width = self.labels.shape[-1]
        return torch.cat((self.input.reshape(-1, width)[rows], heads[..., width:]), -1)


class Opaque:
    """Replaces an argument that code may only pass on or compare with None.

    Args:
        fail: `Accounting.fail`, called for any other use.
    """

    what = "an argument"

    def __init__(self, fail: Callable[[str], NoReturn]):
        self._fail = fail

    def _refuse(self, *_: Any) -> Any:
        return self._fail(f"looks at {self.what}")

    def __eq__(self, other: object) -> bool:
        """Return True if ``other`` is this object; else fail."""
        return other is self or self._refuse()

    __bool__ = __getattr__ = _refuse
    __hash__ = object.__hash__


class HiddenDtype(Opaque):
    """Replaces the dtype or device of a tensor; code may only pass it to another tensor."""

    what = "the dtype or device of a tensor"


class Tables(tuple):
    """Holds position embeddings (cos, sin), which a forward may unpack and move to a device."""

    def to(self, target: Any) -> Tables:
        """Return the tables unchanged; raise Unknown for a dtype that is not a tensor's."""
        if not isinstance(target, HiddenDtype):
            raise Unknown("its forward casts position embeddings")
        return self


class Proxy:
    """Replaces a layer, its config, or an object in one of the two, while a forward runs.

    A proxy records the attributes that the forward looks up. Instead of a child module of the
    layer, the proxy returns a `ChildProxy`.

    Args:
        value: The object.
        path: The path to the object, starting at the layer.
        trace: The running trace.
    """

    def __init__(self, value: Any, path: tuple[str, ...], trace: Trace):
        vars(self).update(_value=value, _path=path, _trace=trace)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the object, or a proxy of the attribute."""
        trace, path, is_layer = self._trace, self._path + (name,), not self._path
        with torch._C.DisableTorchFunction():
            value = getattr(self._value, name, MISSING)
        if value is MISSING:
            # Record this too, since the attribute may be set before a later call.
            trace.lookups.append((path, MISSING))
            raise AttributeError(name)
        # Return the mode of the case, not the current mode of the layer.
        if is_layer and name == "training":
            return trace.training
        if is_layer and isinstance(value, nn.Module):
            return ChildProxy(value, path, trace)
        function = getattr(type(self._value), name, None)
        if is_layer and inspect.ismethod(value) and value.__func__ is function:
            if function not in trace.code.functions:
                trace.fail(f"looks up {name} by no name in its code")
            # Bind the method to this proxy, so that the method is traced, too.
            trace.lookups.append(((name, "__func__"), function))
            return types.MethodType(function, self)
        # Record constants and tensors, for later calls to compare.
        if is_plain(value) or isinstance(value, Tensor):
            trace.lookups.append((path, value))
            return value
        # For any other object, a proxy records the lookups of its attributes.
        return Proxy(value, path, trace)

    def __setattr__(self, name: str, value: Any) -> None:
        self._trace.fail(f"sets {name}")

    def _class(self) -> Any:
        """Return the class of the object, and record the lookup."""
        kind = own_class(type(self._value))
        self._trace.lookups.append((self._path + ("__class__",), kind))
        return kind

    # For isinstance, so that a proxy of a layer is an instance of the layer's class.
    __class__ = property(_class)

    def _refuse(self, *_: Any) -> Any:
        """Fail; this implements every other operation on the object."""
        return self._trace.fail(f"looks into {'.'.join(self._path)}")

    __eq__ = __len__ = __iter__ = __contains__ = __bool__ = __getitem__ = _refuse
    __setitem__ = __delattr__ = _refuse
    __call__: Any = _refuse


class ChildProxy(Proxy):
    """Replaces a child module of the layer; a call returns labels."""

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return new labels in the shape of the child's output; ``x`` for an identity."""
        trace, (name,) = self._trace, self._path
        if args or kwargs or not isinstance(x, Tensor):
            trace.fail(f"gives {name} more than one tensor")
        if self._is_identity():
            return x
        # A child without a known width, such as a norm, returns the shape of its input.
        labels = trace.new_labels(*x.shape[:-1], trace.widths.get(name) or x.shape[-1])
        trace.outputs.append(TracedOutput(name, x, labels))
        return labels

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        self._trace.fail(f"reads {self._path[0]}.{name}")

    def _is_identity(self) -> bool:
        """Return whether the child is ``nn.Identity``, or a dropout that drops nothing.

        Fails for a dropout that drops. The attributes that are read here are recorded as lookups.
        """
        trace, (name,), module = self._trace, self._path, self._value
        if has_own_call(module):
            trace.fail(f"calls {name} ({type(module).__name__}), which has a __call__ of its own")
        # Don't record the forward of a projection. Each call of the layer uses the current
        # projections (`Driven.use`), so an adapter may wrap a projection between calls.
        kind = own_class(type(module))
        if getattr(module, "out_features", None) is None:
            if "forward" in vars(module):
                trace.fail(f"calls {name} ({kind.__name__}), whose forward was replaced")
            trace.lookups.append(((name, "__class__", "forward"), self._class().forward))
        if kind is not nn.Dropout:
            return kind is nn.Identity
        trace.lookups.append(((name, "p"), module.p))
        if trace.training and module.p > 0:
            trace.fail(f"calls {name}, which drops out")
        return True


@dataclass
class _AttentionFunctions:
    """Replaces transformers' registry of attention functions, with one function for all names."""

    attend: Callable

    def get_interface(self, *_: Any) -> Callable:
        return self.attend

    __getitem__ = get_interface


class Trace(Accounting):
    """Runs a layer's forward on labels, and checks the code; all in the constructor.

    Args:
        module: The layer.
        case: The way to call the forward.
        code: The functions that the forward may run.
        keywords: Names of further keywords to pass, if the forward accepts any keyword. The trace
            then also passes "sp_overlap", a keyword that the forward can't know.

    Attributes:
        x: [b, s, m]. The labels of the hidden states.
        mask: The `Opaque` that replaces the mask; None without a mask.
        tables: The position embeddings (cos, sin), each labels [b, s, 2].
        position_ids: The `Opaque` that replaces the positions.
        further_keywords: The values of the passed further keywords, by name.
        widths: The number of output features of each child; None if this number is not known.
        outputs: The outputs of children and of rotary functions, in the order of the calls.
        rotations: For each call of a rotary function: the function, the arguments in the form that
            `rotary_of` expects, and the keywords.
        q, k, v: [b, h, s, d]. The arguments of the attention function.
        options: The keywords of the attention function.
        o: [b, s, h, d]. The labels that the attention function returned.
        weights: The `Opaque` that replaces the attention weights.
        returned: The result of the forward.
        lookups: The attributes that the forward looked up.

    Raises:
        Unknown: if the forward does something that is not allowed.
    """

    def __init__(self, module: Any, case: Case, code: Code, keywords: set[str]):
        self.module, self.training, self.case, self.code = module, case.training, case, code
        self.outputs: list[TracedOutput] = []
        self.rotations: list[tuple[Callable, tuple, tuple]] = []
        kind = own_class(type(module))
        # A call of a module runs these functions of its class.
        self.lookups: list[Lookup] = []
        for name in ("forward", "__call__"):
            self.lookups.append((("__class__", name), getattr(kind, name)))
        self._label_count = 0
        self.further_keywords: dict[str, Opaque] = {}
        self.layer = Proxy(module, (), self)
        # Read widths before `Accounting` begins: reading a weight runs code of ZeRO-3.
        children = module._modules.items()
        self.widths = {name: out_features(child) for name, child in children if child is not None}
        config = module.config
        used = set()
        # Leave out zeros, which every prime divides. Leave out the ids that ZeRO-3 gives to
        # modules, since the ids in a layer with adapters would exclude all primes.
        for holder in [config, *module.modules()]:
            for name, x in vars(holder).items():
                if isinstance(x, int) and x and name != "ds_id":
                    used.add(x)
        batch, *lengths = free_primes(used)
        self.batch, self.seq = batch if case.gives_optional else 1, lengths[not case.masked]
        super().__init__((), {self.batch, self.seq, self.batch * self.seq})
        # Hide the dtype of labels, an integer type, since hidden states have another dtype.
        self.hidden = HiddenDtype(self.fail)
        self.x = self.new_labels(self.batch, self.seq, config.hidden_size)
        self.tables = Tables(self.new_labels(self.batch, self.seq, 2) for _ in ("cos", "sin"))
        self.weights, self.position_ids = Opaque(self.fail), Opaque(self.fail)
        self.mask = Opaque(self.fail) if case.masked else None
        self.o: Any = None
        arguments = self._arguments(code.forward, keywords)
        with contextlib.ExitStack() as stack:
            for namespace, name, value in code.loaded_globals.values():
                if value is attention_functions():
                    attend = _AttentionFunctions(self._attend)
                    stack.enter_context(replaced(namespace, name, attend))
                elif "rotary" in name and callable(value):
                    rotate = functools.partial(self._rotate, value)
                    stack.enter_context(replaced(namespace, name, rotate))
            stack.enter_context(self)
            self.returned = code.forward(self.layer, **arguments)
        if self.o is None:
            raise Unknown("its forward calls no attention function")

    def new_labels(self, *shape: int) -> Tensor:
        """Return new labels of ``shape``: whole numbers that no earlier call has returned."""
        count = torch.Size(shape).numel()
        self._label_count += count
        with torch._C.DisableTorchFunction():
            return torch.arange(self._label_count - count, self._label_count).view(shape)

    def _arguments(self, forward: Callable, keywords: set[str]) -> Keywords:
        """Return the arguments of the forward in this case, by name.

        Raises:
            Unknown: if the forward has a parameter that is not known here.
        """
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        known = dict.fromkeys(UNUSED)
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
        # ``names`` lacks a parameter only if the forward has ``**kwargs``.
        if len(names) < len(parameters):
            further = {"sp_overlap", *keywords} - {*names}
            self.further_keywords = {name: Opaque(self.fail) for name in further}
        return arguments | self.further_keywords

    def _rotate(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Record a call of a rotary function, for `rotary_function.rotary_of`.

        Returns new labels for each tensor among the positional arguments, except the tables.
        """
        tables = dict(zip(map(id, (self.tables, *self.tables)), Table))
        sizes = {self.batch: "batch", self.seq: "seq"}
        recorded, labels = [], []
        with torch._C.DisableTorchFunction():
            for argument in args:
                # Record tables as `Table`, and return no labels for them.
                argument = tables.get(id(argument), argument)
                if isinstance(argument, Tensor):
                    labels.append(self.new_labels(*argument.shape))
                    self.outputs.append(TracedOutput(ROTATION, argument, labels[-1]))
                    argument = tuple(sizes.get(size, size) for size in argument.shape)
                recorded.append(argument)
        self.rotations.append((function, tuple(recorded), tuple(kwargs.items())))
        return labels[0] if len(labels) == 1 else tuple(labels)

    def _attend(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple:
        """Record the call of the attention function; return labels for o [b, s, h, d], and weights.

        This replaces every attention function.
        """
        if self.o is not None or module is not self.layer or attention_mask is not self.mask:
            self.fail(
                "calls its attention more than once, or with a mask that is not as it is given"
            )
        self.q, self.k, self.v, self.options = q, k, v, options
        self.o = self.new_labels(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        return self.o, self.weights
