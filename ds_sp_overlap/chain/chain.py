"""Transformer layers in a chain: each starts the q, k and v of the layer behind it.

    chain = Chain(chunks=4)                     one for each forward of a model
    for layer, successor in pairs:
        hidden = chain.run(layer, successor, hidden, position_embeddings=...)

A successor's q, k, v are used if it is given the hidden states that `run` returned. If it never
runs, or is given others, nothing is lost but the time that they took.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention.heads import Local
from ..attention.runtime import linear
from ..attention.runtime.linear import autocast
from ..schedule import Recompute, by_chunks
from .block import LayerCall, attend, run_segment
from .block_layer import BlockLayer, Options


@dataclass
class Started:
    """q, k and v of a layer that were started ahead of it, and the hidden states that they were
    made of.
    """

    begun: LayerCall
    hidden: Tensor
    version: int
    grad: tuple[bool, bool]
    ahead: Any = None  # node of autograd behind which they are

    @classmethod
    def of(cls, begun: LayerCall, hidden: Tensor) -> Started:
        return cls(begun, hidden, hidden._version, (torch.is_grad_enabled(), hidden.requires_grad))

    def serves(
        self, layer: BlockLayer, hidden: Tensor, options: Options, recompute: Recompute
    ) -> bool:
        return (
            layer is self.begun.layer
            and (self.begun.region is None) == (recompute == "none")
            and self.grad == (torch.is_grad_enabled(), hidden.requires_grad)
            and self.begun.options.is_same(options)
            and not _is_watched(hidden)
            and self._is_same(hidden)
        )

    def watch(self, node: Any, hidden: Tensor) -> None:
        """Have ``node``, through which the layer's residual gives its part of the gradient of
        ``hidden``, refuse to give it to somebody: it would take it for all of the gradient.
        """
        given, ahead, words = weakref.ref(hidden), self.ahead, self._refusal()

        def refuse(_: Any) -> None:
            asked = (x := given()) is not None and _is_watched(x)
            if (
                asked or ahead is not None and not torch._C._will_engine_execute_node(ahead)
            ):  # guard: no part of a gradient
                raise RuntimeError(words)

        node.register_prehook(refuse)

    def watch_between(self, hidden: Tensor) -> None:
        """Refuse it, of ``hidden`` and of what was returned, where gradients of something in front
        of it are asked for as well.

        Then all of backward runs, and no node is told that somebody gets what it is given. So each
        passes on another tensor of the same numbers: if the one that it was given is still there
        when backward is over, somebody got it.
        """
        for node, at in self._between(hidden) or ():
            if node is not None:
                node.register_prehook(partial(_pass_on, at, self._refusal()))

    def _refusal(self) -> str:
        return (
            f"{self.begun.call.where}: somebody asks for the gradient of the hidden states in front of this layer, but the layer "
            "before it, in a block with it, has not made its q, k and v of them; run the layers one by one "
            '(sp_overlap.scope "layer")'
        )

    def _between(self, hidden: Tensor) -> list[tuple[Any, int]] | None:
        """Nodes of autograd from ``hidden`` to what was returned, with the outputs that they are
        of; None if one of them may do something to a gradient.
        """
        node, at, last, found = hidden.grad_fn, hidden.output_nr, self.hidden.grad_fn, []
        while node is not last:
            made_by = getattr(getattr(type(node), "_forward_cls", None), "__module__", "")
            if not made_by.startswith(tuple(linear.harmless)):  # guard: only harmless nodes between
                return None
            found.append((node, at))
            node, at = node.next_functions[0]  # type: ignore[union-attr]
        return [*found, (last, self.hidden.output_nr)]

    def _is_same(self, hidden: Tensor) -> bool:
        """Whether ``hidden`` is what was returned, unchanged, but for nodes of autograd that do
        nothing to a gradient.
        """
        if hidden is not self.hidden:
            mine, given = (
                (x.data_ptr(), x.shape, x.stride(), x.dtype) for x in (self.hidden, hidden)
            )
            if self._between(hidden) is None or mine != given:
                return False
        return hidden._version == self.version  # guard: hidden states as they were


def _pass_on(
    at: int, words: str, gradients: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """Give a node the gradient of its output ``at`` as another tensor; raise, when backward is
    over, if somebody has the first one.
    """
    if (gradient := gradients[at]) is None:
        return None
    kept = weakref.ref(gradient)

    def refuse() -> None:
        if kept() is not None:  # guard: no part of a gradient beside others
            raise RuntimeError(words)

    torch.autograd.Variable._execution_engine.queue_callback(refuse)
    return *gradients[:at], gradient.view_as(gradient), *gradients[at + 1 :]


def _is_watched(hidden: Tensor) -> bool:
    """Whether somebody will see, or change, the gradient of ``hidden``."""
    return bool(hidden._backward_hooks) or hidden.retains_grad and not hidden.is_leaf


class Chain:
    """One forward of a model whose layers are run one after another.

    chunks    C, the parts that every rank's tokens are cut into
    in_step   whether all that was started ahead was of use so far
    """

    def __init__(self, chunks: int):
        self.chunks = chunks
        self._started: Started | None = None
        self.in_step = True

    @property
    def ahead(self) -> BlockLayer | None:
        """The layer whose q, k and v were started ahead of it."""
        return None if self._started is None else self._started.begun.layer

    @torch.compiler.disable
    def run(
        self,
        layer: BlockLayer,
        successor: BlockLayer | None,
        hidden: Tensor,
        *args: Any,
        position_embeddings: Any = None,
        sequence_lengths: list[int] | None = None,
        recompute: Recompute = "none",
        **kwargs: Any,
    ) -> Tensor:
        """Run a layer, and start q, k and v of its successor.

        hidden                [b, s/P, m], or [s/P, b, m] where the attention is not ``batch_first``
        position_embeddings   as for `SelfAttention`
        recompute                 "all": hold hidden states and o from forward to backward, and run the
                              layer again there, as an activation checkpoint does; "but attention":
                              hold what its backward reads beside, and don't run attention again.
                              The same for the successor
        returns               as ``hidden``

        The remaining arguments go to the local attention. Collective, in the order of the program,
        as is `SelfAttention`. Gradients of hidden states between two layers of a chain are refused:
        q, k and v don't come from them. Raises RuntimeError.
        """
        options = Options(position_embeddings, sequence_lengths, args, kwargs)
        recompute = recompute if torch.is_grad_enabled() else "none"
        started, self._started = self._started, None
        if started is not None and started.serves(layer, hidden, options, recompute):
            here = started.begun
            here.options = options
            here.run_by(by_chunks(here.call.geometry.kinds, self.chunks, recompute))
        else:
            self.in_step = self.in_step and started is None
            here, started = self._begun(layer, hidden, options, recompute), None
            run_segment(None, here, hidden, recompute)
        if started is not None:
            started.ahead = next(iter(here.tokens.values())).grad_fn
            started.watch_between(hidden)
        attend(here, hidden, recompute)
        following = None
        if successor is not None and self._may_start(successor):
            following = self._begun(successor, hidden, options, recompute)
        out = run_segment(
            here, following, hidden, recompute, None if started is None else started.watch
        )
        if following is not None:
            self._started = Started.of(following, out)
        return out

    def _may_start(self, successor: BlockLayer) -> bool:
        """Whether q, k and v of ``successor`` may be started ahead of it: on every rank alike."""
        layer = successor.attention.layer
        first = not layer.agreed or layer.config.check  # its ranks compare with nothing under way
        return (
            self.in_step and not first and not torch.is_inference_mode_enabled()
        )  # its tensors don't tell when they are changed

    def _begun(
        self, layer: BlockLayer, hidden: Tensor, options: Options, recompute: Recompute
    ) -> LayerCall:
        attention, chunks = layer.attention, self.chunks
        positions, lengths, args, kwargs = options

        def describe() -> Any:
            geometry, types = attention.describe(
                hidden, positions, lengths, (*args, *kwargs.values())
            )
            if fault := layer.in_the_way():
                raise ValueError(f"a block of layers: {fault}; run the layer by itself")
            return geometry, lambda: (*types(), f"a block in {chunks} chunks")

        dtype = autocast(hidden)[0].dtype
        dim = attention.head_dim
        call = attention.layer.counted(
            describe,
            (hidden,),
            lambda: Local(attention.local_attention, args, kwargs, dim, dim, dtype),
        )
        return LayerCall(layer, call, by_chunks(call.geometry.kinds, chunks, recompute), options)
