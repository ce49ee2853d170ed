"""Query-side and key-side feature maps, one file per paper."""

from .base import FeatureMap
from .focused import Focused
from .norm_aware import NormAware
from .norm_preserving import NormPreserving
from .polarity import Polarity, PolarityExp
from .reflection import Reflection
from .registry import FEATURE_MAPS, feature_map, map_option_names
from .simple import Elu, Hedgehog, Relu, Split

__all__ = [
    "FEATURE_MAPS",
    "Elu",
    "FeatureMap",
    "Focused",
    "Hedgehog",
    "NormAware",
    "NormPreserving",
    "Polarity",
    "PolarityExp",
    "Reflection",
    "Relu",
    "Split",
    "feature_map",
    "map_option_names",
]
