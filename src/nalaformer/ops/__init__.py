"""Mathematics on tensors: the attention op, its state, and the choice of its implementation."""

from .backend import get_backend, set_backend, use_backend
from .checks import check_key_mask
from .delta import delta_rule, delta_step_
from .features import FeatureMapLike, ScaledFeatures, cheap_to_look_at, compute_dtype, hide, outside_autocast
from .interface import attention_weights, linear_attention, recurrent_linear_attention, recurrent_step_
from .kernel_spec import KernelSpec
from .rotary import Rotary, rotary_frequencies
from .state import LinearState

__all__ = [
    "FeatureMapLike",
    "KernelSpec",
    "LinearState",
    "Rotary",
    "ScaledFeatures",
    "attention_weights",
    "cheap_to_look_at",
    "check_key_mask",
    "compute_dtype",
    "delta_rule",
    "delta_step_",
    "get_backend",
    "hide",
    "linear_attention",
    "outside_autocast",
    "recurrent_linear_attention",
    "recurrent_step_",
    "rotary_frequencies",
    "set_backend",
    "use_backend",
]
