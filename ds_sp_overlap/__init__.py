"""Overlapped Ulysses sequence parallelism for DeepSpeed.

Importing this package makes ``deepspeed.initialize`` honour an ``sp_overlap`` section in its config.
"""

from .attention import DistributedAttention
from .config import SpOverlapConfig
from .integrations import Report, disable, enable
from .integrations.deepspeed import install
from .integrations.megatron_bridge import bridge
from .rotary import Rotary
from .self_attention import SelfAttention

__all__ = ["DistributedAttention", "Report", "Rotary", "SelfAttention", "SpOverlapConfig", "disable", "enable"]
__version__ = "0.1.0"

install()
bridge()
