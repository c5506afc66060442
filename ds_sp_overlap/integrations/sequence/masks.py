"""Reads the patterns (sliding windows, chunks) of the masks of a transformers model.

If a sequence is split over ranks, transformers makes a mask for this rank's tokens only, but
attention covers the whole sequence. So this file determines the pattern from transformers' mask
functions, and gives the model a placeholder instead of a mask; see Note [Placeholder masks].
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..inspect.library import replaced
from .positions import GlobalSequence

# Note [Placeholder masks]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# All of transformers' ``create_*_mask`` end in a call of
# ``ALL_MASK_ATTENTION_FUNCTIONS[implementation](mask_function=...)``. While the forward of a
# model runs, this table has a function of this package instead. This function determines the
# pattern from ``mask_function``, and returns a placeholder: a tensor with the mask's shape that
# takes one byte. The model passes the placeholder to its layers. With the placeholder, a layer
# looks up the pattern and the global sequence.
#
# The key of the lookup is the memory of the placeholder, since views and detached copies of the
# placeholder share this memory. So the lookup works under a checkpoint: a layer that is recomputed
# in backward gets the placeholder of its own forward, even if another forward is then running.


@dataclass(frozen=True)
class Pattern:
    """Describes the restrictions of a mask other than causality, documents and padding.

    `read` leaves out a window or a chunk that is not shorter than the sequence.

    Attributes:
        window: The number of tokens to which a token attends, itself included; None for no limit.
        chunk: The length of a chunk in tokens, if tokens attend only within their chunk; else None.
    """

    window: int | None = None
    chunk: int | None = None


def read(function: Callable, seq: int) -> Pattern:
    """Return the pattern of a mask function of transformers, for a sequence of ``seq`` tokens.

    `Masks.for_layers` calls this function once for each mask that a model makes. No mask is
    computed. Layers that declare themselves not causal were refused before (`modules.why_not`,
    `Layer.refuse_unhonoured`).

    transformers builds a mask function from nested closures. The name of the function that made a
    closure identifies the closure. The closure's variables hold the window or the chunk size.

    Raises:
        ValueError: if a closure is unknown, or if no closure is causal.
    """
    is_causal, window, chunk, left = False, seq, seq, [function]
    while left:
        part = left.pop()
        maker, variables = repr(part), dict[str, Any]()
        if isinstance(part, FunctionType) and part.__module__ == "transformers.masking_utils":
            maker = part.__qualname__.split(".")[0]
            contents = [cell.cell_contents for cell in part.__closure__ or ()]
            variables.update(zip(part.__code__.co_freevars, contents))
        if maker == "causal_mask_function":
            is_causal = True
        elif maker == "and_masks":
            left += variables["mask_functions"]
        elif maker == "sliding_window_overlay":
            window = min(window, variables["sliding_window"])  # guard: windows are read
        elif maker == "chunked_overlay" and chunk in (seq, variables["chunk_size"]):
            chunk = variables["chunk_size"]
        elif maker == "remap_positions_for_packed_sequence":
            left.append(variables["mask_function"])
        # Ignore the function for documents, which are known from the position_ids of all ranks.
        elif maker != "packed_sequence_mask_function":
            raise ValueError(f"a mask with {maker}")
    if not is_causal:
        raise ValueError("attention that is not causal")
    return Pattern(window if window < seq else None, chunk if chunk < seq else None)


# The names of two functions of transformers. The first finds documents by position_ids, the second
# makes the masks of recurrent layers.
_FIND_DOCUMENTS, RECURRENT = "find_packed_sequence_indices", "create_recurrent_attention_mask"


def _documents_of(position_ids: Tensor) -> Tensor:
    """Return the index of each token's document [b, s/P]; the host does not wait for the device.

    While `Masks.for_layers` runs, this function replaces one of transformers that would wait.
    Attention does not use the result: it takes documents from `positions.restarts`.
    """
    return (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


class Masks:
    """Makes and finds the placeholders of a model's layers; see Note [Placeholder masks].

    Attributes:
        configs: The configs of the models whose masks are replaced. Other models in the process get
            transformers' masks.
        namespaces: The globals of the files whose models make masks for recurrent layers.
    """

    def __init__(self) -> None:
        # By address of a placeholder: its memory, and the global sequence and pattern that it has.
        self._placeholders: dict[int, tuple[StorageWeakRef, GlobalSequence, Pattern]] = {}
        self.configs: list[Any] = []
        self.namespaces: list[dict[str, Any]] = []

    def find(self, mask: Any) -> tuple[GlobalSequence, Pattern] | None:
        """Return the sequence and the pattern of a placeholder; None for anything else.

        Views and detached copies of a placeholder are found too, since they share its memory.
        """
        if not isinstance(mask, Tensor):
            return None
        key = mask.untyped_storage()._cdata
        placeholder = self._placeholders.get(key)  # guard: of its own forward
        return placeholder and placeholder[1:]

    def placeholder(
        self, shape: tuple[int, ...], sequence: GlobalSequence, pattern: Pattern = Pattern()
    ) -> Tensor:
        """Make a placeholder of ``shape``, which masks nothing; record its sequence and pattern.

        A weak reference to the storage does not keep the memory alive, but reserves its address
        (``_cdata``). So no later mask is mistaken for this placeholder. `for_layers` removes the
        entries of freed placeholders.
        """
        mask = torch.ones((), dtype=torch.bool, device=sequence.device).expand(shape)
        storage = mask.untyped_storage()
        self._placeholders[storage._cdata] = StorageWeakRef(storage), sequence, pattern
        return mask

    @contextlib.contextmanager
    def for_layers(
        self, where: str, sequence: GlobalSequence, implementation: str
    ) -> Iterator[None]:
        """Give placeholders to layers while the body runs.

        Placeholders are [b, 1, s/P, s/P] for attention layers, and [b, s/P] for recurrent layers.

        Args:
            where: The name of the model, for errors.
            sequence: The global sequence of the forward that the body runs.
            implementation: The name of the model's attention implementation.
        """
        for key, (storage, *_) in list(self._placeholders.items()):
            if storage.expired():
                del self._placeholders[key]
        library: Any = sys.modules.get("transformers.masking_utils")
        functions: Any = getattr(library, "ALL_MASK_ATTENTION_FUNCTIONS", {})
        # This is None if the implementation, or the version of transformers, has no mask functions.
        original = functions.get(implementation)

        @torch.compiler.disable
        def create_recurrent(config: Any, inputs_embeds: Tensor, *_: Any, **__: Any) -> Tensor:
            return self.placeholder(inputs_embeds.shape[:2], sequence)

        @torch.compiler.disable
        def create_mask(*args: Any, **kwargs: Any) -> Any:
            """Return a placeholder for a model of ``configs``; for other models, a mask."""
            if not any(config is kwargs.get("config") for config in self.configs):
                return original(*args, **kwargs)
            try:
                pattern = read(kwargs["mask_function"], sum(sequence.lengths))
            except ValueError as error:
                raise ValueError(
                    f"{where}: {error} can't be honoured on a sequence that is split over ranks"
                ) from None
            # transformers up to 5.0 passes the positions of the queries instead of their number.
            positions = kwargs.get("cache_position")
            queries = kwargs["q_length"] if positions is None else len(positions)
            shape = kwargs["batch_size"], 1, queries, kwargs["kv_length"]
            # transformers' flash attention needs a mask only for padding. If the mask function is
            # not transformers' own, ``mask_made`` stays as it is.
            if getattr(original, "__module__", "") == library.__name__:
                is_flash = original is library.flash_attention_mask
                sequence.mask_made = sequence.has_padding or not is_flash
            return self.placeholder(shape, sequence, pattern)

        with contextlib.ExitStack() as stack:
            for names in self.namespaces:
                recurrent = replaced(names, RECURRENT, create_recurrent)
                stack.enter_context(recurrent)  # guard: recurrent layers are told
            if original is not None:
                stack.enter_context(replaced(functions._local_mapping, implementation, create_mask))
                find_documents = replaced(vars(library), _FIND_DOCUMENTS, _documents_of)
                stack.enter_context(find_documents)  # guard: documents need no wait
            yield
