"""Run fused GPU kernels behind `linear_attention`. Importing this package needs Triton; `nalaformer.ops.backend` decides."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..features import FeatureMapLike, check_widths, compute_dtype, hide
from ..kernel_spec import KernelSpec, MapSettings
from ..rotary import Rotary
from ..state import LinearState
from .common.launch import readable
from .linear import bidirectional_op, causal_op, cross_head_op
from .linear.call import TokenLayout
from .linear.step_op import step

RotaryPair = tuple[Rotary | None, Rotary | None]
# Exponent for the features of a normalised rotary: cubes of 1e12 leave room for their sums (KernelSpec.log2_key_shift).
LOG2_KEY_SHIFT = 30.0


class Prepared(NamedTuple):
    """Hold a call in the form that the kernels take."""

    q: Tensor
    k: Tensor
    v: Tensor
    parameters: Tensor
    layout: TokenLayout
    settings: MapSettings
    weight: Tensor | None
    """float32 [B, K, M] or [K, T], or None where keys have no weights. Where the mean query weighs them, the mask of queries
    or None. With decay (causal attention), log_decay."""


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    spec: KernelSpec | None,
    rotary: RotaryPair,
    eps: float,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    longest: int = 0,
    has_contrast: bool = False,
    key_weight: Tensor | None = None,
    by_mean_query: bool = False,
    query_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Prepared:
    """Prepare [B, N, H, D] inputs, or [T, H, D] with cu_seqlens; `longest` is the length of the longest sequence.

    has_contrast: with the mean score. key_weight: [B, M, K] or [T, K]. by_mean_query: instead the mean of the queries that
    query_mask [B, N] shows weighs the keys. log_decay: [B, M, K] or [T, K], for causal attention.
    Maps that the kernels do not support, or not for a head by itself, are computed here; the kernels compute the others.
    """
    contrast = q.shape[-1] ** -0.5 if has_contrast else 0.0
    if spec is None:
        is_normalised = rotary[0] is not None and rotary[0].normalised
        q, k = compute_features(feature_map, q, k, rotary if is_normalised else (None, None), key_mask)
        rotary = (None, None) if is_normalised else rotary
        spec = KernelSpec("identity", parts=1, log2_key_shift=LOG2_KEY_SHIFT if is_normalised else 0.0)
    elif spec.before is not None:
        has_batch = q.dim() == 4
        q, k = (x.float() if has_batch else x[None].float() for x in (q, hide(k, key_mask)))
        q, k = (transform(x) for transform, x in zip(spec.before, (q, k), strict=True))
        q, k = (q, k) if has_batch else (q[0], k[0])
    elif spec.is_written_out or (spec.spans_heads and max(q.shape[-2], k.shape[-2]) > 1):
        q, k = (cross_head_op.features(with_range(x), spec) for x in (q, hide(k, key_mask)))
        spec = KernelSpec("identity", parts=1)
    angles: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] = (None, None, None, None)
    if rotary[0] is not None and rotary[1] is not None:
        of_queries = rotary[0].tables()
        angles = (*of_queries, *(of_queries if rotary[1] is rotary[0] else rotary[1].tables()))
    q, k, v = readable(q), readable(k), readable(v)
    parameters = spec.parameters
    if parameters is None:
        parameters = q.new_empty(1, 0, dtype=torch.float32)
    layout = TokenLayout(*angles, None if key_mask is None else key_mask.contiguous(), cu_seqlens, longest)
    settings = spec.settings(
        streams=feature_map.streams,
        eps=eps,
        contrast=contrast,
        has_weight=key_weight is not None,
        by_mean_query=by_mean_query,
        has_decay=log_decay is not None,
    )
    weight = None
    per_token = key_weight if log_decay is None else log_decay
    if per_token is not None:
        # tokens side by side, as the kernels read values per token
        weight = per_token.float().transpose(-2, -1).contiguous()
    elif by_mean_query and query_mask is not None:
        weight = query_mask.contiguous()
    return Prepared(q, k, v, parameters, layout, settings, weight)


def attend(prepared: Prepared, *, causal: bool, needs_backward: bool) -> Tensor:
    """Return the output, [B, N, H, V] or [T, H, V] if packed. `needs_backward`: a backward pass may follow."""
    q, k, v, parameters, layout, settings, weight = prepared
    if not causal:
        return bidirectional_op.attend(q, k, v, parameters, weight, layout, settings, needs_backward)
    return causal_op.attend(q, k, v, parameters, None, weight, layout, settings, False, needs_backward)[0]


def attend_after(prepared: Prepared, state: LinearState | None, *, needs_backward: bool) -> tuple[Tensor, LinearState]:
    """Compute causal attention of a batch after `state`, and the state after the last token."""
    q, k, v, parameters, layout, settings, log_decay = prepared
    unit = 2.0**settings.log2_key_shift
    initial = None if state is None else to_sums(state, settings.parts, unit)
    out, total = causal_op.attend(q, k, v, parameters, initial, log_decay, layout, settings, True, needs_backward)
    (batch, tokens, kv_heads), key_mask = k.shape[:3], layout.key_mask
    new = torch.full((batch,), tokens, device=total.device) if key_mask is None else key_mask.sum(1)
    count = new if state is None else state.count + new
    sums = total.unflatten(0, (batch, kv_heads)).flatten(2, 3)  # [B, K, F, V + 2]
    if log_decay is not None and log_decay.requires_grad:
        # the kernels have no gradient of the total decay at the end
        end = log_decay.sum(-1)
        sums = sums * (end - end.detach()).exp()[..., None, None]
    return out, LinearState(sums[..., :-2] * unit, sums[..., -2] * unit, count, sums.new_zeros(batch, kv_heads))


def decayed_mean(v: Tensor, log_decay: Tensor, *, key_mask: Tensor | None, needs_backward: bool) -> Tensor:
    """Return the mean value that each token sees with decay, [B, N, K, V]: attention whose only feature is one."""
    alike = torch.ones_like(v[..., :1])
    layout = TokenLayout(None, None, None, None, None if key_mask is None else key_mask.contiguous(), None, 0)
    settings = KernelSpec("identity", parts=1).settings(streams=1, eps=0.0, has_decay=True)
    decay_rows = log_decay.float().transpose(-2, -1).contiguous()
    parameters = alike.new_empty(1, 0, dtype=torch.float32)
    return causal_op.attend(alike, alike, readable(v), parameters, None, decay_rows, layout, settings, False, needs_backward)[0]


def step_(prepared: Prepared, state: LinearState) -> Tensor:
    """Compute one token after `state`, which becomes the state after it; its tensors must be contiguous."""
    sums = (state.state, state.key_sum, state.count, state.log_scale)
    return step(*prepared[:4], *prepared.layout[:4], *sums, prepared.weight, *prepared.settings)


def to_sums(state: LinearState, parts: int, unit: float) -> Tensor:
    """Convert a state to the layout of the kernels' sums, [B * K, PARTS, D, V + 2]; `unit`: the divisor of their features."""
    grow = state.log_scale.exp() / unit
    count = state.count.to(state.state.dtype)[:, None, None].expand_as(state.key_sum)
    columns = (state.state * grow[..., None, None], (state.key_sum * grow[..., None])[..., None], count[..., None])
    sums = torch.cat(columns, dim=-1).to(torch.float32)
    return sums.flatten(0, 1).unflatten(1, (parts, -1)).contiguous()


