"""Put linear attention into a model that somebody else built, keeping its projection weights."""

from .adapters import DiffusersAttention, TimmAttention, TimmWindowAttention, TransformersAttention
from .plan import Replacement, convert, plan_conversion

__all__ = [
    "DiffusersAttention",
    "Replacement",
    "TimmAttention",
    "TimmWindowAttention",
    "TransformersAttention",
    "convert",
    "plan_conversion",
]
