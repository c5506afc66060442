"""The forward of a transformers model around its overlapped attention layers.

Positions and masks of all ranks must be known before a layer attends. Gathering them in every
layer, as stock Ulysses does with positions, costs a collective per layer. Here the forward of the
model itself is rebound (`Host`): it gathers them once, and the layers find them in `Forwards`.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.runtime import sharded
from ...config import SpOverlapConfig
from ...exchange.sp_group import SPGroup
from ...exchange.streams import refuse_captured
from ..inspect.library import CACHES
from ..sequence.masks import Masks, Pattern
from ..sequence.positions import DOCUMENTS, NO_GRAPH, TOKENS, GlobalSequence, Positions
from .checkpoints import Checkpoints
from .modules import Watched, first_of, off_in_eval, pretrained

# Keywords that describe the tokens of this rank alone.
_LOCAL_KEYWORDS = (*DOCUMENTS, "cu_seq_lens_k", "max_length_q", "max_length_k")


class Forwards:
    """The forwards of a model, with the global sequence of each; made by `enable`.

    A layer's call belongs to the forward that is running, to an earlier forward if a checkpoint
    recomputes the layer, or to no forward if the layer is called by itself.

    Attributes:
        positions: Gathers positions and masks.
        masks: The placeholders that layers are given in place of masks.
        running: The forward that is running, the inner one of two; None between forwards.
        fallible: By name, the layers that fall back where a hook or an adapter stands in the way:
            they exchange something else then, so all ranks must. Each has a method
            ``must_fall_back()`` for this rank, and an attribute ``falls_back``, set in each forward
            of the model: whether it does on any rank.
    """

    def __init__(self, sp_group: SPGroup, config: SpOverlapConfig):
        self.positions, self.masks = Positions(sp_group, config.documents), Masks()
        self.running: _Running | None = None
        # Weak, since tables of attention functions reach this object and must keep no model alive.
        self.fallible: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def fallbacks(self) -> list[str]:
        """Return the names of the layers that fall back on this rank, in ascending order."""
        names = []
        for name, layer in self.fallible.items():
            try:
                falls_back = layer.must_fall_back()
            except Exception:  # of any kind: a module is gone, of which the layer's own call tells
                falls_back = True
            if falls_back:
                names.append(name)
        return sorted(names)

    def fall_back(self, names: Collection[str]) -> None:
        """Let the layers that are named fall back, and no others, until the next call of this."""
        for name, layer in self.fallible.items():
            layer.falls_back = name in names

    def sequence_for(self, where: str) -> GlobalSequence | None:
        """Return the global sequence of the forward that is running; None between forwards.

        Args:
            where: The name of the layer, or rotary embedding, that asks for the tokens of all ranks.
        """
        refuse_captured(where, NO_GRAPH)
        if self.running is None:
            return None
        self.running.attended.add(where)
        return self.running.sequence

    def of(
        self, where: str, module: nn.Module, x: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> tuple[GlobalSequence, Pattern]:
        """Return the global sequence and the pattern of a layer's call.

        Collective if no forward of the model is running and there is no placeholder: the layer is
        called by itself, and positions are gathered for this call.

        Args:
            where: The name of the layer, for errors.
            module: The layer.
            x: [b, s/P, ..]. The layer's hidden states or queries.
            mask: The attention mask that the layer is given.
            kwargs: Its other keywords. Those that describe this rank's tokens are removed.

        Raises:
            ValueError: for a bias for each head, or a mask that the model's mask functions did not
                make.
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
        # A placeholder tells both.
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

    def refuse_empty(self, where: str) -> None:
        """Raise ValueError, on all ranks, if a rank has no tokens in the forward that is running.

        For layers that run transformers' own code on a rank's tokens, code that fails without any:
        that rank alone would raise, and the others wait for it.

        Args:
            where: The name of the layer.
        """
        lengths = self.running.sequence.lengths if self.running is not None else ()
        if 0 in lengths:
            raise ValueError(
                f"{where}: sp rank {lengths.index(0)} has no tokens (local lengths {lengths}), for "
                "which the code of this kind of layer fails; give every rank of the sp group one "
                "token at least"
            )


class _Running(NamedTuple):
    """A forward of a model that is running.

    Attributes:
        host: The model.
        sequence: The global sequence.
        attended: The names of the layers, and rotary embeddings, that asked for the tokens of all
            ranks.
    """

    host: Host
    sequence: GlobalSequence
    attended: set[str]


