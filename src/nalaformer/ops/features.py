"""Compute features of queries and keys: the part that every backend shares.

Features can grow beyond every float format (exp of 100, cubes of 1e10). A map may therefore return features divided by
exp(log_scale). Attention divides two sums of them, so the scale cancels everywhere but in eps, which is scaled too.
Ordinary inputs have log_scale = 0, which changes nothing at all.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from .exporting import is_jit_tracing
from .kept_tensors import is_ordinary
from .kernel_spec import KernelSpec
from .rotary import Rotary

if TYPE_CHECKING:
    from .contrast import Contrast

# The largest key may make all features that a query weighs tiny. The gradient divides by no less than this bound: towards
# the channels of that key it would leave float32.
SMALLEST_DIVISOR = 1e-18
# Where only the numerator is rotated, its largest features may meet a denominator of the smallest ones.
LARGEST_ROTATED_OUTPUT = 1e12


class FeatureMapLike(Protocol):
    """Describe what the ops need of a feature map; `nalaformer.feature_maps.FeatureMap` is the base class that provides it."""

    streams: int
    num_heads: int
    head_dim: int
    heads_have_own_keys: bool

    def given(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None, causal: bool, query_mask: Tensor | None = None
    ) -> "FeatureMapLike": ...
    def query_streams(self, q: Tensor) -> "tuple[ScaledFeatures, ...]": ...
    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor: ...
    def key_log_scale(self, k: Tensor) -> Tensor | None: ...
    def kernel_spec(self, device: torch.device) -> KernelSpec | None: ...


class ScaledFeatures(NamedTuple):
    """Hold features in scaled form: true features = value * exp(log_scale); log_scale [B, N, H, 1], or None for zero."""

    value: Tensor
    log_scale: Tensor | None = None


class Queries(NamedTuple):
    """Hold one stream of query features: `rotated` for the numerator, `plain` for the denominator, each [B, N, H, F]."""

    rotated: Tensor
    plain: Tensor
    log_scale: Tensor | None


class Keys(NamedTuple):
    """Hold key features and values, zero at masked tokens; rotated, plain [B, N, H, F], values [B, N, H, V], visible [B]."""

    rotated: Tensor
    plain: Tensor
    values: Tensor
    visible: Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any input is, else float32: half-precision sums over tokens lose the small terms."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def rotate(features: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
    """Return the features for the numerator, rotated, and for the denominator."""
    if rotary is None:
        return features, features
    rotated = rotary.rotate(features)
    return rotated, rotated if rotary.normalised else features


def query_features(
    feature_map: FeatureMapLike, q: Tensor, rotary: Rotary | None, dtype: torch.dtype, *, like: Tensor
) -> list[Queries]:
    """Return one entry per stream; like: features of the keys, or their sum, [..., F]."""
    streams = feature_map.query_streams(q.to(dtype))
    found = [Queries(*rotate(features.value, rotary), features.log_scale) for features in streams]
    for queries in found:
        check_widths(feature_map, queries.plain, like)
    return found


def check_widths(feature_map: FeatureMapLike, of_queries: Tensor, of_keys: Tensor) -> None:
    """Check that the features can be multiplied; torch would silently broadcast one feature over many."""
    if of_queries.shape[-1] != of_keys.shape[-1]:
        raise ValueError(
            f"a feature map must give queries and keys as many features, got {of_queries.shape[-1]} and {of_keys.shape[-1]} of "
            f"{type(feature_map).__name__}; let its methods query and key return the same last dimension"
        )


def key_log_scale(feature_map: FeatureMapLike, k: Tensor, key_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the scale of each key [B, N, H, 1], or None if this map never needs one. It cancels, so it has no gradient."""
    with torch.no_grad():
        return feature_map.key_log_scale(hide(k, key_mask).to(dtype))


def key_features(
    feature_map: FeatureMapLike,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None,
    rotary: Rotary | None,
    log_scale: Tensor | None,
    dtype: torch.dtype,
    weight: Tensor | None = None,
) -> Keys:
    """Return features of the keys times their weight [B, N, H], divided by exp(log_scale), which broadcasts to [B, N, H, 1]."""
    # masked before the map as well as after: NaN in padding must reach neither the sums nor their gradients
    k = hide(k, key_mask).to(dtype)
    features = feature_map.key(k) if log_scale is None else feature_map.key(k, log_scale)
    if weight is not None:
        features = features * hide(weight[..., None], key_mask).to(dtype)
    rotated, plain = rotate(features, rotary)
    both_alike = plain is rotated
    rotated = hide(rotated, key_mask)
    plain = rotated if both_alike else hide(plain, key_mask)
    batch, num_tokens = k.shape[:2]
    every = torch.full((batch,), num_tokens, dtype=torch.int64, device=k.device)
    return Keys(rotated, plain, hide(v, key_mask).to(dtype), every if key_mask is None else key_mask.sum(1))


