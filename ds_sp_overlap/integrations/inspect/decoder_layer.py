"""Transformer layers that compute ``r = h + attention(norm(h))`` and return ``r + mlp(norm(r))``,
told from a run.

The layer's own forward runs with recorders in its children's place, which return random numbers. It
may add these up and move them, and do nothing else (`accounting`); what it makes of them is to be
those sums, bit for bit. Its norms and its MLP are tried out on tokens, together and in parts. No
weight is read.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...attention.runtime.linear import hooks_are_harmless
from ..rebinding import is_ours
from .accounting import MISSING, MOVES, Accounting, Unknown, forward_of, is_plain
from .attention import changed
from .probe import Probed
from .symbolic_trace import CLASS, RUNS, UNUSED, Looked, Opaque, is_identity, replaced
from .tokenwise import BATCH, TOKENS, TRANSFORMERS, Form, held, kind, own_call, try_out

CAPTURING = "transformers.utils.output_capturing"  # whose hooks note what a layer returns: weights of attention, which are None here
CHECKPOINTING = "transformers.modeling_layers"  # whose layers have one forward around another, which a chain can do as well
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
)  # some add residuals up in fp32, or clamp them in fp16
SUMS = "add", "add_", "__iadd__", "__radd__", "mul", "__rmul__"


def records_nothing(hook: Any) -> bool:
    """Whether a hook is one of transformers' that note what a module returns, as a router its
    logits, and notes nothing in the forward that is running.
    """
    if getattr(hook, "__module__", None) != CAPTURING:
        return False
    collected = sys.modules[CAPTURING]._active_collector.get()
    return (
        not collected or inspect.getclosurevars(hook).nonlocals["key"] not in collected
    )  # guard: nothing is recorded in parts


@dataclass(frozen=True)
class BlockReading:
    """What a decoder layer's forward computes: ``r = h + attention(norm_in(h))``, then ``r +
    mlp(norm_mid(r))``.

    norm_in, attention, norm_mid, mlp   names of its children
    arguments   of the attention's arguments, the layer's that they are
    constants   what else the attention is given
    passes      whether further keywords of the layer go to the attention
    blanks      how many None it returns behind the hidden states, in a tuple; None if it returns a
                tensor
    zeros       how many zeros behind these
    """

    norm_in: str
    attention: str
    norm_mid: str
    mlp: str
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    passes: bool
    blanks: int | None
    zeros: int = 0

    def of_attention(self, given: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
        """What the attention gets beside hidden states where the layer, which has arguments
        ``names``, is ``given`` this.
        """
        more = {name: x for name, x in given.items() if name not in names} if self.passes else {}
        return {
            **more,
            **dict(self.constants),
            **{name: given[of] for name, of in self.arguments if of in given},
        }

    def returned(self, hidden: Tensor) -> Any:
        if self.blanks is None:
            return hidden
        return (hidden, *[None] * self.blanks, *(hidden.new_zeros(()) for _ in range(self.zeros)))


class BlockReader:
    """Reads a layer, whose attention is its child ``attention``. Raises Unknown.

    known     readers of other layers, to which it is added; a layer that is like one of theirs is
              not read again
    reading   what it computes
    names     arguments of its forward
    probed    what came of it in the layers' first calls
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
        if like := next(
            (reader for reader in known if reader._serves(layer, attention, form)), None
        ):
            vars(self).update(vars(like))
            return
        try:
            with (
                torch.no_grad(),
                torch.device("cpu"),
                torch.random.fork_rng(()),
            ):  # guard: the program's random numbers stay
                self._read(layer, attention, form)
        except Unknown:
            raise
        except Exception as error:  # of any kind: of code that was not made for recorders
            raise Unknown(
                f"its forward computes what is not known here ({type(error).__name__}: {error})"
            ) from error
        known.append(self)

    def _read(self, layer: Any, attention: str, form: Form) -> None:
        size = form.size(getattr(layer, attention))
        if own_call(layer):
            raise Unknown("it has a __call__ of its own")
        runs: list[_Run] = []
        for training in (True, False):
            for dtype, hidden in (*((dtype, False) for dtype in DTYPES), (torch.float32, True)):
                for bias in {form.biases, False}:
                    keywords = (
                        runs[0].constants if runs and hidden else set()
                    )  # guard: keywords are passed on as they are
                    runs.append(
                        _Run(layer, attention, size, form, training, dtype, hidden, bias, keywords)
                    )
        self.reading, *others = (run.reading() for run in runs)
        if any(other != self.reading for other in others):
            raise Unknown("its forward is another one in evaluation, or in another dtype")
        self.names = frozenset(runs[0].named)
        self._looked = {path: value for run in runs for path, value in run.looked}
        self._names = {
            (id(known), name): (known, name, value)
            for run in runs
            for known, name, value in run.names
        }
        self._held = self._now(layer)
        for name, norm in (
            (self.reading.norm_in, True),
            (self.reading.norm_mid, True),
            (self.reading.mlp, False),
        ):
            for known, loaded, value in try_out(name, getattr(layer, name), size, form, norm):
                self._names[id(known), loaded] = known, loaded, value
        self.probed = Probed()
        self.form, self._like = form, self._form_of(layer, attention, form)

    def _serves(self, layer: Any, attention: str, form: Form) -> bool:
        """Whether ``layer`` is like the one that was read, in all that its forward looks at and in
        the modules that were tried out.
        """
        return not self._changed(layer) and self._form_of(layer, attention, form) == self._like

    def _form_of(self, layer: Any, attention: str, form: Form) -> tuple:
        children = [
            (name, type(child), any(child.children())) for name, child in layer.named_children()
        ]
        parts = (
            getattr(layer, name, None)
            for name in (self.reading.norm_in, self.reading.norm_mid, self.reading.mlp)
        )
        kinds = [kind(part) for part in parts if isinstance(part, nn.Module)]
        return type(layer), attention, form, form.size(getattr(layer, attention)), children, kinds

    def _changed(self, layer: Any) -> str:
        """What it looked at that is something else now, or in this layer; empty if nothing is."""
        looked = (
            ".".join(map(str, path))
            for path, value in self._looked.items()
            if changed(layer, path, value)
        )
        names = (
            name for known, name, value in self._names.values() if known.get(name) is not value
        )
        return next(looked, "") or next(names, "")

    def _now(self, layer: Any) -> list[list[tuple]]:
        """Return what may not change in the modules that were tried out."""
        return [
            held(getattr(layer, name))
            for name in (self.reading.norm_in, self.reading.norm_mid, self.reading.mlp)
        ]

    def unexpected(self, given: dict[str, Any]) -> str:
        """Why the layer can't be driven where it is given this; empty if it can."""
        present = [name for name in self.form.absent if given.get(name) is not None]
        return (
            f"it is given {present[0]}" if present else ""
        )  # guard: what was left out when it was read is not given

    def why_not(self, layer: Any) -> str:
        """Why the layer can't be driven as it was read, as of now; empty if it can."""
        if (what := self._changed(layer)) or self._held != self._now(
            layer
        ):  # guard: what was read is what runs
            return f"{what or 'a module in it'} changed since it was read; call ds_sp_overlap.enable again"
        attention = getattr(layer, self.reading.attention)
        own = "forward" in vars(attention) and not is_ours(attention)
        if own or not hooks_are_harmless(
            attention, CAPTURING
        ):  # guard: an attention that is not called has no hooks
            return f"{self.reading.attention} ({type(attention).__name__}) has a forward or a hook of its own"
        return ""


