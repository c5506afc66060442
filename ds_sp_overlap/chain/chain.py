"""Runs transformer layers in a chain: each starts the q, k and v of the layer behind it.

    chain = Chain(chunks=4)                     one for each forward of a model
    for layer, successor in pairs:
        hidden = chain.run(layer, successor, hidden, position_embeddings=...)

The q, k and v that a layer started for its successor are used if the successor is given the hidden
states that `run` returned. Otherwise only their time is lost.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..attention.memory.forward_state import autocast_of
from ..attention.runtime import linear
from ..attention.runtime.sharded import FSDP
from ..exchange.shares import QueryChunks
from ..schedule import Recompute, by_chunks
from .block import attend, run_segment
from .block_layer import BlockLayer, Options
from .layer_call import LayerCall


@dataclass
class Started:
    """q, k and v of a layer that the layer before it started.

    Attributes:
        begun: The call of the layer, which has not attended yet.
        hidden: The hidden states that the layer before it returned. q, k and v were projected from
            their chunks, so no gradient of q, k and v goes through ``hidden``.
        version: Version of ``hidden`` then, which a change in place increases.
        modes: `_modes` of ``hidden`` then.
        positions: Versions of the position embeddings then.
        ahead: The node of autograd that started q, k and v, set when they are used; None if they
            need no gradient.
    """

    begun: LayerCall
    hidden: Tensor
    version: int
    modes: tuple[object, ...]
    positions: tuple[int, ...]
    ahead: Any = None

    def serves(
        self, layer: BlockLayer, hidden: Tensor, options: Options, recompute: Recompute
    ) -> bool:
        """Return whether these are the q, k and v of a call with these arguments of `Chain.run`.

        If not, the layer makes its own; nothing is wrong.
        """
        return (
            layer is self.begun.layer
            and (self.begun.region is None) == (recompute == "none")
            and self.modes == _modes(hidden)
            and self.begun.options.is_same(options)
            and self.positions == _versions(options.position_embeddings)
            and not _is_watched(hidden)
            and self._is_same(hidden)
        )

    def watch(self, node: Any, hidden: Tensor) -> None:
        """Have backward raise if somebody asks for the gradient of ``hidden``.

        That gradient lacks the part through q, k and v; it is the residual's part alone, which the
        asker would take for the whole. `run_segment` calls this in forward.

        Args:
            node: The node through which the residual gives its part.
            hidden: The hidden states that the layer was given.
        """
        given, ahead, words = weakref.ref(hidden), self.ahead, self._refusal()

        def refuse(_: Any) -> None:
            # Either ``hidden`` got a hook or retains its gradient; or ``autograd.grad`` was asked
            # for it, so that the engine stops there and leaves out the way through q, k and v.
            asked = (x := given()) is not None and _is_watched(x)
            is_left_out = ahead is not None and not torch._C._will_engine_execute_node(ahead)
            if asked or is_left_out:  # guard: no part of a gradient
                raise RuntimeError(words)

        node.register_prehook(refuse)

    def watch_between(self, hidden: Tensor) -> None:
        """Have backward raise if somebody asks for the gradient of ``hidden`` and, in the same
        ``autograd.grad``, for those of earlier tensors. `watch` does not notice that.
        """
        # Then all of backward runs, and no node learns that somebody gets the gradient that the
        # node is given. So each node passes on a view: if the gradient itself is still alive when
        # backward is over, somebody got it.
        for node, at in self._between(hidden) or ():
            if node is not None:
                node.register_prehook(partial(_pass_on, at, self._refusal()))

    def _refusal(self) -> str:
        return (
            f"{self.begun.call.where}: somebody asks for the gradient of the hidden states in "
            "front of this layer, but the layer before it, in a block with it, has not made its q, "
            'k and v of them; run the layers one by one (sp_overlap.scope "layer")'
        )

    def _between(self, hidden: Tensor) -> list[tuple[Any, int]] | None:
        """Return the nodes of autograd from ``hidden`` to the hidden states that were returned.

        Each comes with the number of its output on this way. None if one of them may change a
        gradient, or if ``hidden`` does not come from those hidden states.
        """
        node, at, last, nodes = hidden.grad_fn, hidden.output_nr, self.hidden.grad_fn, []
        while node is not last:
            made_by = getattr(getattr(type(node), "_forward_cls", None), "__module__", "")
            is_harmless = made_by.startswith(tuple(linear.harmless - {FSDP}))
            if not is_harmless:  # guard: only harmless nodes between
                return None
            nodes.append((node, at))
            node, at = node.next_functions[0]  # type: ignore[union-attr]
        return [*nodes, (last, self.hidden.output_nr)]

    def _is_same(self, hidden: Tensor) -> bool:
        """Return whether ``hidden`` is the tensor that was returned, unchanged; or a view of all of
        it, made by nodes of autograd that change no gradient.
        """
        if hidden is not self.hidden:
            mine = self.hidden
            same_place = hidden.data_ptr() == mine.data_ptr() and hidden.dtype == mine.dtype
            same_form = hidden.shape == mine.shape and hidden.stride() == mine.stride()
            if self._between(hidden) is None or not (same_place and same_form):
                return False
        return hidden._version == self.version  # guard: hidden states as they were


def _modes(hidden: Tensor) -> tuple[object, ...]:
    """Return whether autograd records, whether ``hidden`` needs a gradient, and autocast."""
    return torch.is_grad_enabled(), hidden.requires_grad, *autocast_of(hidden.device).values()


def _versions(position_embeddings: Any) -> tuple[int, ...]:
    """Return the versions of the tensors of position embeddings, which a change in place increases.

    Tensors of inference mode have none.
    """
    leaves = tree_leaves(position_embeddings)
    return tuple(x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference())


def _pass_on(
    at: int, words: str, gradients: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """Give a node a view of the gradient of its output ``at``; raise, when backward is over, if
    somebody has the gradient itself.

    A hook in front of a node (``register_prehook``).

    Args:
        at: The number of the output.
        words: The message of the error.
        gradients: The gradients of all outputs of the node; None for those without.

    Returns:
        The gradients for the node; None, by which they stay as they are, if output ``at`` has none.
    """
    gradient = gradients[at]
    if gradient is None:
        return None
    alive = weakref.ref(gradient)

    def refuse() -> None:
        if alive() is not None:  # guard: no part of a gradient beside others
            raise RuntimeError(words)

    # Behind the callbacks that nodes queue later in this backward: operands that wait for weight
    # gradients nobody asked for (`Waiting`) hold the gradient until then.
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(partial(queue, refuse))
    return *gradients[:at], gradient.view_as(gradient), *gradients[at + 1 :]


def _is_watched(hidden: Tensor) -> bool:
    """Return whether somebody will see, or change, the gradient of ``hidden``."""
    if hidden.retains_grad and not hidden.is_leaf:
        return True
    hooks = (hidden._backward_hooks or {}).values()
    # Those of FSDP are harmless: they gather the weights of the layer that returned ``hidden``.
    return not all((getattr(hook, "__module__", "") or "").startswith(FSDP) for hook in hooks)


class Chain:
    """One forward of a model whose layers run one after another.

    Args:
        chunks: C, the parts that every rank's tokens are cut into.

    Attributes:
        in_step: Whether all q, k and v that were started ahead were used so far. Once some were
            not, this forward starts none ahead any more.
    """

    def __init__(self, chunks: int):
        self.chunks = chunks
        self._started: Started | None = None
        self.in_step = True

    @property
    def ahead(self) -> BlockLayer | None:
        """The layer whose q, k and v were started ahead and not yet used; None for none."""
        return None if self._started is None else self._started.begun.layer

    def drop(self) -> None:
        """Have the next layer make its own q, k and v, whatever was started; alike on all ranks."""
        if self._started is not None:
            self._started, self.in_step = None, False

    @torch._disable_dynamo
    def run(
        self,
        layer: BlockLayer,
        successor: BlockLayer | None,
        hidden: Tensor,
        *args: Any,
        position_embeddings: Any = None,
        sequence_lengths: list[int] | None = None,
        query_chunks: QueryChunks | None = None,
        recompute: Recompute = "none",
        **kwargs: Any,
    ) -> Tensor:
        """Run a layer, and start q, k and v of its successor.

        Collective, in the order of the program, as is `SelfAttention`.

        Args:
            layer: The layer.
            successor: The layer behind it; None for none.
            hidden: [b, s/P, m], or [s/P, b, m] where the attention is not ``batch_first``.
            args: For the local attention, as are the other keywords.
            position_embeddings: As for `SelfAttention`.
            sequence_lengths: As for `SelfAttention`.
            query_chunks: As for `SelfAttention`.
            recompute: "all": save hidden states and o, and recompute the layer in backward, as an
                activation checkpoint does. "but attention": save what attention's backward reads
                too, and do not recompute attention. The same for the successor.

        Returns:
            As ``hidden``.

        Raises:
            RuntimeError: in backward, if gradients of hidden states between two layers of a chain
                are asked for: q, k and v don't come from them.
            ValueError: on all ranks alike in a layer's first call, if the layer can't run in a
                chain or the ranks' calls differ.
        """
        options = Options(position_embeddings, sequence_lengths, query_chunks, args, kwargs)
        # Without autograd nothing is saved, and there is no backward to recompute in.
        recompute = recompute if torch.is_grad_enabled() else "none"
        started, self._started = self._started, None
        if started is not None and started.serves(layer, hidden, options, recompute):
            here = started.begun
            # Those of attention may differ from the ones that the layer in front was called with.
            here.options = options
            here.call.run_by(by_chunks(here.call.geometry.kinds, self.chunks, recompute))
            started.ahead = next(iter(here.tokens.values())).grad_fn
            started.watch_between(hidden)
        else:
            self.in_step = self.in_step and started is None
            here, started = self._new_call(layer, hidden, options, recompute), None
            run_segment(None, here, hidden, recompute)
        attend(here, hidden, recompute)
        following = None
        if successor is not None and self._may_start(successor):
            following = self._new_call(successor, hidden, options, recompute)
        out = run_segment(
            here, following, hidden, recompute, None if started is None else started.watch
        )
        if following is not None:
            positions = _versions(position_embeddings)
            self._started = Started(following, out, out._version, _modes(out), positions)
        return out

    def _may_start(self, successor: BlockLayer) -> bool:
        """Return whether q, k and v of ``successor`` may be started ahead; alike on every rank."""
        layer = successor.attention.layer
        # Ranks compare calls in a layer's first call, and in each call in check mode. With q, k
        # and v ahead, exchanges would be under way then.
        compares = not layer.agreed or layer.config.check
        # Tensors of inference mode don't tell when they are changed.
        return self.in_step and not compares and not torch.is_inference_mode_enabled()

    def _new_call(
        self, layer: BlockLayer, hidden: Tensor, options: Options, recompute: Recompute
    ) -> LayerCall:
        """Make the call of a layer, and check that it fits a chain; nothing is started.

        Collective where ranks compare calls: not with exchanges under way, see `_may_start`.

        Args:
            layer: The layer.
            hidden: Hidden states of the layer's shape; for a successor, those that the layer before
                it was given.
            options: What the layer is called with.
            recompute: What is recomputed in backward.
        """
        attention, chunks = layer.attention, self.chunks
        positions, lengths, queries, args, kwargs = options

        def describe() -> Any:
            geometry, types = attention.describe(
                hidden, positions, lengths, (*args, *kwargs.values()), query_chunks=queries
            )
            if fault := layer.in_the_way():
                raise ValueError(f"a block of layers: {fault}; run the layer by itself")
            return geometry, lambda: (*types(), f"a block in {chunks} chunks")

        local = partial(attention.local_to_probe, hidden, args, kwargs)
        call = attention.layer.counted_call(describe, (hidden,), local)
        call.run_by(by_chunks(call.geometry.kinds, chunks, recompute))
        return LayerCall(layer, call, options)
