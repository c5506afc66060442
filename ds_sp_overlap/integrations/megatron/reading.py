"""Megatron-DeepSpeed: reads the forward of a ``ParallelAttention`` from runs on labels.

As for transformers (`symbolic_trace`), the inputs are labels, projections and ``dist_attn`` return
labels, and all that the forward does is accounted for. A layer is known if

- q, k and v are the rows [all q | all k | all v] of its projections,
- ``dist_attn`` is given these, the tables and the mask, and nothing else,
- ``dense`` is given what ``dist_attn`` returns.

Two forwards are special. HEAD asserts that there are as many KV heads as query heads. Where there
are fewer, the forward stops before it computes anything, so it is read as if the layer had as many
KV heads as query heads. The forward of pull request 415 runs its projections on another stream, and
is known by its source.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...attention.runtime.linear import hooks_are_harmless
from ..inspect.accounting import MISSING, LoadedGlobal, Unknown, forward_of, free_primes
from ..inspect.attention import Read, Reader
from ..inspect.symbolic_trace import (  # fmt: skip
    CLASS,
    RUNS,
    Case,
    LabelAccounting,
    Lookup,
    Opaque,
    Proxy,
    Tables,
    cases,
    class_of_child,
    is_identity,
    replaced,
)
from .traced_globals import replacement, source_of

FUSED, SPLIT = ("query_key_value",), ("query_linear", "key_linear", "value_linear")
ARGUMENTS = (
    "hidden_states", "attention_mask", "encoder_output", "inference_params", "rotary_pos_emb",
)  # fmt: skip
# Digests of these parts of forks that are known by their source: pull request 415's. A known fork
# is taken to refuse fewer KV heads than query heads, so that its forward is no baseline there.
PARTS = "forward", "get_sp_stream", "repeat_kv"
KNOWN = {"57d3f24bba0e530c"}


@dataclass(frozen=True)
class AttentionReading:
    """Describes what a layer's forward computes.

    Attributes:
        projections: The names of its projections.
        refuses: Whether the layer has fewer KV heads than query heads, and its own forward refuses
            that.
    """

    projections: tuple[str, ...]
    refuses: bool = False


class AttentionReader(Reader):
    """Reads a ``ParallelAttention``; see `Reader`."""

    def read(self, module: Any, training: bool) -> Read:
        """Run the forward in every case, in training or in evaluation; see `Reader.read`."""
        projections = SPLIT if hasattr(module, SPLIT[0]) else FUSED
        grouped = module.num_attention_heads != module.num_key_value_heads
        if not hooks_are_harmless(module.dist_attn):
            message = "dist_attn has a hook of its own"
            raise Unknown(message)  # guard: a call of dist_attn that is hooked is made
        if source_of(type(module), *PARTS) in KNOWN:  # guard: known by its source, or read
            functions = [_class_lookup(module, name) for name in (*PARTS, "__call__")]
            return Read(AttentionReading(projections, refuses=grouped), functions, [], norms={})
        lookups: dict[Any, Lookup] = {}
        loaded_globals: dict[Any, LoadedGlobal] = {}
        refuses = False
        for case in cases(training):
            try:
                run = _Run(module, case, projections, refuses)
            except AssertionError:
                # HEAD's assertion about KV heads. Any other is raised again by the second run.
                refuses = grouped
                run = _Run(module, case, projections, refuses)
            for path, value in run.lookups:
                lookups[path, type(value)] = path, value
            for loaded in run.loaded_globals:
                loaded_globals[id(loaded.namespace), loaded.name] = loaded
        reading = AttentionReading(projections, refuses)
        return Read(reading, list(lookups.values()), list(loaded_globals.values()), norms={})


def _class_lookup(module: Any, name: str) -> Lookup:
    """Look up an attribute of a layer's class; its value is `MISSING` if there is none."""
    return (*CLASS, name), getattr(type(module), name, MISSING)


