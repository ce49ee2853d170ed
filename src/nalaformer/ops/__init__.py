"""Mathematics on tensors: the attention op, its state, what surrounds it, and the choice of the implementation."""

from .backend import get_backend, set_backend, use_backend
from .checks import check_key_mask
from .delta import delta_rule, delta_step_
from .depthwise import depthwise_conv
from .features import FeatureMapLike, ScaledFeatures, cheap_to_look_at, compute_dtype, hide, outside_autocast
from .interface import attention_weights, linear_attention, recurrent_linear_attention, recurrent_step_
from .kernel_spec import KernelSpec
from .key_weight import global_query_weight
from .layer_norm import layer_norm
from .linear_form import received_attention
from .residual import scaled_residual
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
    "depthwise_conv",
    "get_backend",
    "global_query_weight",
    "hide",
    "layer_norm",
    "linear_attention",
    "outside_autocast",
    "received_attention",
    "recurrent_linear_attention",
    "recurrent_step_",
    "rotary_frequencies",
    "scaled_residual",
    "set_backend",
    "use_backend",
]
