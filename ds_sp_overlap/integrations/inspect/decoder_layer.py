"""Reads decoder layers: r = h + attention(norm_in(h)), then r + mlp(norm_mid(r)).

The layer's own forward runs with recorders in place of its children, which return random numbers.
The forward may only add these numbers up and move them (`accounting`), and the results must be the
sums above, bit for bit. Its norms and its MLP are probed by themselves (`tokenwise`). No weight is
read.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ...attention.runtime.linear import hooks_are_harmless, is_harmless
from ..rebinding import is_ours
from .accounting import MOVES, Accounting, LoadedGlobal, Unknown, forward_of, is_plain
from .attention import has_changed
from .library import own_class
from .probe import ProbeSchedule
from .symbolic_trace import (
    CLASS,
    RUNS,
    UNUSED,
    Lookup,
    Opaque,
    Proxy,
    class_of_child,
    is_identity,
    replaced,
)
from .tokenwise import (
    BATCH,
    TOKENS,
    TRANSFORMERS,
    Form,
    fixed_state,
    has_own_call,
    probe_tokenwise,
    signature,
)  # fmt: skip

# Its hooks record what a layer returns: attention weights, which are None here.
CAPTURING = "transformers.utils.output_capturing"
# Its layers wrap their forward in gradient checkpointing, which a chain can do as well.
CHECKPOINTING = "transformers.modeling_layers"
# Some layers add residuals in fp32, or clamp them in fp16, so a layer is run in each of these.
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
# Operations that a forward may use besides moves; "mul" by exactly 1 only (`_SumAccounting`).
SUMS = "add", "add_", "__iadd__", "__radd__", "mul", "__rmul__"


def records_nothing(hook: Any) -> bool:
    """Return whether a hook is transformers' for recording outputs, and records nothing now.

    Such a hook records, for instance, the logits of a router, if the running forward of the model
    collects them. A chain runs what is inside of an MLP in chunks of tokens, where such a hook must
    be idle; it asks in each forward (`BlockLayer.idle`).
    """
    if getattr(hook, "__module__", None) != CAPTURING:
        return False
    collected = sys.modules[CAPTURING]._active_collector.get()
    if not collected:
        return True
    # What the hook records: a variable of the function in transformers that made it.
    key = inspect.getclosurevars(hook).nonlocals["key"]
    return key not in collected  # guard: nothing is recorded in parts


@dataclass(frozen=True)
class BlockReading:
    """Describes what a decoder layer computes, by the formula at the top of this file.

    Attributes:
        norm_in, attention, norm_mid, mlp: The names of the layer's children.
        arguments: Pairs of names: an argument of the attention, and the argument of the layer that
            it is.
        constants: Further arguments of the attention, by name.
        passes_keywords: Whether further keywords of the layer are passed on to the attention.
        blanks: The number of None that the layer returns behind the hidden states; None if it
            returns no tuple.
        zeros: The number of zeros that it returns behind these.
    """

    norm_in: str
    attention: str
    norm_mid: str
    mlp: str
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    passes_keywords: bool
    blanks: int | None
    zeros: int = 0

    def attention_arguments(
        self, arguments: dict[str, Any], names: frozenset[str]
    ) -> dict[str, Any]:
        """Return the arguments of the attention by name, without hidden states.

        Args:
            arguments: The arguments that the layer was given, by name.
            names: The names of the parameters of the layer's forward.
        """
        result: dict[str, Any] = {}
        if self.passes_keywords:
            result |= {name: x for name, x in arguments.items() if name not in names}
        result |= dict(self.constants)
        for name, name_in_layer in self.arguments:
            if name_in_layer in arguments:
                result[name] = arguments[name_in_layer]
        return result

    def without(self, name: str) -> BlockReading:
        """Return the reading without the argument ``name`` of the layer, or the None in its place.

        Constants that are None say that the layer was not given an argument.
        """
        arguments = tuple(pair for pair in self.arguments if pair[1] != name)
        constants = tuple(pair for pair in self.constants if pair[1] is not None)
        return replace(self, arguments=arguments, constants=constants)

    def as_returned(self, hidden: Tensor) -> Any:
        """Return hidden states in the form in which the layer's own forward returns them.

        Alone, or first in a tuple, with ``blanks`` None and ``zeros`` zeros behind them.
        """
        if self.blanks is None:
            return hidden
        zeros = [hidden.new_zeros(()) for _ in range(self.zeros)]
        return (hidden, *[None] * self.blanks, *zeros)


class BlockReader:
    """Reads a decoder layer, in the constructor, and later says whether the reading still holds.

    An adapter makes one for each decoder layer, in `enable`.

    Args:
        layer: The layer.
        attention: The name of its attention.
        form: How layers of its framework are written.
        known: The readers of other layers, to which this one is added. If the layer is like one of
            theirs, their reading is used.

    Attributes:
        reading: What the layer's forward computes.
        names: The names of the parameters of its forward.
        form: As given.
        probes: The schedule of probes, which layers that are alike share.

    Raises:
        Unknown: if it is not known what the layer's forward computes.
    """

    def __init__(
        self,
        layer: Any,
        attention: str,
        form: Form = TRANSFORMERS,
        known: list[BlockReader] | None = None,
    ):
        known = [] if known is None else known
        if "forward" in vars(layer):
            raise Unknown("its forward was replaced")
        for reader in known:
            if reader._applies_to(layer, attention, form):
                vars(self).update(vars(reader))
                return
        cpu, own_random_state = torch.device("cpu"), torch.random.fork_rng(())
        try:
            with torch.no_grad(), cpu, own_random_state:  # guard: the program's random numbers stay
                self._read(layer, attention, form)
        except Unknown:
            raise
        except Exception as error:  # of any kind: the code was not made for recorders
            raise Unknown(
                f"its forward computes what is not known here ({type(error).__name__}: {error})"
            ) from error
        known.append(self)

    def _read(self, layer: Any, attention: str, form: Form) -> None:
        """Run the layer's forward in every case, and probe its norms and its MLP.

        Sets the attributes. Raises Unknown if the cases give different readings, or a part is not a
        function of one token at a time.
        """
        size = form.size(getattr(layer, attention))
        if has_own_call(layer):
            raise Unknown("it has a __call__ of its own")
        runs: list[_Run] = []
        # Once with the dtype hidden, so that a look at it fails.
        dtypes = [(dtype, False) for dtype in DTYPES]
        dtypes.append((torch.float32, True))
        for training in (True, False):
            for dtype, hidden in dtypes:
                for bias in {form.biases, False}:
                    keywords: set[str] = set()
                    if runs and hidden:
                        keywords = runs[0].constants  # guard: keywords are passed on as they are
                    case = _Case(training, dtype, hidden, bias)
                    runs.append(
                        _Run(layer, attention, size, form=form, case=case, keywords=keywords)
                    )
        self.reading, *others = (run.reading() for run in runs)
        if any(other != self.reading for other in others):
            raise Unknown("its forward is another one in evaluation, or in another dtype")
        self.names = frozenset(runs[0].names)
        runs += self._runs_with_others(layer, attention, size, form, runs[0].case)
        self._lookups: dict[tuple[Any, ...], Any] = {}
        self._loaded_globals: dict[Any, LoadedGlobal] = {}
        loaded_globals: list[LoadedGlobal] = []
        for run in runs:
            self._lookups.update(run.lookups)
            loaded_globals += run.loaded_globals
        self._fixed_states = self._current_states(layer)
        reading = self.reading
        for name, norm in ((reading.norm_in, True), (reading.norm_mid, True), (reading.mlp, False)):
            loaded_globals += probe_tokenwise(
                name, getattr(layer, name), size, form=form, norm=norm
            )
        for loaded in loaded_globals:
            self._loaded_globals[id(loaded.namespace), loaded.name] = loaded
        self.probes = ProbeSchedule()
        self.form, self._signature = form, self._signature_of(layer, attention, form)

    def _runs_with_others(
        self, layer: Any, attention: str, size: int, form: Form, case: _Case
    ) -> list[_Run]:
        """Run the layer's forward with other arguments left out, or given, one in each run.

        Sets the names of those by which the forward goes. Returns the runs that give the reading.
        """
        runs: list[_Run] = []
        needed: set[str] = set()
        unwanted: set[str] = set()
        for name in sorted(self.names - {"hidden_states", *form.absent}):
            is_unused = name in UNUSED
            other = case._replace(other=name)
            for training in (True, False):
                try:
                    run = _Run(
                        layer,
                        attention,
                        size,
                        form=form,
                        case=other._replace(training=training),
                        keywords=set(),
                    )
                    is_same = run.reading().without(name) == self.reading.without(name)
                except Exception:  # of any kind: the code was not made for this
                    is_same = False
                if is_same:
                    runs.append(run)
                else:
                    (unwanted if is_unused else needed).add(name)
        self._needed, self._unwanted = frozenset(needed), frozenset(unwanted)
        return runs

    def _applies_to(self, layer: Any, attention: str, form: Form) -> bool:
        """Return whether the reading applies to ``layer``, which is another one in `enable`."""
        if self._change(layer):
            return False
        return self._signature_of(layer, attention, form) == self._signature

    def _probed_names(self) -> tuple[str, str, str]:
        """Return the names of the children that were probed."""
        return self.reading.norm_in, self.reading.norm_mid, self.reading.mlp

    def _signature_of(self, layer: Any, attention: str, form: Form) -> tuple:
        """Describe a layer by its children, and in detail by the norms and the MLP.

        Layers with equal signatures share a reading, unless what it looked up is another thing in
        one of them (`_applies_to`).
        """
        children = []
        for name, child in layer.named_children():
            # Only a child with children of its own may return a bias, see `_Recorder`.
            children.append((name, own_class(type(child)), any(child.children())))
        probed = [getattr(layer, name, None) for name in self._probed_names()]
        signatures = [signature(child) for child in probed if isinstance(child, nn.Module)]
        size = form.size(getattr(layer, attention))
        return own_class(type(layer)), attention, form, size, children, signatures

    def _change(self, layer: Any) -> str:
        """Return the name of a lookup or global that differs in ``layer`` now; empty if none."""
        for path, value in self._lookups.items():
            if has_changed(layer, path, value):
                return ".".join(map(str, path))
        for loaded in self._loaded_globals.values():
            if loaded.has_changed():
                return loaded.name
        return ""

    def _current_states(self, layer: Any) -> list[list[tuple]]:
        """Return the `fixed_state` of each child that was probed."""
        return [fixed_state(getattr(layer, name)) for name in self._probed_names()]

    def unexpected(self, arguments: dict[str, Any]) -> str:
        """Explain why the layer can't run in a chain with these arguments; empty if it can."""
        # None in all runs, so that it is not known what the layer does with them.
        given = [name for name in self.form.absent if arguments.get(name) is not None]
        # The forward goes by these: they must be left out, or given, as when it was read.
        for name in sorted(self._unwanted):
            # Not ``in``, since a tensor compares number by number.
            if not (arguments.get(name) is None or arguments[name] is False):
                given.append(name)
        reason = f"it is given {given[0]}" if given else ""
        missing = sorted(name for name in self._needed if arguments.get(name) is None)
        if missing and not reason:
            reason = f"it is given no {missing[0]}"
        return reason  # guard: what was left out when it was read is not given

    def why_not(self, layer: Any) -> str:
        """Explain why the layer as it is now can't run in a chain; empty if it can.

        `ChainedLayer.why_not` asks in each forward of the model.
        """
        change = self._change(layer)
        is_same = not change and self._fixed_states == self._current_states(layer)
        if not is_same:  # guard: what was read is what runs
            changed = change or "a module in it"
            return f"{changed} changed since it was read; call ds_sp_overlap.enable again"
        attention = getattr(layer, self.reading.attention)
        has_own_forward = "forward" in vars(attention) and not is_ours(attention)
        harmless = hooks_are_harmless(attention, CAPTURING)
        if has_own_forward or not harmless:  # guard: an attention that is not called has no hooks
            kind = type(attention).__name__
            return f"{self.reading.attention} ({kind}) has a forward or a hook of its own"
        # A forward pre-hook may change the layer, for instance load its weights, and the layer in
        # front starts q, k and v before it runs. Backward hooks put views in the place of hidden
        # states: of those, nothing was started.
        kinds = layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
        hooks = [hook for kind in kinds for hook in kind.values()]
        if not all(map(is_harmless, hooks)):  # guard: runs first
            return f"{type(layer).__name__} has a forward pre-hook or a backward hook of its own"
        return ""


