"""Megatron-DeepSpeed: its ``ParallelTransformerLayer`` in a chain (`chains`).

A layer is read as a decoder layer of transformers is, by running its own forward on recorders, with
an account of all that it does. What is different is its form: hidden states are [s/P, b, m],
attention, MLP and linear layers return ``(output, bias)``, the layer ``(hidden states, 0)``.

Activation checkpointing of the layers, one by one, is done by the chain, cut at attention.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing as of_deepspeed
from torch import nn

from ...attention.self_attention import SelfAttention
from ...config import SpOverlapConfig
from ..chains import ChainedLayer, ForwardPass, ForwardPasses
from ..inspect.accounting import Unknown
from ..inspect.decoder_layer import BlockReader
from ..inspect.probe import difference_of_block, refuse_difference
from ..inspect.tokenwise import Form
from ..layers import HostModule
from ..rebinding import rebind
from .traced_globals import instead

Asked = Callable[[dict[str, Any], dict], dict[str, Any]]
CHECKPOINTED = "_checkpointed_forward"  # what runs the layers under activation checkpointing


def _width(attention: Any) -> int:
    weight = attention.dense.weight
    return getattr(weight, "ds_shape", weight.shape)[0]


class ParallelTransformerLayer(ChainedLayer):
    """A layer around an attention, its child ``child``, which is driven whole. Raises Unknown.

    attention   what drives it
    ask         arguments of the attention by name, and what the forward has made already ->
                keywords of the attention's call
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
        passes: ForwardPasses,
    ):
        if around is None:
            raise Unknown("it is in no list of layers")
        if getattr(module, "num_experts", 1) > 1:
            raise Unknown("a mixture of experts")
        if getattr(module, "fp32_residual_connection", False):
            raise Unknown("residuals in fp32")
        absent = ("aggregated_moe_loss",)
        form = Form(
            _width,
            is_linear,
            token_dim=0,
            biases=True,
            absent=absent,
            accounted=False,
            instead=instead,
        )
        with contextlib.redirect_stdout(
            io.StringIO()
        ):  # its fused norm says, at every call, that it is on a CPU
            reader = BlockReader(module, child, form, passes.known)
        self.ask, self.around = ask, around
        super().__init__(name, module, reader, attention, passes)

    @property
    def lacks(self) -> str:
        reason = _no_rerun(self.around, self.passes.config)
        return reason and f"in training one by one: {reason}"

    def use(self) -> None:
        """Its modules are never replaced."""

    def computed_again(self) -> str:
        """Nothing beside what a checkpoint around it shows."""
        return ""

    def probe(
        self, forward_pass: ForwardPass, given: dict[str, Any], asked: dict[str, Any]
    ) -> None:
        reader, sp_group = self.reader, self.layer.attention.layer.sp_group
        if reader.probed.is_due(self.name, self.passes.config.check, forward_pass.lengths):
            own, attention = type(self.module).forward, reader.reading.attention
            compare = partial(
                difference_of_block, self.module, own, self.layer, attention, given, asked,
                forward_pass.lengths, token_dim=0,
            )  # fmt: skip
            refuse_difference(reader.probed, self.name, self.module, sp_group, compare)

    def asked(self, forward_pass: ForwardPass, given: dict[str, Any]) -> dict[str, Any]:
        return self.ask(given, forward_pass.made)


