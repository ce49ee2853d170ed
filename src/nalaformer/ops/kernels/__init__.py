"""Fused GPU kernels behind `linear_attention`. Importing this package needs Triton; `nalaformer.ops.backend` decides."""

import torch
from torch import Tensor

from ..features import FeatureMapLike, compute_dtype, hide
from ..kernel_spec import KernelSpec
from ..rotary import Rotary
from . import library

RotaryPair = tuple[Rotary | None, Rotary | None]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    rotary: RotaryPair,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    longest: int,
    eps: float,
    keep: bool,
) -> Tensor:
    """Bidirectional attention; [B, N, H, D] inputs, or [T, H, D] with cu_seqlens. `keep`: a backward pass may follow."""
    is_normalised = rotary[0] is not None and rotary[0].normalised
    spec = None if is_normalised else feature_map.kernel_spec(q.device)
    if spec is None:
        q, k = mapped(feature_map, q, k, rotary if is_normalised else (None, None), key_mask)
        rotary = (None, None) if is_normalised else rotary
        spec = KernelSpec("identity", parts=1)
    angles: list[Tensor | None] = [None] * 4
    if rotary[0] is not None and rotary[1] is not None:
        angles = [*rotary[0].tables(), *rotary[1].tables()]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    parameters = spec.parameters
    if parameters is None:
        parameters = q.new_empty(1, 0, dtype=torch.float32)
    return library.attend(
        q,
        k,
        v,
        parameters,
        *angles,
        None if key_mask is None else key_mask.contiguous(),
        cu_seqlens,
        longest,
        spec.name,
        spec.parts,
        feature_map.streams,
        spec.norm_scale,
        spec.alpha,
        eps * 2.0**-spec.log2_key_shift,
        spec.is_guarded,
        spec.is_cube,
        keep,
    )


def mapped(
    feature_map: FeatureMapLike, q: Tensor, k: Tensor, rotary: RotaryPair, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Features computed outside, for maps that the kernels do not know; in the type of the inputs."""
    dtype = compute_dtype(q, k)
    has_batch = q.dim() == 4
    if not has_batch:
        q, k = q[None], k[None]
    (features,) = feature_map.query_streams(q.to(dtype))
    phi_q, phi_k = features.value, feature_map.key(hide(k, key_mask).to(dtype))
    if rotary[0] is not None and rotary[1] is not None:
        phi_q, phi_k = rotary[0].rotate(phi_q), rotary[1].rotate(phi_k)
    phi_q, phi_k = phi_q.to(q.dtype), phi_k.to(k.dtype)
    return (phi_q, phi_k) if has_batch else (phi_q[0], phi_k[0])
