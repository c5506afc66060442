"""Replaces the forward of a transformers model around its overlapped attention layers.

A layer needs the positions and masks of all ranks before it attends. Stock Ulysses gathers
positions in every layer, which costs a collective per layer. Here the forward of the model itself
is rebound (`Host`). This forward gathers positions and masks once, and the layers look them up in
`Forwards`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.runtime import sharded
from ...config import SpOverlapConfig
from ...exchange.sp_group import SPGroup
from ...exchange.streams import refuse_captured
from ..inspect.library import CACHES, Keywords, replaced
from ..sequence.masks import Masks, Pattern
from ..sequence.positions import DOCUMENTS, NO_GRAPH, TOKENS, GlobalSequence, Positions
from .checkpoints import Checkpoints
from .modules import Watched, by_name, first_of, first_tokens, off_in_eval

# Keywords that describe only the tokens of this rank.
_LOCAL_KEYWORDS = (*DOCUMENTS, "cu_seq_lens_k", "max_length_q", "max_length_k")


class Forwards:
    """Holds the global sequence of each forward of a model; `enable` makes this object.

    A call of a layer belongs to the running forward, or to an earlier forward if a checkpoint
    recomputes the layer, or to no forward if the user calls the layer directly.

    Attributes:
        positions: Gathers positions and masks.
        masks: The placeholders that layers get instead of masks.
        running: The running forward, the innermost one if forwards are nested; None between
            forwards.
        fallible: The layers, by name, that may fall back to a simpler method because of a hook or
            an adapter. A layer that falls back exchanges other tensors. So if one rank must fall
            back (``layer.must_fall_back()``), all ranks fall back: each forward of the model then
            sets ``layer.falls_back``.
    """

    def __init__(self, sp_group: SPGroup, config: SpOverlapConfig):
        self.positions, self.masks = Positions(sp_group, config.documents), Masks()
        self.running: _Running | None = None
        # The references are weak, so that transformers' table of attention functions keeps no model
        # alive: through the layers of a `Dispatch`, the table refers to this object.
        self.fallible = weakref.WeakValueDictionary[str, Any]()

    def fallbacks(self) -> list[str]:
        """Return the names of the layers that must fall back on this rank, in ascending order."""
        names = []
        for name, layer in self.fallible.items():
            # Also fall back if a module is missing. The layer's own call will raise the error.
            falls_back = True
            with contextlib.suppress(Exception):
                falls_back = layer.must_fall_back()
            if falls_back:
                names.append(name)
        return sorted(names)

    def sequence_for(self, where: str) -> GlobalSequence | None:
        """Return the global sequence of the running forward; None between forwards.

        Args:
            where: The name of the layer or rotary embedding that needs the tokens of all ranks.
        """
        refuse_captured(where, NO_GRAPH)
        if self.running is None:
            return None
        self.running.attended.add(where)
        return self.running.sequence

    def of(
        self, where: str, module: nn.Module, x: Tensor, mask: Any, kwargs: Keywords
    ) -> tuple[GlobalSequence, Pattern]:
        """Return the global sequence and the mask pattern of a layer's call.

        If no forward of the model is running, and ``mask`` is no placeholder, the user has called
        the layer directly. Then this method gathers positions for the call, and is collective.

        Args:
            where: The name of the layer, for errors.
            module: The layer.
            x: [b, s/P, ..]. The layer's hidden states or queries.
            mask: The attention mask that was passed to the layer.
            kwargs: The layer's other keywords. This method removes keywords that describe only this
                rank's tokens.

        Raises:
            ValueError: for a mask that the model's mask functions did not make, for a bias for each
                head, or if the layer needs a mask but gets none.
        """
        sequence = self.sequence_for(where)
        for keyword in _LOCAL_KEYWORDS:
            kwargs.pop(keyword, None)
        position_ids = kwargs.pop("position_ids", None)
        if kwargs.get("position_bias") is not None:
            raise ValueError(
                f"{where}: attention with position_bias (a mask for each head) can't be split "
                "over ranks here"
            )
        # A placeholder identifies both the sequence and the pattern.
        if (of_mask := self.masks.find(mask)) is not None:
            return of_mask
        if mask is not None:
            raise ValueError(
                f"{where}: {type(module).__name__} is given a mask that is not as transformers' "
                "mask functions made it in this model (it is for this rank's tokens, was changed "
                "on the way, or ds_sp_overlap.enable was called again for this layer meanwhile); "
                "it can't be honoured on a sequence that is split over ranks"
            )
        if sequence is not None and not sequence.one_document:
            if sequence.padded or sequence.mask_made:  # guard: the mask that was made is given
                raise ValueError(
                    f"{where}: {type(module).__name__} is given no attention_mask, though there "
                    "are packed documents or padding and its model made one; it would attend "
                    "across them on one device. Pass the mask on"
                )
        # No mask means plain causal attention.
        return (sequence or self.positions.gather(where, x, position_ids)), Pattern()


class _Running(NamedTuple):
    """Describes a running forward of a model.

    Attributes:
        host: The model.
        sequence: The global sequence.
        ran: The modules, by name, that ran and should have used the tokens of all ranks.
        attended: The names of the layers and rotary embeddings that used the tokens of all ranks.
    """

    host: Host
    sequence: GlobalSequence
    ran: dict[str, nn.Module]
    attended: set[str]

    def note(self, name: str, module: nn.Module, *_: Any) -> None:
        """Record that a module ran; called by the module's forward, or as a hook on the module."""
        self.ran[name] = module


