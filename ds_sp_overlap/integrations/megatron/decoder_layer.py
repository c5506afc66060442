"""Megatron-DeepSpeed: lets ``ParallelTransformerLayer`` run in a chain (`chains`).

A layer is read as a decoder layer of transformers is (`inspect.decoder_layer`), but has another
form: hidden states are [s/P, b, m]; attention, MLP and linear layers return ``(output, bias)``; the
layer returns ``(hidden states, 0)``.

If Megatron checkpoints the layers one by one, the chain does that instead, and splits each layer at
attention. See Note [Checkpoints of Megatron].
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...attention.self_attention import SelfAttention
from ...config import SpOverlapConfig
from ..chains import ChainedLayer, ForwardPass, ForwardPasses
from ..find_chains import place_in_list
from ..inspect.accounting import Unknown
from ..inspect.decoder_layer import BlockReader
from ..inspect.tokenwise import Form
from ..layers import HostModule
from ..rebinding import rebind
from .traced_globals import replacement

# Note [Checkpoints of Megatron]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Under activation checkpointing the list of layers does not call its layers. It calls a method,
# `CHECKPOINTED`, that runs them under a checkpoint, and a layer under a checkpoint can't run in a
# chain. So that method is replaced for the time of a forward: it calls the layers one after the
# other, and the chain recomputes them in backward. The method stays if the layers are checkpointed
# in a way that a chain can't imitate. Dropout is such a case: its numbers are drawn from generators
# that Megatron stores, and restores for its own checkpoints only.
CHECKPOINTED = "_checkpointed_forward"

# Translates the arguments of an attention by name into keywords of its driver. The second argument
# holds values that the layers of one forward of the model share.
TranslateArguments = Callable[[dict[str, Any], dict], dict[str, Any]]


def _width(attention: Any) -> int:
    """Return m of an attention, whole even if ZeRO-3 partitioned the weight."""
    weight = attention.dense.weight
    return getattr(weight, "ds_shape", weight.shape)[0]


class ParallelTransformerLayer(ChainedLayer):
    """A decoder layer whose attention is driven whole.

    Args:
        name: The layer's name in the model.
        module: The layer.
        child: The name of the attention in the layer.
        attention: What drives the attention.
        translate: Translates the arguments of the attention.
        stack: The module that has the layer in its list of layers; with None, Unknown is raised.
        is_linear: Returns whether a module is a linear layer of Megatron without extras.
        forward_passes: The forwards of the model.

    Raises:
        Unknown: if the layer can't run in a chain.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        child: str,
        attention: SelfAttention,
        translate: TranslateArguments,
        stack: nn.Module | None,
        is_linear: Callable[[nn.Module], bool],
        forward_passes: ForwardPasses,
    ):
        if stack is None:
            raise Unknown("it is in no list of layers")
        if getattr(module, "num_experts", 1) > 1:
            raise Unknown("a mixture of experts")
        if getattr(module, "fp32_residual_connection", False):
            raise Unknown("residuals in fp32")
        form = Form(
            _width,
            is_linear,
            token_dim=0,
            biases=True,
            absent=("aggregated_moe_loss",),
            accounted=False,
            replacement=replacement,
        )
        # On a CPU, its fused norm prints a message in every call.
        with contextlib.redirect_stdout(io.StringIO()):
            reader = BlockReader(module, child, form, known=forward_passes.known)
        self.translate, self.stack = translate, stack
        super().__init__(name, module, reader, attention, forward_passes)

    @property
    def lacks(self) -> str:
        """The reason why, in training with checkpoints, layers run one by one; may be empty."""
        reason = _why_chain_cant_recompute(self.stack, self.forward_passes.config)
        return reason and f"in training one by one: {reason}"

    def use(self) -> None:
        """Do nothing, since the modules of a Megatron layer are never replaced."""

    def why_recomputed(self) -> str:
        """Return no reason: `ChainedLayer` itself notices every checkpoint of Megatron."""
        return ""

    def chain_arguments(
        self, forward_pass: ForwardPass, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what `translate` makes; the layers of one forward share its tables."""
        return self.translate(arguments, forward_pass.shared)


def stack_of(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    """Return the module that has the layer ``name`` in its list of layers; None if none has.

    Args:
        name: The name of the layer in the model.
        modules: The modules of the model by name.
    """
    place = place_in_list(modules, name)
    return None if place is None else modules[place[0].rpartition(".")[0]]


def _why_chain_cant_recompute(stack: Any, config: SpOverlapConfig) -> str:
    """Explain why a chain can't do the activation checkpointing of the layers of ``stack``.

    Returns:
        The reason; empty if a chain can do it, or the layers are not checkpointed.
    """
    if not _is_checkpointed(stack):
        return ""
    what = "activation checkpointing"
    if not stack.checkpoint_activations:
        if stack.recompute_method != "uniform" or stack.distribute_saved_activations:
            return f"{what} of some layers, or of activations that are spread over ranks"
    names = ("checkpoint_num_layers", "recompute_num_layers")
    layers_at_a_time = max(getattr(stack, name, 1) or 1 for name in names)
    if layers_at_a_time != 1:
        return f"{what} of {layers_at_a_time} layers at a time"
    if config.checkpointing == "offload" or config.scope == "auto":
        return f'{what}, with sp_overlap.checkpointing "offload" or scope "auto"'
    # Looked at in each call, since a program may change these settings.
    from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing

    if (
        deepspeed_checkpointing.PARTITION_ACTIVATIONS
        or deepspeed_checkpointing.CPU_CHECKPOINT
        or deepspeed_checkpointing.CONTIGUOUS_CHECKPOINTING
    ):
        return f"{what} with partitioned, contiguous or offloaded activations"
    for layer in stack.layers:
        for part in layer.modules():
            # See Note [Checkpoints of Megatron].
            drops = isinstance(part, nn.Dropout) and part.p > 0
            if drops or getattr(part, "dropout_p", None):
                return f"{what} with dropout"
    return ""


def _is_checkpointed(stack: Any) -> bool:
    """Return whether activation checkpointing is on for the layers of ``stack``."""
    return (
        getattr(stack, "checkpoint_activations", False)
        or getattr(stack, "recompute_granularity", None) == "full"
    )


@contextlib.contextmanager
def _chain_checkpoints(
    stack: Any,
    chained_layers: Sequence[ChainedLayer],
    forward_pass: ForwardPass,
    config: SpOverlapConfig,
) -> Iterator[None]:
    """Let the chain do the checkpointing of the layers of ``stack`` in the body, if it can.

    See Note [Checkpoints of Megatron].

    Args:
        stack: The module whose forward the body runs.
        chained_layers: Its layers that may run in a chain.
        forward_pass: The forward that is running.
        config: The ``sp_overlap`` section.
    """
    # Nothing to do for a stack without such a method, or one on which somebody has replaced it.
    original = getattr(stack, CHECKPOINTED, None)
    if original is None or CHECKPOINTED in vars(stack):
        yield
        return

    def forward(
        hidden_states: Tensor,
        attention_mask: Any,
        encoder_output: Any,
        enc_dec_attn_mask: Any,
        rotary_pos_emb: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run all layers of the stack; takes the place of its method `CHECKPOINTED`.

        Returns:
            The hidden states [s/P, b, m], and the list of the MoE losses of the layers.
        """
        layers = [stack._get_layer(number) for number in range(stack.num_layers)]
        # A chain can't leave out layers, nor cross-attend to the output of an encoder.
        able = (
            _is_checkpointed(stack)
            and not _why_chain_cant_recompute(stack, config)
            and encoder_output is None
            and layers == [layer.module for layer in chained_layers]
            and not any(layer.why_not(forward_pass) for layer in chained_layers)
        )
        if not able:
            return original(
                hidden_states,
                attention_mask,
                encoder_output,
                enc_dec_attn_mask,
                rotary_pos_emb,
                *args,
                **kwargs,
            )
        recomputes_all = config.checkpointing == "recompute"
        forward_pass.recompute = "all" if recomputes_all else "but attention"
        losses = []
        for layer in layers:
            output = layer(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb)
            if not isinstance(output, tuple):
                output = output, output.new_zeros(())
            hidden_states, loss = output
            losses.append(loss)
        return hidden_states, losses

    setattr(stack, CHECKPOINTED, forward)
    try:
        yield
    finally:
        delattr(stack, CHECKPOINTED)


def hosts_of(
    chains: list[list[ChainedLayer]], forward_passes: ForwardPasses, sp_size: int
) -> list[HostModule]:
    """Return the modules whose forward must be rebound: stacks, then their chained layers.

    Args:
        chains: The chains of the model.
        forward_passes: The forwards of the model.
        sp_size: ``P``. Every rank is taken to have as many tokens as this one.
    """
    layers_by_stack: dict[Any, list[ChainedLayer]] = {}
    for chain in chains:
        for layer in chain:
            if isinstance(layer, ParallelTransformerLayer):
                layers_by_stack.setdefault(layer.stack, []).append(layer)
    hosts = []
    for stack, layers in layers_by_stack.items():
        forward = _forward_of_stack(stack, layers, forward_passes, sp_size)
        hosts.append(HostModule(stack, partial(rebind, stack, forward, False)))
    for layers in layers_by_stack.values():
        for layer in layers:
            hosts.append(HostModule(layer.module, partial(rebind, layer.module, layer.forward)))
    return hosts


def _forward_of_stack(
    stack: Any, chained_layers: list[ChainedLayer], forward_passes: ForwardPasses, sp_size: int
) -> Callable:
    """Return a forward for ``stack`` that runs its layers as one forward of the model.

    Outside of this forward, chained layers run by themselves.
    """
    original = stack.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        # The stack around this one has begun the forward already. Stages of a pipeline may be given
        # None.
        if forward_passes.forward_pass is not None or hidden is None:
            return original(*args, **kwargs)
        config = forward_passes.config
        with (
            forward_passes.running([len(hidden)] * sp_size) as forward_pass,
            _chain_checkpoints(stack, chained_layers, forward_pass, config),
        ):
            return original(*args, **kwargs)

    return forward