def compute_features(
    feature_map: FeatureMapLike, q: Tensor, k: Tensor, rotary: RotaryPair, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute features for maps that the kernels do not support; in the type of the inputs, float32 for float16.

    With positions the features of keys are multiplied by 2^-LOG2_KEY_SHIFT.
    """
    dtype = compute_dtype(q, k)
    q, k = with_range(q), with_range(k)
    has_batch = q.dim() == 4
    if not has_batch:
        q, k = q[None], k[None]
    (features,) = feature_map.query_streams(q.to(dtype))
    # the kernels take no scale of these queries
    phi_q = features.value if features.log_scale is None else features.value * features.log_scale.exp()
    phi_k = feature_map.key(hide(k, key_mask).to(dtype))
    check_widths(feature_map, phi_q, phi_k)
    if rotary[0] is not None and rotary[1] is not None:
        phi_q, phi_k = rotate_scaled(phi_q, rotary[0], 1.0), rotate_scaled(phi_k, rotary[1], 2.0**-LOG2_KEY_SHIFT)
    phi_q, phi_k = phi_q.to(q.dtype), phi_k.to(k.dtype)
    return (phi_q, phi_k) if has_batch else (phi_q[0], phi_k[0])


def rotate_scaled(features: Tensor, rotary: Rotary, factor: float) -> Tensor:
    """Return factor * rotary.rotate(features); rows are at most 1 in between, since float32 has no square of 1e20."""
    largest = features.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
    return rotary.rotate(features / largest) * (largest * factor)


def with_range(x: Tensor) -> Tensor:
    """Return x in a type that holds features of every size: float16 ends at 65,504 and has few digits below 1e-5."""
    return x.float() if x.dtype == torch.float16 else x
