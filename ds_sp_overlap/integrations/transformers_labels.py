"""transformers: the forward of an attention layer, run on labels.

Every number that goes in, and every number that a projection, a norm, a rotation or the attention function would return, is a
label: a random number that occurs once. Whatever moves numbers (views, transposes, splits) is followed by where its labels turn
up. Whatever computes with them leaves numbers that are no labels. No weight is read, and no module is called.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .transformers_rotary import Table

BATCH = 2
CACHES = "past_key_values", "past_key_value", "layer_past"
UNUSED = (*CACHES, "cache_position", "use_cache", "output_attentions")  # arguments that change nothing in training


class Unknown(Exception):
    """Why a forward is not known."""


class Out:
    """Labels that something returned, and what it was given."""

    def __init__(self, name: str, given: Tensor | None, shape: tuple[int, ...], run: Run):
        self.name, self.given = name, given
        self.labels = run.labels(*shape)
        self._sorted, self._at = self.labels.flatten().sort()

    def find(self, x: Tensor) -> Tensor:
        """Where each number of ``x`` is among the labels, flat; -1 where it is none of them."""
        at = torch.searchsorted(self._sorted, x.contiguous()).clamp_(max=len(self._sorted) - 1)
        return torch.where(self._sorted[at] == x, self._at[at], -1)

    def rows(self, x: Tensor) -> Tensor | None:
        """``x`` with what was given in place of its labels; None unless its last dim is a row of what was given, in order."""
        at = self.find(x)
        if self.given is None or x.shape[-1] != (width := self.given.shape[-1]) or (at < 0).any():
            return None
        in_order = (at % width == torch.arange(width)).all() and (at // width == at[..., :1] // width).all()
        return self.given.flatten()[at] if in_order else None


class Opaque:
    """An argument that may be handed on, and nothing else."""


class _Tables(tuple):
    """(cos, sin) or complex tables: may be taken apart and moved, not computed with."""

    def to(self, *args: Any, **kwargs: Any) -> _Tables:
        return self


MISSING = object()  # what a forward looked for in vain


class Looked:
    """The layer, or its config, as its forward sees it: what it looks at is noted, its children return labels."""

    def __init__(self, value: Any, path: tuple[str, ...], run: Any):
        vars(self).update(_value=value, _path=path, _run=run)

    def __getattr__(self, name: str) -> Any:
        run, value = self._run, getattr(self._value, name, MISSING)
        if value is MISSING:
            run.looked.append(((*self._path, name), MISSING))
            raise AttributeError(name)
        if not self._path and name == "training":
            return run.training
        if isinstance(value, nn.Module):
            return run.child(name, value)
        if inspect.ismethod(value) and value.__self__ is self._value:
            run.looked.append(((*self._path, name, "__func__"), value.__func__))
            return types.MethodType(run.rewired(value.__func__), self) if not self._path else value
        run.looked.append(((*self._path, name), value))
        return Looked(value, (*self._path, name), run) if name == "config" else value

    def __setattr__(self, name: str, value: Any) -> None:
        raise Unknown(f"its forward sets {name}")


class Child:
    def __init__(self, name: str, module: nn.Module, run: Run):
        self._name, self._module, self._run = name, module, run

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not isinstance(x, Tensor):
            raise Unknown(f"{self._name} takes more than one tensor")
        width = getattr(self._module, "out_features", None)
        shape = tuple(x.shape) if width is None else (*x.shape[:-1], width)
        out = Out(self._name, x, shape, self._run)
        self._run.outs.append(out)
        return out.labels

    def __getattr__(self, name: str) -> Any:
        raise Unknown(f"its forward reads {self._name}.{name}")


class _Functions:
    """In place of transformers' attention functions."""

    def __init__(self, attend: Callable):
        self._attend = attend

    def get_interface(self, *_: Any) -> Callable:
        return self._attend

    def __getitem__(self, _: str) -> Callable:
        return self._attend


