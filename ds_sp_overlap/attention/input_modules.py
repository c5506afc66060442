"""The modules in front of a layer's attention: projections, norms and rotation of q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from ..exchange.sp_group import SPGroup
from ..relayout import ops
from ..rotary import Rotary
from ..schedule import Part
from .runtime.cuts import Cuts, OfKinds, cuts_of
from .runtime.execution import Call
from .runtime.linear import Plain, Pure, can_recompute, can_split, products_of, without_hooks
from .runtime.parts import cut

# What `rope` must be, for errors.
ROPE = (
    "it takes (x, position_embeddings), with x the heads of q or of k [b, s/P, heads, d], and "
    "returns x rotated, in its shape; ds_sp_overlap.Rotary is one such function"
)


@dataclass(eq=False)
class InputModules:
    """Makes q, k and v from hidden states, with the modules that `use` gives.

    A linear layer makes each, a norm and a rotation follow for q and k. Either in parts, by rows of
    the weights, inside of nodes (`of_call`); or with projections that are called whole (`whole`),
    see Note [Called whole] in `self_attention`. The arguments are those of `SelfAttention`;
    ``heads`` and ``kv_heads`` are ``h`` and ``h_kv``.

    Attributes:
        projections: The projections of q, k and v, or the fused one.
        norms: The norms of q and k, of those that have one. Backward recomputes them, so that
            nothing but their input is saved.
        cuts: In a call: how the projections are cut into parts.
        folded: In a call: the parts that are rotated by the kernels that pack them.
        cast: In a call: the autocast state, see `linear.products_of`.
    """

    where: str
    heads: int
    kv_heads: int
    head_dim: int
    first_rows: dict[str, tuple[int, ...]] | None
    norm_last: bool
    rope: Any
    plain: Plain
    pure: Pure
    cuts: Cuts = field(init=False)
    folded: frozenset[Part] = field(init=False)
    cast: dict[str, Any] = field(init=False)

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
        rows: list[tuple[str, tuple[int, int | tuple[int, ...]]]] = []
        for kind, module, head in zip("qkv", of_kinds, first_heads):
            first = head * self.head_dim if self.first_rows is None else self.first_rows[kind]
            rows.append((kind, (self.projections.index(module), first)))
        self.of_kinds: OfKinds = tuple(rows)
        # A norm may be a plain function, which has no parameters.
        counts = [(kind, len(_parameters(norm))) for kind, norm in self.norms.items()]
        self._norm_counts = tuple(counts)

    @property
    def modules(self) -> list[Any]:
        """The projections and the norms, each once."""
        return list(dict.fromkeys((*self.projections, *self.norms.values())))

    def can_split(self) -> bool:
        """Return whether q, k and v can be made in parts, as the modules are now."""
        # Backward rotates back by hand, which is known of a `Rotary` alone.
        return (
            (self.rope is None or isinstance(self.rope, Rotary))
            and all(can_recompute(norm, self.pure) for norm in self.norms.values())
            and all(can_split(module, self.plain) for module in self.projections)
        )

    def of_call(self, call: Call) -> InputModules:
        """Return these modules, whatever `use` gives later, to make q, k and v of a call in parts."""
        own = object.__new__(InputModules)
        cuts = self._cuts(call)
        vars(own).update(vars(self), cuts=cuts, folded=call.folded, cast=call.autocast)
        return own

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
        of_layer = self.of_kinds, self.head_dim, self._norm_counts
        return cuts_of(call.geometry, call.schedule, call.by_rank, *of_layer)

    def parameters(self) -> list[Tensor | None]:
        """Return weight and bias of each linear layer, as autocast casts them, then the parameters
        of the norms.

        `operations` counts on two places for each linear layer, see `products_of`.
        """
        parameters = products_of(self.projections, self.plain, self.cast)
        for norm in self.norms.values():
            parameters += norm.parameters()
        return parameters

    def is_needed(self, part: Part, needs: dict[tuple[Any, ...], bool]) -> bool:
        """Return whether dq, dk or dv of a group is needed: by x, its projection, or its norm.

        Args:
            part: The kind and the group.
            needs: By name of register, whether x and each of the parameters need a gradient.
        """
        linear = 2 * self.cuts.rows[part].module
        places = (linear, linear + 1, *self.cuts.norm_places.get(part[0], ()))
        return needs["x",] or any(needs["parameter", index] for index in places)

    def turns(self, part: Part) -> bool:
        """Return whether `shape` rotates a part, if there are tables."""
        return part[0] != "v" and part not in self.folded

    def shape(
        self,
        part: Part,
        heads: Tensor,
        tables: tuple[Tensor, ...],
        norm_parameters: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Apply the norm and the rotation to a projected part; its memory order stays as it is.

        Args:
            part: The kind and the group.
            heads: What the linear layer made.
            tables: (cos, sin), [.., 1, d_rot] each, that q and k are rotated by; they need no
                gradient. Empty if nothing is rotated.
            norm_parameters: In backward, the saved parameters of the norms. None in forward, where
                the norms are being called and have their parameters in place.

        Returns:
            A tensor of the shape of ``heads``.
        """
        module = self.norms.get(part[0])
        # Not the call: hooks run around all parts, once.
        norm: Callable[..., Tensor] | None = None if module is None else module.forward
        if module is not None and norm_parameters is not None:
            place, first = self.cuts.norm_places[part[0]], 2 * len(self.projections)
            norm = _with(module, norm_parameters[place.start - first : place.stop - first])
        ranks = self.cuts.rows[part].ranks
        # The ranks are the first dimension in memory: moved there, heads and result are contiguous.
        heads = heads.movedim(2, 0) if ranks else heads
        heads = heads if norm is None or self.norm_last else norm(heads)
        heads = self.rope.rotate(heads, *tables) if tables and self.turns(part) else heads
        heads = norm(heads) if norm is not None and self.norm_last else heads
        return heads.movedim(0, 2) if ranks else heads

    def whole(
        self,
        call: Call,
        x: Tensor,
        rotate: Callable[[Tensor], Tensor] | None,
    ) -> Callable[[str, int], Tensor]:
        """Return a function that gives q, k or v of a group, of projections that are called whole.

        A projection is called when its first part is asked for, and its output is cut. Each part
        can be asked for once.

        Args:
            call: The call.
            x: Hidden states, [b, s/P, m] or [s/P, b, m].
            rotate: Rotates q or k; None for no rotation.
        """
        cuts = self._cuts(call)
        rows, parts = cuts.rows, cuts.parts
        pieces: dict[Part, Tensor] = {}

        def project(kind: str, group: int) -> Tensor:
            """Return heads [.., .., h_g, d], after the norm and the rotation."""
            module = rows[kind, group].module
            if (kind, group) not in pieces:
                y = self.projections[module](x)
                # A bias beside y is for the caller to add, and no caller adds one to q, k and v.
                y = y[0] if isinstance(y, tuple) else y
                of_module = [part for part, its_rows in rows.items() if its_rows.module == module]
                pieces.update(zip(of_module, cut(y, 2, list(parts[module]))))
                del y  # freed once its last part is asked for
            heads = pieces.pop((kind, group)).unflatten(-1, (-1, self.head_dim))
            if kind == "v":
                return heads
            norm = self.norms.get(kind)
            if norm is not None and not self.norm_last:
                heads = norm(heads)
            if rotate is not None and (kind, group) not in call.folded:
                heads = rotate(heads)
            return norm(heads) if norm is not None and self.norm_last else heads

        return project

    def learns(self) -> list[bool]:
        """Return for each of q, k and v whether its projection or its norm requires a gradient.

        The ranks compare this in a first call. Which gradients are computed is decided elsewhere
        (`is_needed`).
        """
        learning = []
        for kind, (index, _) in self.of_kinds:
            parameters = _parameters(self.projections[index], self.norms.get(kind))
            learning.append(any(p.requires_grad for p in parameters))
        return learning


def _parameters(*modules: Any) -> list[nn.Parameter]:
    """Return the parameters of those that are modules."""
    parameters: list[nn.Parameter] = []
    for module in modules:
        parameters += module.parameters() if isinstance(module, nn.Module) else ()
    return parameters


def _with(norm: nn.Module, saved: Sequence[Tensor]) -> Callable[..., Tensor]:
    """Return ``norm`` with the saved tensors in the place of its parameters."""
    own = dict(norm.named_parameters())
    # Mostly they are the norm's own, and the call below would only cost the host time.
    if all(parameter is tensor for parameter, tensor in zip(own.values(), saved)):
        return norm
    # They differ where a caller's `functional_call` replaced the parameters in forward, and in an
    # activation checkpoint, which saves tensors of its own.
    norm = without_hooks(norm)  # hooks of ZeRO-3 expect parameters of its own
    return lambda heads: functional_call(norm, dict(zip(own, saved)), (heads,))
