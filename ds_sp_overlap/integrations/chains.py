"""Transformer layers one after another, run as a chain (`attention.chain`): what is the same in every framework.

The forward of each is rebound, and starts the q, k and v of the layer behind it in its list of modules. Whatever else a model does
with its layers (leaves some out, calls one twice or by itself, changes hidden states between two) gives the same results: what was
started for a layer that is not given it is dropped, and after the second time in a row nothing is started for it any more.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..attention.block import Rerun
from ..attention.block_layer import BlockLayer
from ..attention.chain import Chain
from ..attention.self_attention import SelfAttention
from ..autotune.policy import Policy
from ..autotune.trial import BLOCK, LAYER, Candidate
from ..config import SpOverlapConfig
from ..profiling.steps import in_backward
from ..profiling.timed import Run
from ..say import say_once
from .accounting import Unknown
from .layers import Found, Overlap
from .transformers_blocks import BlockReader, records_nothing

CHECKPOINTS = "torch.utils.checkpoint", "deepspeed."  # where hooks on saved tensors come from that compute a layer again
MISSES = 2  # in a row, after which a layer starts nothing for the one behind it any more


class Course:
    """One forward of a model: its chain of layers.

    lengths   local length of every rank
    rerun     what of its layers is run again in backward, by gradient checkpointing
    reasons   of each of its layers why it can't run in the chain; empty if it can
    ahead     tells the layer that last started its successor's q, k and v whether they were of use; None where there is none
    made      what its layers have in common, made for the first of them
    """

    def __init__(self, config: SpOverlapConfig, lengths: Sequence[int]):
        self.chain, self.lengths = Chain(config.chunks_for(lengths)), list(lengths)
        self.rerun: Rerun = "none"
        self.reasons: dict[Link, str] = {}
        self.ahead: Callable[[bool], None] | None = None
        self.made: dict[Any, Any] = {}

    def settle(self, of_use: bool) -> None:
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead(of_use)


class Courses:
    """The forwards of a model; ``course`` is that which is running, ``known`` what was read of its layers."""

    def __init__(self, config: SpOverlapConfig):
        self.config = config
        self.known: list[BlockReader] = []
        self.course: Course | None = None

    @contextlib.contextmanager
    def running(self, lengths: Sequence[int]) -> Iterator[Course]:
        """The body is a forward of the model over so many tokens of each rank."""
        self.course = course = Course(self.config, lengths)
        try:
            yield course
            course.settle(False)  # of a layer that never came
        finally:
            self.course = None


class Link(ABC):
    """A layer that may run in a chain, and a forward for it.

    name, module   of the layer
    reader         of what it computes
    successor      the layer behind it in the chain; None behind the last
    choice         whether the chain is run; None where it is

    Raises Unknown if its modules are hooked, or ZeRO-3 gathers all their weights when the layer is called: too late for those that
    run ahead.
    """

    def __init__(self, name: str, module: Any, reader: BlockReader, attention: SelfAttention, courses: Courses):
        if any(hasattr(parameter, "ds_z3_leaf_module") for parameter in module.parameters()):  # guard: no leaf of ZeRO-3
            raise Unknown("ZeRO-3 gathers its weights in a leaf module")
        self.name, self.module, self.reader, self.courses = name, module, reader, courses
        self.successor: Link | None = None
        self.choice: Choice | None = None
        self.layer = BlockLayer(attention, *self._parts(), records_nothing)
        if reason := self.layer.in_the_way():
            raise Unknown(reason)
        self._misses = 0
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the layer's class, as of now."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def rerun(self) -> Rerun:
        """What of the layer is run again in backward, by gradient checkpointing."""
        return "none" if self.courses.course is None else self.courses.course.rerun

    @property
    def lacks(self) -> str:
        """What is in the way of more, as far as it is known before the first forward."""
        return ""

    @abstractmethod
    def use(self) -> None:
        """Have the attention driven with its modules as they are now."""

    @abstractmethod
    def computed_again(self) -> str:
        """Why the layer that is called now may be computed again in backward, by what only its framework knows; empty if not."""

    def probe(self, course: Course, given: dict[str, Any], asked: dict[str, Any]) -> None:  # noqa: B027
        """Raise RuntimeError, on all ranks, if the layer, ``given`` this, does something else than what was read. Collective.

        asked   its attention's arguments, beside hidden states
        """

    @abstractmethod
    def asked(self, course: Course, given: dict[str, Any]) -> dict[str, Any]:
        """What the layer asks of `Chain.run` where it is ``given`` this, by names."""

    def _parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        module, reading = self.module, self.reader.reading
        return getattr(module, reading.norm_in), getattr(module, reading.norm_mid), getattr(module, reading.mlp)

    def why_not(self, course: Course) -> str:
        """Why the layer can't run in the chain of ``course`` now; empty if it can. The same on every rank."""
        module = self.module
        if reason := self.computed_again() or _computed_again(module):
            return f"{type(module).__name__}: {reason}"
        if self not in course.reasons:  # asked by the layer in front already
            if not (reason := self.reader.why_not(module)):
                self.use()
                self.layer.norm_in, self.layer.norm_mid, self.layer.mlp = self._parts()
                reason = self.layer.in_the_way()
            course.reasons[self] = reason and f"{self.name}: {reason}"
        return course.reasons[self]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        course = self.courses.course
        if course is None:  # of a layer that is called by itself, or again in backward
            return self._original(*args, **kwargs)
        if self.choice is None:
            return self._chained(course, args, kwargs)
        if self is self.choice.first:
            args, kwargs = self.choice.begin(course, args, kwargs)
        run = self._chained(course, args, kwargs) if self.choice.made == BLOCK else self._original(*args, **kwargs)
        return self.choice.end(run) if self.successor is None else run

    def _chained(self, course: Course, args: tuple, kwargs: dict[str, Any]) -> Any:
        given, reading = {**dict(zip(self._names, args)), **kwargs}, self.reader.reading
        if reason := self.why_not(course) or self.reader.unexpected(given):
            say_once(f"sp_overlap: a layer by itself, in no block: {reason}")
            return self._original(*args, **kwargs)
        hidden = given["hidden_states"]
        of_attention = reading.of_attention(given, self.reader.names)
        self.probe(course, given, of_attention)
        asked = self.asked(course, {"hidden_states": hidden, **of_attention})
        successor = self.successor
        if self._misses >= MISSES or successor is not None and (successor.rerun != self.rerun or successor.why_not(course)):
            successor = None
        following = None if successor is None else successor.layer
        out = course.chain.run(self.layer, following, hidden, rerun=self.rerun, **asked)
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

    def begin(self, course: Course, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The first layer is called with these arguments; returns those that it is to use."""
        hidden = args[0] if args else kwargs["hidden_states"]
        batch_first = hidden if self.first.layer.attention.batch_first else hidden.transpose(0, 1)
        trial = self.policy.trial_of_block(self.first.name, batch_first, course.lengths)
        self.made, self._run = LAYER if trial is None else trial.candidate(0), Run((hidden,))
        if trial is not None:
            self.policy.follow(self._run, trial, self.made, batch_first.shape[0] * sum(course.lengths))
        (hidden,) = self._run.inputs
        return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})

    def end(self, output: Any) -> Any:
        """The last layer returns ``output``."""
        run, self._run = self._run, None
        return output if run is None else run.end(output)


def _computed_again(module: nn.Module) -> str:
    """Why a layer that is called now may be computed again in backward, by itself, or is; empty if not."""
    if module.training and not torch.is_grad_enabled():  # guard: computed again as it was
        return "training without gradients, as under a reentrant checkpoint"
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if in_backward() or hooks is not None and (getattr(hooks[0], "__module__", None) or "").startswith(CHECKPOINTS):
        return "a checkpoint around it"
    return ""


def find_chains(
    modules: dict[str, nn.Module], wanted: Mapping[str, Callable[[], Link]], found: list[Found], overlap: Overlap
) -> list[list[Link]]:
    """Chains of layers; ``found`` is told of its attention layers what they get by them, or why not.

    wanted   makes the layers, by the names of the attention in them
    """
    config, policy = overlap.config, overlap.policy
    chains: list[list[Link]] = []
    if config.scope == "layer":
        return chains
    auto = config.scope == "auto"
    reasons: dict[str, str] = {}
    links: dict[str, tuple[Link, list[Link]]] = {}
    for name, make in wanted.items():
        parent, _, _ = name.rpartition(".")
        try:
            if not config.projections:
                raise Unknown("sp_overlap.projections is false")
            if config.window is not None:
                raise Unknown("sp_overlap.window is of layers one by one")
            if auto and (policy is None or policy.replicas):
                raise Unknown('scope "auto" is found beside head_groups "auto", in one sp group; "block" takes it')
            link = make()
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
        links[name] = link, chains[-1]
    for layer in found:
        if layer.name in links:
            link, chain = links[layer.name]
            layer.got, layer.lacks = overlap.of_block(layer.got, link.layer.attention, len(chain)), link.lacks
        elif layer.name in reasons:
            layer.lacks = "; ".join(filter(None, (layer.lacks, f"no block: {reasons[layer.name]}")))
    return chains


def _behind(modules: dict[str, nn.Module], name: str) -> str | None:
    """Name of the module behind one in a list of modules; None where there is none."""
    around, _, number = name.rpartition(".")
    listed = isinstance(modules.get(around), nn.ModuleList) and number.isdecimal()
    return f"{around}.{int(number) + 1}" if listed else None
