"""Defines how a recurrent or convolutional mixer is described to a `MixerLayer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Documents(Protocol):
    """Defines the interface to packed documents (``integrations.sequence.documents``).

    Attributes:
        long: (row, start, stop) of each document for which `attend` makes a call of its own.
            `attend` makes these calls first, in this order.
    """

    long: list[tuple[int, int, int]]

    def attend(self, attention: Callable[..., Tensor], q: Tensor, *others: Tensor) -> Tensor:
        """Apply ``attention`` to each document of tensors [b, s, ..]; return all results joined."""


@dataclass(frozen=True)
class Pieces:
    """Holds the places of documents in the sequence; a piece is a document's part on this rank.

    Attributes:
        lengths: Local sequence length of every rank, in tokens.
        window: The pieces of this rank's tokens and the `Mixer.reach` tokens before them; None if
            each row is one piece.
        own: The pieces of this rank's tokens alone; None if each row is one piece.
        whole: The documents of the global sequence; None if each row is one document.
        last_starts: [b]. The local index at which the last piece of each row starts; empty if this
            index is 0 in all rows.
        reached: [b, s/P]. For each token, whether its document began on an earlier rank; None if
            true for all.
        reaches: [b, earlier rank]. For each earlier rank, whether the document of this rank's first
            token began on that rank or before; None if true for all.
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
    """Describes a projection of a layer's hidden states to one or more named results.

    Attributes:
        names: The names of the results, in order.
        project: Maps x [b, s/P, m] to the results; to a bare tensor if there is one name.
    """

    names: Sequence[str]
    project: Callable[[Tensor], Any]


class Projected:
    """Runs the projections of one call, each at the first request for one of its results.

    Args:
        sources: The projections.
        x: [b, s/P, m]. The hidden states.
    """

    def __init__(self, sources: Sequence[Source], x: Tensor):
        self.sources, self.x = sources, x
        self._results: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        """Return the result called ``name``, and keep no reference; ask once for each result."""
        if name not in self._results:
            source = next(source for source in self.sources if name in source.names)
            results = source.project(self.x)
            results = results if len(source.names) > 1 else [results]
            self._results.update(zip(source.names, results))
        return self._results.pop(name)

    def give(self, given: dict[str, Tensor], names: Sequence[str]) -> None:
        """Put the results called ``names`` into ``given``."""
        for name in names:
            given[name] = self(name)


# The numbers of query heads and of KV heads.
Heads = tuple[int, int]
# The sections of a parameter's rows, in order. For each: the kind of its heads ("q", or "k" for the
# heads of k and v), and the number of rows of each head.
Sections = Sequence[tuple[str, int]]
# Parameters that are cut by heads, each with its sections; None for a parameter that a layer lacks.
Parameters = Sequence[tuple[Tensor | None, Sections]]


class Mixer:
    """Describes one kind of mixer to a `MixerLayer`; each kind has a subclass.

    Attributes:
        layer: The layer. A mixer has all attributes of its layer, unless it defines them itself.
        split: The name of the projection that is computed in parts where possible; may be empty.
        beside: The names of the results that are projected while the last tokens of earlier ranks
            travel.
        late: The names of the results that are projected while states, or q, k and v, travel.
        by_positions: Whether the recurrence also reads position_ids.
        by_states: Whether the mixer has a recurrence that exchanges states, see Note [States] in
            `mixer_layer`.
        by_heads: The operation that needs whole sequences of some heads, in words; empty for none.
            Channels count as heads. If ``by_states`` is set too, heads are exchanged only if the
            kernel gives no state.
        sources: Takes a bool, whether ``split`` may be computed in parts; returns the projections.
            Together they give "x" [b, s/P, width], the input of the convolution or the scan, or
            they give "q", "k" and "v" of ``mix``. They also give the results that ``beside`` and
            ``late`` name.
        merge: Takes y; and by name position_ids ("positions") if given, and the results of
            ``beside`` and ``late``. Returns the output.
        convolve: Takes x [b, n, width] of one document; returns y [b, n, ..]. None for no
            convolution.
        scan: Scans one document from a zero state. Takes tensors [b, s/P, ..]: the convolved x,
            then position_ids if given, then the results of ``beside``. Returns y [b, s/P, h, ..],
            and the final state [b, h, ..] or None if the kernel doesn't give the state.
        log_decay: Takes the tensors of ``scan``; returns the logarithm of each token's decay
            [b, s/P, h], in fp32.
        read: Takes H of Note [States] in `mixer_layer`, in the shape of a state, and the tensors of
            ``scan``. Returns the term that H without decay adds to y of each token, in a shape that
            broadcasts to the shape of y.
        widths: Returns the last dim of each tensor that ``scan`` takes. Needed where a mixer has
            both ``by_states`` and ``by_heads``.
        counts: Returns ``h``, the heads of q and o, and ``h_kv``, the heads of k and v; ``h_kv``
            divides ``h``.
        parameters: Returns the parameters that are cut by heads.
        inputs: Takes the results of ``beside`` by name; returns the projections of the convolved x
            to q, k and v [b, s/P, heads, ..]. Needed where the mixer has both ``convolve`` and
            ``by_heads``.
        mix: Takes q, k and v [b, s, heads, ..] of one document, with this rank's heads of a group,
            and the slices of the parameters for these heads; returns o [b, s, heads of q, ..].
    """

    split = by_heads = ""
    beside: Sequence[str] = ()
    late: Sequence[str] = ()
    by_positions = by_states = False
    sources: Callable[[bool], Sequence[Source]]
    merge: Callable[..., Any]
    convolve: Callable[[Tensor], Tensor] | None = None
    scan: Callable[..., tuple[Tensor, Any]]
    log_decay: Callable[..., Tensor]
    read: Callable[..., Tensor]
    widths: Callable[[], Sequence[int]]
    counts: Callable[[], Heads]
    parameters: Callable[[], Parameters]
    inputs: Callable[..., Sequence[Source]]
    mix: Callable[..., Tensor]

    def __init__(self, layer: Any):
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def reach(self) -> int:
        """Return the number of tokens before its own tokens that a rank needs."""
        return 0
