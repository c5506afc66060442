"""Megatron-DeepSpeed: what the forward of a ``ParallelAttention`` computes, told from runs on
labels.

As for transformers (`symbolic_trace`), every number that goes in, and every number that a
projection or ``dist_attn`` would return, is a label, and all that the forward does is accounted
for.
A layer is known if q, k and v are the rows [all q | all k | all v] of its projections, ``dist_attn``
is given these and nothing that is not known, and ``dense`` is given what it returns.

HEAD asserts that there are as many KV heads as query heads. Such a forward is read as that of a
layer with as many, since it computes nothing for any other.

The forward of pull request 415 puts its projections on a stream of its own, and is known by source.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...attention.runtime.linear import hooks_are_harmless
from ..inspect.accounting import MISSING, Unknown, forward_of
from ..inspect.attention import Read, Reader
from ..inspect.symbolic_trace import (  # fmt: skip
    CLASS,
    RUNS,
    Case,
    Looked,
    OfLabels,
    Opaque,
    Tables,
    cases,
    is_identity,
    replaced,
)
from .traced_globals import instead, source_of

FUSED, SPLIT = ("query_key_value",), ("query_linear", "key_linear", "value_linear")
ARGUMENTS = (
    "hidden_states", "attention_mask", "encoder_output", "inference_params", "rotary_pos_emb",
)  # fmt: skip
KNOWN = {"57d3f24bba0e530c"}  # source of pull request 415's forward, and of what it calls
PARTS = "forward", "get_sp_stream", "repeat_kv"


@dataclass(frozen=True)
class AttentionReading:
    """What a layer's forward computes.

    projections   names of its projections
    refuses       whether it refuses fewer KV heads than query heads, which it has
    """

    projections: tuple[str, ...]
    refuses: bool = False


class AttentionReader(Reader):
    """Reads a ``ParallelAttention``, and again whenever what its forward looked at has changed.
    Raises Unknown.
    """

    def read(self, module: Any, training: bool) -> Read:
        projections = SPLIT if hasattr(module, SPLIT[0]) else FUSED
        if not hooks_are_harmless(module.dist_attn):
            raise Unknown(
                "dist_attn has a hook of its own"
            )  # guard: a call of dist_attn that is hooked is made
        if source_of(type(module), *PARTS) in KNOWN:  # guard: known by its source, or read
            grouped = module.num_attention_heads != module.num_key_value_heads
            looked = [_now(module, name) for name in (*PARTS, "__call__")]
            return Read(AttentionReading(projections, refuses=grouped), looked, [], {})
        found: dict[Any, Any] = {}
        names: dict[Any, Any] = {}
        refuses = False
        for case in cases(training):
            try:
                run = _Run(module, case, projections, refuses)
            except AssertionError:
                refuses = module.num_attention_heads != module.num_key_value_heads
                run = _Run(module, case, projections, refuses)
            found.update(((path, type(value)), (path, value)) for path, value in run.looked)
            names.update(((id(known), name), (known, name, x)) for known, name, x in run.names)
        reading = AttentionReading(projections, refuses)
        return Read(reading, list(found.values()), list(names.values()), {})


def _now(module: Any, name: str) -> tuple[tuple[Any, ...], Any]:
    return (*CLASS, name), getattr(type(module), name, MISSING)


class _Run:
    """One run of a layer's forward on labels.

    looked, names   what it looked at on the way: names from the layer on, and globals; what it
                    found

    Raises Unknown if it computes something else than what is known.
    """

    takes_parameters = False

    def __init__(self, module: Any, case: Case, projections: tuple[str, ...], refuses: bool):
        self.module, self.training, self.dtype = module, case.training, case.dtype
        self.projections, self._count = projections, 0
        self.looked: list[tuple[tuple[Any, ...], Any]] = [_now(module, name) for name in RUNS]
        self.heads, self.head_dim = (
            module.num_attention_heads,
            module.hidden_size_per_attention_head,
        )
        self.kv_heads = self.heads if refuses else module.num_key_value_heads
        self.flash = module.use_flash_attn and not module.use_flash_attn_triton
        self.instead = self._of_as_many_heads() if refuses else {}
        batch, seq = self._sizes(case)
        self.tokens = seq, batch
        self.x = self.labels(seq, batch, _width(module))
        self.tables = (
            Tables((self.labels(seq, 1, 1, 2), self.labels(seq, 1, 1, 2))) if case.told else None
        )
        self.mask = Opaque(self) if case.masked else None
        self.outs: dict[str, Tensor] = {}
        self.o: Any = None
        self.bias: Any = None
        self.accounting = OfLabels(case.dtype, {batch, seq, batch * seq})
        forward = forward_of(type(module))
        given = self._arguments(forward, case)
        with replaced(module, instead(self)), self.accounting:
            returned = forward(Looked(module, (), self), **given)
        known = self.accounting.names
        self.names = [(known, name, known.get(name, MISSING)) for known, name, _ in known]
        self.looked = [each for each in self.looked if each[0][0] not in self.instead]
        self._check(returned)

    def _of_as_many_heads(self) -> dict[str, Any]:
        """What the layer would hold with as many KV heads as query heads."""
        width = self.heads * self.head_dim
        return {
            "num_key_value_heads": self.heads,
            "num_key_value_heads_per_partition": self.heads,
            "num_key_value_groups": 1,
            "kv_projection_size": width,
            "use_gqa": False,
        }

    def _sizes(self, case: Case) -> tuple[int, int]:
        """Batch and sequence, by which no size of the layer divides."""
        numbers = [x for x in vars(self.module).values() if isinstance(x, int) and x]
        numbers += [
            size for p in self.module.parameters() for size in getattr(p, "ds_shape", p.shape)
        ]
        numbers += [(self.heads + 2 * self.kv_heads) * self.head_dim]
        free = [p for p in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31) if all(x % p for x in numbers)]
        return free[0] if case.batch > 1 else 1, free[1 + case.place]

    def _arguments(self, forward: Any, case: Case) -> dict[str, Any]:
        names = list(inspect.signature(forward).parameters)[1:]
        if unknown := next((name for name in names if name not in ARGUMENTS), None):
            raise Unknown(f"its forward takes {unknown}")
        given: dict[str, Any] = dict.fromkeys(names)
        told = dict(
            hidden_states=self.x, attention_mask=self.mask, rotary_pos_emb=self.tables,
            encoder_output=Opaque(self) if case.masked else None,
        )  # fmt: skip
        return {**given, **{name: x for name, x in told.items() if name in names}}

    def fail(self, reason: str) -> NoReturn:
        self.accounting.fail(reason)

    def look(self, holder: Any, name: str) -> Any:
        if holder is self.module and name in self.instead:
            return self.instead[name]
        return self.accounting.look(holder, name)

    def labels(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        self._count += count
        return torch.arange(self._count - count, self._count).view(shape)

    def child(self, name: str, module: nn.Module) -> Any:
        return _Child(name, module, self)

    def project(self, name: str, module: Any, x: Tensor) -> tuple[Tensor, Any]:
        if not torch.equal(x, self.x):
            self.fail(f"gives {name} something else than the hidden states as they are")
        kv = self.kv_heads
        heads = self.heads + 2 * kv if name in FUSED else self.heads if name == SPLIT[0] else kv
        self.outs[name] = self.labels(*self.tokens, heads * self.head_dim)
        return self.outs[name], Opaque(self) if module.skip_bias_add else None

    def exchange(
        self, q: Tensor, k: Tensor, v: Tensor, dim: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """In place of ``dist_attn``."""
        self._check_arguments(dim, args, kwargs)
        rows = torch.cat([self.outs.get(name, self.x[..., :0]) for name in self.projections], -1)
        kv = self.kv_heads * self.head_dim
        expected = rows.split((rows.shape[-1] - 2 * kv, kv, kv), -1)
        for name, heads, of_rows in zip("qkv", (q, k, v), expected):
            of_heads = of_rows.unflatten(-1, (-1, self.head_dim))
            repeated = of_heads.repeat_interleave(self.heads // of_heads.shape[2], 2)
            heads = heads.transpose(0, 1) if self.flash else heads
            if not any(torch.equal(heads, each) for each in (of_heads, repeated)):
                where = ", ".join(self.projections)
                self.fail(f"gives dist_attn another {name} than the rows of {where}, in order")
        self.o = self.labels(*self.tokens, self.heads * self.head_dim)
        o = self.o.unflatten(-1, (self.heads, self.head_dim)).transpose(0, 1)
        return o.clone() if self.flash else self.o  # others' attention returns [s, b, h d]

    def _check_arguments(self, dim: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Fail unless ``dist_attn`` is told what the driver does, or HEAD's mask in place of
        ``dim``, with which it can't run.
        """
        if self.o is not None:
            self.fail("calls dist_attn more than once")
        if not self.flash and dim is self.mask and not args and not kwargs:
            return
        if type(dim) is not int or dim != (0 if self.flash else 1):
            self.fail("gives dist_attn another layout than its local attention takes")
        told = {**dict(zip(("rotary_pos_emb", "attention_mask"), args)), **kwargs}
        expected: dict[str, Any] = {"rotary_pos_emb": self.tables}
        if not self.module.use_flash_attn:
            expected["attention_mask"] = self.mask
        told.setdefault("rotary_pos_emb", None)
        if len(args) > 2 or told.keys() != expected.keys():
            self.fail(f"gives dist_attn {', '.join(told)}, not {', '.join(expected)}")
        if other := [name for name, x in expected.items() if told[name] is not x]:
            self.fail(f"gives dist_attn another {other[0]}")

    def output(self, module: Any, x: Tensor) -> tuple[Tensor, Any]:
        """In place of ``dense``."""
        if self.o is None or not torch.equal(x, self.o):
            self.fail("gives dense something else than what dist_attn returns")
        self.outs["dense"] = self.labels(*self.tokens, _width(module))
        self.bias = Opaque(self) if module.skip_bias_add and module.bias is not None else None
        return self.outs["dense"], self.bias

    def _check(self, returned: Any) -> None:
        if "dense" not in self.outs:
            raise Unknown("its forward calls no dense")
        if not isinstance(returned, tuple) or len(returned) != 2 or returned[1] is not self.bias:
            raise Unknown("its forward doesn't return (output, bias) of dense")
        if not isinstance(returned[0], Tensor) or not torch.equal(returned[0], self.outs["dense"]):
            raise Unknown("its forward doesn't return what dense returns")
        for name, _ in (*self.module.named_parameters(), *self.module.named_buffers()):
            if name.split(".")[0] not in {*self.outs, "dist_attn"}:
                what = f"its forward does nothing that is known here with {name}"
                raise Unknown(what)  # guard: all that a layer learns is known


class _Child:
    """In place of a child of the layer."""

    def __init__(self, name: str, module: nn.Module, run: _Run):
        self._name, self._module, self._run = name, module, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, name, module = self._run, self._name, self._module
        if name == "dist_attn":
            with torch._C.DisableTorchFunction():
                return run.exchange(*args, **kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            run.fail(f"gives {name} more than one tensor")
        if is_identity(name, module, run):
            return args[0]
        if name not in (*run.projections, "dense"):
            run.fail(f"calls {name} ({type(module).__name__})")
        if name in run.outs:
            run.fail(f"calls {name} more than once")
        with torch._C.DisableTorchFunction():
            return (
                run.output(module, *args) if name == "dense" else run.project(name, module, *args)
            )

    def __getattr__(self, name: str) -> Any:
        self._run.fail(f"reads {self._name}.{name}")


def _width(module: Any) -> int:
    """m of a layer, or of its output projection."""
    weight = getattr(module, "dense", module).weight
    return getattr(weight, "ds_shape", weight.shape)[0]
