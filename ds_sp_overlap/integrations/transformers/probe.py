"""Compares the own forward of a transformers attention layer with its replacement (a probe).

From the hidden states and rotary tables of the call, both compute q, k, v, the output, and the
gradient of the hidden states. See `inspect.probe`, and Note [Nobody sees a probe].

Note [Nobody sees a probe]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A module of the user may count its calls: in an attribute of its class, in a global, in a log, by a
hook. So a probe calls no module of the layer. Instead of each projection and each norm, the own
forward and the replacement call a `_StandIn`. Without a probe, both would call the same modules. So
it is enough that the probe compares the computation around these modules. The layer's own forward
is transformers' code, since no other forward is ever known (`inspect.accounting`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.runtime.linear import without_hooks
from ...attention.unobserved import unobserved
from ...exchange.modes import outside_modes
from ...warn import by_rank
from ..inspect.library import MISSING, Keywords, in_registry, own_class, replaced
from ..inspect.probe import UNSEEN, first_difference
from ..inspect.tensor_parallel import out_features
from .modules import first_tokens

# The limit on compared tokens. With all tokens of a long sequence, the comparison would need more
# memory than a training step.
TOKENS = 512
# The magnitude of a stand-in's results for inputs of magnitude 1. It is large, so that a clamp in
# the forward changes the results.
SCALE = 64


class _StandIn(nn.Module):
    """Replaces a projection or a norm; see Note [Nobody sees a probe].

    Args:
        module: The projection or norm.
        index: Any number; stand-ins with different indices return different results.
    """

    def __init__(self, module: nn.Module, index: int):
        super().__init__()
        self.kind, self.index = own_class(type(module)), index
        # The number of output features; None for a norm, which has as many as input features.
        self.width = out_features(module)

    # For isinstance(), which sees the class of the replaced module.
    __class__ = property(lambda self: self.kind)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x by a matrix of rank 1; or for a norm, multiply each feature by a factor."""
        size = x.shape[-1]
        if self.width is None:
            return x * self._made_up(size, x)
        y = (x @ self._made_up(size, x))[..., None] / size**0.5
        return y * SCALE * self._made_up(self.width, y)

    def _made_up(self, size: int, like: Tensor) -> Tensor:
        """Return made-up numbers [size] between -1 and 1, with dtype and device of ``like``."""
        steps = torch.arange(1, size + 1, device=like.device)
        return torch.sin((self.index + 1) * steps).to(like.dtype)


@contextlib.contextmanager
def _stood_in(driven: Any) -> Iterator[None]:
    """Replace a layer's children by stand-ins while the body runs, in its `Driven` too."""
    held = vars(driven.module)
    children, stand_ins = held["_modules"], dict[str, nn.Module]()
    called = set[str]().union(*driven.children.values())
    for index, (name, child) in enumerate(children.items()):
        if name in called:
            stand_ins[name] = _StandIn(child, index)
        # The other children are identities, or dropouts that drop nothing.
        elif child is not None:
            stand_ins[name] = without_hooks(child)
    try:
        with replaced(held, "_modules", stand_ins):
            driven.use()
            yield
    finally:
        driven.use()


@outside_modes()
def refuse_difference(driven: Any, own: Callable, arguments: Keywords, options: Keywords) -> None:
    """Compare a layer's own forward with its block. Collective; see `difference` for arguments.

    `Driven` calls this in the first call of one layer of each kind, before any exchange.

    Raises:
        RuntimeError: on all ranks, if there is a difference on any rank.
    """
    name = driven.name
    try:
        message = difference(driven, own, arguments, options)
    except Exception as error:  # Catch any error, since other ranks wait in the collective below.
        message = f"{type(error).__name__}: {error}"
    messages = driven.overlap.sp_group.gather(message, name)
    if any(messages):
        # A rank could not compare, or found a difference, so probe the next call as well.
        driven.reader.probes.calls = 0
    if not {*messages} <= {"", UNSEEN}:  # guard: the layer's own forward is the judge
        raise RuntimeError(
            f"{name}: {type(driven.module).__name__} computes something else than what was read of "
            f"its forward ({by_rank(messages)}); please report it, and set sp_overlap.enabled to "
            "false until then"
        )


def difference(driven: Any, own: Callable, arguments: Keywords, options: Keywords) -> str:
    """Compare a layer's own forward with its block, on the first `TOKENS` of this rank's tokens.

    In place of attention, the own forward gets a random o. The same o is the input of the block's
    output projection.

    Args:
        driven: The `Driven` of the layer.
        own: The layer's own forward.
        arguments: The layer's arguments by name.
        options: The keywords that the block's attention gets by the reading of the layer.

    Returns:
        A description of the first difference; empty if there is none.
    """
    x = first_tokens(arguments["hidden_states"], TOKENS)
    tables = first_tokens(arguments.get("position_embeddings"), TOKENS)
    o, theirs, own_options = x, list[Tensor](), Keywords()

    def made_up(
        _: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **more: Any
    ) -> tuple[Tensor, None]:
        nonlocal o
        o = torch.randn_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        theirs.extend((q, k, v))
        own_options.update(more)
        return o, None

    with unobserved(x.device, backward=not x.is_inference()), _stood_in(driven):
        leaf = x.detach().requires_grad_(torch.is_grad_enabled())
        arguments = {**arguments, "hidden_states": leaf}
        if tables is not None:
            arguments["position_embeddings"] = tables
        with in_registry(driven.module, made_up):
            theirs.append(own(**arguments)[0])
        ours = [x.transpose(1, 2) for x in driven.block.project_locally(leaf, tables)]
        ours.append(driven.block.o_proj(o.flatten(2)))
        named = dict(zip(("q", "k", "v", "output"), zip(theirs, ours)))
        if leaf.requires_grad:
            dys = [torch.randn_like(y) for y in theirs]
            named["gradient of the hidden states"] = (
                _gradient(leaf, theirs, dys),
                _gradient(leaf, ours, dys),
            )
        text = first_difference(named)
    # The own forward must pass these keywords, with these values, to its attention function.
    for name, value in options.items():
        given = own_options.get(name, MISSING)
        is_same = given is value or not isinstance(value, Tensor) and given == value
        if not is_same:
            return f"attention's {name} is {own_options.get(name)}, not {value}"
    return text


def _gradient(x: Tensor, ys: list[Tensor], dys: list[Tensor]) -> Tensor:
    """Return the gradient of ``x`` for ``dys``; a y that requires no gradient adds nothing."""
    total: Any = sum((y * dy).sum() for y, dy in zip(ys, dys))
    return torch.autograd.grad(total, x)[0]
