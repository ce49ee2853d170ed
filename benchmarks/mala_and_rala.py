"""MALA and RALA beside the op that they extend, and beside their published formulas."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nalaformer.feature_maps import feature_map
from nalaformer.ops import linear_attention, use_backend

from .cases import Case
from .implementations import IMPLEMENTATIONS, Attend, Implementation

# images have no more tokens, and the longest cases take longest
MOST_TOKENS = {"cpu": 4096, "cuda": 69696}


def attend_with(q: Tensor, k: Tensor, v: Tensor, *, method: str) -> Tensor:
    """elu + 1 features with the extension of a method: "elu" (none), "mala" or "rala"; [B, N, H, D]."""
    phi = feature_map("elu", num_heads=q.shape[2], head_dim=q.shape[3])
    weight = "global_query" if method == "rala" else None
    contrast = "mean_score" if method == "mala" else None
    return linear_attention(q, k, v, feature_map=phi, contrast=contrast, key_weight=weight)


def oracle(q: Tensor, k: Tensor, v: Tensor, places: Tensor | None, *, method: str) -> Tensor:
    with use_backend("reference"):
        return attend_with(q, k, v, method=method)


def mala_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MALA as its formula reads, eager and in float32; all [B, H, N, D]."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    q, k, v = F.elu(q.float()) + 1, F.elu(k.float()) + 1, v.float()
    z = q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) * scale
    attended = q @ (k.transpose(-2, -1) @ v * (scale / k.shape[-2]))
    return (attended * (1 + 1 / (z + 1e-6)) - z * v.mean(dim=-2, keepdim=True)).to(dtype)


def rala_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """RALA as its formula reads, eager and in float32; all [B, H, N, D]."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    q, k, v = F.elu(q.float()) + 1, F.elu(k.float()) + 1, v.float()
    scores = q.mean(dim=-2, keepdim=True) @ k.transpose(-2, -1) * scale
    k = k * (scores.softmax(dim=-1) * k.shape[-2]).transpose(-2, -1)
    z = 1 / (q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) + 1e-6)
    return (q @ (k.transpose(-2, -1) @ v / k.shape[-2]) * z).to(dtype)


FORMULAS = {"mala": mala_formula, "rala": rala_formula}


def make_compiled(case: Case, *, method: str) -> Attend:
    torch.compiler.reset()
    return torch.compile(FORMULAS[method], dynamic=False)


def make_eager(case: Case, *, method: str) -> Attend:
    return FORMULAS[method]


def make_ours(case: Case, *, method: str) -> Attend:
    return partial(attend_with, method=method)


for _method in ("elu", "mala", "rala"):
    _shared: dict[str, Any] = {
        "oracle": partial(oracle, method=_method),
        "most_tokens": MOST_TOKENS,
        # the weights of RALA depend on every query, so the truth needs them all
        "needs_all_queries": _method == "rala",
        # a contrast magnifies what rounding makes of the features
        "slack": 2.0 if _method == "mala" else 1.0,
    }
    IMPLEMENTATIONS.register(f"{_method} attention")(Implementation(make=partial(make_ours, method=_method), **_shared))
    if _method in FORMULAS:
        _published = _shared | {"heads_first": True, "slack": 4.0}
        IMPLEMENTATIONS.register(f"{_method} as published")(
            Implementation(make=partial(make_eager, method=_method), **_published)
        )
        IMPLEMENTATIONS.register(f"{_method} as published, compiled")(
            Implementation(make=partial(make_compiled, method=_method), devices=("cuda",), **_published)
        )
