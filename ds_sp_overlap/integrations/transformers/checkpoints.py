"""Lets the gradient checkpoints of a transformers model save the results of attention.

In backward, a plain checkpoint would recompute attention and repeat its exchanges. torch's
non-reentrant checkpoint has a parameter ``context_fn``: with `keep_attention` as argument, the
checkpoint saves the results of attention. The user may call ``gradient_checkpointing_enable``,
which sets the checkpoint function of each layer, at any time. So this file replaces the checkpoint
functions at the beginning of each forward of the model, and restores them at its end.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ...attention.memory.checkpoint_cache import keep_attention
from ...config import SpOverlapConfig
from ...warn import warn_once
from ..inspect.library import replaced

# Attributes that transformers sets on each module that it can checkpoint: whether checkpointing is
# on, and the checkpoint function.
SWITCH, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"


class Checkpoints:
    """Finds the modules of a model whose checkpoints must save attention.

    The outermost called `Host` replaces the checkpoint functions of these modules during forward.

    Args:
        name: The name of the model, for errors.
        model: The model.
        layers: The attention layers whose results are saved over checkpoints.
        config: The ``sp_overlap`` section.

    Attributes:
        around: The modules, by name, that can be checkpointed, and that are or contain one of
            ``layers``; as they were in `enable`.
    """

    def __init__(
        self, name: str, model: nn.Module, layers: set[nn.Module], config: SpOverlapConfig
    ):
        self.name, self.config = name, config
        switches = {at: x for at, x in model.named_modules() if hasattr(x, SWITCH)}
        # All modules that can be checkpointed. The references are weak, so as not to keep alive a
        # module that the user has replaced.
        self._switches = weakref.WeakValueDictionary(switches)
        # Innermost modules come first. Usually these run the checkpoints, and errors should name
        # them.
        inward = sorted(switches.items(), key=lambda item: -item[0].count("."))
        self.around = {at: x for at, x in inward if not layers.isdisjoint(x.modules())}

    def checkpointed(self) -> list[str]:
        """Return the names of the modules whose checkpointing is on, for `Positions.gather`.

        If a module's checkpoint can't save attention, the reason follows the name. The ranks
        compare these texts.
        """
        names = []
        for at, module in self._switches.items():
            if is_checkpointed(module):
                reason = _why_not(vars(module).get(FUNCTION))
                names.append(f"{at} ({reason})" if reason else at)
        return names

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Let checkpoints save attention while the body runs a forward of the model.

        Raises:
            ValueError: on all ranks, if the checkpoint function of a layer can't save attention.
                (The ranks have compared their checkpoints before, by `checkpointed`.)
        """
        with contextlib.ExitStack() as originals:
            for at, module in self.around.items():
                function = vars(module).get(FUNCTION)
                if function is None or not is_checkpointed(module):
                    continue
                reason, kind = _why_not(function), type(module).__name__
                if reason and not self.config.keeps_where_possible:
                    raise ValueError(
                        f"{at or self.name} ({kind}) is checkpointed {reason}, over which "
                        "sp_overlap.checkpointing can't keep attention; use "
                        'gradient_checkpointing_kwargs={"use_reentrant": False}, or set '
                        'sp_overlap.checkpointing to "recompute"'
                    )
                if reason:
                    warn_once(
                        f"sp_overlap: attention is computed again in backward: {kind} is "
                        f"checkpointed {reason}; with gradient_checkpointing_kwargs="
                        '{"use_reentrant": False} it is kept'
                    )
                    continue
                # transformers uses torch's checkpoint, or a function that also offloads the inputs.
                moves = getattr(function, "func", function) is not checkpoint
                offloads = self.config.keeps_where_possible and moves
                saving = functools.partial(keep_attention, offloads)
                keeping = functools.partial(function, context_fn=saving)
                originals.enter_context(replaced(vars(module), FUNCTION, keeping))
            yield


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether gradient checkpointing is on for a module, and the module is in training.

    Without gradients, checkpoints save nothing.
    """
    return torch.is_grad_enabled() and module.training and getattr(module, SWITCH, False)


def _why_not(function: Any) -> str:
    """Explain why a checkpoint function can't save attention; empty if it can.

    The reason continues the words "is checkpointed".
    """
    keywords, inner = getattr(function, "keywords", {}), getattr(function, "func", function)
    module = getattr(inner, "__module__", "")
    if inner is not checkpoint and not module.startswith("transformers."):
        name = getattr(inner, "__qualname__", type(inner).__name__)
        return f"by {module or '?'}.{name}"
    # Only a non-reentrant checkpoint takes a ``context_fn``, and only one.
    if keywords.get("use_reentrant") is not False:
        return f"with use_reentrant={keywords.get('use_reentrant')}"
    if keywords.get("context_fn", noop_context_fn) is not noop_context_fn:
        return "with a context_fn of its own"
    return ""
