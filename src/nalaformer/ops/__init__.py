"""Mathematics on tensors: the attention op, its state, and the choice of its implementation."""

from .backend import get_backend, set_backend, use_backend
from .features import FeatureMapLike, ScaledFeatures, hide
from .interface import attention_weights, linear_attention, recurrent_linear_attention
from .rotary import Rotary, rotary_frequencies
from .state import LinearState

__all__ = [
    "FeatureMapLike",
    "LinearState",
    "Rotary",
    "ScaledFeatures",
    "attention_weights",
    "get_backend",
    "hide",
    "linear_attention",
    "recurrent_linear_attention",
    "rotary_frequencies",
    "set_backend",
    "use_backend",
]
