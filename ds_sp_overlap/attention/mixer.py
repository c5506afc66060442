"""Runs a recurrent or convolutional mixer under sequence parallelism, on each rank's own tokens.

Attention needs all tokens of some heads. Many mixers need less. A convolution needs a few tokens
before the first of this rank, its `reach`. A recurrence whose decay is a number for each head needs
the state that the ranks before have left. So each rank works on its own tokens with the mixer's own
kernels, and receives little, whatever the number of tokens:

    start x    the last tokens before the convolution     | what else the scan needs is projected
    finish x   convolve; scan from a zero state
    start s    the state and the decay of this rank       | the gate is projected
    finish s   add what the earlier ranks left behind; norm, gate, output projection

In backward the gradients of the states travel under the gradient of the gate's projection.

Note [States]
~~~~~~~~~~~~~
A scan from a zero state lacks what came before this rank. The state H that the earlier ranks left
is the sum of their own states S_i, each decayed through the ranks between; the output of token t
lacks ``read(H)``, decayed from this rank's first token to t. Decays are sums of logarithms, in
fp32, and so are states. A document that begins on this rank lacks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..exchange.earlier import state_layout, tail_layout
from ..exchange.exchange import Exchange
from ..exchange.geometry import Geometry
from ..exchange.layout import Layout
from .layer import LayerRuntime
from .runtime.linear import call_through, can_split


class Documents(Protocol):
    """The documents of some tokens, as ``integrations.sequence.documents`` has them.

    Attributes:
        long: The rows, the start and the stop of the first calls of a function in `attend`.
    """

    long: list[tuple[slice, int, int]]

    def attend(
        self, attention: Callable[..., Tensor], alone: None, q: Tensor, *others: Tensor
    ) -> Tensor:
        """Return the results of ``attention`` for each document of tensors [b, s, ..]."""


@dataclass(frozen=True)
class Pieces:
    """The pieces of documents among this rank's tokens.

    Attributes:
        lengths: Local sequence length of every rank, in tokens.
        window: The pieces of this rank's tokens and of the `reach` tokens before; None if each row
            is one piece.
        own: The pieces of this rank's tokens alone; None if each row is one piece.
        last_starts: [b]. The first token of the last piece of each row; empty where it is 0.
        reached: [b, s/P]. Whether a token's document has begun on an earlier rank; None if all have.
        reaches: [b, rank]. Whether the document of this rank's first token has begun on that
            earlier rank, or before; None if all have.
    """

    lengths: list[int]
    window: Documents | None = None
    own: Documents | None = None
    last_starts: Sequence[int] = ()
    reached: Tensor | None = None
    reaches: Tensor | None = None


@dataclass(frozen=True)
class Source:
    """A projection of a layer's hidden states.

    Attributes:
        names: The results, in order.
        project: Maps the layer and x [b, s/P, m] to the results.
    """

    names: Sequence[str]
    project: Callable[[Any, Tensor], Sequence[Tensor]]


class Projected:
    """The projections of one call; each runs when one of its results is first asked for.

    Args:
        layer: The layer.
        sources: Its projections.
        x: [b, s/P, m]. The hidden states.
    """

    def __init__(self, layer: Any, sources: Sequence[Source], x: Tensor):
        self.layer, self.sources, self.x = layer, sources, x
        self._results: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        """Return and forget a result."""
        if name not in self._results:
            source = next(source for source in self.sources if name in source.names)
            self._results.update(zip(source.names, source.project(self.layer, self.x)))
        return self._results.pop(name)


@dataclass(frozen=True)
class States:
    """The recurrence of a mixer, see Note [States].

    Its functions take the layer and tensors [b, s/P, ..]: x behind the convolution, then those of
    `Mixer.beside`.

    Attributes:
        scan: Mixes one document from a zero state. Returns y [b, s/P, h, ..] and the final state
            [b, h, ..].
        log_decay: Gives the logarithm of each token's decay [b, s/P, h], in fp32.
        read: Takes H, shaped as a state, behind the layer. Gives what each token reads of H, shaped
            as y.
    """

    scan: Callable[..., tuple[Tensor, Tensor]]
    log_decay: Callable[..., Tensor]
    read: Callable[..., Tensor]


@dataclass(frozen=True)
class Mixer:
    """Describes the mixers of one kind.

    Attributes:
        sources: The projections of a layer, and whether those of ``split`` may be computed in parts
            -> the parts. Their results are "x", what the convolution or scan runs on, [b, s/P,
            width], and those that ``beside`` and ``late`` name.
        merge: The layer, y, and the results of ``beside`` and ``late`` by name -> the output.
        beside: What is projected while the tokens before this rank's own travel.
        late: What is projected while states travel.
        reach: How many tokens before its own a rank needs.
        convolve: The layer and x [b, n, width] of one document -> the same shape. None for no
            convolution.
        states: The recurrence behind it; None for none.
        split: The names of the projections that are computed in parts where they can be.
        pair: Whether the layer returns a pair, whose second part is for a cache.
    """

    sources: Callable[[Any, bool], Sequence[Source]]
    merge: Callable[[Any, Tensor, dict[str, Tensor]], Tensor]
    beside: Sequence[str] = ()
    late: Sequence[str] = ()
    reach: Callable[[Any], int] = lambda layer: 0
    convolve: Callable[[Any, Tensor], Tensor] | None = None
    states: States | None = None
    split: Sequence[str] = ()
    pair: bool = False


class MixerLayer:
    """A mixer of tokens under sequence parallelism; holds a layer, and no parameter of its own.

    Args:
        runtime: The runtime of the layer.
        layer: The layer.
        mixer: Its description.
    """

    def __init__(self, runtime: LayerRuntime, layer: Any, mixer: Mixer):
        self.runtime, self.layer, self.mixer = runtime, layer, mixer

    @torch._disable_dynamo
    def __call__(self, hidden_states: Tensor, pieces: Pieces) -> Tensor:
        """Mix the tokens of the global sequence.

        Collective.

        Args:
            hidden_states: [b, s/P, m].
            pieces: The pieces of documents that this rank holds.

        Returns:
            The result of `Mixer.merge`.

        Raises:
            ValueError: for tensors that don't fit; on all ranks alike in the layer's first call.
        """
        sp_group, layer = self.runtime.sp_group, self.layer
        projections = [getattr(layer, name) for name in self.mixer.split]
        splits = all(map(can_split, projections))

        def describe() -> tuple[Geometry, Callable[[], tuple]]:
            """Describe the call, see `layer.Describe`; no heads are dealt to ranks."""
            if hidden_states.dim() != 3:
                got = list(hidden_states.shape)
                raise ValueError(f"hidden_states must be 3-D, [b, s/P, m], got {got}")
            size, lengths = sp_group.size, tuple(pieces.lengths)
            geometry = Geometry(
                size, sp_group.rank, lengths, len(hidden_states), size, size, batch_first=True
            )

            def types() -> tuple:
                trained = [hidden_states, *layer.parameters()]
                learns = [torch.is_grad_enabled() and x.requires_grad for x in trained]
                words = "gradients of hidden states and parameters"
                return str(hidden_states.dtype), hidden_states.shape[2], words, learns

            return geometry, types

        run, call = self.runtime.begin(describe, (hidden_states,))
        # Only a baseline runs without a call, and a mixer has none.
        assert call is not None
        checked = call.checked

        def body(x: Tensor) -> Tensor:
            """Run as the forward of the projections of which parts are computed."""
            projected = Projected(layer, self.mixer.sources(layer, splits), x)
            return self._mix(projected, pieces, checked)

        return run.end(call_through(projections if splits else [], body, *run.inputs))

    def _mix(self, projected: Projected, pieces: Pieces, checked: bool) -> Tensor:
        """Return the layer's output."""
        mixer, layer = self.mixer, self.layer
        y = projected("x")
        if mixer.convolve is None:
            beside = {name: projected(name) for name in mixer.beside}
        else:
            group, reach = self.runtime.sp_group, mixer.reach(layer)
            batch, tokens, width = y.shape
            lengths = tuple(pieces.lengths)
            layout = tail_layout(group.rank, lengths, reach, batch=batch, width=width)
            most = layout.source.shape[1]
            before = _Started(self.runtime, layout, "x", y[:, tokens - most :], checked)
            beside = {name: projected(name) for name in mixer.beside}
            window = torch.cat([before.finish(), y], 1)
            y = _each(pieces.window, layer, mixer.convolve, window)[:, -tokens:]
        late: dict[str, Tensor] = {}
        if mixer.states is not None:
            tensors = y, *beside.values()
            y, state, log_decay = self._scan(mixer.states, tensors, pieces)
            states = self._send(state, log_decay[:, -1], checked)
            late = {name: projected(name) for name in mixer.late}
            earlier = _combined(states.finish(), log_decay.shape[2], pieces)
            scale = log_decay.exp()
            if pieces.reached is not None:  # guard: a document that begins lacks nothing
                scale = scale.masked_fill(~pieces.reached[..., None], 0)
            lacks = mixer.states.read(layer, earlier.view(state.shape).to(y.dtype), *tensors)
            scale = scale.view(*scale.shape, *[1] * (y.dim() - 3)).to(y.dtype)
            y = torch.addcmul(y, lacks, scale)
        return mixer.merge(layer, y, {**beside, **late})

    def _scan(
        self, states: States, tensors: Sequence[Tensor], pieces: Pieces
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scan this rank's pieces, each from a zero state.

        Returns:
            y; the state that each row's last piece leaves; and the sum of the logarithms of decays
            from the first token on, [b, s/P, h].
        """
        layer, tokens = self.layer, tensors[0].shape[1]
        log_decay = states.log_decay(layer, *tensors).cumsum(1)
        if pieces.own is None:
            y, state = states.scan(layer, *tensors)
            return y, state, log_decay
        finals: list[Tensor] = []

        def scan(*xs: Tensor) -> Tensor:
            y, final = states.scan(layer, *xs)
            finals.append(final)
            return y

        y = pieces.own.attend(scan, None, *tensors)
        of_rows: dict[int, Tensor] = {}
        for (rows, _, stop), final in zip(pieces.own.long, finals):
            if stop == tokens:
                of_rows.update(zip(range(*rows.indices(len(y))), final.split(1)))
        for row, start in enumerate(pieces.last_starts):
            # A short piece shared its call with others, and repeats its last token there.
            if row not in of_rows:
                last = (x[row : row + 1, start:] for x in tensors)
                of_rows[row] = states.scan(layer, *last)[1]
        return y, torch.cat([of_rows[row] for row in range(len(y))]), log_decay

    def _send(self, state: Tensor, decay: Tensor, checked: bool) -> _Started:
        """Start the exchange of this rank's state [b, h, ..] and its decay [b, h]."""
        group = self.runtime.sp_group
        sent = torch.cat([state.float().flatten(2), decay[..., None]], -1)
        batch, heads, width = sent.shape
        layout = state_layout(group.rank, group.size, batch=batch, heads=heads, width=width)
        return _Started(self.runtime, layout, "s", sent[:, : layout.source.shape[1]], checked)


class _Started:
    """An exchange that was started; `finish` gives what arrives."""

    def __init__(self, runtime: LayerRuntime, layout: Layout, name: str, x: Tensor, checked: bool):
        self.exchange = Exchange(runtime.sp_group, layout, runtime.where, name, checked)
        self.token = self.exchange.start(x)

    def finish(self) -> Tensor:
        """Order the compute stream after the exchange; return what was received."""
        return self.exchange.finish(self.token)


def _each(
    documents: Documents | None, layer: Any, mix: Callable[[Any, Tensor], Tensor], x: Tensor
) -> Tensor:
    """Apply ``mix`` to each document of x."""
    if documents is None:
        return mix(layer, x)
    return documents.attend(lambda piece: mix(layer, piece), None, x)


def _combined(received: Tensor, heads: int, pieces: Pieces) -> Tensor:
    """Return H of Note [States].

    Args:
        received: [b, rank x h, n + 1]. For each earlier rank its state and, behind, its decay.
        heads: ``h``.
        pieces: The pieces of documents that this rank holds.

    Returns:
        [b, h, n].
    """
    states = received.unflatten(1, (received.shape[1] // heads, heads))
    # The decay through the ranks behind each, up to this one: a sum from the last rank on.
    decays = F.pad(states[:, 1:, :, -1], (0, 0, 0, min(1, states.shape[1])))
    weights = decays.flip(1).cumsum(1).flip(1).exp()
    if pieces.reaches is not None:  # guard: a state stays in its document
        weights = weights.masked_fill(~pieces.reaches[..., None], 0)
    return (weights[..., None] * states[..., :-1]).sum(1)
