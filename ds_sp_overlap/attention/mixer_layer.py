"""Runs a recurrent or convolutional mixer under sequence parallelism.

Attention needs all tokens of some heads. Many mixers need less: a convolution needs a few tokens
before this rank's first token (`Mixer.reach`); a recurrence with one decay for each head and token
needs the final states of the earlier ranks. So each rank runs the mixer's own kernels on its own
tokens, and receives an amount that does not depend on the number of tokens:

    start x    the last tokens before the convolution     | project the other inputs of the scan
    finish x   convolve; scan from a zero state
    start s    the state and the decay of this rank       | project the gate
    finish s   add the contribution of the earlier ranks; norm, gate, output projection

In backward the projection of the gate hides the exchange of the states' gradients. A mixer with
other decays, or with a kernel that returns no state, exchanges heads after the convolution, as
attention does (`mixer_heads`).

Note [States]
~~~~~~~~~~~~~
A scan from a zero state lacks the contribution of the earlier ranks. Let H be the true state at the
start of this rank's tokens: the sum of the earlier ranks' final states S_i, each decayed through
the ranks between. The output of token t lacks ``read(H)``, decayed from this rank's first token to
t. Decays are summed as logarithms. Logarithms and states are in fp32. A document that begins on
this rank lacks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..exchange.exchange import Exchange
from ..exchange.geometry import Geometry
from ..exchange.layout import tail_layout
from ..warn import warn_once
from .call_geometry import Tokens, geometry_of, make_geometry
from .layer import LayerRuntime
from .mixer import Mixer, Pieces, Projected
from .mixer_heads import in_documents, mix_by_heads
from .runtime.execution import Call
from .runtime.linear import call_through, can_split
from .unobserved import unobserved


class MixerLayer:
    """Runs a mixer under sequence parallelism; has no parameters beside those of the layer.

    Args:
        runtime: The runtime of the layer.
        mixer: The description of the layer. If both ``by_states`` and ``by_heads`` are set, the
            first call uses one of the two and clears the other.
    """

    def __init__(self, runtime: LayerRuntime, mixer: Mixer):
        self.runtime, self.mixer = runtime, mixer

    @torch._disable_dynamo
    def __call__(
        self, hidden_states: Tensor, pieces: Pieces, positions: Tensor | None = None
    ) -> Any:
        """Mix the tokens of the global sequence.

        Collective.

        Args:
            hidden_states: [b, s/P, m].
            pieces: The pieces of documents that this rank holds.
            positions: [b, s/P]. The position_ids, for a mixer with ``by_positions``; else None.

        Returns:
            The result of `Mixer.merge`.

        Raises:
            ValueError: for tensors that don't fit. In the layer's first call, all ranks raise.
        """
        return self.runtime.run(
            partial(self._geometry, hidden_states, pieces.lengths),
            partial(self._types, hidden_states),
            (hidden_states,),
            partial(self._called, pieces, positions),
        )

    def _geometry(self, hidden_states: Tensor, lengths: list[int]) -> Geometry:
        """Choose between states and heads in the first call; return the geometry of the call."""
        if hidden_states.dim() != 3:
            got = list(hidden_states.shape)
            raise ValueError(f"hidden_states must be 3-D, [b, s/P, m], got {got}")
        self._choose(hidden_states)
        group, mixer = self.runtime.sp_group, self.mixer
        if not mixer.by_heads:
            # No heads are exchanged: one head for each rank makes the geometry valid.
            size, batch = group.size, len(hidden_states)
            return make_geometry(
                size, group.rank, tuple(lengths), batch, size, size, batch_first=True
            )
        counts, why = mixer.counts(), f"its {mixer.by_heads} needs all queries at once"
        return geometry_of(self.runtime, hidden_states, counts, Tokens(True, lengths), attend=why)

    def _types(self, hidden_states: Tensor) -> tuple:
        """Return further values that must be equal on all ranks; called after `_geometry`."""
        trained = [hidden_states, *self.mixer.layer.parameters()]
        learns = [torch.is_grad_enabled() and x.requires_grad for x in trained]
        words = "gradients of hidden states and parameters"
        way = f"{self.mixer.by_heads or 'nothing'} by heads"
        return str(hidden_states.dtype), hidden_states.shape[2], way, words, learns

    def _choose(self, hidden_states: Tensor) -> None:
        """Choose between states and heads, if the mixer has both, by a trial run of its kernel."""
        mixer, what = self.mixer, type(self.mixer.layer).__name__
        if not (mixer.by_states and mixer.by_heads):
            return
        with torch.inference_mode(False), unobserved(hidden_states.device, backward=True):
            # The trial has the call's size, since kernels are tuned to the first size they see.
            of_width = (hidden_states.shape[:2] + (width,) for width in mixer.widths())
            xs = [hidden_states.new_ones(shape).requires_grad_() for shape in of_width]
            state = mixer.scan(*xs)[1]
            dx = None
            if state is not None and state.requires_grad:
                (dx,) = torch.autograd.grad(state.sum(), xs[:1], allow_unused=True)
        if dx is not None and dx.any():
            mixer.by_heads = ""
            return
        lacks = "no final state" if state is None else "a final state without a gradient"
        warn_once(
            f"sp_overlap: the scan of {what} gives {lacks}, which the ranks behind need; whole "
            "sequences of some heads are exchanged instead. Another kernel, such as mamba-ssm's, "
            "needs fewer bytes"
        )
        mixer.by_states = False

    def _called(self, pieces: Pieces, positions: Tensor | None, call: Call, x: Tensor) -> Any:
        """Run the mixer inside of the call of the projection that is computed in parts."""
        projection: Any = getattr(self.mixer.layer, self.mixer.split, None)
        splits = projection is not None and can_split(projection)
        mix = partial(self._mix, call, splits, pieces, positions)
        return call_through([projection] if splits else [], mix, x)

    def _mix(
        self, call: Call, splits: bool, pieces: Pieces, positions: Tensor | None, x: Tensor
    ) -> Any:
        """Convolve; then scan and exchange states, or mix and exchange heads; return the output."""
        mixer = self.mixer
        projected = of_heads = Projected(mixer.sources(splits), x)
        given = {} if positions is None else {"positions": positions}
        if mixer.convolve is not None or mixer.by_states:
            y = projected("x")
        if mixer.convolve is not None:
            # The projections of ``beside`` hide the exchange of tokens.
            beside = partial(projected.give, given, mixer.beside)
            reach = mixer.reach()
            before = _tail(call, "x", y, lengths=pieces.lengths, reach=reach, meanwhile=beside)
            y = torch.cat([before, y], 1)
            y = in_documents(pieces.window, mixer.convolve, y)[:, -x.shape[1] :]
            if mixer.by_heads:
                of_heads = Projected(mixer.inputs(**given), y)
        late = partial(projected.give, given, mixer.late)
        if mixer.by_states:
            y = self._by_states(call, [y] + list(given.values()), pieces, late)
        elif mixer.by_heads:
            y = mix_by_heads(call, mixer, of_heads, pieces.whole, late)
        return mixer.merge(y, **given)

    def _by_states(
        self,
        call: Call,
        tensors: Sequence[Tensor],
        pieces: Pieces,
        meanwhile: Callable[[], None],
    ) -> Tensor:
        """Scan this rank's tokens and add ``read(H)`` of the earlier ranks, see Note [States].

        ``meanwhile`` is called while the states travel.
        """
        y, state, log_decay = self._scan(tensors, pieces)
        sent = torch.cat([state.float().flatten(2), log_decay[:, -1, :, None]], -1)
        # Each rank receives the states of all earlier ranks; the last rank sends none.
        heads, size = sent.shape[1], call.sp_group.size
        received = _tail(
            call, "s", sent, lengths=[heads] * size, reach=heads * size, meanwhile=meanwhile
        )
        earlier = _combined(received, heads, pieces)
        scale = log_decay.exp()
        if pieces.reached is not None:  # guard: a document that begins lacks nothing
            scale = scale.masked_fill(~pieces.reached[..., None], 0)
        lacks = self.mixer.read(earlier.view(state.shape).to(y.dtype), *tensors)
        scale = scale.view(scale.shape + (1,) * (y.dim() - 3)).to(y.dtype)
        return torch.addcmul(y, lacks, scale)

    def _scan(self, tensors: Sequence[Tensor], pieces: Pieces) -> tuple[Tensor, Tensor, Tensor]:
        """Scan this rank's pieces, each from a zero state.

        Returns:
            y; the final state of each row's last piece; and for each token the sum of log decays
            from this rank's first token to it, [b, s/P, h].
        """
        mixer, tokens = self.mixer, tensors[0].shape[1]
        log_decay = mixer.log_decay(*tensors).cumsum(1)
        finals = []

        def scan(*xs: Tensor) -> Tensor:
            y, final = mixer.scan(*xs)
            finals.append(final)
            return y

        if pieces.own is None:
            return scan(*tensors), finals[0], log_decay
        y = pieces.own.attend(scan, *tensors)
        of_rows = {}
        for (row, _, stop), final in zip(pieces.own.long, finals):
            if stop == tokens:
                of_rows[row] = final
        for row, start in enumerate(pieces.last_starts):
            # A short piece was padded with copies of its last token, and scanned in one call with
            # others. The call gave no final state of this piece, so scan the piece alone.
            if row not in of_rows:
                scan(*(x[row : row + 1, start:] for x in tensors))
                of_rows[row] = finals[-1]
        return y, torch.cat([of_rows[row] for row in range(len(y))]), log_decay


def _tail(
    call: Call,
    name: str,
    x: Tensor,
    lengths: Sequence[int],
    reach: int,
    meanwhile: Callable[[], None],
) -> Tensor:
    """Return the last ``reach`` rows of the earlier ranks, which precede this rank's rows.

    Args:
        call: The call.
        name: Name of the exchange, for errors and logs.
        x: [b, rows, width]. The rows of this rank.
        lengths: The number of rows of every rank.
        reach: The number of rows to receive; all rows of the earlier ranks if they have fewer.
        meanwhile: Called while the rows travel.
    """
    batch, rows, width = x.shape
    layout = tail_layout(call.sp_group.rank, tuple(lengths), reach, batch=batch, width=width)
    exchange = Exchange(call.sp_group, layout, call.where, name, call.checked)
    token = exchange.start(x[:, rows - layout.sources.shapes[0][1] :])
    meanwhile()
    return exchange.finish(token)


def _combined(received: Tensor, heads: int, pieces: Pieces) -> Tensor:
    """Return H of Note [States].

    Args:
        received: [b, rank x h, n + 1]. For each earlier rank its state and then its log decay.
        heads: ``h``.
        pieces: The pieces of documents that this rank holds.

    Returns:
        [b, h, n].
    """
    states = received.unflatten(1, (received.shape[1] // heads, heads))
    # For each earlier rank, the log decay through the ranks between that rank and this rank: a
    # cumulative sum that begins at the rank before this rank.
    decays = F.pad(states[:, 1:, :, -1], (0, 0, 0, min(1, states.shape[1])))
    weights = decays.flip(1).cumsum(1).flip(1).exp()
    if pieces.reaches is not None:  # guard: a state stays in its document
        weights = weights.masked_fill(~pieces.reaches[..., None], 0)
    return (weights[..., None] * states[..., :-1]).sum(1)