def _given(arguments: dict[str, Any], names: Iterable[str]) -> Any:
    """Return the first argument of these names that is given; None if none is."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


@dataclass(eq=False)
class Host:
    """A model that holds overlapped layers, with the forward that takes the place of its own.

    Models inside of each other have a host each; the outermost that is called gathers. A model that
    is called meanwhile and is not inside of that one gathers for itself.

    Attributes:
        name: The model's name, for errors.
        model: The model.
        forwards: Its forwards.
        layers: The layers that are overlapped, by name.
        configs: The configs whose models make masks for these layers.
        namespaces: The globals of the models that make masks for recurrent layers.
        hands_on_mask: Whether the model makes no masks, but hands its mixers the one it is given.
        checkpoints: The checkpoints in the model.
        watched: Checks that the layers are still in place.
    """

    name: str
    model: nn.Module
    forwards: Forwards
    layers: dict[str, Any]
    configs: list[Any]
    namespaces: list[dict[str, Any]]
    hands_on_mask: bool
    checkpoints: Checkpoints
    watched: Watched

    def __post_init__(self) -> None:
        self._parameters = list(inspect.signature(type(self.model).forward).parameters)[1:]
        self._original, self._has_looked = self.model.forward, False
        self._first_layer = next(iter(self.layers.values()))
        # The layers, overlapped at their attention function, that must still be seen to exchange.
        self._unseen = dict(self.watched.functions)
        # Not all modules: those that are replaced later would be kept alive.
        inner = (module for module in self.model.modules() if isinstance(module, pretrained()))
        self._inside = {*inner} - {self.model}

    @torch._disable_dynamo(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather positions and masks of all ranks, and run the model's own forward.

        Collective. Returns what the model's own forward returns.
        """
        outer, masks = self.forwards.running, self.forwards.masks
        # An outer model has gathered already, or stock Ulysses is off in evaluation.
        has_gathered = (
            outer is not None and self.model in outer.host._inside
        )  # guard: not another model
        if has_gathered or off_in_eval(self._first_layer):
            return self._original(*args, **kwargs)
        self.watched.refuse_changed()
        arguments = {**dict(zip(self._parameters, args)), **kwargs}
        implementation = self._first_layer.config._attn_implementation
        if not self._has_looked:  # for units of FSDP that were made since `enable`
            sharded.look_for_units(self.model)
            self._has_looked = True
        with (
            self._running(arguments) as sequence,
            self.checkpoints.keeping(),
            masks.for_attention(self.name, sequence, implementation, configs=self.configs),
        ):
            self.forwards.fall_back(sequence.fallbacks)
            for name in self.watched.functions:  # they run transformers' code on this rank's tokens
                self.forwards.refuse_empty(name)
            if self.hands_on_mask:  # guard: mixers find their sequence
                # By the placeholder a checkpoint finds the sequence of its forward.
                shape = sequence.rows, sequence.lengths[self.forwards.positions.sp_group.rank]
                mask = masks.placeholder(shape, sequence.device, sequence, pattern=Pattern())
                return self._original(**{**arguments, "attention_mask": mask})
            recurrent = masks.for_recurrent(sequence, self.namespaces)
            with recurrent:  # guard: recurrent layers are told
                return self._original(*args, **kwargs)

    @contextlib.contextmanager
    def _running(self, arguments: dict[str, Any]) -> Iterator[GlobalSequence]:
        """Gather the global sequence and hold it while the body runs the forward. Collective.

        Raises:
            RuntimeError: after the body, if a module ran that should exchange, and did not: one of
                ``_unseen``, or one that `Watched` found to be another one than in `enable`.
        """
        forwards, cache = self.forwards, _given(arguments, CACHES)
        sequence = forwards.positions.gather(
            self.name,
            _given(arguments, TOKENS),
            arguments.get("position_ids"),
            mask=arguments.get("attention_mask"),
            cache=cache,
            names=(forwards.fallbacks(), self.checkpoints.checkpointed()),
            told={key: x for key in DOCUMENTS if (x := arguments.get(key)) is not None},
        )
        watched = {**self._unseen, **self.watched.foreign()}
        ran, attended, hooks = set[str](), set[str](), []
        for name, module in watched.items():
            # The default binds the name of this module, not that of the last one.
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: ran.add(name)))
        outer, forwards.running = forwards.running, _Running(self, sequence, attended)
        try:
            yield sequence
        finally:
            forwards.running = outer
            for hook in hooks:
                hook.remove()
        if local := sorted(ran - attended):
            raise RuntimeError(
                f"{first_of(local[0], watched[local[0]], len(local))} ran without an exchange, "
                "each rank with its own tokens alone: it was put into the model or changed, or its "
                "forward replaced or set back, since ds_sp_overlap.enable (disable of a model that "
                "shares it does so; call enable again), or it calls none of transformers' "
                "attention functions, which is not supported here"
            )
        # Each layer of ``_unseen`` is checked once.
        for name in ran:
            self._unseen.pop(name, None)


def stretched(name: str, module: nn.Module, forwards: Forwards) -> Callable:
    """Return a forward for a rotary embedding whose frequencies depend on the largest position.

    Its ``rope_type`` is dynamic or longrope (`modules.goes_by_length`).

    Args:
        name: The name of the rotary embedding.
        module: The rotary embedding.
        forwards: The forwards of its model.

    Returns:
        The forward that `enable` binds. Raises RuntimeError outside of the model's forward.
    """
    original = module.forward

    def with_largest_position(x, position_ids, *args, **kwargs):
        sequence = forwards.sequence_for(name)
        if sequence is None:
            if off_in_eval(module):
                return original(x, position_ids, *args, **kwargs)
            raise RuntimeError(
                f"{type(module).__name__}: RoPE of type {module.rope_type} depends on the length "
                "of the whole sequence, which is known in the model's forward only; call the model"
            )
        # The positions of one rank would give other frequencies than those of the whole sequence.
        # So the embedding is given the largest position of the global sequence as one more token,
        # whose table row is cut off again.
        token = position_ids[..., :1]
        largest = torch.full_like(
            token, sequence.largest_position
        )  # guard: the longest of all ranks
        tables = original(x, torch.cat([position_ids, largest], -1), *args, **kwargs)
        if not isinstance(tables, tuple):
            return tables[..., :-1, :].contiguous()
        return tuple(table[..., :-1, :].contiguous() for table in tables)

    return with_largest_position
