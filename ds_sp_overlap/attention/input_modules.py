"""The modules in front of a layer's attention: projections, norms and rotation of q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from ..exchange.geometry import Geometry
from ..exchange.sp_group import SPGroup
from ..relayout import ops
from ..rotary import Rotary
from ..schedule import Part
from .runtime.execution import Call
from .runtime.linear import Plain, Pure, can_recompute, can_split
from .runtime.parts import cut
from .runtime.projections import Cuts, Projections, Rows

# What `rope` must be, for errors.
ROPE = (
    "it takes (x, position_embeddings), with x the heads of q or of k [b, s/P, heads, d], and "
    "returns x rotated, in its shape; ds_sp_overlap.Rotary is one such function"
)


class InputModules:
    """Makes q, k and v from hidden states, with the modules that `use` gives.

    Either in parts, by rows of the weights (`split`), or with projections that are called whole
    (`whole`), see Note [Called whole] in `self_attention`. The arguments are those of
    `SelfAttention`; ``heads`` and ``kv_heads`` are ``h`` and ``h_kv``.

    Attributes:
        projections: The projections of q, k and v, or the fused one.
        norms: The norms of q and k, of those that have one.
    """

    def __init__(
        self,
        where: str,
        heads: int,
        kv_heads: int,
        head_dim: int,
        first_rows: dict[str, tuple[int, ...]] | None,
        norm_last: bool,
        rope: Callable[[Tensor, Any], Tensor] | None,
        plain: Plain,
        pure: Pure,
    ):
        self.where, self.heads, self.kv_heads, self.head_dim = where, heads, kv_heads, head_dim
        self.first_rows, self.norm_last, self.rope = first_rows, norm_last, rope
        self.plain, self.pure = plain, pure

    def use(
        self, q_proj=None, k_proj=None, v_proj=None, qkv_proj=None, q_norm=None, k_norm=None
    ) -> None:
        """Call these modules from now on.

        Called by `SelfAttention.use`. The arguments are those of its constructor.

        Raises:
            ValueError: unless there are either three separate projections or a fused one.
        """
        modules = {"q_proj": q_proj, "k_proj": k_proj, "v_proj": v_proj, "qkv_proj": qkv_proj}
        given = [name for name, module in modules.items() if module is not None]
        if given not in (["q_proj", "k_proj", "v_proj"], ["qkv_proj"]):
            raise ValueError(
                f"{self.where}: give q_proj, k_proj and v_proj, or qkv_proj alone, got "
                f"{', '.join(given) or 'none'}"
            )
        of_kinds = [modules[name] for name in given] if qkv_proj is None else [qkv_proj] * 3
        # A module that is given for several of q, k and v is called once.
        self.projections: list[Any] = list(dict.fromkeys(of_kinds))
        norms: dict[str, Any] = {"q": q_norm, "k": k_norm}
        self.norms = {kind: norm for kind, norm in norms.items() if norm is not None}
        first_heads = (0, 0, 0)
        if qkv_proj is not None:
            first_heads = (0, self.heads, self.heads + self.kv_heads)
        # For each of q, k and v: the index of its projection, and the first row of head 0, or of
        # each head.
        self.of_kinds: dict[str, tuple[int, int | tuple[int, ...]]] = {}
        for kind, module, head in zip("qkv", of_kinds, first_heads):
            rows = head * self.head_dim if self.first_rows is None else self.first_rows[kind]
            self.of_kinds[kind] = self.projections.index(module), rows
        # What `_cuts` was asked for last, and its answer.
        self._last_cuts: tuple[tuple, Any] | None = None

    @property
    def modules(self) -> list[Any]:
        """The projections and the norms."""
        return [*self.projections, *self.norms.values()]

    def can_split(self) -> bool:
        """Return whether q, k and v can be made in parts, as the modules are now."""
        # Backward rotates back by hand, which is known of a `Rotary` alone.
        return (
            (self.rope is None or isinstance(self.rope, Rotary))
            and all(can_recompute(norm, self.pure) for norm in self.norms.values())
            and all(can_split(module, self.plain) for module in self.projections)
        )

    def split(self, call: Call) -> Projections:
        """Make what computes q, k and v of a call part by part; nothing is computed yet."""
        return Projections(
            modules=self.projections,
            cuts=self._cuts(call),
            norms=self.norms,
            rope=self.rope,
            norm_last=self.norm_last,
            folded=call.folded,
            head_dim=self.head_dim,
            plain=self.plain,
            cast=call.autocast,
        )

    def rope_in_kernels(self, sp_group: SPGroup) -> Rotary | None:
        """Return the rotation of q and k if the kernels that pack them are to do it; else None."""
        rope = self.rope
        # A norm between rotation and exchange needs the rotated heads in memory.
        if not isinstance(rope, Rotary) or self.norm_last and self.norms:
            return None
        # Kernels that don't fold would take more time than PyTorch's rotation.
        return rope if ops.implementation(sp_group.kernels).folds else None

    def rotation(self, position_embeddings: Any) -> Callable[[Tensor], Tensor] | None:
        """Return a function that rotates q or k by ``rope``; None without ``rope``.

        The function raises ValueError where a ``rope`` of the caller fails, or returns something of
        another shape.
        """
        rope = self.rope
        if rope is None or isinstance(rope, Rotary):
            return None if rope is None else lambda heads: rope(heads, position_embeddings)

        def rotate(heads: Tensor) -> Tensor:
            """Call the caller's ``rope``, and refuse a result that is no rotated heads."""
            try:
                rotated = rope(heads, position_embeddings)
            except (AttributeError, IndexError, TypeError) as error:
                raise ValueError(f"{self.where}: rope= failed ({error}); {ROPE}") from error
            if isinstance(rotated, Tensor) and rotated.shape == heads.shape:
                return rotated
            got = type(rotated).__name__
            if isinstance(rotated, Tensor):
                got = f"a tensor {list(rotated.shape)}"
            raise ValueError(
                f"{self.where}: rope= returned {got} for heads {list(heads.shape)}; {ROPE}"
            )

        return rotate

    def tables(self, position_embeddings: Any) -> tuple[Tensor, ...] | None:
        """Return the tables by which q and k are rotated.

        Empty if no `Rotary` rotates; None if the tables need a gradient, so that q and k can't be
        made in parts.
        """
        if not isinstance(self.rope, Rotary):
            return ()
        tables = self.rope.of(position_embeddings, self.head_dim)
        if tables is None:
            return ()
        return None if any(table.requires_grad for table in tables) else tables

    def _cuts(self, call: Call) -> Cuts:
        """Return how the projections are cut into parts of q, k and v."""
        asked, last = (call.geometry, call.schedule, call.by_rank), self._last_cuts
        # Mostly it is as in the call before.
        if last is not None and last[0] == asked:
            return last[1]
        norms = []
        for kind, norm in self.norms.items():
            is_module = isinstance(norm, nn.Module)
            norms.append((kind, len(list(norm.parameters())) if is_module else 0))
        schedule, count = call.schedule, len(self.projections)
        of_layer = tuple(self.of_kinds.items()), count, self.head_dim, tuple(norms)
        cuts = _cuts_of(call.geometry, schedule.parts, schedule.alone, call.by_rank, *of_layer)
        self._last_cuts = asked, cuts
        return cuts

    def whole(
        self,
        call: Call,
        x: Tensor,
        rotate: Callable[[Tensor], Tensor] | None,
        called: Callable[[Any], Any] = lambda module: module,
    ) -> Callable[[str, int], Tensor]:
        """Return a function that gives q, k or v of a group, of projections that are called whole.

        A projection is called when its first part is asked for, and its output is cut. Each part
        can be asked for once.

        Args:
            call: The call.
            x: Hidden states, [b, s/P, m] or [s/P, b, m].
            rotate: Rotates q or k; None for no rotation.
            called: Gives the function to call in place of a projection or a norm; by default the
                module itself.
        """
        cuts = self._cuts(call)
        rows, parts = cuts.rows, cuts.parts
        pieces: dict[Part, Tensor] = {}

        def project(kind: str, group: int) -> Tensor:
            """Return heads [.., .., h_g, d], after the norm and the rotation."""
            module = rows[kind, group].module
            if (kind, group) not in pieces:
                y = called(self.projections[module])(x)
                # A bias beside y is for the caller to add, and no caller adds one to q, k and v.
                y = y[0] if isinstance(y, tuple) else y
                of_module = [part for part, its_rows in rows.items() if its_rows.module == module]
                pieces.update(zip(of_module, cut(y, 2, list(parts[module]))))
                del y  # freed once its last part is asked for
            heads = pieces.pop((kind, group)).unflatten(-1, (-1, self.head_dim))
            if kind == "v":
                return heads
            norm = called(self.norms[kind]) if kind in self.norms else None
            if norm is not None and not self.norm_last:
                heads = norm(heads)
            if rotate is not None and (kind, group) not in call.folded:
                heads = rotate(heads)
            return norm(heads) if norm is not None and self.norm_last else heads

        return project

    def learns(self) -> list[bool]:
        """Return for each of q, k and v whether its projection or its norm requires a gradient.

        The ranks compare this in a first call. Which gradients are computed is decided elsewhere
        (`Projections.is_needed`).
        """
        learning = []
        for kind, (index, _) in self.of_kinds.items():
            # A norm may be a plain function, which has no parameters.
            parameters: list[Tensor] = []
            for module in (self.projections[index], self.norms.get(kind)):
                parameters += module.parameters() if isinstance(module, nn.Module) else ()
            learning.append(any(p.requires_grad for p in parameters))
        return learning