def given(arguments: Keywords, names: Iterable[str]) -> Any:
    """Return the first of these arguments that is not None; None if all are None."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


@dataclass(eq=False)
class Host:
    """Replaces the forward of a model that contains overlapped layers.

    Each of several nested models has a host. Only the outermost called model gathers. If this model
    calls a model that is not its submodule, that model gathers separately.

    Attributes:
        name: The model's name, for errors.
        model: The model.
        forwards: The forwards of the whole model that was passed to `enable`.
        layer: The first attention layer in the model; the model itself if all layers are mixers.
        own_code: The names of the layers that run transformers' code on this rank's tokens.
        checkpoints: The checkpoints in the model.
        watched: Checks that the layers still exchange as in `enable`.
        has_looked: Whether a forward has already looked for FSDP units made after `enable`.
    """

    name: str
    model: nn.Module
    forwards: Forwards
    layer: Any
    own_code: list[str]
    checkpoints: Checkpoints
    watched: Watched
    has_looked: bool = False

    @torch._disable_dynamo(recursive=False)
    def forward(self, own: Callable, *args: Any, **kwargs: Any) -> Any:
        """Gather positions and masks of all ranks, and run the model's own forward.

        Collective. Returns the result of the model's own forward.
        """
        outer, masks = self.forwards.running, self.forwards.masks
        # Don't gather if an outer model has done so, or if stock Ulysses is off in evaluation.
        inside = [] if outer is None else [*outer.host.model.modules()][1:]
        has_gathered = self.model in inside  # guard: not another model
        if has_gathered or off_in_eval(self.layer):
            return own(*args, **kwargs)
        arguments = by_name(self.model, args, kwargs)
        if not self.has_looked:
            sharded.look_for_units(self.model)
            self.has_looked = True
        implementation = self.layer.config._attn_implementation
        with (
            self._running(arguments) as sequence,
            self.checkpoints.keeping(),
            masks.for_layers(self.name, sequence, implementation),
        ):
            for name, layer in self.forwards.fallible.items():
                layer.falls_back = name in sequence.fallbacks
            # A model with mixers only may make no masks, and pass its own mask argument on.
            hands_on = self.layer is self.model and not masks.namespaces
            if hands_on:  # guard: mixers find their sequence
                # By a placeholder, a layer that a checkpoint recomputes finds its sequence.
                shape = sequence.rows, sequence.lengths[self.forwards.positions.sp_group.rank]
                mask = masks.placeholder(shape, sequence)
                return own(**{**arguments, "attention_mask": mask})
            return own(*args, **kwargs)

    @contextlib.contextmanager
    def _running(self, arguments: Keywords) -> Iterator[GlobalSequence]:
        """Gather the global sequence, and provide it while the body runs the forward. Collective.

        Raises:
            ValueError: on all ranks, if a rank has no tokens and runs transformers' code.
            RuntimeError: after the body, if a module ran without an exchange that it needs: a
                `FunctionLayer`, or one of `Watched.suspects`.
        """
        forwards, cache = self.forwards, given(arguments, CACHES)
        sequence = forwards.positions.gather(
            self.name,
            given(arguments, TOKENS),
            arguments.get("position_ids"),
            mask=arguments.get("attention_mask"),
            cache=cache,
            names=(forwards.fallbacks(), self.checkpoints.checkpointed()),
            told={key: x for key in DOCUMENTS if (x := arguments.get(key)) is not None},
        )
        lengths = sequence.lengths
        # transformers' code fails without tokens. Only that rank would raise, while the others wait.
        if self.own_code and 0 in lengths:
            raise ValueError(
                f"{self.own_code[0]}: sp rank {lengths.index(0)} has no tokens (local lengths "
                f"{lengths}), for which the code of this kind of layer fails; give every rank of "
                "the sp group one token at least"
            )
        running = _Running(self, sequence, {}, set())
        with contextlib.ExitStack() as stack:
            for name, module in self.watched.suspects().items():
                ran = functools.partial(running.note, name)
                stack.enter_context(module.register_forward_pre_hook(ran))
            stack.enter_context(replaced(vars(forwards), "running", running))
            yield sequence
        if local := sorted(running.ran.keys() - running.attended):
            raise RuntimeError(
                f"{first_of(local[0], running.ran[local[0]], len(local))} ran without an exchange, "
                "each rank with its own tokens alone: it was put into the model or changed, or its "
                "forward replaced or set back, since ds_sp_overlap.enable (disable of a model that "
                "shares it does so; call enable again), or it calls none of transformers' "
                "attention functions, which is not supported here"
            )


def run_with_largest_position(
    name: str,
    module: nn.Module,
    forwards: Forwards,
    own: Callable,
    x: Tensor,
    position_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a rotary embedding as if this rank had the largest position of the global sequence.

    The frequencies of the rotary embedding depend on the largest position: its ``rope_type`` is dynamic or longrope (`modules.goes_by_length`).

    Args:
        name: The name of the rotary embedding.
        module: The rotary embedding.
        forwards: Knows the largest position of the model's current forward.
        own: The rotary embedding's own forward.
        x: A tensor with the dtype of the tables.
        position_ids: [.., b, s/P].
        *args: More arguments for ``own``.
        **kwargs: More keyword arguments for ``own``.

    Raises:
        RuntimeError: outside of the model's forward.
    """
    sequence = forwards.sequence_for(name)
    if sequence is None:
        if off_in_eval(module):
            return own(x, position_ids, *args, **kwargs)
        raise RuntimeError(
            f"{type(module).__name__}: RoPE of type {module.rope_type} depends on the length "
            "of the whole sequence, which is known in the model's forward only; call the model"
        )
    # For the positions of one rank, the embedding would choose wrong frequencies. So add a token at
    # the largest position of the global sequence. Afterwards remove this token's row of the tables.
    token, most = position_ids[..., :1], sequence.largest_position
    largest = torch.full_like(token, most)  # guard: the longest of all ranks
    tables = own(x, torch.cat([position_ids, largest], -1), *args, **kwargs)
    return first_tokens(tables, -1)
