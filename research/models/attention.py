"""The attention of a small model by name: a method, a feature map in the plain layer or a delta rule; what it remembers."""

from typing import Any

import torch
from torch import nn

from nalaformer.attention import METHODS, Attention, build
from nalaformer.feature_maps import FEATURE_MAPS
from nalaformer.registry import unknown_name

from .delta_layer import DELTA_RULES, DeltaLayer


def sequence_attention(
    name: str, *, dim: int, num_heads: int, causal: bool = False, options: dict[str, Any] | None = None
) -> nn.Module:
    """The attention of a method, the plain layer with the feature map of that name, or a delta rule ("delta", "gated_delta").

    A delta rule is causal and takes feature_map (none by default) and the options of the map.
    Convolutions and positions inside attention are off unless asked for: they hide what the maps differ in.
    """
    if name in DELTA_RULES:
        if not causal:
            raise ValueError(f"the delta rule goes from token to token: {name} needs a causal model, such as recall")
        given = dict(options or {})
        map_name = given.pop("feature_map", None)
        return DeltaLayer(dim=dim, num_heads=num_heads, gated=name == "gated_delta", feature_map_name=map_name, **given)
    method, chosen = plain_method(name, {"causal": causal} | (options or {}))
    return build(method, dim=dim, num_heads=num_heads, **chosen)


def plain_method(name: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The method behind the name of a method or a feature map, and its options."""
    chosen = {"position": "none", "local_mix": "none"} | options
    if name in METHODS:
        if chosen.get("causal") and METHODS[name].map_options.get("variance") and "feature_map" not in chosen:
            # a variance over all tokens would look ahead
            chosen = {"variance": False} | chosen
        return name, chosen
    if name in FEATURE_MAPS.names():
        return "linear", {"feature_map": name} | chosen
    raise unknown_name("attention (a method or a feature map)", name, attention_names())


def attention_names() -> list[str]:
    """Return the names that `attention` of a sequence model accepts."""
    return [*METHODS, *FEATURE_MAPS.names(), *DELTA_RULES]


def state_size(model: nn.Module) -> int:
    """Numbers that a model's attention remembers of a sequence: heads x features x values, over all layers; 0 for softmax,
    which remembers every token."""
    total = 0
    for layer in model.modules():
        if isinstance(layer, Attention) and layer.map is not None:
            heads, size = layer.num_heads, layer.head_dim
            token = torch.zeros(1, 1, heads, size, device=next(layer.parameters()).device)
            # some maps look at all tokens first
            features = layer.map.given(token, token, key_mask=None, causal=False).key(token).shape[-1]
            total += layer.config.num_states * heads * features * size
        elif isinstance(layer, DeltaLayer):
            total += layer.num_heads * layer.features * layer.head_dim
    return total
