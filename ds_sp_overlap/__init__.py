"""Overlapped Ulysses sequence parallelism for DeepSpeed."""

from .attention import DistributedAttention, SelfAttention
from .config import SpOverlapConfig
__all__ = ["DistributedAttention", "SelfAttention", "SpOverlapConfig"]
__version__ = "0.1.0"
