"""Put linear attention into a pretrained model, keeping its projection weights."""

from .adapters import DiffusersAttention, TimmAttention, TimmWindowAttention, TransformersAttention
from .folding import fold
from .plan import Replacement, convert, plan_conversion
from .records import load_converted
from .token_filter import TokenFilter, filter_tokens

__all__ = [
    "DiffusersAttention",
    "Replacement",
    "TimmAttention",
    "TimmWindowAttention",
    "TokenFilter",
    "TransformersAttention",
    "convert",
    "filter_tokens",
    "fold",
    "load_converted",
    "plan_conversion",
]
