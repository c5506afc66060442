"""A transformers model's forward around its attention layers: what the ranks must know is gathered in it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..config import SpOverlapConfig
from ..exchange.channel import Channel
from .chains import Courses
from .masks import Masks, Pattern
from .positions import GlobalSequence, Positions
from .transformers_checkpoints import Checkpoints
from .transformers_modules import Watched, first_of, off_in_eval, refuse_copy


class Forwards(Courses):
    """The forwards of a model, and the global sequence of each: its own, a checkpoint's, a layer's that is called by itself."""

    def __init__(self, channel: Channel, config: SpOverlapConfig):
        super().__init__(config)
        self.positions, self.masks = Positions(channel, config.documents), Masks()
        self.attended: set[str] = set()  # layers whose attention function was called

    def of(self, where: str, module: nn.Module, x: Tensor, mask: Any, kwargs: dict[str, Any]) -> tuple[GlobalSequence, Pattern]:
        """What a layer's call with ``x`` [b, s/P, ..] belongs to. Collective if the layer is called by itself.

        Takes out of ``kwargs`` what describes this rank's tokens.
        """
        for of_slice in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
            kwargs.pop(of_slice, None)
        position_ids, sequence = kwargs.pop("position_ids", None), self.positions.current
        if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise ValueError(f"{where}: {type(module).__name__} is told that its attention is not causal; not supported here")
        if (found := self.masks.find(mask)) is not None:
            return found
        if mask is not None or (sequence is not None and sequence.padded):
            raise ValueError(
                f"{where}: {type(module).__name__} is given a mask that is not as transformers' mask functions made it (for this "
                "rank's tokens, or changed on the way); it can't be honoured on a sequence that is split over ranks"
            )
        return (sequence or self.positions.gather(where, x, position_ids)), Pattern()


def host(
    name: str,
    model: nn.Module,
    forwards: Forwards,
    layers: dict[str, nn.Module],
    witnessed: set[str],
    configs: list[Any],
    recurrent: list[dict[str, Any]],
    checkpoints: Checkpoints,
    watched: Watched,
) -> tuple[Callable, bool, Callable]:
    """A forward for a model that holds ``layers``: what the ranks must know is gathered in it, once for all of them.

    recurrent     the globals of models that ask for masks of recurrent layers
    checkpoints   in the model
    watched       the layers
    """
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    original, positions = model.forward, forwards.positions
    first: Any = next(iter(layers.values()))
    unseen = {name: module for name, module in layers.items() if name in witnessed}  # to call their attention function

    @torch.compiler.disable(recursive=False)
    def forward(*args, **kwargs):
        if positions.current is not None or off_in_eval(first):
            return original(*args, **kwargs)
        watched.refuse_changed()
        with (
            checkpoints.keeping(),
            positions.forward(name, {**dict(zip(names, args)), **kwargs}) as sequence,
            _witnessed(forwards, unseen),
            forwards.running(sequence.lengths),
        ):
            asked = forwards.masks.asked(name, sequence, first.config._attn_implementation, configs)
            with asked, forwards.masks.told(sequence, recurrent):  # guard: recurrent layers are told
                return original(*args, **kwargs)

    return forward, False, refuse_copy


@contextlib.contextmanager
def _witnessed(forwards: Forwards, unseen: dict[str, nn.Module]) -> Iterator[None]:
    """Refuse, behind the body, layers that ran in it without a call of their attention function."""
    if not unseen:
        yield
        return
    ran: set[str] = set()
    forwards.attended.clear()
    hooks = [module.register_forward_pre_hook(lambda *_, name=name: ran.add(name)) for name, module in unseen.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    local = sorted(ran - forwards.attended)
    if local:
        raise RuntimeError(
            f"{first_of(local[0], unseen[local[0]], len(local))} attends without transformers' attention functions, so that each "
            "rank attended to its own tokens alone; not supported with sequence parallelism"
        )
    for name in ran:
        del unseen[name]


def stretched(module: nn.Module, forwards: Forwards) -> tuple[Callable]:
    """A forward for a rotary embedding that goes by the largest position: shown is that of the global sequence."""
    original = module.forward

    def forward(x, position_ids, *args, **kwargs):
        sequence = forwards.positions.current
        if sequence is None and not off_in_eval(module):
            raise RuntimeError(
                f"{type(module).__name__}: RoPE of type {module.rope_type} depends on the length of the whole sequence, which is "
                "known in the model's forward only; call the model"
            )
        if sequence is None:
            return original(x, position_ids, *args, **kwargs)
        longest = torch.full_like(position_ids[..., :1], sequence.longest)  # guard: the longest of all ranks
        tables = original(x, torch.cat([position_ids, longest], -1), *args, **kwargs)
        cut = [table[..., :-1, :].contiguous() for table in (tables if isinstance(tables, tuple) else (tables,))]
        return tuple(cut) if isinstance(tables, tuple) else cut[0]

    return (forward,)
