"""Running the decoder layers of a model as one chain, whatever the framework.

In a chain, each layer starts the exchanges of the next layer's q, k and v behind its own MLP (see
`chain.chain`). Those exchanges are of use only if the model gives the next layer the hidden states
that this layer returned. But a model may leave layers out, call a layer twice or by itself, or
change hidden states between two layers. So the rebound forward of a layer (`ChainedLayer.forward`)
follows what the model does: the results are right in all these cases, and exchanges whose result is
not used are dropped. After two drops in a row a layer starts nothing for its successor any more.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.runtime import sharded
from ..attention.self_attention import SelfAttention
from ..autotune.policy import Policy
from ..autotune.trial import BLOCK, LAYER, Candidate
from ..chain.block_layer import BlockLayer
from ..chain.chain import Chain
from ..config import SpOverlapConfig
from ..profiling.steps import in_backward
from ..profiling.timed import TimedCall
from ..schedule import Recompute
from ..warn import warn_once
from .inspect.accounting import Unknown
from .inspect.decoder_layer import BlockReader, records_nothing
from .inspect.probe import EVERY, ProbeSchedule, difference_of_block, refuse_difference
from .inspect.projections import ProjectionProbe

# Note [Leaf modules of ZeRO-3]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# ZeRO-3 gathers the weights of a module in a hook, when the module is called. A chain runs the
# norm and the projections of a layer before the layer is called, so it calls these modules one by
# one, and their own hooks gather their weights. If the layer is a leaf module of ZeRO-3, only the
# hook of the layer itself gathers, which is too late. Such a layer is left out of chains.

# Note [Edits through .data]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
# A chain recognises the hidden states that a layer returned by their memory and version counter.
# An edit through ``.data`` changes numbers, but no version counter, so the q, k and v that were
# started before the edit would be used. Comparing the numbers costs a copy of the hidden states,
# so they are compared the first time that a layer follows another in a chain, and every hundredth
# time. If an edit is seen the first time, what the layer in front has started for its successor is
# dropped, and it starts nothing more from the next forward on: no wrong results were used. If an
# edit is seen later, earlier results may have been wrong, which is an error.

# Note [Layers that others recompute]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A checkpoint that is not the chain's own recomputes a layer in backward. The recomputation is
# outside a forward of the model, hence in no chain. If the first run were in a chain, it would
# draw random numbers in another order and save other tensors than the recomputation. So a layer
# runs by itself whenever another checkpoint may recompute it. A reentrant checkpoint runs layers
# in training without gradients; a non-reentrant checkpoint has hooks on saved tensors.

# Modules whose hooks on saved tensors recompute a layer.
CHECKPOINT_MODULES = ("torch.utils.checkpoint", "deepspeed.")
# A miss: a layer started q, k and v of its successor, and they were not used. After this many
# misses in a row the layer starts nothing for its successor any more.
MAX_MISSES = 2


class ForwardPass:
    """One forward of a model, with the chain of its layers.

    Attributes:
        chain: Runs the layers.
        lengths: [P]. Local sequence length of every rank, in tokens.
        recompute: The part of each layer that the chain recomputes in backward, in place of a
            checkpoint around the layers. Set by Megatron's adapter alone; "none" until then.
        reasons: For each layer that was asked (`ChainedLayer.why_not`), the reason why it can't run
            in the chain; empty if it can.
        report_use: Tells the layer that last started its successor's q, k and v whether they were
            used; None if no q, k and v were started.
        shared: Values that the layers share; the first layer that needs a value computes it.
        last_output: The output of the layer that ran last, if the next layer must compare its
            input with it; else None.
    """

    def __init__(self, config: SpOverlapConfig, lengths: Sequence[int]):
        self.chain, self.lengths = Chain(config.chunks_for(lengths)), list(lengths)
        self.recompute: Recompute = "none"
        self.reasons: dict[ChainedLayer, str] = {}
        self.report_use: Callable[[bool], None] | None = None
        self.shared: dict[Any, Any] = {}
        self.last_output: LayerOutput | None = None

    def settle(self, used: bool) -> None:
        """Tell the layer that last started q, k and v ahead whether they were used.

        Does nothing if no layer waits to be told.
        """
        report_use, self.report_use = self.report_use, None
        if report_use is not None:
            report_use(used)


class LayerOutput:
    """The hidden states that a layer returned, with a copy; see Note [Edits through .data].

    Args:
        layer: The layer that returned them.
        hidden: [b, s/P, m] or [s/P, b, m]. They are copied now, before the model can edit them.
    """

    def __init__(self, layer: ChainedLayer, hidden: Tensor):
        self.layer, self.copy = layer, hidden.detach().clone()
        self.identity = hidden.data_ptr(), hidden._version

    def is_edited(self, hidden: Tensor) -> bool:
        """Return whether ``hidden`` has the identity of the output, but other numbers."""
        same = self.identity == (hidden.data_ptr(), hidden._version)
        return same and not torch.equal(hidden.detach(), self.copy)


class ForwardPasses:
    """The forwards of a model.

    Attributes:
        config: The ``sp_overlap`` section.
        known: Readings of the layers so far; layers that are alike share a reading.
        forward_pass: The forward that is running, the inner one of two; None between forwards.
        fallible: By name, the layers that fall back where a hook or an adapter stands in the way:
            they exchange something else then, so all ranks must. Each has a method
            ``why_fallback()``, which gives the reason on this rank; and an attribute
            ``falls_back``, set in each forward of the model: whether it does on any rank.
    """

    def __init__(self, config: SpOverlapConfig):
        self.config = config
        # Weak, since tables of attention functions reach this object and must keep no model alive.
        self.fallible: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.known: list[BlockReader] = []
        self.forward_pass: ForwardPass | None = None

    def fallbacks(self) -> list[str]:
        """Return the names of the layers that fall back on this rank, in ascending order."""
        names = []
        for name, layer in self.fallible.items():
            try:
                reason = layer.why_fallback()
            except Exception:  # of any kind: a module is gone, of which the layer's own call tells
                reason = "it can't be looked at"
            if reason:
                names.append(name)
        return sorted(names)

    def fall_back(self, names: Collection[str]) -> None:
        """Let the layers that are named fall back, and no others, until the next call of this."""
        for name, layer in self.fallible.items():
            layer.falls_back = name in names

    @contextlib.contextmanager
    def running(self, lengths: Sequence[int]) -> Iterator[ForwardPass]:
        """Provide a `ForwardPass` to the body, which runs one forward of the model.

        The rebound forward of the model, or of Megatron's stack of layers, enters this. Layers that
        are called outside of it run by themselves.

        Args:
            lengths: [P]. Local sequence length of every rank, in tokens.
        """
        outer, self.forward_pass = self.forward_pass, ForwardPass(self.config, lengths)
        forward_pass = self.forward_pass
        try:
            yield forward_pass
            # The successor of the last layer that started something was never called.
            forward_pass.settle(False)
        finally:
            self.forward_pass = outer


class ChainedLayer(ABC):
    """A layer that may run in a chain, with the forward that takes the place of its own.

    Made by `find_chains` in `enable`, one for each decoder layer.

    Args:
        name: The layer's name in the model.
        module: The layer.
        reader: The reading of the layer's forward.
        attention: The overlapped attention of the layer.
        forward_passes: The forwards of the model.

    Attributes:
        successor: The layer behind this one in the chain; None for the last. Set by `find_chains`.
        choice: Chooses between the chain and single layers by timing; the layers of a chain share
            it. None if the chain is always used. Set by `find_chains`.
        unused: Names of arguments of the attention that change nothing.

    Raises:
        Unknown: if modules of the layer are hooked, or the layer is a leaf module of ZeRO-3.
    """

    unused: Collection[str] = ()

    def __init__(
        self,
        name: str,
        module: Any,
        reader: BlockReader,
        attention: SelfAttention,
        forward_passes: ForwardPasses,
    ):
        # See Note [Leaf modules of ZeRO-3].
        leaf = any(hasattr(parameter, "ds_z3_leaf_module") for parameter in module.parameters())
        if leaf:  # guard: no leaf of ZeRO-3
            raise Unknown("ZeRO-3 gathers its weights in a leaf module")
        self.name, self.module, self.reader = name, module, reader
        self.forward_passes, self.falls_back = forward_passes, False
        forward_passes.fallible[name] = self
        self.successor: ChainedLayer | None = None
        self.choice: ChainTrial | None = None
        self.layer = BlockLayer(attention, *self._parts(), records_nothing)
        self._projections = ProjectionProbe(reader.form)
        if reason := self._why_not_now():
            raise Unknown(reason)
        # Misses in a row, see `MAX_MISSES`; when to copy the output, to find edits of it.
        self._misses, self._edit_checks = 0, ProbeSchedule()
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer by itself: the forward that its class has now, whose attention may still
        be overlapped.
        """
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def own_forward(self) -> Callable[..., Any]:
        """The forward of the layer's class, which `probe` compares with the chain's formula."""
        return type(self.module).forward

    @property
    def recompute(self) -> Recompute:
        """The part of the layer that the chain recomputes in backward; "none" between forwards."""
        forward_pass = self.forward_passes.forward_pass
        return "none" if forward_pass is None else forward_pass.recompute

    @property
    def lacks(self) -> str:
        """The reason, known before the first forward, why no more is overlapped; may be empty."""
        return ""

    @abstractmethod
    def use(self) -> None:
        """Let the overlapped attention use the layer's modules as they are now.

        `why_not` calls this in each forward, since adapters may replace modules in between.
        """

    @abstractmethod
    def why_recomputed(self) -> str:
        """Explain why the framework may recompute this call by a checkpoint that the chain can't
        imitate.

        Returns:
            The reason; empty if no such checkpoint may. See Note [Layers that others recompute].
        """

    def probe(
        self,
        forward_pass: ForwardPass,
        arguments: dict[str, Any],
        attention_arguments: dict[str, Any],
    ) -> None:
        """Compare the layer's own forward with the reading of it, where a comparison is due.

        Collective where it is due, which is in the same calls on every rank. It runs before the
        chain exchanges anything for the layer.

        Args:
            forward_pass: The forward that is running.
            arguments: The arguments of the layer by name.
            attention_arguments: The arguments of its attention by name, without hidden states.

        Raises:
            RuntimeError: on all ranks, if the two differ on any rank.
        """
        probes, check = self.reader.probes, self.forward_passes.config.check
        if not probes.is_due(self.name, check, forward_pass.lengths):
            return
        compare = functools.partial(
            difference_of_block,
            self.module,
            self.own_forward,
            self.layer,
            attention=self.reader.reading.attention,
            arguments=arguments,
            attention_arguments=attention_arguments,
            lengths=forward_pass.lengths,
            token_dim=self.reader.form.token_dim,
            unused=self.unused,
        )
        sp_group = self.layer.attention.layer.sp_group
        refuse_difference(probes, self.name, self.module, sp_group=sp_group, compare=compare)

    @abstractmethod
    def chain_arguments(
        self, forward_pass: ForwardPass, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Translate the arguments of the layer's attention into keywords of `Chain.run`.

        Collective where the attention itself must be compared with the layer's own forward.

        Args:
            forward_pass: The forward that is running.
            arguments: The arguments of the attention by name.
        """

    def _parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """Return the norm before attention, the norm before the MLP, and the MLP."""
        module, reading = self.module, self.reader.reading
        return (
            getattr(module, reading.norm_in),
            getattr(module, reading.norm_mid),
            getattr(module, reading.mlp),
        )

    def why_not(self, forward_pass: ForwardPass) -> str:
        """Explain why the layer can't run in the chain now; the same on every rank.

        Also gives the `BlockLayer` the modules as they are now. Called by the layer itself; by the
        layer in front, before that starts anything; and by a checkpointed stack of Megatron's, for
        all layers before the first runs. The answer is kept for the forward, except for
        checkpoints, which are looked at in each call.

        Args:
            forward_pass: The forward that is running.

        Returns:
            The reason; empty if the layer can run in the chain.
        """
        module = self.module
        if reason := self.why_recomputed() or _why_in_checkpoint(module):
            return f"{type(module).__name__}: {reason}"
        # The layer in front may have asked already. Hooks may have come since the model's forward
        # asked, on all ranks: transformers' own, which record what layers return.
        if self not in forward_pass.reasons:
            reason = self.why_fallback()
            if self.falls_back and not reason:
                reason = f"{self.name}: a hook, or another change, on another rank"
            forward_pass.reasons[self] = reason
        return forward_pass.reasons[self]

    def why_fallback(self) -> str:
        """Explain why the layer, as its modules are on this rank now, can't run in a chain."""
        module, reason = self.module, self.reader.why_not(self.module)
        if not reason:
            self.use()
            self.layer.norm_in, self.layer.norm_mid, self.layer.mlp = self._parts()
            self.layer.unit = module if sharded.is_unit(module) else None
            reason = self._why_not_now()
        return reason and f"{self.name}: {reason}"

    def _why_not_now(self) -> str:
        """Explain why the layer's modules, as they are now, can't run in a chain; may be empty."""
        return self.layer.in_the_way() or self._why_not_tokenwise() or self._why_not_gathered()

    def _why_not_tokenwise(self) -> str:
        """Explain why a projection may mix tokens, of which a chain gives it some at a time."""
        attention = self.layer.attention
        hidden = self.reader.form.size(getattr(self.module, self.reader.reading.attention))
        sizes = dict.fromkeys(attention.inputs.projections, hidden)
        sizes[attention.o_proj] = attention.heads * attention.head_dim
        for module, size in sizes.items():
            if reason := self._projections.why_not(module, size, attention.plain):
                return reason
        return ""

    def _why_not_gathered(self) -> str:
        """Explain why FSDP would not gather weights that the chain needs; empty if it does.

        FSDP gathers the weights of a unit in a hook on the unit's call, but the chain calls only
        the norms, projections and MLP, and the modules inside of these.
        """
        called: set[nn.Module] = set()
        for part in (*self.layer.begins, *self.layer.ends):
            called.update(part.modules())
        for name, module in self.module.named_modules():
            uncalled = module is not self.module and module not in called
            if uncalled and sharded.is_unit(module):  # guard: no unit that is not called
                return (
                    f"{name} is a unit of fully_shard, but a block calls the modules inside of it; "
                    "give fully_shard the whole layer, or those modules"
                )
        return ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer in the chain, or by itself; takes the place of the layer's own forward.

        Collective, as the layer's attention is.
        """
        forward_pass = self.forward_passes.forward_pass
        # Called outside of a forward of the model, or recomputed in backward by a checkpoint.
        if forward_pass is None:
            return self._original(*args, **kwargs)
        if self.choice is None:
            return self._run_in_chain(forward_pass, args, kwargs)
        if self is self.choice.first:
            args, kwargs = self.choice.begin(forward_pass, args, kwargs)
        if self.choice.candidate == BLOCK:
            output = self._run_in_chain(forward_pass, args, kwargs)
        else:
            output = self._original(*args, **kwargs)
        return self.choice.end(output) if self.successor is None else output

    def _run_in_chain(self, forward_pass: ForwardPass, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the layer in the chain of ``forward_pass`` if it can run there, else by itself.

        Returns:
            What the layer's own forward returns, a tensor or a tuple.
        """
        arguments, reading = {**dict(zip(self._names, args)), **kwargs}, self.reader.reading
        previous, forward_pass.last_output = forward_pass.last_output, None
        if reason := self.why_not(forward_pass) or self.reader.unexpected(arguments):
            warn_once(f"sp_overlap: a layer by itself, in no block: {reason}")
            return self._original(*args, **kwargs)
        hidden = arguments["hidden_states"]
        if previous is not None and previous.layer.successor is self:
            self._check_for_edits(forward_pass, previous, hidden)
        attention_arguments = reading.attention_arguments(arguments, self.reader.names)
        self.probe(forward_pass, arguments, attention_arguments)
        inputs = {"hidden_states": hidden, **attention_arguments}
        keywords = self.chain_arguments(forward_pass, inputs)
        successor = self._ready_successor(forward_pass)
        following = None if successor is None else successor.layer
        output = forward_pass.chain.run(
            self.layer, following, hidden, recompute=self.recompute, **keywords
        )
        # To the layer in front: this call has used its q, k and v, or dropped them. After a drop
        # `in_step` stays False and the chain starts nothing more in this forward.
        forward_pass.settle(forward_pass.chain.in_step)
        forward_pass.report_use = None if forward_pass.chain.ahead is None else self._count_misses
        # The version counter of an inference tensor can't be read.
        if successor is not None and not output.is_inference():
            if self._edit_checks.is_due(self.name, True, forward_pass.lengths):
                forward_pass.last_output = LayerOutput(self, output)
        return reading.as_returned(output)

    def _ready_successor(self, forward_pass: ForwardPass) -> ChainedLayer | None:
        """Return the successor if this layer may start its q, k and v; else None."""
        successor = self.successor
        if successor is None or self._misses >= MAX_MISSES:
            return None
        if successor.recompute != self.recompute or successor.why_not(forward_pass):
            return None
        if not sharded.cast_alike(self.layer.unit, successor.layer.unit):
            return None  # guard: hidden states in the dtype of the successor
        return successor

    def _check_for_edits(
        self, forward_pass: ForwardPass, previous: LayerOutput, hidden: Tensor
    ) -> None:
        """Stop the layer in front from starting q, k and v if ``hidden`` was edited on any rank.

        Those that it has started are dropped. Collective. See Note [Edits through .data].

        Args:
            forward_pass: The forward of the model.
            previous: The output of the layer in front.
            hidden: [b, s/P, m] or [s/P, b, m]. The hidden states that this layer is given.

        Raises:
            RuntimeError: on all ranks, if this is not the first comparison: the layer in front has
                started q, k and v in forwards since the last one, whose hidden states may have been
                edited, too.
        """
        sp_group, front = self.layer.attention.layer.sp_group, previous.layer
        edited_on_ranks = sp_group.gather(previous.is_edited(hidden), self.name)
        if any(edited_on_ranks):  # guard: edits through .data
            edited = f"what {front.name} returns is edited through .data before {self.name}"
            if front._edit_checks.calls > 1:
                raise RuntimeError(
                    f"{edited}, whose q, k and v are started before that: since the last "
                    f"comparison, {EVERY} forwards ago, results may be wrong; set sp_overlap.scope "
                    'to "layer", or edit a tensor of your own'
                )
            front._misses = MAX_MISSES
            forward_pass.chain.drop()
            warn_once(f"sp_overlap: {edited}, for which it starts nothing any more")

    def _count_misses(self, used: bool) -> None:
        """Count how often in a row the q, k and v that this layer started were not used.

        `ForwardPass.settle` calls this once for each time that the layer started some.
        """
        self._misses = 0 if used else self._misses + 1
        if self._misses == MAX_MISSES and self.successor is not None:
            warn_once(
                f"sp_overlap: {self.successor.name} is not given what {self.name} returns, "
                "which starts nothing for it any more"
            )


class ChainTrial:
    """The choice, by timing, whether layers run as a chain or one by one.

    A measurement lasts from the first layer of the chain to the last.

    Args:
        first: The first layer of the chain.
        policy: Times the candidates.

    Attributes:
        candidate: The candidate of the forward that is running, `BLOCK` or `LAYER`; all layers of
            the chain follow it.
    """

    def __init__(self, first: ChainedLayer, policy: Policy):
        self.first, self.policy = first, policy
        self.candidate: Candidate = LAYER
        self._run: TimedCall | None = None

    def begin(
        self, forward_pass: ForwardPass, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Choose the candidate of this forward, and start its measurement.

        The first layer of the chain calls this at the begin of its forward. Collective where the
        policy compares the ranks, after an optimizer step.

        Args:
            forward_pass: The forward that is running.
            args: Positional arguments of the first layer.
            kwargs: Keyword arguments of the first layer.

        Returns:
            The arguments that the first layer must use instead: its hidden states may be a view
            that the measurement watches in backward.
        """
        hidden = args[0] if args else kwargs["hidden_states"]
        batch_first = hidden if self.first.layer.attention.batch_first else hidden.transpose(0, 1)
        trial = self.policy.trial_of_block(self.first.name, batch_first, forward_pass.lengths)
        self.candidate = LAYER if trial is None else trial.candidate(0)
        self._run = TimedCall((hidden,))
        if trial is not None:
            tokens = batch_first.shape[0] * sum(forward_pass.lengths)
            self.policy.follow(self._run, trial, self.candidate, tokens)
        elif not self.policy.over:
            # The policy counts a step only if it follows some call, and opens this trial only after
            # a step. Where layers have no G to choose, this call is the only one for it to follow.
            self.policy.follow_back(self._run)
        (hidden,) = self._run.inputs
        return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})

    def end(self, output: Any) -> Any:
        """End the measurement, and return ``output``; the last layer of the chain calls this."""
        run, self._run = self._run, None
        return output if run is None else run.end(output)


def _why_in_checkpoint(module: nn.Module) -> str:
    """Explain why a checkpoint may recompute this call of ``module``; empty if none may.

    See Note [Layers that others recompute].
    """
    if module.training and not torch.is_grad_enabled():  # guard: computed again as it was
        return "training without gradients, as under a reentrant checkpoint"
    if in_backward():
        return "a checkpoint around it"
    # (pack, unpack), which autograd calls for saved tensors now; None if there are no hooks.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None:
        hook_module = getattr(hooks[0], "__module__", None) or ""
        if hook_module.startswith(CHECKPOINT_MODULES):
            return "a checkpoint around it"
    return ""
