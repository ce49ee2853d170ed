"""Compute features of length one: the delta rules need bounded keys."""

import torch
from torch import Tensor

from .backend import LARGEST_HEAD, runs_kernels
from .features import FeatureMapLike, compute_dtype, outside_autocast
from .kernel_spec import KernelSpec
from .layer_norm import to_rows

# shorter features go to zero: a unit vector would only show how they were rounded
SMALLEST_LENGTH = 1e-6


def unit_features(feature_map: FeatureMapLike, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return phi / sqrt(|phi|^2 + 1e-12) of q and k [B, N, H, D] -> [B, N, H, F].

    Kernels return several tokens in the type of q and k, which the kernels of the delta rule read; otherwise the result is
    float32 (float64 for float64).
    """
    mapped = feature_map.given(q, k, key_mask=None, causal=True)
    if runs_kernels(q) and q.numel() > 0 and (spec := mapped.kernel_spec(q.device)) is not None and _is_fixed_row(spec, q):
        return _on_kernels(spec, q, is_query=True), _on_kernels(spec, k, is_query=False)
    dtype = compute_dtype(q, k)
    with outside_autocast(q):
        q, k = q.to(dtype), k.to(dtype)
        # the factor by which a map divides large features cancels in the length
        scale = mapped.key_log_scale(k.detach())
        features = (mapped.query_streams(q)[0].value, mapped.key(k) if scale is None else mapped.key(k, scale))
        first, second = (x * (x.square().sum(-1, keepdim=True) + SMALLEST_LENGTH**2).rsqrt() for x in features)
        return first, second


def _is_fixed_row(spec: KernelSpec, q: Tensor) -> bool:
    """True if the map works on each head by itself, with fixed parameters that all heads share."""
    rows = spec.parameters
    has_row = rows is None or (rows.shape[0] == 1 and rows.dim() == 2 and not rows.requires_grad)
    return has_row and spec.before is None and not spec.spans_heads and not spec.is_guarded and q.shape[-1] <= LARGEST_HEAD


def _on_kernels(spec: KernelSpec, x: Tensor, *, is_query: bool) -> Tensor:
    from .kernels.delta import unit_features_op

    parameters = x.new_empty(1, 0, dtype=torch.float32) if spec.parameters is None else spec.parameters
    # a single token is multiplied with a state in float32
    dtype = x.dtype if x.shape[1] > 1 else torch.float32
    settings = spec.settings(streams=1, eps=0.0)
    out = unit_features_op.make(to_rows(x), parameters, settings, is_query, SMALLEST_LENGTH, dtype)
    return out.view(*x.shape[:-1], -1)
