"""Local attention whose backward is run later, from q, k and v that are made again then.

What its backward reads is mostly q, k, v and o themselves: flash kernels keep a log-sum-exp beside
them and nothing else. So attention is run with autograd watching, and of what autograd would save,
q, k, v and o are left out and only noted: which, and as which view. Backward puts new ones in their
place. That serves any attention that is made like this: PyTorch's fused kernels, flash-attn 2 and
3. Where more than a log-sum-exp is saved beside (scores, k repeated for GQA, a mask that attention
made), or q, k or v was changed in place, nothing is kept, and backward runs attention again, with
the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

AttendGroup = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v -> o
MOST_KEPT = (
    0.5  # bytes beside q, k, v and o, as a share of o's; a log-sum-exp is 4 bytes a head and token
)


class _Source(torch.autograd.Function):
    """``x`` with a gradient; the graph leads to it and does not hold it."""

    @staticmethod
    def forward(ctx, anchor: Tensor, x: Tensor):
        storage = x.untyped_storage()
        return x.new_empty(0).set_(
            storage, x.storage_offset(), x.size(), x.stride()
        )  # guard: no view, which nobody may change

    @staticmethod
    def backward(ctx, dx):
        return None, None


@dataclass
class Random:
    """States of the generators that attention may draw from."""

    device: torch.device
    states: list[Tensor]

    @classmethod
    def now(cls, device: torch.device) -> Random:
        states = [torch.get_rng_state()]
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        return cls(device, states)

    def set(self) -> None:
        torch.set_rng_state(self.states[0])
        if len(self.states) > 1:
            torch.get_device_module(self.device).set_rng_state(self.states[1], self.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Random) and self._bytes() == other._bytes()

    def _bytes(self) -> list[bytes]:
        return [state.numpy().tobytes() for state in self.states]  # which are the host's


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@dataclass
class _Views:
    """What the graph of attention saves instead of tensors, and holds: no more than this, and
    nothing that leads back to the graph.

    views   of what each saved tensor is which view: size, strides, offset
    given   q, k, v, o and what was kept, while a backward runs
    """

    views: list[tuple[str | int, tuple]] = field(default_factory=list)
    given: dict[str | int, Tensor] = field(default_factory=dict)

    def unpack(self, at: int) -> Tensor:
        of, (size, stride, offset) = self.views[at]
        x = self.given[of]
        return x if isinstance(of, int) else x.as_strided(size, stride, x.storage_offset() + offset)


@dataclass
class Attended:
    """What is kept of a head group's attention.

    kept      how many tensors its backward reads beside q, k, v and o
    reads_o   whether it reads o
    edges     of o, and of q, k and v; None where attention is run again
    foreign   what attention learns that is not known, in words
    before    the random numbers at its begin, where it drew any
    """

    kept: int = 0
    reads_o: bool = False
    edges: tuple[GradientEdge, list[GradientEdge | None]] | None = None
    foreign: str = ""
    before: Random | None = None
    saved: _Views = field(default_factory=_Views)
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of q, k, v and o

    def backward(
        self, attend: AttendGroup, heads: Sequence[Tensor], wanted: Sequence[bool], o: Tensor | None, do: Tensor,
        kept: Sequence[Tensor], learned: Sequence[Tensor],
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients of q, k and v, and of what attention learns.

        heads     q, k and v again
        wanted    of which of them there is to be a gradient
        o         again; None if it is not read
        kept      what `attend_once` gave to keep
        learned   tensors with a gradient that attention reads beside
        """
        at_rest = self.edges is not None and all(
            self.strides[kind] == x.stride() for kind, x in zip("qkv", heads)
        )
        if not at_rest or self.reads_o and (o is None or o.dtype != do.dtype):
            return self._run_again(attend, heads, wanted, do, learned)
        assert self.edges is not None
        if self.reads_o:
            assert o is not None
            if o.stride() != self.strides["o"]:
                o = torch.empty_strided(
                    o.shape, self.strides["o"], dtype=o.dtype, device=o.device
                ).copy_(o)
            self.saved.given["o"] = o
        self.saved.given.update(zip("qkv", heads))
        self.saved.given.update(enumerate(kept))
        of_o, edges = self.edges
        inputs: list[Any] = [edge for edge in edges if edge is not None] + list(learned)
        try:
            found = iter(_gradients(of_o, inputs, do, learned, retain_graph=True))
        finally:
            self.saved.given.clear()
        return [next(found) if edge is not None else None for edge in edges] + list(found)

    def _run_again(
        self,
        attend: AttendGroup,
        heads: Sequence[Tensor],
        wanted: Sequence[bool],
        do: Tensor,
        learned: Sequence[Tensor],
    ) -> list[Tensor | None]:
        sources, inputs = _sources(heads, wanted)
        after = None
        if self.before is not None:
            after = Random.now(self.before.device)
            self.before.set()  # guard: the same random numbers
        try:
            plainly = saved_tensors_hooks(
                Tensor.detach, lambda x: x
            )  # guard: a checkpoint or offload around is not asked
            with torch.enable_grad(), plainly:
                o = attend(*sources)
        finally:
            if after is not None:
                after.set()  # guard: what is drawn next is as before
        del sources, heads
        if not o.requires_grad:  # computed of nothing
            return [None] * (len(wanted) + len(learned))
        ends: list[Any] = [edge for edge in inputs if edge is not None] + list(learned)
        found = iter(_gradients(o, ends, do, learned))
        return [next(found) if edge is not None else None for edge in inputs] + list(found)


