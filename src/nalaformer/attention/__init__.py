"""Attention layers: one layer class, and the published methods as its configurations."""

from typing import Any

from .config import METHODS, AttentionConfig, configure
from .layer import Attention
from .layer_norm import LayerNorm
from .local_mix import DepthwiseConv


def build(name: str, *, dim: int, num_heads: int, **options: Any) -> Attention:
    """Build an attention layer by method: "softmax", "linear", "flatten", "polaformer", "polaformerpp", "nalaformer", "rala",
    "mala", "mirrorla".

    Options change its parts (the fields of AttentionConfig); any other option goes to its feature map:
    build("nalaformer", dim=64, num_heads=2, gate="none", direction="cosine").
    """
    return Attention(configure(name, options), dim=dim, num_heads=num_heads)


__all__ = ["METHODS", "Attention", "AttentionConfig", "DepthwiseConv", "LayerNorm", "build", "configure"]