# The layer's own forward.


class _Case(NamedTuple):
    """A way to run a decoder layer's forward.

    Attributes:
        training: Whether the layer is in training.
        dtype: The dtype of its numbers.
        hidden: Whether the dtype is hidden.
        bias: Whether the children return biases that are yet to be added.
        other: The name of an argument that is given where it is left out in other cases, or left
            out where it is given; empty if there is none.
    """

    training: bool
    dtype: torch.dtype
    hidden: bool
    bias: bool
    other: str = ""


# No NamedTuple: its generated code would be accounted for, as it belongs to no package.
@dataclass(frozen=True)
class _Call:
    """A call of a child.

    Attributes:
        name: The name of the child.
        input: Its input, copied.
        output: Its output with the bias, copied.
    """

    name: str
    input: Tensor
    output: Tensor


class _Recorder:
    """Stands for a child: records its input, and returns random numbers of the same shape.

    An identity returns its input, and is not recorded.
    """

    def __init__(self, name: str, module: nn.Module, run: _Run):
        self._name, self._module, self._run = name, module, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return self._record(*args, **kwargs)

    def _record(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call; return what the child would: numbers, or a pair.

        Attentions and, in Megatron's form, MLPs return pairs: (numbers, weights or bias).
        """
        run, module, name = self._run, self._module, self._name
        if not kwargs and is_identity(name, module, run):
            return args[0]
        if name == run.attention:
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            run.attention_arguments = {**dict(zip(names, args)), **kwargs}
            args, kwargs = (run.attention_arguments.pop("hidden_states", None),), {}
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            run.fail(f"gives {name} more than one tensor")
        output, bias = run.random_numbers(), None
        # A norm, which has no children, returns no bias.
        may_return_bias = run.form.biases and any(module.children())
        if may_return_bias and run.case.bias:
            bias = run.random_numbers()[0, 0]
        with_bias = output.clone() if bias is None else output + bias
        run.calls.append(_Call(name, args[0].clone(), with_bias))
        if may_return_bias:
            return output, bias
        return (output, run.weights) if name == run.attention else output

    def __getattr__(self, name: str) -> Any:
        self._run.fail(f"reads {self._name}.{name}")

    # For isinstance.
    __class__ = property(lambda self: class_of_child(self._name, self._module, self._run))


class _SumAccounting(Accounting):
    """Accounts for code that adds numbers up and moves them.

    A factor that is exactly 1 is allowed, too. Whether a tensor requires a gradient may be passed
    on.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hide whether a tensor requires a gradient; judge all else as `Accounting` does."""
        name = getattr(function, "__name__", "")
        if name == "__get__" and function.__self__.__name__ == "requires_grad":
            return Opaque(self)
        return super().__torch_function__(function, types, args, kwargs)

    def execute(self, name: str, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Execute a move, a sum of two, or a product with exactly 1; fail for keywords of sums."""
        # A factor that is 1 now is looked up again in later calls.
        if "mul" in name:
            is_by_one = len(args) > 1 and not kwargs and is_plain(args[1]) and args[1] == 1
            if not is_by_one:
                self.fail(f"computes what is not known here: {name}")
        # Such as the ``alpha`` of a sum, which is a factor.
        if kwargs and name not in MOVES:
            self.fail(f"computes what is not known here: {name} with {', '.join(kwargs)}")
        return super().execute(name, function, args, kwargs)


class _Run:
    """One run of a layer's forward on random numbers, which the constructor makes.

    Args:
        layer: The layer.
        attention: The name of its attention.
        size: m.
        form: How layers of its framework are written.
        case: The way to run it.
        keywords: Names of further keywords that it is given if it accepts any, beside "sp_overlap",
            which no forward knows.

    Attributes:
        x, x_before: [b, s, m]. The hidden states that it was given, and a copy made before.
        returned: What it returned.
        calls: The calls of its children, in order.
        arguments: The arguments of the layer by name.
        names: The names of the parameters of its forward.
        attention_arguments: The arguments of its attention by name, without hidden states.
        lookups: The attributes that the forward looked up.
        loaded_globals: The globals that it loaded.

    Raises:
        Unknown: if the forward does what is not accounted for.
    """

    # For `Proxy`: the forward may not read tensors of the layer.
    takes_parameters = False

    def __init__(
        self,
        layer: Any,
        attention: str,
        size: int,
        *,
        form: Form,
        case: _Case,
        keywords: set[str],
    ):
        self.layer, self.attention, self.form, self.case = layer, attention, form, case
        # Of the interface that proxies and the replacements of globals use.
        self.training, self.dtype = case.training, case.dtype
        self.generator = torch.Generator().manual_seed(0)
        self.shape = BATCH, TOKENS, size
        self.calls: list[_Call] = []
        self.attention_arguments: dict[str, Any] = {}
        kind = own_class(type(layer))
        self.lookups: list[Lookup] = [((*CLASS, name), getattr(kind, name)) for name in RUNS]
        self.weights = Opaque(self)
        self.further_keywords = {name: Opaque(self) for name in {"sp_overlap", *keywords}}
        self.accounting = _SumAccounting(SUMS, {BATCH, TOKENS}, case.hidden)
        forward = forward_of(type(layer), beside=CHECKPOINTING)
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        self.names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if "hidden_states" not in self.names:
            raise Unknown("its forward takes no hidden_states")
        self.x = self.random_numbers()
        self.arguments: dict[str, Any] = {}
        for name in self.names:
            is_absent = name in UNUSED or name in form.absent
            # In one run it is the other way round for one of them.
            is_absent = is_absent != (name == case.other)
            self.arguments[name] = None if is_absent else Opaque(self)
        self.arguments["hidden_states"] = self.x
        # The forward may not change its input in place.
        self.x_before, random_state = self.x.clone(), torch.get_rng_state()
        more = self.further_keywords if len(self.names) < len(parameters) else {}
        with replaced(layer, self._replacement), self.accounting:
            self.returned = forward(Proxy(layer, (), self), **self.arguments, **more)
        # Behind `replaced`, which has put the globals back into place.
        self.loaded_globals = self.accounting.globals_now()
        if not torch.equal(random_state, torch.get_rng_state()):
            raise Unknown("its forward draws random numbers")

    @property
    def constants(self) -> set[str]:
        """Strings in the code of the forward that may be names of further keywords; later runs give
        the forward keywords of these names, to see whether it uses one.
        """
        return self.accounting.possible_keywords() - {*self.names, *self.attention_arguments}

    def fail(self, reason: str) -> NoReturn:
        """Raise Unknown; see `Accounting.fail`."""
        self.accounting.fail(reason)

    def random_numbers(self) -> Tensor:
        """Return random hidden states [b, s, m], one number of them infinite."""
        numbers = torch.randn(self.shape, generator=self.generator, dtype=torch.float64)
        numbers = numbers.to(self.dtype)
        # A clamp, which some layers have, changes the infinite number. That has another place for
        # each call of a child.
        numbers.view(-1)[len(self.calls)] = torch.inf
        return numbers

    def look_up(self, holder: Any, name: str) -> Any:
        """Return an attribute; see `Accounting.look_up`."""
        return self.accounting.look_up(holder, name)

    def _replacement(self, name: str, value: Any) -> Any:
        """Return what replaces a global of the layer's code; None if it stays."""
        return self.form.replacement(self, name, value) if self.form.replacement else None

    def child(self, name: str, module: nn.Module) -> _Recorder:
        """Return what stands for a child of the layer."""
        return _Recorder(name, module, self)

    def reading(self) -> BlockReading:
        """Compare what the forward returned, and what it gave its children, with the formula above.

        Returns:
            What the forward computed, in the terms of that formula.

        Raises:
            Unknown: if it is anything else than a `BlockReading` can say.
        """
        names = [call.name for call in self.calls]
        if len(names) != 4 or names[1] != self.attention or len(set(names)) < 4:
            raise Unknown(
                f"its forward calls {', '.join(names)}, not a norm, {self.attention}, a norm and "
                "an MLP"
            )
        norm_in, attention, norm_mid, mlp = self.calls
        self._check(self.x, self.x_before, "its forward changes the hidden states that it is given")
        self._check(
            norm_in.input,
            self.x_before,
            f"{norm_in.name} is not given the hidden states as they are",
        )
        self._check(
            attention.input,
            norm_in.output,
            f"{attention.name} is not given what {norm_in.name} returned",
        )
        self._check(
            norm_mid.input,
            self.x_before + attention.output,
            f"{norm_mid.name} is not given the hidden states + what {attention.name} returned",
        )
        self._check(
            mlp.input, norm_mid.output, f"{mlp.name} is not given what {norm_mid.name} returned"
        )
        is_tuple = isinstance(self.returned, tuple)
        hidden, *behind = self.returned if is_tuple else (self.returned,)
        self._check(
            hidden,
            norm_mid.input + mlp.output,
            f"its forward doesn't return what {norm_mid.name} was given + what {mlp.name} returned",
        )
        # Only Megatron's form has zeros: the loss of a layer without experts.
        zeros = sum(map(self._is_zero, behind)) if self.form.biases else 0
        blanks = len(behind) - zeros
        for x in behind[:blanks]:
            # Attention weights may be returned, since they are None in a chain.
            if x is not None and x is not self.weights:
                raise Unknown("its forward returns more than hidden states")
        rest = dict(self.attention_arguments)
        # All further keywords must be passed on to the attention, or none of them.
        passed = [rest.pop(name, None) is x for name, x in self.further_keywords.items()]
        if any(passed) and not all(passed):
            keyword = [*self.further_keywords][passed.index(False)]
            raise Unknown(f"its forward uses the keyword {keyword}")
        # The names of the layer's arguments, by the ids of their stand-ins.
        opaque = {id(x): name for name, x in self.arguments.items() if isinstance(x, Opaque)}
        arguments, constants = [], []
        for name, x in rest.items():
            if id(x) in opaque:
                arguments.append((name, opaque[id(x)]))
            elif x is not None and not isinstance(x, (bool, int, float, str)):
                raise Unknown(f"its forward changes what {self.attention} is given")
            elif name not in UNUSED:
                constants.append((name, x))
        return BlockReading(
            norm_in.name,
            self.attention,
            norm_mid.name,
            mlp=mlp.name,
            arguments=tuple(arguments),
            constants=tuple(constants),
            passes_keywords=any(passed),
            blanks=blanks if is_tuple else None,
            zeros=zeros,
        )

    def _check(self, x: Any, expected: Tensor, error: str) -> None:
        """Raise Unknown with the message ``error`` unless ``x`` is ``expected``, bit for bit."""
        if not isinstance(x, Tensor) or x.dtype != expected.dtype or not torch.equal(x, expected):
            raise Unknown(error)

    def _is_zero(self, x: Any) -> bool:
        """Return whether ``x`` is a zero of no dims, in the dtype of the hidden states."""
        if not isinstance(x, Tensor) or x.dim() > 0 or x.dtype != self.returned[0].dtype:
            return False
        return not x
