"""Lays the parts of a tensor end to end before a transfer, and restores the order after it.

    pack                 cut a tensor along one dimension and lay the parts, each contiguous, end to
                         end
    unpack               the inverse of pack; sums elements where parts overlap, in fp32 for half
                         precision
    rotate_pack          rotary embedding of heads [tokens..., h, d], then pack: q and k
    unpack_rotate_back   the transpose of rotate_pack: unpack, sum, rotate back: dq and dk

All operators write into tensors that the caller passes, so that the caller chooses the stream that
allocates. The operators raise errors for arguments that don't fit. They are compiled from csrc/;
`kernels` loads them as ``torch.ops.ds_sp_overlap``. The CPU kernels only serve to test the index
maps of the CUDA kernels. Without compiled kernels, `exchange.copies` packs and unpacks by PyTorch's
copies.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from . import kernels


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are summed: fp32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Relayout(NamedTuple):
    """Holds the operators; all None if PyTorch's copies pack and unpack (`exchange.copies`).

    Attributes:
        folds: Whether rotary embedding is faster inside ``rotate_pack`` than before ``pack``.
    """

    pack: Any = None
    unpack: Any = None
    rotate_pack: Any = None
    unpack_rotate_back: Any = None
    folds: bool = False


_TORCH = Relayout()


@functools.cache
def _compiled() -> Relayout:
    """Return the compiled operators of the loaded library, looked up once."""
    *names, _ = Relayout._fields
    compiled = [getattr(torch.ops.ds_sp_overlap, name).default for name in names]
    return Relayout(*compiled)._replace(folds=True)


def implementation(which: str) -> Relayout:
    """Return the operators that ``sp_overlap.kernels`` names.

    Args:
        which: "torch" for PyTorch's copies; "compiled" for the compiled operators, only after
            `check_usable`; or "auto", the same as "torch" until `SPGroup.prepare` has chosen.
    """
    return _compiled() if which == "compiled" else _TORCH


def lacks_compiled(build: bool) -> str:
    """Return why this process has no compiled operators for a GPU; empty if it has them.

    Args:
        build: Whether to build a library if there is none; a build takes a minute.
    """
    library = kernels.demanded() if build else kernels.library()
    if library.cuda:
        return ""
    return f"{library.reason}; {kernels.REMEDY}"


def check_usable(which: str) -> None:
    """Check that this process can use the operators that ``sp_overlap.kernels`` names.

    Call this inside of `SPGroup.agree`, so that all ranks raise if one rank does. The first call
    for "compiled" loads the library, or builds one.

    Raises:
        ValueError: for "compiled", if there is no CUDA device or there are no CUDA kernels. The
            message has the reason and a remedy.
    """
    if which != "compiled":
        return
    if not torch.cuda.is_available():
        raise ValueError(
            f'sp_overlap.kernels: "compiled", but torch {torch.__version__} sees no CUDA device '
            'here; say "auto" or "torch"'
        )
    lacks = lacks_compiled(build=True)
    if lacks:
        raise ValueError(f'sp_overlap.kernels: "compiled", but {lacks}')
