"""Inputs, a map and settings of hybrid attention."""

import torch

import nalaformer
from nalaformer.attention.hybrid import HybridSettings

# linear_mass: reached by texts of four chunks
SMALL = HybridSettings(chunk_size=8, salient_per_chunk=2, linear_mass=10)


def make_inputs(tokens, *, batch=2, heads=4, key_heads=2, head_dim=6, dtype=torch.float64):
    q = torch.randn(batch, tokens, heads, head_dim, dtype=dtype)
    k, v = (torch.randn(batch, tokens, key_heads, head_dim, dtype=dtype) for _ in range(2))
    return 2 * q, 2 * k, v


def make_map(heads=4, head_dim=6, dtype=torch.float64):
    return nalaformer.feature_map("norm_preserving", num_heads=heads, head_dim=head_dim).to(dtype)
