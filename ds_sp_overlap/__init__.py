"""Overlapped Ulysses sequence parallelism for DeepSpeed.

Importing this package makes ``deepspeed.initialize`` honour an ``sp_overlap`` section in its config.

Rooms, each of which imports from those above it alone:

    schedule       the order of work in a layer, as plain data; drawn, checked and played. Read it first
    say            warnings that are said once
    config         the ``sp_overlap`` section
    rotary         rotary position embedding
    relayout       pack and unpack, PyTorch's and compiled
    profiling      clocks, optimizer steps, the timeline of what each exchange cost
    exchange       geometry (who holds what), the sp group with its streams, transports, the exchange itself, its check
    autotune       choice of the number of head groups by timing
    attention      runs a layer by its schedule: the whole layer (`SelfAttention`) or the drop-in (`DistributedAttention`); chains of layers
    integrations   DeepSpeed, Megatron-DeepSpeed, transformers: find attention layers, rebind their forward
    planner        what overlap would be worth, before anything is run
    doctor, cli    the self-check, and ``ds-sp-overlap``

The way of a query from a rebound forward to the wire, each calling the next: ``integrations.rebinding`` (was put in place of the
layer's forward) -> ``integrations.transformers_driven`` (what the layer asks for) -> ``attention.self_attention`` (the whole layer) ->
``attention.linear`` (the projections' own hooks) -> ``attention.projections`` (one node of autograd) ->
``attention.execution`` (walks the schedule) -> ``exchange.exchange`` -> ``exchange.in_flight`` (packed) -> ``exchange.transport``.

In a window ``attention.window`` stands in place of ``projections`` and ``execution``; in a chain of layers ``integrations.chains``,
``attention.chain`` and ``attention.block`` do, from the layer's forward on.

Before it projects, the layer asks ``attention.layer``: agreement of the ranks, number of head groups, the schedule. In the drop-in
the way leads from there straight to ``attention.execution``, since q is projected already. The way back is autograd's:
``attention.output`` (do), ``exchange.exchange`` (dq, dk, dv start), ``attention.projections`` (dx and the weights).
"""

from .attention.drop_in import DistributedAttention
from .attention.heads import PerHead
from .attention.kept import keep_attention
from .attention.self_attention import SelfAttention
from .config import SpOverlapConfig
from .integrations.deepspeed import install
from .integrations.megatron_bridge import bridge
from .integrations.registry import Report, disable, enable
from .rotary import Rotary

__all__ = [
    "DistributedAttention", "PerHead", "Report", "Rotary", "SelfAttention", "SpOverlapConfig", "disable", "enable", "keep_attention",
]  # fmt: skip
__version__ = "0.2.0"

install()
bridge()