@lru_cache(maxsize=1024)
def _cuts_of(
    geometry: Geometry,
    parts: tuple[Part, ...],
    alone: frozenset[Part],
    by_rank: frozenset[str],
    of_kinds: tuple[tuple[str, tuple[int, int | tuple[int, ...]]], ...],
    count: int,
    head_dim: int,
    norms: tuple[tuple[str, int], ...],
) -> Cuts:
    """Return how projections are cut; layers that are alike share one answer.

    Args:
        geometry: Of the call.
        parts: q, k and v of groups, as `Schedule.parts`.
        alone: As `Schedule.alone`.
        by_rank: As in `Call`.
        of_kinds: As in `InputModules`.
        count: The number of projections.
        head_dim: ``d``.
        norms: As in `Cuts`.
    """
    rows, modules = {}, dict(of_kinds)
    for part in parts:
        kind, group = part
        module, first = modules[kind]
        elements = geometry.rows_of(kind, group, first, head_dim)
        is_by_rank = kind in by_rank and part in alone
        rows[part] = Rows(module, elements, ranks=geometry.parts if is_by_rank else 0)
    of_modules = []
    for index in range(count):
        of_modules.append(tuple([part.rows for part in rows.values() if part.module == index]))
    return Cuts(rows, of_modules, norms)
