"""Compute the contrast of MALA (arXiv 2507.00698): attention plus its distance from the mean value.

    out_i = o_i + z_i (o_i - mean_j v_j)

o is normalised linear attention, and z_i >= 0 scales how far each token's output moves away from the mean, which is what
softmax returns for a query of small norm. MALA takes the mean score, z_i = D^-1/2 phi_q(q_i) . mean_j phi_k(k_j), so that a
larger query attends to fewer keys. Means are over the keys that token i sees; with decay, each key has its decay factor.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .features import FeatureMapLike, compute_dtype, hide, repeat_heads

MEAN_SCORE = "mean_score"
# a mean score may be the product of two features that is too large for float32
LARGEST_CONTRAST_SCALE = 1e12
LARGEST_LOG_SCALE = 60.0


class Contrast(NamedTuple):
    """Hold what a backend needs for the contrast besides the sums of attention."""

    contrast_scale: Tensor | None
    """z, [B, N, H]; None stands for the mean score."""
    mean: Tensor
    """Mean of the visible values: [B, 1, K, V], or [B, N, K, V] if causal, as each token sees them."""
    head_dim: int

    def split_streams(self, streams: int) -> "list[Contrast]":
        """Return one contrast for each stream, with the values that this stream reads."""
        return [self._replace(mean=mean) for mean in self.mean.chunk(streams, dim=-1)]

    def apply(self, out: Tensor, denominator: Tensor, *, count: Tensor, scales: list[Tensor]) -> Tensor:
        """Move out [B, N, H, V] away from the mean; denominator = phi_q . sum_j phi_k of features / exp(sum of scales)."""
        if self.contrast_scale is not None:
            return self.apply_scale(out)
        contrast_scale = mean_score(denominator, head_dim=self.head_dim, count=count, scales=scales)
        return add_contrast(out, repeat_heads(out, self.mean), contrast_scale)

    def apply_scale(self, out: Tensor) -> Tensor:
        """Move `out` away from the mean by the scale that the caller gave, which needs no sums."""
        assert self.contrast_scale is not None
        return add_contrast(out, repeat_heads(out, self.mean), self.contrast_scale)


def make_contrast(
    contrast: Tensor | str | None,
    q: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None,
    causal: bool,
    dtype: torch.dtype,
    mean: Tensor | None = None,
) -> Contrast | None:
    """Convert the argument of a call to the form that backends take. mean: the mean of the values, if the caller has it."""
    if contrast is None:
        return None
    contrast_scale = contrast.to(dtype) if isinstance(contrast, Tensor) else None
    if mean is None:
        mean = mean_value(v, key_mask=key_mask, causal=causal, dtype=dtype)
    return Contrast(contrast_scale, mean, q.shape[-1])


def running_mean_score(feature_map: FeatureMapLike, q: Tensor, k: Tensor, *, key_mask: Tensor | None) -> Tensor:
    """Return the causal mean score [B, N, H], for maps of one stream without scale; causal kernels return no sums."""
    dtype = compute_dtype(q, k)
    (queries,) = feature_map.query_streams(q.to(dtype))
    keys = hide(feature_map.key(hide(k, key_mask).to(dtype)), key_mask)
    visible = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
    score = (queries.value * repeat_heads(q, keys.cumsum(1))).sum(-1)
    return mean_score(score, head_dim=q.shape[-1], count=visible.cumsum(1)[..., None], scales=[])


def mean_value(v: Tensor, *, key_mask: Tensor | None, causal: bool, dtype: torch.dtype) -> Tensor:
    """Average v [B, M, K, V] over visible tokens: [B, 1, K, V], or the running mean [B, M, K, V] if causal."""
    if key_mask is None and not causal:
        return v.mean(1, keepdim=True, dtype=dtype)
    visible = torch.ones(v.shape[:2], dtype=torch.bool, device=v.device) if key_mask is None else key_mask
    shown = hide(v, key_mask).to(dtype)
    total, count = (shown.cumsum(1), visible.cumsum(1)) if causal else (shown.sum(1, True), visible.sum(1, True))
    return total / count.clamp(min=1)[:, :, None, None]


def mean_score(denominator: Tensor, *, head_dim: int, count: Tensor, scales: list[Tensor]) -> Tensor:
    """Return z = D^-1/2 phi_q . mean_j phi_k, from phi_q . sum_j phi_k of features divided by exp(sum of scales)."""
    contrast_scale = denominator * head_dim**-0.5 / count.clamp(min=1)
    if scales:
        contrast_scale = contrast_scale * sum(scales[1:], scales[0]).clamp(max=LARGEST_LOG_SCALE).exp()
    return contrast_scale.clamp(max=LARGEST_CONTRAST_SCALE)


def add_contrast(out: Tensor, mean: Tensor, contrast_scale: Tensor) -> Tensor:
    """Return out + z (out - mean). out: [..., V]; mean broadcasts to it; contrast_scale: [...]."""
    return out + contrast_scale[..., None] * (out - mean)
