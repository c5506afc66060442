"""What a transformers model asks its masks to say, read off the mask functions.

The mask itself is of no use where the sequence is split: a mask is made for a rank's tokens, and short slices hide a window.
But all of transformers' ``create_*_mask`` end in ``ALL_MASK_ATTENTION_FUNCTIONS[implementation](mask_function=...)``.
While a model's forward runs, another function stands there (`asked`). This function reads the mask function and gives the model
a placeholder of the mask's shape and one byte. By the placeholder a layer finds the pattern to apply and the global sequence to
apply it to, also when a checkpoint runs the layer again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .positions import GlobalSequence


@dataclass(frozen=True)
class Pattern:
    """What a mask says beside causality, documents and padding.

    window   a token sees as many, itself included
    chunk    a token sees its chunk of as many
    """

    window: int | None = None
    chunk: int | None = None


def read(function: Callable) -> Pattern:
    """The pattern of one of transformers' mask functions. Raises ValueError for what isn't known here."""
    said: dict[str, Any] = {}
    _read(function, said)
    if not said.pop("causal", False):
        raise ValueError("attention that is not causal")
    return Pattern(**said)


def _read(function: Callable, said: dict[str, Any]) -> None:
    known = getattr(function, "__module__", "") == "transformers.masking_utils"
    maker = getattr(function, "__qualname__", repr(function)).split(".")[0] if known else repr(function)
    cells = getattr(function, "__closure__", None) or ()
    inside = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells))) if known else {}
    if maker == "causal_mask_function":
        said["causal"] = True
    elif maker == "and_masks":
        for joined in inside["mask_functions"]:
            _read(joined, said)
    elif maker == "sliding_window_overlay":
        said["window"] = min(inside["sliding_window"], said.get("window", inside["sliding_window"]))  # guard: windows are read
    elif maker == "chunked_overlay" and said.get("chunk") in (None, inside["chunk_size"]):
        said["chunk"] = inside["chunk_size"]
    elif maker == "remap_positions_for_packed_sequence":
        _read(inside["mask_function"], said)
    elif maker != "packed_sequence_mask_function":  # documents are known from all ranks
        raise ValueError(f"a mask with {maker}")


_FIND_DOCUMENTS = "find_packed_sequence_indices"


def _documents_of(position_ids: Tensor) -> Tensor:
    """Number of each token's document [b, s/P]. transformers' own waits for the device, to say None where there is one only."""
    return (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


class Masks:
    """The placeholders that are in use; each is known by its memory, which views and detached tensors share."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[StorageWeakRef, GlobalSequence, Pattern]] = {}

    def find(self, mask: Any) -> tuple[GlobalSequence, Pattern] | None:
        found = self._given.get(mask.untyped_storage()._cdata) if isinstance(mask, Tensor) else None  # guard: of its own forward
        return found and found[1:]

    @contextlib.contextmanager
    def asked(self, where: str, sequence: GlobalSequence, implementation: str, configs: Iterable[Any]) -> Iterator[None]:
        """While the body runs, placeholders take the place of the masks that models of ``configs`` make."""
        library: Any = sys.modules.get("transformers.masking_utils")
        functions: Any = getattr(library, "ALL_MASK_ATTENTION_FUNCTIONS", {})
        if implementation not in functions:  # masks aren't asked for
            yield
            return
        known, before = {id(config) for config in configs}, functions[implementation]
        self._given = {key: given for key, given in self._given.items() if not given[0].expired()}

        @torch.compiler.disable
        def ask(*args: Any, **kwargs: Any) -> Any:
            if id(kwargs.get("config")) not in known:
                return before(*args, **kwargs)
            try:
                pattern = read(kwargs["mask_function"])
            except ValueError as error:
                raise ValueError(f"{where}: {error} can't be honoured on a sequence that is split over ranks") from None
            shape = kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"]
            mask = torch.ones((), dtype=torch.bool, device=kwargs["device"]).expand(shape)
            storage = mask.untyped_storage()
            self._given[storage._cdata] = StorageWeakRef(storage), sequence, pattern
            return mask

        own, find_documents = functions._local_mapping.get(implementation), getattr(library, _FIND_DOCUMENTS, None)
        functions[implementation] = ask
        setattr(library, _FIND_DOCUMENTS, _documents_of)  # guard: documents need no wait
        try:
            yield
        finally:
            setattr(library, _FIND_DOCUMENTS, find_documents)
            if own is None:
                del functions[implementation]
            else:
                functions[implementation] = own