def heads_for(feature_map: FeatureMapLike, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Give every query head its own keys where the map treats heads that share keys differently."""
    if not feature_map.heads_have_own_keys or feature_map.num_heads == k.shape[2]:
        return k, v
    return repeat_heads(q, k), repeat_heads(q, v)


def repeat_heads(q: Tensor, x: Tensor) -> Tensor:
    """Repeat the heads of x [B, M, K, *] to those of q, [B, M, H, *]; return x itself, not a copy, where it has them."""
    group = q.shape[2] // x.shape[2]
    return x if group == 1 else x.repeat_interleave(group, dim=2)


def cheap_to_look_at(x: Tensor) -> bool:
    """True if code may depend on the values of x: on a GPU that would synchronize, and a traced program has no values."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not torch.jit.is_tracing() and is_ordinary(x)


def outside_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off inside; the meta device, which computes nothing, has no autocast."""
    device = x.device.type
    # a torch.autocast block takes as long as a launch, so none is entered where it would change nothing
    if device == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device)):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zero the tokens of x [B, N, H, *] that the mask [B, N] does not show."""
    return x if key_mask is None else torch.where(key_mask[:, :, None, None], x, x.new_zeros(()))


def without_infinity(state: Tensor) -> Tensor:
    """Replace infinity with NaN, as a causal chunk does and every product with a feature of zero."""
    return state + (state - state)


def weighted_values(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Multiply weights [B, K, G, i, j] by values [B, j, K, V] -> [B, i, K, G, V]; a value counts only where visible [i, j].

    Zero times NaN is NaN: a token that holds NaN or infinity would reach the rows that do not see it.
    """
    bad = ~values.isfinite()
    if cheap_to_look_at(values) and not bool(bad.any()):
        return torch.einsum("bkgij,bjkv->bikgv", weights, values)
    finite = torch.where(bad, values.new_zeros(()), values)
    reached = torch.einsum("ij,bjkv->bikv", visible.to(values.dtype), bad.to(values.dtype)) > 0
    product = torch.einsum("bkgij,bjkv->bikgv", weights, finite)
    return torch.where(reached[:, :, :, None], values.new_full((), torch.nan), product)


def normalise(
    numerator: Tensor,
    denominator: Tensor,
    *,
    eps: float,
    count: Tensor,
    query_scale: Tensor | None,
    key_scale: Tensor | None,
    is_rotated: bool,
    out: Tensor | None = None,
    contrast: "Contrast | None" = None,
) -> Tensor:
    """Return numerator [..., V] / (denominator [...] + eps * count), eps in the units of the scaled features.

    count and the scales broadcast to the denominator. is_rotated: rotary is in the numerator alone.
    A row that sees no key has both sums zero and gives zero.
    `out` is a buffer for the result, in any float dtype, for calls without gradients.
    contrast: moves the result away from the mean value, for the values of this stream.
    """
    plain_sum = denominator
    amount = eps * count.to(denominator.dtype)
    scales = [scale for scale in (query_scale, key_scale) if scale is not None]
    # with decay the scale has a gradient, also where it is zero
    is_plain = all(cheap_to_look_at(scale) and not scale.requires_grad and not bool(scale.any()) for scale in scales)
    if not is_plain:
        amount = amount * torch.exp(-sum(scales[1:], scales[0]))
    denominator = denominator + amount
    divisor = torch.where(denominator == 0, 1.0, denominator)[..., None]
    if is_rotated and not is_plain:
        divisor = torch.maximum(divisor, numerator.detach().abs().amax(-1, keepdim=True) / LARGEST_ROTATED_OUTPUT)
    if out is not None and contrast is None:
        return torch.div(numerator, divisor, out=out)
    result = numerator / divisor if is_plain else quotient_with_bounded_gradient(numerator, divisor)
    if contrast is None:
        return result
    result = contrast.apply(result, plain_sum, count=count, scales=[] if is_plain else scales)
    return result if out is None else out.copy_(result)


def quotient_with_bounded_gradient(numerator: Tensor, divisor: Tensor) -> Tensor:
    """Return numerator [..., V] / divisor [..., 1]; exact, and its gradient too unless the divisor is tiny."""
    is_tiny = divisor.detach() < SMALLEST_DIVISOR
    # torch.jit.trace may record a program without gradients that computes them later
    wants_gradient = torch.is_grad_enabled() or is_jit_tracing()
    if not wants_gradient or (cheap_to_look_at(divisor) and not bool(is_tiny.any())):
        return numerator / divisor
    value = numerator.detach() / divisor.detach()
    # its value is zero, and the gradients of numerator and divisor have their true proportion
    change = (numerator - value * divisor) / SMALLEST_DIVISOR
    return torch.where(is_tiny, value + (change - change.detach()), numerator / torch.where(is_tiny, 1.0, divisor))