# The layer's own forward.


class _Recorder:
    """In place of a child: notes what it is given, and returns random numbers of its shape."""

    def __init__(self, name: str, module: nn.Module, run: _Run):
        self._name, self._module, self._run = name, module, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return self._recorded(*args, **kwargs)

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        run, module = self._run, self._module
        if not kwargs and is_identity(self._name, module, run):
            return args[0]
        if attends := self._name == run.attention:
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            run.given = {**dict(zip(names, args)), **kwargs}
            args, kwargs = (run.given.pop("hidden_states", None),), {}
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            run.fail(f"gives {self._name} more than one tensor")
        made = run.numbers()
        if run.form.biases and any(module.children()):  # else it is a norm
            bias = run.numbers()[0, 0] if run.bias else None
            run.calls.append(
                (self._name, args[0].clone(), made.clone() if bias is None else made + bias)
            )
            return made, bias
        run.calls.append((self._name, args[0].clone(), made.clone()))
        return (made, run.weights) if attends else made

    def __getattr__(self, name: str) -> Any:
        self._run.fail(f"reads {self._name}.{name}")


class _Sums(Accounting):
    """Of what adds up and moves; a factor of exactly one, which is looked at like all else, is
    none.

    Whether a gradient is wanted may be handed on.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__" and function.__self__.__name__ == "requires_grad":
            return Opaque(self)
        return super().__torch_function__(function, types, args, kwargs)

    def done(self, name: str, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if "mul" in name and (len(args) < 2 or kwargs or not (is_plain(args[1]) and args[1] == 1)):
            self.fail(f"computes what is not known here: {name}")
        if kwargs and name not in MOVES:
            self.fail(f"computes what is not known here: {name} with {', '.join(kwargs)}")
        return super().done(name, function, args, kwargs)


class _Run:
    """One run of a layer's forward on random numbers.

    calls      names of the children that were called, what they were given, and what they returned
    given      the attention's arguments
    arguments  the layer's
    named      which of them have names
    names      globals that were loaded
    looked     what the forward looked at on the way: names from the layer on, and what it found
    """

    def __init__(
        self,
        layer: Any,
        attention: str,
        size: int,
        form: Form,
        training: bool,
        dtype: torch.dtype,
        hidden: bool,
        bias: bool,
        keywords: set[str],
    ):
        self.layer, self.attention, self.form, self.training, self.dtype, self.bias = (
            layer,
            attention,
            form,
            training,
            dtype,
            bias,
        )
        self.generator = torch.Generator().manual_seed(0)
        self.size = BATCH, TOKENS, size
        self.calls: list[tuple[str, Tensor, Tensor]] = []
        self.given: dict[str, Any] = {}
        self.looked: list[tuple[tuple[Any, ...], Any]] = [
            ((*CLASS, name), getattr(type(layer), name)) for name in RUNS
        ]
        self.weights, self.more = (
            Opaque(self),
            {name: Opaque(self) for name in {"sp_overlap", *keywords}},
        )
        self.accounting = _Sums(SUMS, {BATCH, TOKENS}, hidden)
        forward = forward_of(type(layer), beside=CHECKPOINTING)
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        self.named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if "hidden_states" not in self.named:
            raise Unknown("its forward takes no hidden_states")
        self.x = self.numbers()
        self.arguments: dict[str, Any] = {
            name: None if name in (*UNUSED, *form.absent) else Opaque(self) for name in self.named
        }
        self.arguments["hidden_states"] = self.x
        self.hidden, drawn = self.x.clone(), torch.get_rng_state()
        more = self.more if len(self.named) < len(parameters) else {}
        instead = form.instead(self) if form.instead else lambda name, value: None
        with replaced(layer, instead), self.accounting:
            self.returned = forward(Looked(layer, (), self), **self.arguments, **more)
        self.names = [
            (known, name, known.get(name, MISSING)) for known, name, _ in self.accounting.names
        ]
        if not torch.equal(drawn, torch.get_rng_state()):
            raise Unknown("its forward draws random numbers")

    takes_parameters = False

    @property
    def constants(self) -> set[str]:
        return self.accounting.strings() - {*self.named, *self.given}

    def fail(self, reason: str) -> NoReturn:
        self.accounting.fail(reason)

    def numbers(self) -> Tensor:
        """With an infinite one, which some would clamp."""
        made = torch.randn(self.size, generator=self.generator, dtype=torch.float64).to(self.dtype)
        made.view(-1)[len(self.calls)] = torch.inf
        return made

    def look(self, holder: Any, name: str) -> Any:
        return self.accounting.look(holder, name)

    def child(self, name: str, module: nn.Module) -> _Recorder:
        return _Recorder(name, module, self)

    def reading(self) -> BlockReading:
        """Raises Unknown."""
        names = [name for name, _, _ in self.calls]
        if len(names) != 4 or names[1] != self.attention or len(set(names)) < 4:
            raise Unknown(
                f"its forward calls {', '.join(names)}, not a norm, {self.attention}, a norm and an MLP"
            )
        (norm_in, h, a), (_, b, attended), (norm_mid, r, c), (mlp, d, out) = self.calls
        self._same(self.x, self.hidden, "its forward changes the hidden states that it is given")
        self._same(h, self.hidden, f"{norm_in} is not given the hidden states as they are")
        self._same(b, a, f"{self.attention} is not given what {norm_in} returned")
        self._same(
            r,
            self.hidden + attended,
            f"{norm_mid} is not given the hidden states + what {self.attention} returned",
        )
        self._same(d, c, f"{mlp} is not given what {norm_mid} returned")
        hidden, *behind = self.returned if isinstance(self.returned, tuple) else (self.returned,)
        self._same(
            hidden,
            r + out,
            f"its forward doesn't return what {norm_mid} was given + what {mlp} returned",
        )
        zeros = [
            x
            for x in behind
            if self.form.biases
            and isinstance(x, Tensor)
            and x.dim() == 0
            and x.dtype == hidden.dtype
            and not x
        ]
        if any(x is not None and x is not self.weights for x in behind[: len(behind) - len(zeros)]):
            raise Unknown("its forward returns more than hidden states")
        passed = [self.given.pop(name, None) is x for name, x in self.more.items()]
        if (passes := any(passed)) and not all(passed):
            raise Unknown(f"its forward uses the keyword {[*self.more][passed.index(False)]}")
        opaque = {id(x): name for name, x in self.arguments.items() if isinstance(x, Opaque)}
        arguments = {name: opaque[id(x)] for name, x in self.given.items() if id(x) in opaque}
        rest = {name: x for name, x in self.given.items() if name not in arguments}
        if not all(x is None or isinstance(x, (bool, int, float, str)) for x in rest.values()):
            raise Unknown(f"its forward changes what {self.attention} is given")
        constants = {name: x for name, x in rest.items() if name not in UNUSED}
        blanks = len(behind) - len(zeros) if isinstance(self.returned, tuple) else None
        given = tuple(arguments.items()), tuple(constants.items()), passes
        return BlockReading(norm_in, self.attention, norm_mid, mlp, *given, blanks, len(zeros))

    def _same(self, x: Any, expected: Tensor, otherwise: str) -> None:
        """Raise Unknown unless ``x`` is what is expected, bit for bit."""
        if not isinstance(x, Tensor) or x.dtype != expected.dtype or not torch.equal(x, expected):
            raise Unknown(otherwise)


# Norms and MLPs, token by token.
