"""Overlapped Ulysses sequence parallelism for DeepSpeed.

Importing this package makes ``deepspeed.initialize`` honour an ``sp_overlap`` section in its config.
"""

from .attention.drop_in import DistributedAttention
from .attention.self_attention import SelfAttention
from .config import SpOverlapConfig
from .integrations.deepspeed import install
from .integrations.megatron_bridge import bridge
from .integrations.registry import Report, disable, enable
from .rotary import Rotary

__all__ = ["DistributedAttention", "Report", "Rotary", "SelfAttention", "SpOverlapConfig", "disable", "enable"]
__version__ = "0.1.0"

install()
bridge()
