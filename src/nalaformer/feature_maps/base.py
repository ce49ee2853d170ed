"""The base class of feature maps."""

import math

import torch
from torch import Tensor, nn

from ..ops import FeatureMapLike, KernelSpec, ScaledFeatures, cheap_to_look_at
from ..ops.exporting import is_jit_tracing

# Features stay below this, so that products with values and tokens fit into float32, also squared in gradients.
LARGEST_FEATURE = 1e4
LOG_LARGEST_FEATURE = math.log(LARGEST_FEATURE)


def check_number(name: str, value: object, *, least: float = 0.0, above: bool = False, why: str = "") -> None:
    """Reject values that are no finite number of at least (or `above`) a bound."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < least or (above and value == least):  # type: ignore[operator]
        rule = f"{'above' if above else 'at least'} {least:g}"
        raise ValueError(f"{name} must be a finite number {rule}{f', {why}' if why else ''}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


class FeatureMap(nn.Module):
    """phi_q and phi_k of linear attention; attention weights are phi_q(q_i) . phi_k(k_j), never negative.

    The smallest map overrides `query` and `key`, [B, N, H, D] -> [B, N, H, F]. Inputs come in float32 or float64, outside
    autocast, and masked keys are zero.

    A map whose features can overflow also overrides `key_log_scale` and `query_streams` (see ops.features).
    """

    streams = 1
    """2 for polarity maps: the second stream of queries reads the second half of the values."""
    queries_are_bounded = False
    """True if query features are bounded for every query norm, so that they need no scale."""
    heads_have_own_keys = False
    """True if the key map has parameters per head; grouped keys are then repeated for a map with more heads."""

    def __init__(self, *, num_heads: int, head_dim: int) -> None:
        super().__init__()
        if not all(isinstance(size, int) and size > 0 for size in (num_heads, head_dim)):
            raise ValueError(f"num_heads and head_dim must be positive whole numbers, got {num_heads!r} and {head_dim!r}")
        self.num_heads = num_heads
        self.head_dim = head_dim

    def query(self, q: Tensor) -> Tensor:
        """Compute phi_q of the first stream: [B, N, H, D] -> [B, N, H, F]."""
        if type(self).query_streams is FeatureMap.query_streams:
            raise NotImplementedError(self.missing_method_error("query", "q"))
        return self.streams_as_numbers(q)[0]

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        """Compute phi_k(k) * exp(-log_scale): [B, N, H, D] -> [B, N, H, F]. Maps without `key_log_scale` get no log_scale."""
        raise NotImplementedError(self.missing_method_error("key", "k"))

    def missing_method_error(self, method: str, argument: str) -> str:
        """Return the error message for a map without a required method."""
        return (
            f"a feature map must have the methods query and key, got {type(self).__name__} without {method}; add "
            f"def {method}(self, {argument}), [batch, tokens, heads, channels] -> [batch, tokens, heads, features]"
        )

    def query_streams(self, q: Tensor) -> tuple[ScaledFeatures, ...]:
        """Return the query features of every stream, each with the scale that its tokens were divided by."""
        features = self.query(q)
        return (ScaledFeatures(features) if self.queries_are_bounded else within_reach(features),)

    def key_log_scale(self, k: Tensor) -> Tensor | None:
        """Return the log of the scale that keeps each key's features below LARGEST_FEATURE, [B, N, H, 1]; None: no scale."""
        return None

    def kernel_spec(self, device: torch.device) -> KernelSpec | None:
        """Return how the fused kernels compute this map in registers; None: they get features computed here."""
        return None

    def given(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None, causal: bool, query_mask: Tensor | None = None
    ) -> FeatureMapLike:
        """Return the map for this input; only maps that use statistics of all tokens return another one."""
        return self

    def streams_as_numbers(self, q: Tensor) -> tuple[Tensor, ...]:
        """Return the unscaled features of each stream, which may overflow."""
        return tuple(
            features.value if features.log_scale is None else features.value * features.log_scale.exp()
            for features in self.query_streams(q)
        )

    def per_head(self, parameter: Tensor, x: Tensor) -> Tensor:
        """Return a parameter [num_heads, ...] in the dtype of x and expanded to its heads; grouped heads share one."""
        parameter = parameter.to(x.dtype)
        heads = x.shape[2]
        if heads == self.num_heads:
            return parameter
        if heads % self.num_heads:
            raise ValueError(f"the map was made for {self.num_heads} heads, got {heads}; make it with num_heads={heads}")
        return parameter.repeat_interleave(heads // self.num_heads, dim=0)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}"


def excess(log_size: Tensor) -> Tensor:
    """Return how far a log size exceeds LOG_LARGEST_FEATURE; 0 for ordinary features."""
    return (log_size - LOG_LARGEST_FEATURE).clamp(min=0)


def within_reach(features: Tensor) -> ScaledFeatures:
    """Divide query features so that their products with keys fit into float32: 1e20 times 1e20 does not."""
    largest = features.detach()
    if cheap_to_look_at(features) and (largest.numel() == 0 or bool(largest.amax() <= LARGEST_FEATURE)):
        return ScaledFeatures(features)
    log_scale = excess(largest.amax(dim=-1, keepdim=True).log())
    return ScaledFeatures(features * (-log_scale).exp(), log_scale)


def safe_power(size: Tensor, power: Tensor | float) -> Tensor:
    """Return size^power for sizes >= 0 and powers >= 1. Gradients of any order are zero at zero, where torch gives NaN."""
    # a traced program must be the same with gradients and without
    if not torch.is_grad_enabled() or is_jit_tracing() or (cheap_to_look_at(size) and bool((size > 0).all())):
        return size**power
    is_zero = size == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, size) ** power)


def both_signs(x: Tensor) -> Tensor:
    """Return [relu(x) ; relu(-x)], which is non-negative and loses nothing."""
    if not cheap_to_look_at(x) or (x.requires_grad and torch.is_grad_enabled()):
        return torch.cat((x.relu(), (-x).relu()), dim=-1)
    # write each half into its place, since joining them took a third of a forward pass; heads lie outside of tokens in memory,
    # which is the fastest order for the products over tokens
    batch, tokens, heads, channels = x.shape
    features = x.new_empty(batch, heads, tokens, 2 * channels).transpose(1, 2)
    positive, negative = features.chunk(2, dim=-1)
    torch.clamp(x, min=0, out=positive)
    torch.sub(positive, x, out=negative)
    return features


def by_sign(magnitude: Tensor, sign_of: Tensor) -> Tensor:
    """Put each magnitude into the first half of the channels where `sign_of` is positive, else into the second half.

    This computes a function once instead of on relu(x) and relu(-x), without torch.where, which is slow on a CPU.
    """
    return both_signs(magnitude * sign_of.sign())


def swap_halves(features: Tensor) -> Tensor:
    """Return [b ; a] for [a ; b]: the feature of -x for maps that keep both signs."""
    first, second = features.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)
