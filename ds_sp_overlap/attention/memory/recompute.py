"""Runs local attention without saving q, k and v; backward recomputes these three.

Note [Saved tensors by name]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The backward of attention mostly reads q, k, v and o; beside these, flash kernels save only a
log-sum-exp. So autograd records attention under hooks for saved tensors. For a view of q, k, v or
o, the graph holds only a name (such as "q"), and the view's shape and strides. Other tensors are
saved as they are. Before backward, each name gets its tensor: q, k and v are recomputed, o is
received again. This works for every attention that saves only views of q, k, v and o, and a
log-sum-exp: for PyTorch's fused kernels, flash-attn 2 and 3.

If attention saves more (scores, k repeated for GQA, a mask that attention made), or changes q, k or
v in place, its saved tensors are dropped. Backward then recomputes attention, with the same random
numbers.

The graph holds both hooks. The hooks must not refer back to the graph, since such a cycle would
keep tensors alive until the garbage collector runs. So both hooks are methods of a `SavedViews`,
which has no reference to the graph. (`Attended` has one.) Also, forward empties the list that
`SavedViews.pack` fills.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ..arguments import LocalAttention
from .forward_state import Random, drawing_again, in_modes
from .saved_views import SavedViews

# The attention of a head group: q, k, v -> pieces of o, for successive ranges of tokens.
AttendGroup = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]
# The gradient edges of o and of q, k and v; None for a tensor that needs no gradient.
Graph = tuple[GradientEdge | None, list[GradientEdge | None]]


class _Source(torch.autograd.Function):
    """Returns ``x`` as a tensor with a gradient edge; the graph does not hold ``x``.

    ``x`` itself requires no gradient. The result requires a gradient because ``anchor`` does, which
    is an empty tensor.
    """

    @staticmethod
    def forward(ctx, anchor: Tensor, x: Tensor):
        # Attention may change q, k or v in place. For a view of ``x``, autograd would forbid this.
        return x.new_empty(0).set_(  # guard: no view, which nobody may change
            x.untyped_storage(), x.storage_offset(), x.size(), x.stride()
        )

    @staticmethod
    def backward(ctx, dx):
        # This never runs, since `torch.autograd.grad` stops at the edge.
        return None, None


@dataclass
class Attended:
    """Holds what the backward of one head group's attention needs beside tensors.

    Attributes:
        needs: For each of q, k and v, whether it needs a gradient.
        edges: The graph of attention; None if backward recomputes attention.
        views: The hooks of the graph. In backward, these hooks replace each name by its tensor.
        foreign: A description of a tensor outside `LocalAttention.learned` that needs a gradient
            through attention; empty for none.
        before: The states of the generators before attention; None if attention drew no numbers.
        changes: Whether attention itself changes or replaces tensors that it reads beside q, k and
            v. Always False if ``edges`` is not None.
    """

    needs: Sequence[bool]
    edges: Graph | None
    views: SavedViews
    foreign: str
    before: Random | None
    changes: bool

    @property
    def reads_o(self) -> bool:
        """Return whether the backward of attention reads o."""
        return self.edges is not None and self.views.read_o

    def backward(
        self,
        attend: AttendGroup,
        heads: Sequence[Tensor],
        o: Tensor | None,
        do: Tensor,
        saved: Sequence[Tensor],
        local: LocalAttention,
    ) -> list[Tensor | None]:
        """Run the backward of attention, in the autocast state of forward.

        This uses the graph that `attend_once` recorded. If there is no graph, or the tensors don't
        fit the graph (`SavedViews.put`), this recomputes attention.

        Args:
            attend: The attention of the head group.
            heads: q, k and v, recomputed.
            o: The output of forward, received again; None if backward does not read o.
            do: The gradient of o.
            saved: The tensors that `attend_once` returned to be saved.
            local: The local attention of the call.

        Returns:
            The gradients of q, k and v, then those of ``local.learned``; None for no gradient.

        Raises:
            RuntimeError: if attention must be recomputed, but a tensor that it reads beside q, k
                and v was changed in place or replaced since forward.
        """
        graph = self.edges
        if graph is None or not self.views.put(heads, o, saved, do):
            graph = self._recompute(attend, heads, local)
        # The graph of forward has names instead of tensors. So it costs nothing to keep this graph
        # for another backward.
        try:
            return _gradients(graph, do, local.learned, retain_graph=graph is self.edges)
        finally:
            self.views.tensors.clear()

    def _recompute(
        self, attend: AttendGroup, heads: Sequence[Tensor], local: LocalAttention
    ) -> Graph:
        """Recompute attention, recorded by autograd; the arguments are those of `backward`."""
        if not (self.changes or local.is_as_begun()):  # guard: attention of forward
            raise RuntimeError(
                f"{local.where}: a tensor that local attention reads (a mask, a bias, a buffer) "
                "was changed or replaced between forward and backward, which computes this "
                "attention once more; give each forward a tensor of its own, or hold all head "
                "groups (leave out sp_overlap.window and checkpointing)"
            )
        sources, edges = _sources(heads, self.needs)
        # With these hooks, a checkpoint or an offload around this layer does not see the tensors
        # that attention saves.
        hooks = saved_tensors_hooks(  # guard: a checkpoint or offload around is not asked
            Tensor.detach, lambda x: x
        )
        modes = in_modes(local.modules, local.training)
        with drawing_again(self.before), modes, torch.enable_grad(), hooks:
            o = join_pieces(attend(*sources), local.seq_dim)
        return get_gradient_edge(o) if o.requires_grad else None, edges


def _gradients(
    graph: Graph, do: Tensor, learned: list[Tensor], retain_graph: bool
) -> list[Tensor | None]:
    """Return the gradients of q, k and v, then those of ``learned``; None for no gradient.

    Hooks on ``learned`` are not called. Autocast is off, since the graph already has the casts of
    forward.
    """
    o, edges = graph
    # A tensor of ``learned`` may have been frozen since forward; its gradient is None.
    ends: list[Any] = edges + [x if x.requires_grad else None for x in learned]
    inputs = [end for end in ends if end is not None]
    if o is None or not inputs:
        return [None] * len(ends)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(do.device.type, enabled=False))
        # Remove the hooks for now. Autograd calls them later, with the sum over the groups.
        for hooks in filter(None, (x._backward_hooks for x in learned)):
            stack.callback(hooks.update, dict(hooks))
            hooks.clear()  # guard: hooks run once
        gradients = torch.autograd.grad(
            [o], inputs, [do], retain_graph=retain_graph, allow_unused=True
        )
    remaining = iter(gradients)
    return [None if end is None else next(remaining) for end in ends]


def _sources(
    heads: Sequence[Tensor], needs_grad: Sequence[bool]
) -> tuple[list[Tensor], list[GradientEdge | None]]:
    """Return q, k and v as inputs of a new graph, and the gradient edge of each.

    A tensor that needs no gradient is returned unchanged, with None as edge.
    """
    anchor = heads[0].new_empty(0).requires_grad_()
    sources = []
    edges = []
    with torch.enable_grad():
        for x, needed in zip(heads, needs_grad):
            source = _Source.apply(anchor, x) if needed else x
            sources.append(source)
            edges.append(get_gradient_edge(source) if needed else None)
    return sources, edges


def attend_once(
    attend: AttendGroup,
    heads: Sequence[Tensor],
    needs_grad: Sequence[bool],
    local: LocalAttention,
) -> tuple[Tensor, Attended, list[Tensor]]:
    """Run the attention of a head group, see Note [Saved tensors by name].

    Args:
        attend: The attention of the head group.
        heads: q, k and v.
        needs_grad: For each of q, k and v, whether it needs a gradient.
        local: The local attention of the call.

    Returns:
        o, detached; the `Attended` for backward; and the tensors to save for backward beside q, k,
        v and o: none if backward is to recompute attention.
    """
    device, views = heads[0].device, SavedViews(heads, local.tensors, local.seq_dim)
    sources, edges = _sources(heads, needs_grad)
    versions, before = [x._version for x in sources], Random.now(device)
    with torch.enable_grad(), saved_tensors_hooks(views.pack, views.unpack):
        pieces = attend(*sources)
        o = join_pieces(pieces, local.seq_dim)
    changed = [x._version for x in sources] != versions  # guard: changed, so run again
    beside = views.settle(pieces) if o.requires_grad and not changed else None
    views.saved.clear()  # guard: the graph holds `pack`
    attended = Attended(
        needs_grad,
        edges=None if beside is None else (get_gradient_edge(o), edges),
        views=views,
        foreign=_foreign(o, edges, local.learned),
        before=None if Random.now(device) == before else before,
        changes=beside is None and not local.is_as_begun(),
    )
    return o.detach(), attended, beside or []


def join_pieces(pieces: Sequence[Tensor], seq_dim: int) -> Tensor:
    """Concatenate the o of successive ranges of queries; a single piece is returned as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces), seq_dim)


def _foreign(o: Tensor, edges: Sequence[GradientEdge | None], learned: Sequence[Tensor]) -> str:
    """Describe a tensor outside ``learned`` that needs a gradient through o; empty for none.

    The gradient of such a tensor would be lost, since `_gradients` computes only the gradients of
    q, k, v and ``learned``.
    """
    # Walk the graph of o. Known tensors count as visited, so every other leaf is foreign.
    known = [get_gradient_edge(x) for x in learned] + [edge for edge in edges if edge is not None]
    visited = {None} | {edge.node for edge in known}
    todo: list[Any] = [o.grad_fn]
    while todo:
        node = todo.pop()
        if node in visited:
            continue
        visited.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            return f"a tensor of {list(leaf.shape)}"
        todo += [before for before, _ in node.next_functions]
    return ""
