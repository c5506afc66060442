"""Makes q, k and v from hidden states, by a layer's projections, norms and rotation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from ..relayout import ops
from ..rotary import Rotary
from ..schedule import Part
from .runtime.cuts import Cuts, OfKinds, cuts_of
from .runtime.execution import Call
from .runtime.flat import Name
from .runtime.linear import (
    Plain,
    Pure,
    autocast,
    can_recompute,
    can_split,
    products_of,
    without_hooks,
)
from .runtime.parts import cut

# The signature that `rope` must have, for errors.
ROPE = (
    "it takes (x, position_embeddings), with x the heads of q or of k [b, s/P, heads, d], and "
    "returns x rotated, in its shape; ds_sp_overlap.Rotary is one such function"
)


@dataclass(eq=False)
class InputModules:
    """Makes q, k and v from hidden states, with the modules that `use` sets.

    Linear layers project q, k and v; for q and k, a norm and a rotation follow. There are two ways
    to project (Note [Called whole] in `self_attention`). With `of_call`, nodes of autograd compute
    each part (q, k or v of one head group) from its rows of the weights. With `whole`, the modules
    are called.

    ``where`` is the layer's name, ``heads`` is ``h`` and ``kv_heads`` is ``h_kv``. `SelfAttention`
    describes the other arguments.

    Attributes:
        projections: The projections of q, k and v, or the fused projection.
        norms: The norm of q and the norm of k, where given. Backward recomputes the norms, so that
            forward saves only their input.
        cuts: In a call: how the projections are cut into parts.
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

    def use(self, q_norm: Any = None, k_norm: Any = None, **projections: Any) -> None:
        """Set the modules for the calls that follow.

        The arguments are those of the constructor of `SelfAttention`.

        Raises:
            ValueError: unless given q_proj, k_proj and v_proj, or qkv_proj alone.
        """
        given = [name for name, module in projections.items() if module is not None]
        is_fused = given == ["qkv_proj"]
        if not is_fused and sorted(given) != ["k_proj", "q_proj", "v_proj"]:
            raise ValueError(
                f"{self.where}: give q_proj, k_proj and v_proj, or qkv_proj alone, got "
                f"{', '.join(given) or 'none'}"
            )
        of_kinds = [projections["qkv_proj" if is_fused else f"{kind}_proj"] for kind in "qkv"]
        # A module that is given for several of q, k and v is called once.
        self.projections = list(dict.fromkeys(of_kinds))
        norms = {"q": q_norm, "k": k_norm}
        self.norms = {kind: norm for kind, norm in norms.items() if norm is not None}
        first_heads = (0, self.heads, self.heads + self.kv_heads) if is_fused else (0, 0, 0)
        self.of_kinds: OfKinds = ()
        for kind, module, head in zip("qkv", of_kinds, first_heads):
            first = head * self.head_dim if self.first_rows is None else self.first_rows[kind]
            self.of_kinds += ((kind, (self.projections.index(module), first)),)
        # A norm may be a plain function, which has no parameters.
        counts = [(kind, len(_parameters(norm))) for kind, norm in self.norms.items()]
        self._norm_counts = tuple(counts)

    @property
    def modules(self) -> list[Any]:
        """Return the projections and the norms, each once."""
        return list(dict.fromkeys(self.projections + list(self.norms.values())))

    def can_split(self) -> bool:
        """Return whether the current modules can make q, k and v part by part."""
        # Backward rotates gradients back without autograd, which only a `Rotary` supports.
        return (
            (self.rope is None or isinstance(self.rope, Rotary))
            and all(can_recompute(norm, self.pure) for norm in self.norms.values())
            and all(can_split(module, self.plain) for module in self.projections)
        )

    def of_call(self, call: Call) -> InputModules:
        """Return a copy for one call, which makes q, k and v part by part.

        A later `use` does not change the modules of the copy.
        """
        own = object.__new__(InputModules)
        vars(own).update(vars(self), cuts=self._cuts(call))
        return own

    def tables_of_kernels(
        self, call: Call, x: Tensor, position_embeddings: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Return (cos, sin) for the kernels that pack q and k; None if they can't rotate.

        Args:
            call: The call.
            x: The hidden states.
            position_embeddings: The second argument of ``rope``.
        """
        rope = self.rope
        # A norm that follows the rotation needs rotated heads in memory, before the pack.
        if not isinstance(rope, Rotary) or self.norm_last and self.norms:
            return None
        # Rotate in the kernels only if this is faster than a rotation before the pack.
        if not ops.implementation(call.sp_group.kernels).folds or call.geometry.cuts_tokens:
            return None
        return rope.of_tokens(position_embeddings, self.head_dim, autocast(x)[0].dtype)

    def _rotated(self, heads: Tensor, position_embeddings: Any) -> Tensor:
        """Rotate q or k by the caller's ``rope``.

        Raises:
            ValueError: if ``rope`` fails, or doesn't return a tensor of the shape of its input.
        """
        try:
            rotated = self.rope(heads, position_embeddings)
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

    def tables(self, position_embeddings: Any) -> tuple[Tensor, ...] | None:
        """Return the tables (cos, sin) by which q and k are rotated.

        Returns:
            The tables; () if there is no `Rotary` or it has no tables; None if a table needs a
            gradient: q and k can't be made part by part then.
        """
        is_rotary = isinstance(self.rope, Rotary)
        tables = self.rope.of(position_embeddings, self.head_dim) if is_rotary else None
        if tables is None:
            return ()
        return None if any(table.requires_grad for table in tables) else tables

    def _cuts(self, call: Call) -> Cuts:
        """Return how the projections are cut into parts of q, k and v."""
        of_layer = self.of_kinds, self.head_dim, self._norm_counts
        return cuts_of(call.geometry, call.schedule, call.by_rank, *of_layer)

    def parameters(self) -> list[Tensor | None]:
        """Return weight and bias of each linear layer, then the parameters of the norms.

        Weights and biases are cast as autocast would cast them. A missing bias is None in the list
        (`products_of`).
        """
        parameters = products_of(self.projections, self.plain)
        for norm in self.norms.values():
            parameters += norm.parameters()
        return parameters

    def is_needed(self, part: Part, needs: dict[Name, bool]) -> bool:
        """Return whether x, or the projection or norm of a part, needs the gradient of the part.

        Args:
            part: The kind, "q", "k" or "v", and the head group.
            needs: By name, for x and for each parameter: whether the tensor needs a gradient.
        """
        module, norm = self.cuts.rows[part].module, self.cuts.norms.get(part[0], ())
        return any(map(needs.get, ["x", ("weight", module), ("bias", module), *norm]))

    def shape(
        self, part: Part, heads: Tensor, tables: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> Tensor:
        """Apply norm and rotation to a projected part; the result has the memory order of the part.

        Args:
            part: The kind, "q", "k" or "v", and the head group.
            heads: [.., .., h_g, d]. The output of the linear layer, by heads.
            tables: (cos, sin), [.., 1, d_rot] each, without a gradient. Empty for no rotation.
            saved: In backward, the saved parameters of the norm. Empty in forward: the norm then
                uses its own parameters.

        Returns:
            A tensor of the shape of ``heads``.
        """
        norm = self.norms.get(part[0])
        if norm is not None:
            # `__call__` would run the norm's hooks for each part. They run once, around all parts.
            norm = _with(norm, saved) if saved else norm.forward
        ranks = self.cuts.rows[part].ranks
        # The ranks are the first dimension in memory. Move their dimension to the front, so that
        # heads and result are contiguous.
        heads = heads.movedim(2, 0) if ranks else heads
        heads = heads if norm is None or self.norm_last else norm(heads)
        heads = self.rope.rotate(heads, *tables) if tables else heads
        heads = norm(heads) if norm is not None and self.norm_last else heads
        return heads.movedim(0, 2) if ranks else heads

    def whole(
        self, call: Call, x: Tensor, position_embeddings: Any
    ) -> Callable[[str, int], Tensor]:
        """Return a function that returns q, k or v of a head group, from projections called whole.

        The first request for a part of a projection's output calls the projection, and cuts its
        output into parts. Each part can be requested once.

        Args:
            call: The call.
            x: Hidden states, [b, s/P, m] or [s/P, b, m].
            position_embeddings: The second argument of ``rope``.
        """
        rows = self._cuts(call).rows
        pieces: dict[Part, Tensor] = {}

        def project(kind: str, group: int) -> Tensor:
            """Return q, k or v of a group [.., .., h_g, d], after norm and rotation."""
            module = rows[kind, group].module
            if (kind, group) not in pieces:
                y = self.projections[module](x)
                # Some linear layers return (y, bias) and leave the bias for their caller to add.
                # For q, k and v, the callers in models ignore this bias.
                y = y[0] if isinstance(y, tuple) else y
                parts = {part: own.rows for part, own in rows.items() if own.module == module}
                pieces.update(zip(parts, cut(y, list(parts.values()))))
                del y  # so that y is freed once its last part is taken
            heads = pieces.pop((kind, group)).unflatten(-1, (-1, self.head_dim))
            if kind == "v":
                return heads
            norm = self.norms.get(kind)
            if norm is not None and not self.norm_last:
                heads = norm(heads)
            if self.rope is not None and (kind, group) not in call.folded:
                heads = self._rotated(heads, position_embeddings)
            return norm(heads) if norm is not None and self.norm_last else heads

        return project

    def learns(self) -> list[bool]:
        """Return for each of q, k and v whether its projection or its norm requires a gradient.

        The ranks compare the result in the layer's first call. The gradients that backward computes
        do not depend on this result, but on `is_needed`.
        """
        learning = []
        for kind, (index, _) in self.of_kinds:
            parameters = _parameters(self.projections[index], self.norms.get(kind))
            learning.append(any(p.requires_grad for p in parameters))
        return learning


def _parameters(*modules: Any) -> list[nn.Parameter]:
    """Return the parameters of all ``modules``; an entry that is no module has none."""
    parameters: list[nn.Parameter] = []
    for module in modules:
        parameters += module.parameters() if isinstance(module, nn.Module) else ()
    return parameters


def _with(norm: nn.Module, saved: Sequence[Tensor]) -> Callable[..., Tensor]:
    """Return a function that applies ``norm`` with ``saved`` in place of its parameters."""
    own = dict(norm.named_parameters())
    # Usually the saved tensors are the norm's own parameters. Then `functional_call` would only
    # cost the host time.
    if all(parameter is tensor for parameter, tensor in zip(own.values(), saved)):
        return norm
    # The saved tensors differ from the parameters if the caller ran forward by `functional_call`,
    # or in an activation checkpoint, which saves tensors of its own.
    norm = without_hooks(norm)  # ZeRO-3's hooks expect the norm's own parameters
    return lambda heads: functional_call(norm, dict(zip(own, saved)), (heads,))
