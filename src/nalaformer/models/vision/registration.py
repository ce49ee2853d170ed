"""Enters every named backbone into timm's registry."""

from collections.abc import Callable
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from .backbone import Backbone
from .variants import VARIANTS, build

__all__: list[str] = []


def entry(name: str) -> Callable[..., Backbone]:
    """timm's entry point for one backbone."""

    def create(pretrained: bool = False, **options: Any) -> Backbone:
        features = {"out_indices": (0, 1, 2, 3), "feature_cls": "getter", "flatten_sequential": True}
        features |= options.pop("feature_cfg", None) or {}
        if options.get("features_only") and "output_fmt" in options:
            features["output_fmt"] = options.pop("output_fmt")
        return build_model_with_cfg(lambda **changes: build(name, **changes), name, pretrained, feature_cfg=features, **options)

    # timm files a function under its name, and looks for its default_cfgs in its module
    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    create.__doc__ = f"{name}: see nalaformer.models.vision.card({name!r})."
    return create


default_cfgs = generate_default_cfgs(
    {
        name: {
            "url": "",
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "pool_size": (224 // variant.config.stride(3), 224 // variant.config.stride(3)),
            "crop_pct": 0.9,
            "interpolation": "bicubic",
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": "stem.0",
            "classifier": "head.fc",
            "fixed_input_size": False,
        }
        for name, variant in VARIANTS.items()
    }
)

for _name in VARIANTS:
    register_model(entry(_name))
