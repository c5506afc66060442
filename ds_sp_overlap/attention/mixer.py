"""Describes recurrent and convolutional mixers: how the tokens of a layer meet (`Mixer`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Documents(Protocol):
    """The documents of some tokens, as ``integrations.sequence.documents`` has them.

    Attributes:
        long: The row, the start and the stop of the first calls of a function in `attend`.
    """

    long: list[tuple[int, int, int]]

    def attend(self, attention: Callable[..., Tensor], q: Tensor, *others: Tensor) -> Tensor:
        """Return the results of ``attention`` for each document of tensors [b, s, ..]."""


@dataclass(frozen=True)
class Pieces:
    """The pieces of documents among this rank's tokens.

    Attributes:
        lengths: Local sequence length of every rank, in tokens.
        window: The pieces of this rank's tokens and of the `reach` tokens before; None if each row
            is one piece.
        own: The pieces of this rank's tokens alone; None if each row is one piece.
        whole: The documents of the whole sequence; None if each row is one document.
        last_starts: [b]. The first token of the last piece of each row; empty where it is 0.
        reached: [b, s/P]. Whether a token's document has begun on an earlier rank; None if all have.
        reaches: [b, rank]. Whether the document of this rank's first token has begun on that
            earlier rank, or before; None if all have.
    """

    lengths: list[int]
    window: Documents | None = None
    own: Documents | None = None
    whole: Documents | None = None
    last_starts: Sequence[int] = ()
    reached: Tensor | None = None
    reaches: Tensor | None = None


@dataclass(frozen=True)
class Source:
    """A projection of a layer's hidden states.

    Attributes:
        names: The results, in order.
        project: Maps x [b, s/P, m] to the results; to the tensor itself where there is one name.
    """

    names: Sequence[str]
    project: Callable[[Tensor], Any]


class Projected:
    """The projections of one call; each runs when one of its results is first asked for.

    Args:
        sources: The projections.
        x: [b, s/P, m]. The hidden states.
    """

    def __init__(self, sources: Sequence[Source], x: Tensor):
        self.sources, self.x = sources, x
        self._results: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        """Return and forget a result."""
        if name not in self._results:
            source = next(source for source in self.sources if name in source.names)
            results = source.project(self.x)
            if len(source.names) == 1:
                return results
            self._results.update(zip(source.names, results))
        return self._results.pop(name)


# Rows of a parameter that belong to heads, in order: the kind of the heads, "q", or "k" for those of
# k and v; and the rows of each head.
Sections = Sequence[tuple[str, int]]


class Mixer:
    """Describes the mixers of one kind: how the tokens of a layer meet. A subclass for each kind.

    Attributes:
        layer: The layer.
        split: The name of the projection that is computed in parts where it can be; may be empty.
        beside: What is projected while the tokens before this rank's own travel.
        late: What is projected while states, or q, k and v, travel.
        by_positions: Whether the recurrence goes by position_ids, too.
        by_states: Whether it has a recurrence that exchanges states, see Note [States] in
            `mixer_layer`.
        by_heads: What meets in whole sequences of some heads, in words; empty if nothing does.
            Channels count as heads. Beside ``by_states`` only where the kernel gives no state.
        sources: Takes whether ``split`` may be computed in parts; returns the projections. Their
            results are "x", what the convolution or scan runs on, [b, s/P, width], or "q", "k" and
            "v" of ``mix``; and those that ``beside`` and ``late`` name.
        merge: Takes y, and the results of ``beside`` and ``late`` by name; returns the output.
        convolve: Takes x [b, n, width] of one document; returns y [b, n, ..]. None for no
            convolution.
        scan: Mixes one document from a zero state. Like ``log_decay`` it takes tensors [b, s/P,
            ..]: x behind the convolution, then those of ``beside``, or position_ids. Returns y [b,
            s/P, h, ..] and the final state [b, h, ..]; None for a state that its kernel doesn't
            give.
        log_decay: Returns the logarithm of each token's decay [b, s/P, h], in fp32.
        read: Takes H, shaped as a state, and the tensors of ``scan``; returns what each token reads
            of H, of a shape that broadcasts to that of y.
        widths: Returns the last dim of each tensor that ``scan`` takes. Needed where a mixer has
            both ``by_states`` and ``by_heads``.
        counts: Returns the heads of q and o, ``h``, and of k and v, ``h_kv``, which divides ``h``.
        parameters: Returns the parameters that are cut by heads (None for one that the layer
            hasn't), each with what its rows are.
        inputs: Takes the results of ``beside`` by name; returns the projections of what was
            convolved to q, k and v [b, s/P, heads, ..], where the layer convolves its own tokens
            first.
        mix: Takes q, k and v [b, s, heads, ..] of one document, with this rank's heads of a group,
            and its slices of the parameters; returns o [b, s, heads of q, ..].
    """

    split = by_heads = ""
    beside: Sequence[str] = ()
    late: Sequence[str] = ()
    by_positions = by_states = False
    sources: Callable[[bool], Sequence[Source]]
    merge: Callable[[Tensor, dict[str, Tensor]], Any]
    convolve: Callable[[Tensor], Tensor] | None = None
    scan: Callable[..., tuple[Tensor, Any]]
    log_decay: Callable[..., Tensor]
    read: Callable[..., Tensor]
    widths: Callable[[], Sequence[int]]
    counts: Callable[[], tuple[int, int]]
    parameters: Callable[[], Sequence[tuple[Tensor | None, Sections]]]
    inputs: Callable[[dict[str, Tensor]], Sequence[Source]]
    mix: Callable[..., Tensor]

    def __init__(self, layer: Any):
        self.layer = layer

    def reach(self) -> int:
        """Return how many tokens before its own a rank needs."""
        return 0