def _gradients(
    o: Any, ends: list[Any], do: Tensor, learned: Sequence[Tensor], retain_graph: bool = False
) -> Sequence[Tensor | None]:
    """Of ``ends``; hooks on what is learned stay silent, as autograd runs them with the sum over
    the groups.
    """
    hooks = [(x._backward_hooks, dict(x._backward_hooks)) for x in learned if x._backward_hooks]
    for held, _ in hooks:
        held.clear()  # guard: hooks run once
    try:
        return torch.autograd.grad([o], ends, [do], retain_graph=retain_graph, allow_unused=True)
    finally:
        for held, were in hooks:
            held.update(were)


def _sources(
    heads: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[list[Tensor], list[GradientEdge | None]]:
    anchor = heads[0].new_empty(0).requires_grad_()
    with torch.enable_grad():
        sources = [
            _Source.apply(anchor, x) if is_wanted else x for x, is_wanted in zip(heads, wanted)
        ]
    return sources, [
        get_gradient_edge(x) if is_wanted else None for x, is_wanted in zip(sources, wanted)
    ]


def attend_once(
    attend: AttendGroup,
    heads: Sequence[Tensor],
    wanted: Sequence[bool],
    given: Sequence[Tensor],
    learned: Sequence[Tensor],
) -> tuple[Tensor, Attended, list[Tensor]]:
    """Run the attention of a head group; returns o, and what its backward needs beside q, k, v and
    o, the tensors of it apart.

    heads    q, k and v
    wanted   of which of them there will be a gradient
    given    tensors that attention is called with beside them, which live on anyhow
    learned  tensors with a gradient that attention reads beside
    """
    device = heads[0].device
    attended = Attended(strides={kind: x.stride() for kind, x in zip("qkv", heads)})
    sources, edges = _sources(heads, wanted)
    known = {_storage(x): kind for kind, x in zip("qkv", heads)}
    free = {_storage(x) for x in given}
    saved: list[Tensor] = []
    room = (
        (1 + MOST_KEPT)
        * heads[0].numel()
        // heads[0].shape[-1]
        * heads[2].shape[-1]
        * heads[0].element_size()
    )
    spent, versions = 0.0, [x._version for x in sources]

    def pack(x: Tensor) -> int:
        nonlocal spent
        if _storage(x) not in known and _storage(x) not in free:
            spent += x.numel() * x.element_size()
        if spent > room:
            saved.clear()  # too much: let go at once
        else:
            saved.append(x)
        return len(saved) - 1

    before = Random.now(device)
    with torch.enable_grad(), saved_tensors_hooks(pack, attended.saved.unpack):
        o = attend(*sources)
    if Random.now(device) != before:
        attended.before = before
    attended.strides["o"], attended.foreign = o.stride(), _foreign(o, edges, learned)
    changed = [x._version for x in sources] != versions  # guard: changed, so run again
    starts = {kind: int(x.storage_offset()) for kind, x in zip("qkvo", (*heads, o))}
    lost = changed or spent > room or not o.requires_grad
    kept = None if lost else _note(attended, saved, known, free, o, starts)
    saved.clear()  # guard: the graph holds `pack`
    if kept is None:
        return o.detach(), attended, []
    attended.kept, attended.reads_o = len(kept), any(of == "o" for of, _ in attended.saved.views)
    attended.edges = get_gradient_edge(o), edges
    return o.detach(), attended, kept


def _note(
    attended: Attended,
    saved: list[Tensor],
    known: dict[int, str],
    free: set[int],
    o: Tensor,
    starts: dict[str, int],
) -> list[Tensor] | None:
    """Fill in what each saved tensor is a view of; returns what is to be kept, None if that is too
    much.
    """
    kept: list[Tensor] = []
    size = 0
    for x in saved:
        of: str | int | None = known.get(_storage(x)) if x.dtype == o.dtype else None
        if of is None and x.dtype == o.dtype and _storage(x) == _storage(o):
            of = "o" if (x.numel(), x.storage_offset()) == (o.numel(), o.storage_offset()) else None
        if of is None:
            of = len(kept)
            kept.append(x.detach())
            size += 0 if _storage(x) in free else x.numel() * x.element_size()
        start = starts[of] if isinstance(of, str) else 0
        attended.saved.views.append((of, (x.shape, x.stride(), x.storage_offset() - start)))
    return kept if size <= MOST_KEPT * o.numel() * o.element_size() else None


def _foreign(o: Tensor, edges: Sequence[GradientEdge | None], learned: Sequence[Tensor]) -> str:
    """What attention learns beside ``learned``, which nobody would give its gradient to; empty if
    nothing.
    """
    if o.grad_fn is None:
        return ""
    ends = {get_gradient_edge(x).node for x in learned} | {
        edge.node for edge in edges if edge is not None
    }
    todo, seen = [o.grad_fn], set(ends)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            return f"a tensor of {list(leaf.shape)}"
        todo += [before for before, _ in node.next_functions if before is not None]
    return ""
