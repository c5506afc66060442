"""transformers: decoder layers one after another, run as a chain (`attention.block`).

The forward of each is rebound, and starts the q, k and v of the layer behind it in its list of modules. Whatever else a model does
with its layers (leaves some out, calls one twice or by itself, changes hidden states between two) gives the same results: what was
started for a layer that is not given it is dropped, and after the second time in a row nothing is started for it any more.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ..attention.block import BlockLayer, Rerun
from ..attention.kept import keep_attention
from ..autotune.policy import Policy
from ..autotune.trial import BLOCK, LAYER, Candidate
from ..config import SpOverlapConfig
from ..profiling.steps import in_backward
from ..profiling.timed import Run
from ..say import say_once
from .transformers_blocks import BlockReader, records_nothing
from .transformers_driven import Driven
from .transformers_forward import Course, Forwards
from .transformers_labels import Unknown

CHECKPOINTS = "torch.utils.checkpoint", "deepspeed."  # where hooks on saved tensors come from that compute a layer again
MISSES = 2  # in a row, after which a layer starts nothing for the one behind it any more


class Link:
    """A decoder layer that may run in a chain, and a forward for it.

    name, module   of the layer
    reader         of what it computes
    attention      in it, which is driven whole
    successor      the layer behind it in the chain; None behind the last
    choice         whether the chain is run; None where it is

    Raises Unknown if its modules are hooked, or ZeRO-3 gathers all their weights when the layer is called: too late for those that
    run ahead.
    """

    def __init__(self, name: str, module: Any, reader: BlockReader, attention: Driven, forwards: Forwards):
        if any(hasattr(parameter, "ds_z3_leaf_module") for parameter in module.parameters()):  # guard: no leaf of ZeRO-3
            raise Unknown("ZeRO-3 gathers its weights in a leaf module")
        self.name, self.module, self.reader, self.attention, self.forwards = name, module, reader, attention, forwards
        self.successor: Link | None = None
        self.choice: Choice | None = None
        self.layer = BlockLayer(attention.block, *self._parts(), records_nothing)
        if reason := self.layer.in_the_way():
            raise Unknown(reason)
        self._original, self._misses = module.forward, 0
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def _parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        module, reading = self.module, self.reader.reading
        return getattr(module, reading.norm_in), getattr(module, reading.norm_mid), getattr(module, reading.mlp)

    @property
    def lacks(self) -> str:
        """What is in the way of more, as far as it is known before the first forward."""
        reason = _no_rerun(self.module, self.forwards.config) if _is_checkpointed(self.module) else ""
        return reason and f"in training one by one: {reason}"

    @property
    def rerun(self) -> Rerun:
        """What of the layer is run again in backward, by gradient checkpointing."""
        if not (self.module.training and _is_checkpointed(self.module)):
            return "none"
        return "all" if self.forwards.config.checkpointing == "recompute" else "but attention"

    def why_not(self, course: Course) -> str:
        """Why the layer can't run in the chain of ``course`` now; empty if it can. The same on every rank."""
        module = self.module
        if reason := _computed_again(module, self.forwards.config):
            return f"{type(module).__name__}: {reason}"
        if self not in course.reasons:  # asked by the layer in front already
            if not (reason := self.reader.why_not(module)):
                self.attention.use()
                self.layer.norm_in, self.layer.norm_mid, self.layer.mlp = self._parts()
                reason = self.layer.in_the_way()
            course.reasons[self] = reason and f"{self.name}: {reason}"
        return course.reasons[self]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        course = self.forwards.course
        if course is None:  # of a layer that is called by itself, or again in backward
            return self._original(*args, **kwargs)
        if self.choice is None:
            return self._chained(course, args, kwargs)
        if self is self.choice.first:
            args, kwargs = self.choice.begin(args, kwargs)
        run = self._chained(course, args, kwargs) if self.choice.made == BLOCK else self._original(*args, **kwargs)
        return self.choice.end(run) if self.successor is None else run

    def _chained(self, course: Course, args: tuple, kwargs: dict[str, Any]) -> Any:
        if reason := self.why_not(course):
            say_once(f"sp_overlap: a layer by itself, in no block: {reason}")
            return self._original(*args, **kwargs)
        given = {**dict(zip(self._names, args)), **kwargs}
        reading, hidden = self.reader.reading, given["hidden_states"]
        call = self.attention.asked({"hidden_states": hidden, **reading.of_attention(given, self.reader.names)})
        successor = self.successor
        if self._misses >= MISSES or successor is not None and (successor.rerun != self.rerun or successor.why_not(course)):
            successor = None
        following = None if successor is None else successor.layer
        out = course.chain.run(self.layer, following, hidden, rerun=self.rerun, **call.keywords())
        course.settle(course.chain.in_step)
        course.ahead = None if course.chain.ahead is None else self._learn
        return reading.returned(out)

    def _learn(self, of_use: bool) -> None:
        """Take note of whether what was started for the successor was of use."""
        self._misses = 0 if of_use else self._misses + 1
        if self._misses == MISSES and self.successor is not None:
            say_once(
                f"sp_overlap: {self.successor.name} is not given what {self.name} returns, which starts nothing for it any more"
            )


