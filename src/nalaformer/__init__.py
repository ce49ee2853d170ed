"""Linear-time attention for PyTorch: NaLaFormer and related methods, as layers, timm backbones and language models."""

from typing import TYPE_CHECKING, Any

from . import attention, feature_maps, ops, published
from .conversion import convert, filter_tokens, fold, load_converted, plan_conversion
from .feature_maps import FEATURE_MAPS, FeatureMap, feature_map
from .ops import (
    LinearState,
    Rotary,
    attention_weights,
    delta_rule,
    delta_step_,
    get_backend,
    global_query_weight,
    linear_attention,
    recurrent_linear_attention,
    recurrent_step_,
    set_backend,
    use_backend,
)

if TYPE_CHECKING:
    from .models.diffusion import NaLaDiT, NaLaDiTPipeline

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    """Return a model class that diffusers looks up in this package, by the name that it writes into a pipeline's folder."""
    if name not in ("NaLaDiT", "NaLaDiTPipeline"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .models import diffusion

    return getattr(diffusion, name)


__all__ = [
    "FEATURE_MAPS",
    "FeatureMap",
    "LinearState",
    "NaLaDiT",
    "NaLaDiTPipeline",
    "Rotary",
    "attention",
    "attention_weights",
    "convert",
    "delta_rule",
    "delta_step_",
    "feature_map",
    "feature_maps",
    "filter_tokens",
    "fold",
    "get_backend",
    "global_query_weight",
    "linear_attention",
    "load_converted",
    "ops",
    "plan_conversion",
    "published",
    "recurrent_linear_attention",
    "recurrent_step_",
    "set_backend",
    "use_backend",
]
