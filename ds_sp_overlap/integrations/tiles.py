"""Finds the norms and dense MLPs around attention layers, and runs them in tiles.

See Note [Tiles] in `attention.runtime.tiles`. A module runs in tiles only if it is known to compute
each token by itself. If the module has changed since then, its own forward runs.
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

# The bytes of a norm's temporaries, forward and backward in bf16, divided by the bytes of its
# input. Nearly all of the temporaries are fp32.
_NORM = 14
# The number of an MLP's temporaries that are alive at a time, per token and unit of inner width. A
# unit has four temporaries: its value, its activation, and the gradients of both. The inner width
# is the number of elements of the weights, divided by m.
_MLP = 3


def find_tiles(
    model: nn.Module, layers: Sequence[FoundLayer], tokens: Literal["auto"] | int, binds: Binds
) -> str:
    """Find norms and MLPs that can run in tiles: siblings of attention layers or of their parents.

    Args:
        model: The model.
        layers: Its attention layers.
        tokens: The most tokens in a tile; "auto" leaves the number to `_TiledModule.tokens_for`.
        binds: Receives the modules, each with the function that rebinds its forward.

    Returns:
        Lines for the report.
    """
    around = set()
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
        except Exception as error:  # the user's code may raise anything
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
    """Return names with their counts, such as "LlamaMLP (32), LlamaRMSNorm (64)"."""
    return ", ".join(f"{name} ({count})" for name, count in names.items())


def _holds_more(module: nn.Module) -> bool:
    """Return whether a module may need temporaries besides its input and its output.

    Linear layers, embeddings, dropouts and activations don't.
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return False
    return hasattr(module, "normalized_shape") or any(True for _ in module.parameters())


def _why_whole(module: nn.Module) -> str:
    """Return why a module can't run in tiles as it is now; empty if it can.

    Hooks of the module itself are no reason: they run once, around all tiles. Hooks of its
    submodules would run in each tile.
    """
    for name, part in module.named_modules():
        if part is not module and not can_call_through(part):
            return f"{name} has a hook, or a forward of its own"
        if isinstance(part, nn.ModuleList):
            return "it is a mixture of experts"
        # FSDP1, for example, replaces parameters by views.
        if any(isinstance(value, Tensor) for value in vars(part).values()):
            return f"{name or 'it'} has a tensor that is no parameter"
    return ""


def _token_size(module: nn.Module) -> int:
    """Return m of a module: the input width of an MLP's first linear layer, or of a norm."""
    for part in module.modules():
        for name in ("in_features", "nx"):  # of linear layers, and of transformers' Conv1D
            if isinstance(size := vars(part).get(name), int):
                return size
    shape = getattr(module, "normalized_shape", None) or whole_shape(next(module.parameters()))
    return shape[-1]


class _TiledModule:
    """Runs a norm or an MLP in tiles.

    Args:
        name: The name of the module in the model.
        module: The module.
        tokens: The most tokens in a tile, or "auto".
        known: The tiled modules so far; no probe runs if one of them has the same state and shapes.

    Raises:
        Unknown: if the module can't run in tiles.
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
            probe_tokenwise(name, module, _token_size(module))

    def tokens_for(self, x: Tensor) -> int:
        """Return the most tokens in a tile of ``x``.

        For "auto", the number keeps a tile's temporaries below half the size of ``x``. The number
        may differ between ranks, since tiles don't communicate.
        """
        if self.tokens != "auto":
            return self.tokens
        columns = sum(shape.numel() for shape in self.shapes if len(shape) > 1) / x.shape[-1]
        held = max(_NORM, _MLP * columns / x.shape[-1])
        return max(1, int(x.shape[:-1].numel() / (2 * held)))

    def forward(self, own: Callable, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run in tiles; or run the own forward if tiles may no longer give the same result."""
        reason = _why_whole(self.module)
        if args or kwargs or not isinstance(x, Tensor) or x.dim() != 3:
            reason = "it is called with something else than hidden states [b, s, m]"
        elif fixed_state(self.module) != self.state:
            reason = "it was changed"
        if not reason:
            return run_in_tiles(self.module, x, self.tokens_for(x))
        warn_once(f"sp_overlap.tiles: {self.name} runs whole: {reason}")
        return own(x, *args, **kwargs)
