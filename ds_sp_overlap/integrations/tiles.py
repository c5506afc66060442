"""Finds the norms and dense MLPs around attention layers, and runs them in tiles.

See Note [Tiles] in `attention.runtime.tiles`. A module keeps its own forward unless it was read as
a function of one token at a time, and in each call where this no longer holds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from ..attention.runtime.linear import can_call_through
from ..attention.runtime.tiles import run_in_tiles
from ..warn import warn_once
from .inspect.accounting import Unknown
from .inspect.library import whole_shape
from .inspect.tokenwise import fixed_state, probe_tokenwise
from .layers import Binds, FoundLayer
from .rebinding import rebind

# Temporaries of a norm in bf16, forward and backward, over its input. Nearly all are fp32.
_NORM = 14
# Temporaries of an MLP for each number that a token takes from its weights, that is, for each
# column of a weight: an output, its activation, and the gradients of both, as far as they coexist.
_MLP = 3


def find_tiles(
    model: nn.Module, layers: Sequence[FoundLayer], tokens: Literal["auto"] | int, binds: Binds
) -> str:
    """Find the norms and MLPs that can run in tiles, beside overlapped layers and around them.

    Args:
        model: The model.
        layers: Its attention layers.
        tokens: The most tokens in a tile; "auto": see `_TiledModule.tokens_for`.
        binds: The modules are added here, each with the binding of its forward.

    Returns:
        Lines for the report.
    """
    around: set[str] = set()
    for layer in layers:
        name = layer.name if layer.bind is not None else ""
        while name:
            name = name.rpartition(".")[0]
            around.add(name)
    attention = {layer.module for layer in layers}
    tiled: list[_TiledModule] = []
    reasons = Counter[str]()
    for name, module in model.named_modules():
        beside = name and name not in around and name.rpartition(".")[0] in around
        if not beside or module in attention or not _holds_more(module):
            continue
        kind = type(module).__name__
        try:
            tiled.append(_TiledModule(name, module, tokens, tiled))
        except Exception as error:  # code of somebody's own may raise anything
            reason = str(error).replace(f"{name} ({kind})", "it").replace(f"{name}.", "")
            reasons[f"{kind}: {reason or type(error).__name__}"] += 1
    kinds = Counter(type(each.module).__name__ for each in tiled)
    lines = [f"in tiles: {_counted(kinds) or 'nothing'}"]
    if kinds:
        lines.append(
            "an MLP in tiles runs twice a step under a checkpoint that it ends; three times in "
            "front of a norm or a dropout, or if the checkpoint is reentrant"
        )
    if reasons:
        lines.append(f"whole, not in tiles: {_counted(reasons)}")
    for each in tiled:
        binds[each.module] = functools.partial(rebind, each.module, each.forward)
    return "\n".join(lines)


def _counted(names: Counter[str]) -> str:
    """Return names with their counts, in words."""
    return ", ".join(f"{name} ({count})" for name, count in names.items())


def _holds_more(module: nn.Module) -> bool:
    """Return whether a module may hold more than its input and its output.

    Products, embeddings, dropouts and activations don't.
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return False
    return hasattr(module, "normalized_shape") or any(True for _ in module.parameters())


def _why_whole(module: nn.Module) -> str:
    """Return why a module can't run in tiles as it is now; empty if it can.

    Its own hooks run around all tiles. Those of its parts would run in each tile.
    """
    for name, part in module.named_modules():
        if part is not module and not can_call_through(part):
            return f"{name} has a hook, or a forward of its own"
        if isinstance(part, nn.ModuleList):
            return "it is a mixture of experts"
        # As FSDP1 puts views in the place of parameters.
        if any(isinstance(value, Tensor) for value in vars(part).values()):
            return f"{name or 'it'} has a tensor that is no parameter"
    return ""


def _token_size(module: nn.Module) -> int:
    """Return m of a norm or an MLP: what its first product takes, or what it normalizes."""
    for part in module.modules():
        for name in ("in_features", "nx"):  # of linear layers, and of transformers' Conv1D
            if isinstance(size := vars(part).get(name), int):
                return size
    shape = getattr(module, "normalized_shape", None) or whole_shape(next(module.parameters()))
    return shape[-1]


class _TiledModule:
    """A norm or an MLP that runs in tiles.

    Args:
        name: Its name in the model.
        module: The module.
        tokens: The most tokens in a tile, or "auto".
        known: Modules that were read before. One that is alike needs no second probe.

    Raises:
        Unknown: if it can't run in tiles.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        tokens: Literal["auto"] | int,
        known: Sequence[_TiledModule],
    ):
        self.name, self.module, self.tokens = name, module, tokens
        self.state, self.shapes = fixed_state(module), [*map(whole_shape, module.parameters())]
        if "forward" in vars(module):
            raise Unknown("its forward was replaced")
        if reason := _why_whole(module):
            raise Unknown(reason)
        if not any((one.state, one.shapes) == (self.state, self.shapes) for one in known):
            is_norm = not any(True for _ in module.children())
            probe_tokenwise(name, module, _token_size(module), is_norm)

    def tokens_for(self, x: Tensor) -> int:
        """Return the most tokens in a tile of ``x``.

        "auto": as many as keep a tile's temporaries below half of ``x``. Ranks with other lengths
        take other tiles, since no tile communicates.
        """
        if self.tokens != "auto":
            return self.tokens
        columns = sum(shape.numel() for shape in self.shapes if len(shape) > 1) / x.shape[-1]
        held = max(_NORM, _MLP * columns / x.shape[-1])
        return max(1, int(x.shape[:-1].numel() / (2 * held)))

    def forward(self, own: Callable, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run in tiles, or whole where that is no longer known to be the same."""
        reason = _why_whole(self.module)
        if args or kwargs or not isinstance(x, Tensor) or x.dim() != 3:
            reason = "it is called with something else than hidden states [b, s, m]"
        elif fixed_state(self.module) != self.state:
            reason = "it was changed"
        if not reason:
            return run_in_tiles(self.module, x, self.tokens_for(x))
        warn_once(f"sp_overlap.tiles: {self.name} runs whole: {reason}")
        return own(x, *args, **kwargs)
