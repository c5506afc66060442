"""Overlapped Ulysses sequence parallelism for DeepSpeed.

Importing this package makes ``deepspeed.initialize`` honour an ``sp_overlap`` section in its
config, whether DeepSpeed is imported before this package or after it. The import loads neither
DeepSpeed nor torch: a public name of the package is imported on its first use.

The package consists of rooms, which are files and folders. A room imports only from the rooms above
it in this list, and from the rooms inside it:

    schedule       the order of work in a layer, as plain data; drawn, checked and simulated. Read
                   it first
    warn           log messages, shown on rank 0
    launch_order   asks NCCL to start kernels in the order of their launch
    config         the ``sp_overlap`` section
    rotary         rotary position embedding
    relayout       pack and unpack kernels, PyTorch's and compiled
    profiling      clocks, optimizer steps, and the trace of the cost of each exchange
    exchange       the tokens and heads of each rank (geometry, shares), the sp group with its
                   streams, transports, the exchange itself, and the check of its results
    autotune       choice of the number of head groups by timing
    attention      one layer: the whole layer (`SelfAttention`) or the drop-in
                   (`DistributedAttention`)
      memory       the tensors that a layer saves over activation checkpoints, offloads, recomputes
      runtime      projections, exchanges and local attention, in the order of a schedule
    integrations   finds attention layers and rebinds their forward
      inspect      finds out what the forward of a transformers module computes
      sequence     positions, documents, masks of the whole sequence
      transformers, megatron, deepspeed
    tools          planner, timeline of a trace, self-check, command line; loaded when called

The way of a query from a rebound forward to the network, each file calling the next:
``integrations.rebinding`` (replaces the layer's forward) ->
``integrations.transformers.driven`` (fetches positions, masks and rotary tables) ->
``attention.self_attention`` (the whole layer) -> ``attention.layer`` (agrees on the call with the
other ranks) -> ``attention.self_attention`` (runs the call) -> ``attention.runtime.walk`` (piece
after piece) -> ``attention.runtime.linear`` (the projections' own hooks) ->
``attention.runtime.nodes`` (one node of autograd for each piece) ->
``attention.runtime.operations`` (executes a step of the schedule) ->
``exchange.in_flight`` (packs) -> ``exchange.transport``.

Before it projects, the layer calls ``attention.layer``. There the ranks compare their calls, and
choose the number of head groups and the schedule, for the heads and tokens of each rank that
``attention.call_geometry`` computes. The drop-in (``attention.projected``) calls
``attention.layer``, too, and then ``attention.runtime.walk`` directly, since its q is already
projected. In backward, autograd runs the pieces from the last to the first. With a window, the
whole layer is a single piece.
"""

import importlib
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook

from . import profiling
from .integrations.deepspeed import accelerate
from .integrations.megatron.bridge import bridge
from .launch_order import ask_for_launch_order

if TYPE_CHECKING:
    from .attention.arguments import PerHead
    from .attention.declared import attention_function
    from .attention.drop_in import DistributedAttention
    from .attention.memory.checkpoint_cache import keep_attention
    from .attention.self_attention import SelfAttention
    from .config import SpOverlapConfig
    from .integrations.registry import Report, disable, enable
    from .rotary import Rotary

__all__ = [
    "DistributedAttention", "PerHead", "Report", "Rotary", "SelfAttention", "SpOverlapConfig", "attention_function", "disable",
    "enable", "keep_attention",
]  # fmt: skip
__version__ = "0.3.0"

_MODULES = {
    "DistributedAttention": "attention.drop_in",
    "PerHead": "attention.arguments",
    "Report": "integrations.registry",
    "Rotary": "rotary",
    "SelfAttention": "attention.self_attention",
    "SpOverlapConfig": "config",
    "attention_function": "attention.declared",
    "disable": "integrations.registry",
    "enable": "integrations.registry",
    "keep_attention": "attention.memory.checkpoint_cache",
}


def __getattr__(name: str) -> Any:
    """Import a public name of the package on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _write_timeline(traces: list[str]) -> None:
    """Write the timeline of ``traces``, the paths of trace files.

    Imports `tools.timeline` only now, since training itself doesn't need it.
    """
    from .tools import timeline

    timeline.write(traces)


def _honour_section(deepspeed: Any) -> None:
    """Make ``deepspeed.initialize`` honour the ``sp_overlap`` section."""
    importlib.import_module(".integrations.deepspeed.initialize", __name__)


profiling.write_timeline = _write_timeline
register_post_import_hook(_honour_section, "deepspeed")
register_post_import_hook(accelerate.install, accelerate.PLUGINS)
ask_for_launch_order()
bridge()
