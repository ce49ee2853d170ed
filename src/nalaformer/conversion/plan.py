"""Find the layers of a model that are softmax attention, and replace them.

Layers that look like attention and cannot be replaced are listed with the reason; docs/backbones.md has a table.
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from .adapters import Adapter
from .layer_kinds import find_layers
from .records import attach_record, keep_names_when_saved


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """An attention layer of a model, and the reason if it cannot be replaced."""

    name: str
    """The name of the layer in the model."""
    kind: str
    """The class of the layer."""
    dim: int
    num_heads: int
    obstacle: str
    """The reason why the layer stays; empty: it is replaced."""


def convert(model: nn.Module, attention: str = "nalaformer", *, only: str = "", **options: Any) -> nn.Module:
    """Replace softmax attention by the linear attention of a method, in place, and return the model.

    The weights of the projections stay; the parameters of the feature map are new, so the model needs fine-tuning. `only`: a
    regular expression that the names of the layers to replace must contain. Options as in attention.build; gates and norms are
    off by default. `plan_conversion` lists what would be replaced, and `load_converted` loads a saved model.
    """
    plan = plan_conversion(model, only=only)
    replacements = [found for found in plan if not found.obstacle]
    if not replacements:
        chosen = f" among the names that contain {only!r}" if only else ""
        reason = f" ({plan[0].name}: {plan[0].obstacle})" if plan else ""
        raise ValueError(
            f"found no attention that can be replaced{chosen}{reason}; plan_conversion(model) lists what looks like it and why "
            "it stays"
        )
    # all layers are built before the first is inserted, so that an error leaves the model unchanged
    made = {}
    names = {found.name for found in replacements}
    for name, module, layer_kind in find_layers(model):
        if name in names:
            made[name] = layer = layer_kind.convert(module, attention, options)
            attach_record(layer, layer_kind.record)
            if isinstance(layer, Adapter):
                layer.config = next((part.config for part in module.modules() if hasattr(part, "config")), None)
            layer.train(module.training)
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
    keep_names_when_saved(model)
    return model


def plan_conversion(model: nn.Module, *, only: str = "") -> list[Replacement]:
    """List the layers that `convert` would replace and those that stay, with the reason; the model is not changed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}; timm.create_model makes one by its name")
    try:
        pattern = re.compile(only)
    except (re.error, TypeError) as error:
        raise ValueError(f"only must be a regular expression over names of layers, got {only!r}: {error}") from error
    plan = []
    for name, module, layer_kind in find_layers(model):
        if not pattern.search(name):
            continue
        if not name:
            raise ValueError("the model must hold attention layers, got a single one; build a new one with attention.build")
        dim = next(layer.in_features for layer in module.modules() if isinstance(layer, nn.Linear))
        plan.append(
            Replacement(
                name=name,
                kind=type(module).__name__,
                dim=dim,
                num_heads=layer_kind.num_heads(module),
                obstacle=layer_kind.obstacle(module),
            )
        )
    return plan