def list_of(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The module whose list of layers the layer ``name`` is in; None if it is in none."""
    at, _, number = name.rpartition(".")
    if not isinstance(modules.get(at), nn.ModuleList) or not number.isdecimal():
        return None
    return modules[at.rpartition(".")[0]]


def _no_rerun(around: Any, config: SpOverlapConfig) -> str:
    """Why a chain can't do the activation checkpointing of the layers of ``around``; empty if it
    can, or there is none.
    """
    if not _is_checkpointed(around):
        return ""
    what = "activation checkpointing"
    if not around.checkpoint_activations and (
        around.recompute_method != "uniform" or around.distribute_saved_activations
    ):
        return f"{what} of some layers, or of activations that are spread over ranks"
    if (
        layers := max(
            getattr(around, f"{which}_num_layers", 1) or 1 for which in ("checkpoint", "recompute")
        )
    ) != 1:
        return f"{what} of {layers} layers at a time"
    if config.checkpointing == "offload" or config.scope == "auto":
        return f'{what}, with sp_overlap.checkpointing "offload" or scope "auto"'
    if any(
        (
            of_deepspeed.PARTITION_ACTIVATIONS,
            of_deepspeed.CPU_CHECKPOINT,
            of_deepspeed.CONTIGUOUS_CHECKPOINTING,
        )
    ):
        return f"{what} with partitioned, contiguous or offloaded activations"
    # Its numbers are drawn from generators that Megatron keeps, and puts back for its own
    # checkpoints only.
    inside = (inner for layer in around.layers for inner in layer.modules())
    if any(
        isinstance(inner, nn.Dropout) and inner.p > 0 or getattr(inner, "dropout_p", 0)
        for inner in inside
    ):
        return f"{what} with dropout"
    return ""


def _is_checkpointed(around: Any) -> bool:
    return (
        getattr(around, "checkpoint_activations", False)
        or getattr(around, "recompute_granularity", None) == "full"
    )


@contextlib.contextmanager
def _cut_at_attention(
    around: Any,
    layers_of_chain: Sequence[ChainedLayer],
    forward_pass: ForwardPass,
    config: SpOverlapConfig,
) -> Iterator[None]:
    """The body is a forward of ``around``, whose ``layers_of_chain`` do the checkpointing of its layers if
    they can.
    """
    original = getattr(around, CHECKPOINTED, None)
    if original is None or CHECKPOINTED in vars(around):
        yield
        return

    def forward(
        hidden_states,
        attention_mask,
        encoder_output,
        enc_dec_attn_mask,
        rotary_pos_emb,
        *args,
        **kwargs,
    ):
        layers = [around._get_layer(at) for at in range(around.num_layers)]
        able = _is_checkpointed(around) and not _no_rerun(around, config) and encoder_output is None
        if (
            not able
            or layers != [chained.module for chained in layers_of_chain]
            or any(chained.why_not(forward_pass) for chained in layers_of_chain)
        ):
            return original(
                hidden_states,
                attention_mask,
                encoder_output,
                enc_dec_attn_mask,
                rotary_pos_emb,
                *args,
                **kwargs,
            )
        forward_pass.recompute, losses = (
            "all" if config.checkpointing == "recompute" else "but attention",
            [],
        )
        for layer in layers:
            output = layer(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb)
            hidden_states, loss = (
                output if isinstance(output, tuple) else (output, output.new_zeros(()))
            )
            losses.append(loss)
        return hidden_states, losses

    setattr(around, CHECKPOINTED, forward)
    try:
        yield
    finally:
        delattr(around, CHECKPOINTED)


def around(
    chains: list[list[ChainedLayer]], passes: ForwardPasses, sp_size: int
) -> list[HostModule]:
    """What rebinds the layers, and the modules that run them."""

    def pass_of(module: Any, layers_of_chain: list[ChainedLayer]) -> Callable:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if passes.forward_pass is not None or hidden is None:  # of a stage of a pipeline
                return original(*args, **kwargs)
            with (
                passes.running([len(hidden)] * sp_size) as forward_pass,
                _cut_at_attention(module, layers_of_chain, forward_pass, passes.config),
            ):
                return original(*args, **kwargs)

        return forward

    of_module: dict[Any, list[ChainedLayer]] = {}
    for chained in (chained for chain in chains for chained in chain):
        if isinstance(chained, ParallelTransformerLayer):
            of_module.setdefault(chained.around, []).append(chained)
    hosts = [
        HostModule(module, partial(rebind, module, pass_of(module, layers_of_chain), False))
        for module, layers_of_chain in of_module.items()
    ]
    return hosts + [
        HostModule(chained.module, partial(rebind, chained.module, chained.forward))
        for layers_of_chain in of_module.values()
        for chained in layers_of_chain
    ]
