"""Feature maps by name."""

from inspect import Parameter, signature

from ..registry import Registry, unknown_name
from .base import FeatureMap

FEATURE_MAPS: Registry[type[FeatureMap]] = Registry("feature map")


def feature_map(name: str, *, num_heads: int, head_dim: int, **options: object) -> FeatureMap:
    """Make the feature map of that name; the options are those of its class."""
    cls = FEATURE_MAPS[name]
    known = [p.name for p in signature(cls).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise unknown_name(f"option of the feature map {name!r}:", option, set(known) - {"num_heads", "head_dim"})
    return cls(num_heads=num_heads, head_dim=head_dim, **options)
