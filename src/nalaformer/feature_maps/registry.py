"""The registry of feature maps."""

from inspect import Parameter, signature

from ..registry import Registry, unknown_name
from .base import FeatureMap

FEATURE_MAPS: Registry[type[FeatureMap]] = Registry("feature map")


def map_option_names(name: str) -> list[str]:
    """Return the names of the options that a feature map takes."""
    parameters = signature(FEATURE_MAPS[name]).parameters.values()
    return [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY and p.name not in ("num_heads", "head_dim")]


def feature_map(name: str, *, num_heads: int, head_dim: int, **options: object) -> FeatureMap:
    """Build the feature map of that name; the options are those of its class."""
    known = map_option_names(name)
    for option in options:
        if option not in known:
            raise unknown_name(f"option of the feature map {name!r}:", option, known)
    return FEATURE_MAPS[name](num_heads=num_heads, head_dim=head_dim, **options)
