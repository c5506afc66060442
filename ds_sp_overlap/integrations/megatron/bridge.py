"""Lets Megatron-DeepSpeed's HEAD run with a current DeepSpeed.

"HEAD" is the last commit of Megatron-DeepSpeed, 4efb479d. This file provides a module that
DeepSpeed has removed, and reads a flag of Megatron-DeepSpeed's pull request 415. This file never
imports Megatron.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from typing import Any, NoReturn


class _Compression(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provides ``deepspeed.compression.compress``, which HEAD imports and DeepSpeed removed.

    The functions of the provided module raise an error when they are called.
    """

    names = ("deepspeed.compression", "deepspeed.compression.compress")
    functions = ("init_compression", "redundancy_clean")

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec of a module in ``names``, with this object as loader; else None."""
        # Provide nothing in programs without Megatron.
        if name not in self.names or "megatron" not in sys.modules:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name == self.names[0])

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

    The import of the package calls this in every program, whether it uses Megatron or not.
    """
    # Append behind all other finders, so that DeepSpeed's own module has precedence.
    sys.meta_path.append(_Compression())


def section(args: Any) -> dict | None:
    """Return the ``sp_overlap`` section for the flag ``--ds-sequence-parallel-overlap-comm``.

    Pull request 415 of Megatron-DeepSpeed defines the flag.

    Args:
        args: The script's parsed arguments, which may lack the flag; or None.

    Returns:
        The section; None if the flag is not set.
    """
    return {"enabled": True} if getattr(args, "ds_sequence_parallel_overlap_comm", False) else None
