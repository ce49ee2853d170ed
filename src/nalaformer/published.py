"""The authors' released checkpoints, by their own parameter names: read without running code, translated, loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from .published_names import FAMILIES, translate
from .registry import unknown_name

if TYPE_CHECKING:
    from .models import Backbone

__all__ = ["FAMILIES", "load", "read", "translate"]

# under which key training programs keep the weights of a checkpoint: the averaged ones are those that were evaluated
INSIDE = ("state_dict_ema", "model_ema", "state_dict", "model")


def load(weights: Mapping[str, Tensor] | str | Path, family: str, **config: Any) -> "Backbone":
    """The backbone with published weights: a file (see `read`) or a state dict, in the authors' names.

    `config`: what differs from the family's tiny model, as fields of models.BackboneConfig; classes are counted on the
    weights. The published variants have names: timm.create_model("nalaformer_s", checkpoint_path=file) does the same.
    """
    from .models import LAYOUTS
    from .models.variants import build_from

    if family not in FAMILIES:
        raise unknown_name("family of published weights", family, FAMILIES)
    if isinstance(weights, str | Path):
        weights = read(weights)
    translated = translate(weights, family)
    if "head.fc.weight" in translated:
        config.setdefault("num_classes", translated["head.fc.weight"].shape[0])
    if family in LAYOUTS:
        layout = LAYOUTS[family]
    else:
        layout = LAYOUTS["pvt" if any(name.startswith("block1.") for name in weights) else "swin"]
        config = {"family": family, "attention": family} | config
    model = build_from(layout, **config)
    model.load_state_dict(translated)
    return model.eval()


def read(path: str | Path) -> dict[str, Tensor]:
    """The weights in a checkpoint file: safetensors, or a .pth file of which nothing but tensors is read, never code."""
    path = Path(path)
    if path.suffix == ".safetensors":
        return load_file(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as weights alone: {' '.join(str(error).split())[:200]}; "
            "a file that holds other objects would run their code, so save its state dict anew where you trust it"
        ) from error
    for key in INSIDE:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} must hold a state dict, or one under {', '.join(INSIDE)}; got {type(content).__name__}")
    # what distributed training and torch.compile put in front
    return {name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in content.items()}