class Run:
    """One run of a layer's forward on labels.

    x, mask, tables, position_ids, more   what its forward was given: hidden states [b, s, m], and what stands for the rest;
                                          ``more`` as a keyword ``sp_overlap``, None if it takes no more keywords
    outs                                  what its children returned, in the order of their calls
    rotations, rotated                    functions and what they were called with, and what they returned
    q, k, v, options, o                   what its attention was given and returned, [b, h, s, d] and [b, s, h, d]
    returned, weights                     what its forward returned, and what stands for the weights of attention in it
    looked                                what it looked at on the way: names from the layer on, and what it found

    Raises Unknown.
    """

    def __init__(self, module: Any, training: bool):
        self.module, self.training = module, training
        self.generator = torch.Generator().manual_seed(0)
        self.outs: list[Out] = []
        self.rotations: list[tuple[Callable, tuple, tuple]] = []
        self.rotated: list[Out] = []
        self.looked: list[tuple[tuple[str, ...], Any]] = []
        self.layer = Looked(module, (), self)
        config = self.layer.config
        counts = {getattr(config, name, 0) for name in ("num_attention_heads", "num_key_value_heads")}
        self.seq = next(seq for seq in (5, 7, 11) if seq not in counts)  # unlike the heads, whose dim is told by its size
        self.x = self.labels(BATCH, self.seq, config.hidden_size)
        self.tables = _Tables((self.labels(BATCH, self.seq, 2), self.labels(BATCH, self.seq, 2)))
        self.mask, self.weights, self.position_ids, self.more = (Opaque() for _ in range(4))
        self.o: Any = None
        forward = self.rewired(type(module).forward)
        self.returned = forward(self.layer, **self._arguments(forward))
        if self.o is None:
            raise Unknown("its forward calls no attention function")

    def labels(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def child(self, name: str, module: nn.Module) -> Child:
        return Child(name, module, self)

    def _arguments(self, forward: Callable) -> dict[str, Any]:
        given = dict(
            hidden_states=self.x, attention_mask=self.mask, position_embeddings=self.tables, position_ids=self.position_ids
        )
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if unknown := next((name for name in names if name not in given and name not in UNUSED), None):
            raise Unknown(f"its forward takes {unknown}")
        more = dict(sp_overlap=self.more) if len(names) < len(parameters) else {}
        return {**{name: given.get(name) for name in names}, **more}

    def rewired(self, function: Any) -> Callable:
        """``function`` with rotations and attention functions that return labels."""
        function = inspect.unwrap(function)
        known = function.__globals__
        new: dict[str, Any] = {
            name: self._rotary(known[name]) for name in function.__code__.co_names if "rotary" in name and callable(known.get(name))
        }
        new["ALL_ATTENTION_FUNCTIONS"] = _Functions(self._attend)
        copy = types.FunctionType(
            function.__code__, {**known, **new}, function.__name__, function.__defaults__, function.__closure__
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy

    def _rotary(self, function: Callable) -> Callable:
        def rotary(*args: Any, **kwargs: Any) -> Any:
            tables = dict(zip(Table, (self.tables, *self.tables)))
            said = [next((table for table, x in tables.items() if x is given), given) for given in args]
            moving = [x for x in said if isinstance(x, Tensor)]
            outs = [Out(function.__name__, x, tuple(x.shape), self) for x in moving]
            shapes = tuple(x.shape if isinstance(x, Tensor) else x for x in said)
            self.rotations.append((function, shapes, tuple(kwargs.items())))
            self.rotated += outs
            return outs[0].labels if len(outs) == 1 else tuple(out.labels for out in outs)

        return rotary

    def _attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **options: Any) -> tuple:
        if self.o is not None or module is not self.layer or attention_mask is not self.mask:
            raise Unknown("its attention is not called once, with the mask as it is given")
        self.q, self.k, self.v, self.options = q, k, v, options
        self.o = self.labels(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        return self.o, self.weights
