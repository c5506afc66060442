"""Megatron-DeepSpeed: its ``ParallelTransformerLayer`` in a chain (`chains`).

A layer is read as a decoder layer of transformers is, by running its own forward on recorders. What is different is its form:
hidden states are [s/P, b, m], attention, MLP and linear layers return ``(output, bias)``, the layer ``(hidden states, 0)``.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..attention.self_attention import SelfAttention
from .chains import Course, Courses, Link
from .layers import Around
from .rebinding import rebind
from .transformers_blocks import BlockReader
from .transformers_labels import Unknown
from .tried_out import Form

Asked = Callable[[dict[str, Any], dict], dict[str, Any]]


def _width(attention: Any) -> int:
    weight = attention.dense.weight
    return getattr(weight, "ds_shape", weight.shape)[0]


class ParallelTransformerLayer(Link):
    """A layer around an attention, its child ``child``, which is driven whole. Raises Unknown.

    attention   what drives it
    ask         arguments of the attention by name, and what the forward has made already -> keywords of the attention's call
    around      the module that has it in its list of layers
    is_linear   whether a module is one of Megatron's linear layers, and plain
    """

    def __init__(
        self,
        name: str,
        module: Any,
        child: str,
        attention: SelfAttention,
        ask: Asked,
        around: nn.Module | None,
        is_linear: Callable[[nn.Module], bool],
        courses: Courses,
    ):
        if around is None:
            raise Unknown("it is in no list of layers")
        if getattr(module, "num_experts", 1) > 1:
            raise Unknown("a mixture of experts")
        if getattr(module, "fp32_residual_connection", False):
            raise Unknown("residuals in fp32")
        form = Form(_width, is_linear, token_dim=0, biases=True, absent=("aggregated_moe_loss",))
        with contextlib.redirect_stdout(io.StringIO()):  # its fused norm says, at every call, that it is on a CPU
            reader = BlockReader(module, child, form)
        self.ask, self.around = ask, around
        super().__init__(name, module, reader, attention, courses)

    @property
    def lacks(self) -> str:
        again = getattr(self.around, "checkpoint_activations", False)
        again = again or getattr(self.around, "recompute_granularity", None) == "full"
        return "in training one by one: activation checkpointing" if again else ""

    def use(self) -> None:
        """Its modules are never replaced."""

    def computed_again(self) -> str:
        """Nothing beside what a checkpoint around it shows."""
        return ""

    def asked(self, course: Course, given: dict[str, Any]) -> dict[str, Any]:
        return self.ask(given, course.made)


def list_of(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The module whose list of layers the layer ``name`` is in; None if it is in none."""
    at, _, number = name.rpartition(".")
    if not isinstance(modules.get(at), nn.ModuleList) or not number.isdecimal():
        return None
    return modules[at.rpartition(".")[0]]


def around(chains: list[list[Link]], courses: Courses, sp_size: int) -> list[Around]:
    """What rebinds the layers, and the modules that run them."""

    def course_of(module: Any) -> Callable:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if courses.course is not None or hidden is None:  # of a stage of a pipeline
                return original(*args, **kwargs)
            with courses.running([len(hidden)] * sp_size):
                return original(*args, **kwargs)

        return forward

    links = [link for chain in chains for link in chain]
    outer = dict.fromkeys(link.around for link in links if isinstance(link, ParallelTransformerLayer))
    hosts = [Around(module, partial(rebind, module, course_of(module), False)) for module in outer]
    return hosts + [Around(link.module, partial(rebind, link.module, link.forward)) for link in links]
