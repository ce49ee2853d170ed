"""Every feature map by name, with its main options."""

from typing import Any

import torch
from torch import Tensor

from helpers.products import FULL
from nalaformer import FEATURE_MAPS

# options that change what a map computes; the registry alone would test the defaults only
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "norm_aware+cosine": ("norm_aware", {"direction": "cosine"}),
    "norm_aware+learnable": ("norm_aware", {"learnable": True}),
    "norm_aware+mild": ("norm_aware", {"powers": "mild", "norm_scale": "head"}),
    "focused+head": ("focused", {"norm_over": "head"}),
    "reflection+per_head": ("reflection", {"cross_head": False}),
}

MAP_NAMES = [*FEATURE_MAPS.names(), *VARIANTS]

# one of each kind, for what does not depend on the formula: parameters of each head, two streams and a scale of each row, a
# norm over all heads, a product first, and heads that are mixed
KINDS = MAP_NAMES if FULL else ["norm_aware+learnable", "polarity", "focused", "hedgehog", "reflection"]

# looks at all tokens at once, so it has no causal form and stands in none of the lists above
VARIANCE_AWARE = "reflection+variance"


def entropy(features: Tensor) -> Tensor:
    """PSE: the entropy of the features over the channels."""
    share = features / features.sum(-1, keepdim=True)
    return -torch.xlogy(share, share).sum(-1)
