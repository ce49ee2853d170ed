"""Compute the mathematics on tensors: the attention op, its state, the modules around it, and the choice of backend."""

from .backend import get_backend, set_backend, use_backend
from .checks import check_key_mask
from .delta import delta_rule, delta_step_
from .depthwise import depthwise_conv
from .exact_weights import attention_weights
from .features import FeatureMapLike, ScaledFeatures, cheap_to_look_at, compute_dtype, hide, outside_autocast
from .gated_linear import gated_linear
from .interface import linear_attention, recurrent_linear_attention, recurrent_step_
from .kernel_spec import KernelSpec
from .key_weight import global_query_weight
from .layer_norm import add_layer_norm, layer_norm
from .linear_cross_entropy import linear_cross_entropy
from .linear_form import received_attention
from .residual import scaled_residual
from .rms_norm import add_rms_norm, rms_norm
from .rotary import Rotary, rotary_frequencies
from .short_convolution import short_convolution, short_convolution_step_
from .state import LinearState
from .unit_features import unit_features

__all__ = [
    "FeatureMapLike",
    "KernelSpec",
    "LinearState",
    "Rotary",
    "ScaledFeatures",
    "add_layer_norm",
    "add_rms_norm",
    "attention_weights",
    "cheap_to_look_at",
    "check_key_mask",
    "compute_dtype",
    "delta_rule",
    "delta_step_",
    "depthwise_conv",
    "gated_linear",
    "get_backend",
    "global_query_weight",
    "hide",
    "layer_norm",
    "linear_attention",
    "linear_cross_entropy",
    "outside_autocast",
    "received_attention",
    "recurrent_linear_attention",
    "recurrent_step_",
    "rms_norm",
    "rotary_frequencies",
    "scaled_residual",
    "set_backend",
    "short_convolution",
    "short_convolution_step_",
    "unit_features",
    "use_backend",
]
