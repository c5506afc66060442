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
    attention      runs a layer by its schedule: the block (`SelfAttention`) and the drop-in (`DistributedAttention`)
    integrations   DeepSpeed, Megatron-DeepSpeed, transformers: find attention layers, rebind their forward
    planner        what overlap would be worth, before anything is run
    doctor, cli    the self-check, and ``ds-sp-overlap``

The way of a query from a model's forward to the wire: ``integrations`` (the forward that was put in place) ->
``attention.self_attention`` (the block) -> ``attention.layer`` (agreement of the ranks, number of head groups, the schedule) ->
``attention.linear`` (the projections' own hooks) -> ``attention.nodes`` (one node, which projects) -> ``attention.execution`` (in its
turn) -> ``exchange.exchange`` (packed) -> ``exchange.transport``. In the drop-in it goes from ``attention.layer`` straight to
``attention.execution``, since it is projected already. The way back is autograd's: ``attention.nodes`` (do),
``exchange.exchange`` (dq, dk, dv start), ``attention.nodes`` (dx and the weights).
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