class _Run:
    """One run of a layer's forward on labels, which the constructor makes and checks.

    Args:
        module: The layer.
        case: The way to call it.
        projections: The names of its projections.
        refuses: Whether to run it with as many KV heads as query heads, see
            `AttentionReading.refuses`.

    Attributes:
        x: [s, b, m]. The labels that stand for hidden states.
        tables, mask: Stand for the tables and the mask; None where the case gives none.
        outputs: The labels that the projections and ``dense`` returned, by name.
        o: [s, b, h d]. The labels that ``dist_attn`` returned; None until it is called.
        bias: Stands for the bias of ``dense``; None if ``dense`` returns none.
        lookups: The attributes that the forward looked up.
        loaded_globals: The globals that it loaded.

    Raises:
        Unknown: if the forward computes anything else than what is known.
    """

    # For `Proxy`: the forward may not read tensors of the layer.
    takes_parameters = False

    def __init__(self, module: Any, case: Case, projections: tuple[str, ...], refuses: bool):
        self.module, self.training = module, case.training
        self.projections, self._label_count = projections, 0
        self.lookups: list[Lookup] = [_class_lookup(module, name) for name in RUNS]
        self.heads, self.head_dim = (
            module.num_attention_heads,
            module.hidden_size_per_attention_head,
        )
        self.kv_heads = self.heads if refuses else module.num_key_value_heads
        self.flash = module.use_flash_attn and not module.use_flash_attn_triton
        # Attributes of the layer that are replaced while it runs.
        self.replaced_attributes = self._ungrouped_attributes() if refuses else {}
        batch, seq = self._sizes(case)
        self.tokens = seq, batch
        self.x = self.new_labels(seq, batch, _width(module))
        self.tables: Tables | None = None
        if case.gives_optional:
            cos, sin = (self.new_labels(seq, 1, 1, 2) for _ in range(2))
            self.tables = Tables((cos, sin))
        self.mask = Opaque(self) if case.masked else None
        self.outputs: dict[str, Tensor] = {}
        self.o: Any = None
        self.bias: Any = None
        self.accounting = LabelAccounting(case.dtype, {batch, seq, batch * seq})
        forward = forward_of(type(module))
        arguments = self._arguments(forward, case)
        with replaced(module, functools.partial(replacement, self)), self.accounting:
            returned = forward(Proxy(module, (), self), **arguments)
        # Behind `replaced`, which has put the globals back into place.
        self.loaded_globals = self.accounting.globals_now()
        # Attributes that were replaced in this run are no facts about the layer.
        self.lookups = [
            (path, value) for path, value in self.lookups if path[0] not in self.replaced_attributes
        ]
        self._check(returned)

    def _ungrouped_attributes(self) -> dict[str, Any]:
        """Return the attributes of the layer with as many KV heads as query heads."""
        width = self.heads * self.head_dim
        return {
            "num_key_value_heads": self.heads,
            "num_key_value_heads_per_partition": self.heads,
            "num_key_value_groups": 1,
            "kv_projection_size": width,
            "use_gqa": False,
        }

    def _sizes(self, case: Case) -> tuple[int, int]:
        """Return batch size and sequence length: primes that divide no size of the layer.

        Where the case says so, the batch size is 1.
        """
        # Zeros are left out, since every prime divides them.
        used = [x for x in vars(self.module).values() if isinstance(x, int) and x]
        for parameter in self.module.parameters():
            used += getattr(parameter, "ds_shape", parameter.shape)
        # The rows of a fused projection, whose weight has other rows where KV heads are ungrouped.
        used.append((self.heads + 2 * self.kv_heads) * self.head_dim)
        free = free_primes(used)
        return free[0] if case.batch > 1 else 1, free[1 + case.seq_index]

    def _arguments(self, forward: Any, case: Case) -> dict[str, Any]:
        """Return the arguments of the forward in this case, by name.

        Raises:
            Unknown: if the forward has a parameter that is not known here.
        """
        names = list(inspect.signature(forward).parameters)[1:]
        for name in names:
            if name not in ARGUMENTS:
                raise Unknown(f"its forward takes {name}")
        values: dict[str, Any] = dict(
            hidden_states=self.x, attention_mask=self.mask, rotary_pos_emb=self.tables,
            encoder_output=Opaque(self) if case.masked else None,
        )  # fmt: skip
        return {name: values.get(name) for name in names}

    def fail(self, reason: str) -> NoReturn:
        """Raise Unknown; see `Accounting.fail`."""
        self.accounting.fail(reason)

    def look_up(self, holder: Any, name: str) -> Any:
        """Return an attribute, or what replaces it in this run; see `Accounting.look_up`."""
        if holder is self.module and name in self.replaced_attributes:
            return self.replaced_attributes[name]
        return self.accounting.look_up(holder, name)

    def new_labels(self, *shape: int) -> Tensor:
        """Return labels, whole numbers of which none was returned before, in this shape."""
        count = torch.Size(shape).numel()
        self._label_count += count
        return torch.arange(self._label_count - count, self._label_count).view(shape)

    def child(self, name: str, module: nn.Module) -> Any:
        """Return what stands for a child of the layer."""
        return _ChildProxy(name, module, self)

    def project(self, name: str, module: Any, x: Tensor) -> tuple[Tensor, Any]:
        """Return labels [s, b, rows] and a bias in place of a projection of ``x``.

        Fail unless ``x`` holds the hidden states as they are. The bias is None unless the
        projection leaves the bias to its caller.
        """
        if not torch.equal(x, self.x):
            self.fail(f"gives {name} something else than the hidden states as they are")
        heads = self.kv_heads
        if name in FUSED:
            heads = self.heads + 2 * self.kv_heads
        elif name == SPLIT[0]:
            heads = self.heads
        self.outputs[name] = self.new_labels(*self.tokens, heads * self.head_dim)
        return self.outputs[name], Opaque(self) if module.skip_bias_add else None

    def exchange(
        self, q: Tensor, k: Tensor, v: Tensor, dim: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return labels for o in place of ``dist_attn``; fail unless q, k and v are as expected.

        Args:
            q: [s, b, h, d], or [b, s, h, d] for flash attention.
            k: As ``q``, with h_kv heads, or with each repeated for its query heads.
            v: As ``k``.
            dim: The dimension of the batch.
            *args: Tables and mask, as are ``kwargs``.
        """
        self._check_arguments(dim, args, kwargs)
        # [s, b, all q | all k | all v]; of no width in place of a projection that was not called.
        rows = torch.cat([self.outputs.get(name, self.x[..., :0]) for name in self.projections], -1)
        kv = self.kv_heads * self.head_dim
        expected_rows = rows.split((rows.shape[-1] - 2 * kv, kv, kv), -1)
        for name, heads, row in zip("qkv", (q, k, v), expected_rows):
            expected = row.unflatten(-1, (-1, self.head_dim))
            # Some forwards repeat KV heads for their query heads, others leave that to attention.
            repeated = expected.repeat_interleave(self.heads // expected.shape[2], 2)
            heads = heads.transpose(0, 1) if self.flash else heads
            if not torch.equal(heads, expected) and not torch.equal(heads, repeated):
                where = ", ".join(self.projections)
                self.fail(f"gives dist_attn another {name} than the rows of {where}, in order")
        self.o = self.new_labels(*self.tokens, self.heads * self.head_dim)
        # Flash attention returns [b, s, h, d], other attention [s, b, h d].
        o = self.o.unflatten(-1, (self.heads, self.head_dim)).transpose(0, 1)
        return o.clone() if self.flash else self.o

    def _check_arguments(self, dim: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Fail unless ``dist_attn`` is given the same arguments as the driver would give."""
        if self.o is not None:
            self.fail("calls dist_attn more than once")
        # Without flash attention HEAD passes the mask in place of ``dim``. Its ``dist_attn`` can't
        # run with that, so there is no result that the driver would have to reproduce.
        if not self.flash and dim is self.mask and not args and not kwargs:
            return
        if type(dim) is not int or dim != (0 if self.flash else 1):
            self.fail("gives dist_attn another layout than its local attention takes")
        names = ("rotary_pos_emb", "attention_mask")
        actual = {**dict(zip(names, args)), **kwargs}
        actual.setdefault("rotary_pos_emb", None)
        expected: dict[str, Any] = {"rotary_pos_emb": self.tables}
        if not self.module.use_flash_attn:
            expected["attention_mask"] = self.mask
        if len(args) > 2 or actual.keys() != expected.keys():
            self.fail(f"gives dist_attn {', '.join(actual)}, not {', '.join(expected)}")
        for name, x in expected.items():
            if actual[name] is not x:
                self.fail(f"gives dist_attn another {name}")

    def output(self, module: Any, x: Tensor) -> tuple[Tensor, Any]:
        """Return labels [s, b, m] and a bias in place of ``dense``.

        Fail unless ``x`` is what ``dist_attn`` returned.
        """
        if self.o is None or not torch.equal(x, self.o):
            self.fail("gives dense something else than what dist_attn returns")
        self.outputs["dense"] = self.new_labels(*self.tokens, _width(module))
        self.bias = Opaque(self) if module.skip_bias_add and module.bias is not None else None
        return self.outputs["dense"], self.bias

    def _check(self, returned: Any) -> None:
        """Raise Unknown unless the forward returned (output, bias) of ``dense``, and each parameter
        and buffer of the layer belongs to a child that it called.
        """
        if "dense" not in self.outputs:
            raise Unknown("its forward calls no dense")
        if not isinstance(returned, tuple) or len(returned) != 2 or returned[1] is not self.bias:
            raise Unknown("its forward doesn't return (output, bias) of dense")
        output = returned[0]
        if not isinstance(output, Tensor) or not torch.equal(output, self.outputs["dense"]):
            raise Unknown("its forward doesn't return what dense returns")
        # The forward may use any other parameter in another call.
        for name, _ in (*self.module.named_parameters(), *self.module.named_buffers()):
            if name.split(".")[0] not in {*self.outputs, "dist_attn"}:
                message = f"its forward does nothing that is known here with {name}"
                raise Unknown(message)  # guard: all that a layer learns is known


class _ChildProxy:
    """Stands for a child of the layer; returns labels when it is called."""

    def __init__(self, name: str, module: nn.Module, run: _Run):
        self._name, self._module, self._run = name, module, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what stands for the child's output; fail for an unexpected child or argument."""
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
        if name in run.outputs:
            run.fail(f"calls {name} more than once")
        with torch._C.DisableTorchFunction():
            if name == "dense":
                return run.output(module, args[0])
            return run.project(name, module, args[0])

    def __getattr__(self, name: str) -> Any:
        self._run.fail(f"reads {self._name}.{name}")

    # For isinstance.
    __class__ = property(lambda self: class_of_child(self._name, self._module, self._run))


def _width(module: Any) -> int:
    """Return m of a layer, or of its output projection, whole even if ZeRO-3 partitioned it."""
    weight = getattr(module, "dense", module).weight
    return getattr(weight, "ds_shape", weight.shape)[0]