class Choice:
    """Whether layers in a row run as a chain or one by one: by timing them from the first to the last.

    made   for the forward that is running
    """

    def __init__(self, first: Link, policy: Policy):
        self.first, self.policy = first, policy
        self.made: Candidate = LAYER
        self._run: Run | None = None

    def begin(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The first layer is called with these arguments; returns those that it is to use."""
        hidden, sequence = args[0] if args else kwargs["hidden_states"], self.first.forwards.positions.current
        assert sequence is not None
        trial = self.policy.trial_of_block(self.first.name, hidden, sequence.lengths)
        self.made, self._run = LAYER if trial is None else trial.candidate(0), Run((hidden,))
        if trial is not None:
            self.policy.follow(self._run, trial, self.made, hidden.shape[0] * sum(sequence.lengths))
        (hidden,) = self._run.inputs
        return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})

    def end(self, output: Any) -> Any:
        """The last layer returns ``output``."""
        run, self._run = self._run, None
        return output if run is None else run.end(output)


def _is_checkpointed(module: Any) -> bool:
    return getattr(module, "gradient_checkpointing", False)


def _no_rerun(module: Any, config: SpOverlapConfig) -> str:
    """Why a layer's gradient checkpointing is left to the layer; empty where a chain can do the same."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    given = function.keywords if isinstance(function, functools.partial) else {}
    if config.checkpointing == "offload":
        return 'gradient checkpointing, with sp_overlap.checkpointing "offload"'
    if getattr(function, "func", None) is not checkpoint or given.get("use_reentrant") is not False:
        return "gradient checkpointing that is not torch's with use_reentrant=False"
    if given.get("context_fn", noop_context_fn) not in (noop_context_fn, keep_attention) or given.get("debug"):
        return "gradient checkpointing with a context_fn or debug"
    return ""


def _computed_again(module: Any, config: SpOverlapConfig) -> str:
    """Why a layer that is called now may be computed again in backward, by itself, or is; empty if not."""
    if module.training and _is_checkpointed(module) and (reason := _no_rerun(module, config)):
        return reason
    if module.training and not torch.is_grad_enabled():  # guard: computed again as it was
        return "training without gradients, as under a reentrant checkpoint"
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if in_backward() or hooks is not None and (getattr(hooks[0], "__module__", None) or "").startswith(CHECKPOINTS):
        return "a checkpoint around it"
    return ""


def find_chains(
    modules: dict[str, nn.Module], attention: dict[str, Driven], forwards: Forwards, policy: Policy | None
) -> tuple[list[list[Link]], dict[str, str]]:
    """Chains of the decoder layers around some attention layers; and by the names of the latter why others are in none.

    policy   times layers, for scope "auto"
    """
    auto = forwards.config.scope == "auto"
    chains: list[list[Link]] = []
    reasons: dict[str, str] = {}
    tried: set[Any] = set()
    for name, driven in attention.items():
        parent, _, child = name.rpartition(".")
        try:
            if not forwards.config.projections:
                raise Unknown("sp_overlap.projections is false")
            if forwards.config.window is not None:
                raise Unknown("sp_overlap.window is of layers one by one")
            if auto and (policy is None or policy.replicas):
                raise Unknown('scope "auto" is found beside head_groups "auto", in one sp group; "block" takes it')
            link = Link(parent, modules[parent], BlockReader(modules[parent], child, tried), driven, forwards)
        except Unknown as error:
            reasons[name] = f"{type(modules[parent]).__name__}: {error}"
            continue
        if chains and _behind(modules, chains[-1][-1].name) == parent:
            link.choice = chains[-1][0].choice
            chains[-1][-1].successor = link
            chains[-1].append(link)
        else:
            link.choice = Choice(link, policy) if auto and policy is not None else None
            chains.append([link])
    return chains, reasons


def _behind(modules: dict[str, nn.Module], name: str) -> str | None:
    """Name of the module behind one in a list of modules; None where there is none."""
    around, _, number = name.rpartition(".")
    listed = isinstance(modules.get(around), nn.ModuleList) and number.isdecimal()
    return f"{around}.{int(number) + 1}" if listed else None
