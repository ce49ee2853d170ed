"""Attention layers of every method, small."""

import torch

from nalaformer.attention import METHODS, Attention, build

LINEAR_METHODS = [name for name, config in METHODS.items() if config.feature_map is not None]


def make(method: str, *, dim: int = 16, num_heads: int = 2, dtype: torch.dtype = torch.float32, **options) -> Attention:
    """With parameters moved away from their start, where zeros would hide mistakes."""
    layer = build(method, dim=dim, num_heads=num_heads, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer.to(dtype)
