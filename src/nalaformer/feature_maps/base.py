"""What a feature map is."""

import math

import torch
from torch import Tensor, nn

from ..ops import FeatureMapLike, KernelSpec, ScaledFeatures, cheap_to_look_at
from ..ops.exporting import is_jit_tracing

# Features stay below this, so that their products with values and tokens fit into float32, squared in gradients too.
LARGEST_FEATURE = 1e4
LOG_LARGEST_FEATURE = math.log(LARGEST_FEATURE)


def check_number(name: str, value: object, *, least: float = 0.0, above: bool = False, why: str = "") -> None:
    """Refuse what is no finite number of at least (or `above`) a bound."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < least or (above and value == least):  # type: ignore[operator]
        rule = f"{'above' if above else 'at least'} {least:g}"
        raise ValueError(f"{name} must be a finite number {rule}{f', {why}' if why else ''}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


class FeatureMap(nn.Module):
    """phi_q and phi_k of linear attention; attention weights are phi_q(q_i) . phi_k(k_j), never negative.

    The smallest map overrides `query` and `key`, [B, N, H, D] -> [B, N, H, F]. What it need not care about: the inputs come
    in float32 or float64, outside autocast, with hidden keys set to zero.

    A map whose features can overflow also overrides `key_log_scale` and `query_streams` (see ops.features).
    """

    streams = 1
    """2 for polarity maps: the second stream of queries reads the second half of the values."""
    queries_are_bounded = False
    """True where query features cannot grow with the query, so that nothing needs to be divided out of them."""
    heads_have_own_keys = False
    """True where the key map has parameters per head; grouped keys are then repeated for a map made for more heads."""

    def __init__(self, *, num_heads: int, head_dim: int) -> None:
        super().__init__()
        if not all(isinstance(size, int) and size > 0 for size in (num_heads, head_dim)):
            raise ValueError(f"num_heads and head_dim must be positive whole numbers, got {num_heads!r} and {head_dim!r}")
        self.num_heads = num_heads
        self.head_dim = head_dim

    def query(self, q: Tensor) -> Tensor:
        """phi_q of the first stream: [B, N, H, D] -> [B, N, H, F]."""
        if type(self).query_streams is FeatureMap.query_streams:
            raise NotImplementedError(self.missing("query", "q"))
        return self.streams_as_numbers(q)[0]

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        """phi_k(k) * exp(-log_scale): [B, N, H, D] -> [B, N, H, F]. Maps without `key_log_scale` never see the argument."""
        raise NotImplementedError(self.missing("key", "k"))

    def missing(self, method: str, argument: str) -> str:
        """What to say of a map that lacks a method which it must have."""
        return (
            f"a feature map must have the methods query and key, got {type(self).__name__} without {method}; add "
            f"def {method}(self, {argument}), [batch, tokens, heads, channels] -> [batch, tokens, heads, features]"
        )

    def query_streams(self, q: Tensor) -> tuple[ScaledFeatures, ...]:
        """Query features of every stream, each with the scale by which its tokens were divided."""
        features = self.query(q)
        return (ScaledFeatures(features) if self.queries_are_bounded else within_reach(features),)

    def key_log_scale(self, k: Tensor) -> Tensor | None:
        """[B, N, H, 1]: the log of what divides each key's features, to keep them below LARGEST_FEATURE; None: nothing does."""
        return None

    def kernel_spec(self, device: torch.device) -> KernelSpec | None:
        """How the fused kernels compute this map in registers; None: they get features computed here."""
        return None

    def given(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None, causal: bool, query_mask: Tensor | None = None
    ) -> FeatureMapLike:
        """The map for this very input; only maps that look at all tokens at once differ from themselves."""
        return self

    def streams_as_numbers(self, q: Tensor) -> tuple[Tensor, ...]:
        """The true features of each stream, which may overflow."""
        return tuple(
            features.value if features.log_scale is None else features.value * features.log_scale.exp()
            for features in self.query_streams(q)
        )

    def per_head(self, parameter: Tensor, x: Tensor) -> Tensor:
        """A parameter [num_heads, ...] in the dtype of x and for its heads; each serves the heads that share it."""
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
    """How far features of this logarithmic size exceed the largest that we want; 0 for ordinary ones."""
    return (log_size - LOG_LARGEST_FEATURE).clamp(min=0)


def within_reach(features: Tensor) -> ScaledFeatures:
    """Query features divided so that their products with keys fit into float32: 1e20 times 1e20 does not."""
    largest = features.detach()
    if cheap_to_look_at(features) and (largest.numel() == 0 or bool(largest.amax() <= LARGEST_FEATURE)):
        return ScaledFeatures(features)
    log_scale = excess(largest.amax(dim=-1, keepdim=True).log())
    return ScaledFeatures(features * (-log_scale).exp(), log_scale)


def power_of(size: Tensor, power: Tensor | float) -> Tensor:
    """size^power for sizes >= 0 and powers >= 1, whose gradients of any order are zero where the size is; torch makes NaN."""
    # a recorded program is the same with gradients and without
    if not torch.is_grad_enabled() or is_jit_tracing() or (cheap_to_look_at(size) and bool((size > 0).all())):
        return size**power
    is_zero = size == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, size) ** power)


def both_signs(x: Tensor) -> Tensor:
    """[relu(x) ; relu(-x)]: nothing is thrown away, and everything is non-negative."""
    if not cheap_to_look_at(x) or (x.requires_grad and torch.is_grad_enabled()):
        return torch.cat((x.relu(), (-x).relu()), dim=-1)
    # the same numbers written straight to their place (joining the halves took a third of a forward pass), heads outside
    # tokens in memory, the order in which the products over tokens are fastest
    batch, tokens, heads, channels = x.shape
    features = x.new_empty(batch, heads, tokens, 2 * channels).transpose(1, 2)
    positive, negative = features.chunk(2, dim=-1)
    torch.clamp(x, min=0, out=positive)
    torch.sub(positive, x, out=negative)
    return features


def by_sign(magnitude: Tensor, sign_of: Tensor) -> Tensor:
    """Put each magnitude into the first half of the channels where `sign_of` is positive, else into the second half.

    Half the work of computing a function of relu(x) and of relu(-x), and without torch.where, which is slow on a CPU.
    """
    return both_signs(magnitude * sign_of.sign())


def swap_halves(features: Tensor) -> Tensor:
    """[a ; b] -> [b ; a]: the feature of -x for maps that keep both signs."""
    first, second = features.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)
