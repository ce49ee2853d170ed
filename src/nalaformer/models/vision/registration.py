"""Registration of every named backbone with timm."""

from collections.abc import Callable
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import FeatureGetterNet

from .backbone import Backbone, translate_published_names
from .variants import VARIANTS, build

__all__: list[str] = []


def accept_whole_checkpoints(features: FeatureGetterNet, names: set[str]) -> None:
    """Let features_only=True load files of the whole network, with our names or the authors', and drop what timm cut off.

    names: parameters of the whole network; tensors with other names stay, so that torch rejects them.
    """

    def hook(_: Any, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
        if prefix or any(key.startswith("model.") for key in state_dict):
            return
        translate_published_names(features.model, state_dict, prefix)
        kept = set(features.model.state_dict())
        for key in list(state_dict):
            value = state_dict.pop(key)
            if key in kept or key not in names:
                state_dict[f"model.{key}"] = value

    features.register_load_state_dict_pre_hook(hook)


def entry(name: str) -> Callable[..., Backbone]:
    """Return timm's entry point for one backbone."""

    def create(pretrained: bool = False, **options: Any) -> Backbone:
        features = {"out_indices": (0, 1, 2, 3), "feature_cls": "getter", "flatten_sequential": True}
        features |= options.pop("feature_cfg", None) or {}
        if options.get("features_only") and "output_fmt" in options:
            features["output_fmt"] = options.pop("output_fmt")
        names: set[str] = set()

        def build_whole(**changes: Any) -> Backbone:
            model = build(name, **changes)
            names.update(model.state_dict())
            return model

        model = build_model_with_cfg(build_whole, name, pretrained, feature_cfg=features, **options)
        if isinstance(model, FeatureGetterNet):
            accept_whole_checkpoints(model, names)
        return model

    # timm registers a function under its name, and looks for default_cfgs in its module
    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    create.__doc__ = f"{name}: see nalaformer.models.vision.card({name!r})."
    return create


default_cfgs = generate_default_cfgs(
    {
        name: {
            "url": "",
            "num_classes": 1000,
            "input_size": (3, *variant.config.input_size),
            "pool_size": variant.config.grid(3),
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
