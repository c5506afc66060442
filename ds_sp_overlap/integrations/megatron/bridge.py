"""Lets Megatron-DeepSpeed's HEAD run with a current DeepSpeed.

"HEAD" is the last commit of Megatron-DeepSpeed, 4efb479d. This file provides a module that
DeepSpeed removed, explains known errors, and reads a flag of pull request 415. Megatron is never
imported from here.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import traceback
from typing import Any, NoReturn


class _Compression(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provides ``deepspeed.compression.compress``, which HEAD imports and DeepSpeed removed.

    The functions of the module raise.
    """

    names = ("deepspeed.compression", "deepspeed.compression.compress")
    functions = ("init_compression", "redundancy_clean")

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec whose loader is this object; None for any other module."""
        # Other programs shall see that DeepSpeed has no such module.
        if name not in self.names or "megatron" not in sys.modules:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name == self.names[0])

    def create_module(self, spec: Any) -> None:
        # Python makes the module as it makes any other.
        return None

    def exec_module(self, module: Any) -> None:
        """Fill ``deepspeed.compression.compress`` with functions that raise."""
        if module.__name__ == self.names[1]:
            for function in self.functions:
                setattr(module, function, functools.partial(self._refuse, function))

    @staticmethod
    def _refuse(function: str, *args: Any, **kwargs: Any) -> NoReturn:
        version = sys.modules["deepspeed"].__version__
        raise RuntimeError(
            f"deepspeed.compression.compress.{function}: DeepSpeed {version} has no "
            'compression any more; take "compression_training" and --compression-training out, or '
            "train without sequence parallelism on an older DeepSpeed"
        )


def bridge() -> None:
    """Let Megatron-DeepSpeed import a module that DeepSpeed has removed.

    Called when the package is imported, whether the program uses Megatron or not.
    """
    if not any(isinstance(finder, _Compression) for finder in sys.meta_path):
        # Last of all finders, so that a module of DeepSpeed's own comes first.
        sys.meta_path.append(_Compression())


# Advice for errors that HEAD raises before or without an overlapped layer, by a part of the message
# or of the failing line.
HINTS = {
    "num_attention_heads % parallel_state.get_sequence_parallel_world_size()": (
        "the query heads must divide by --ds-sequence-parallel-size; take another size"
    ),
    "self.projection_size == self.kv_projection_size": (
        "Megatron-DeepSpeed has no grouped queries here; they work where the overlap is on: an "
        '"sp_overlap" section in the DeepSpeed config, and --ds-sequence-parallel-size above 1'
    ),
    "batch_dim_idx": (
        "Megatron-DeepSpeed passes attention_mask where DeepSpeed takes batch_dim_idx; core "
        'attention works where the overlap is on: an "sp_overlap" section in the DeepSpeed config; '
        "or take --use-flash-attn-v2"
    ),
    "num_local_head, head_dim = input.shape": (
        "DeepSpeed's class wants the heads of attention's output in a dimension of their own; "
        'Triton\'s attention works where the overlap is on: an "sp_overlap" section in the '
        "DeepSpeed config"
    ),
    "Invalid Grid": "pipeline modules know no sequence parallelism; add --no-pipeline-parallel",
    "save_for_backward can only save variables": (
        "RoPE is recomputed only with --checkpoint-activations "
        "--deepspeed-activation-checkpointing, in place of --recompute-granularity full"
    ),
    "Invalid activation recompute method": (
        "--checkpoint-activations needs --deepspeed-activation-checkpointing beside it"
    ),
}


def explain(error: BaseException) -> str | None:
    """Return advice for an error of Megatron-DeepSpeed under sequence parallelism.

    ``python -m ds_sp_overlap run`` asks when the script has raised. An error is known by a part of
    its message, or of the source line that raised it.

    Returns:
        The advice; None for an unknown error.
    """
    frames = traceback.extract_tb(error.__traceback__)
    text = str(error) + (frames[-1].line or "" if frames else "")
    return next((hint for part, hint in HINTS.items() if part in text), None)


def section(args: Any) -> dict | None:
    """Return the section that a flag of pull request 415 stands for.

    Args:
        args: The script's arguments, which may lack the flag; None for a script without any.

    Returns:
        The ``sp_overlap`` section; None if the flag is not set.
    """
    return {"enabled": True} if getattr(args, "ds_sequence_parallel_overlap_comm", False) else None
