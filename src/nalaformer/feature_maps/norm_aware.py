"""NaLaFormer: norm-aware linear attention (arXiv 2506.21137)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import KernelSpec, cheap_to_look_at
from ..ops.kept_tensors import kept
from .base import FeatureMap, both_signs, by_sign, check_flag, check_number, excess
from .registry import FEATURE_MAPS

# Below this norm a query has no direction that gradients could trust: it fades into a query that favours no channel.
SMALLEST_NORM = 1e-5
# A query beyond it points where it does and no further: the square of 1e20 fits into no float32.
LARGEST_NORM = 1e15
# What a zero vector is divided by.
SMALLEST_PEAK = 1e-30
# Without saturation: a channel of half the largest is 1e-10 of it then, and more only loses digits.
LARGEST_TURN = 32.0
# Below it expm1(a x) / expm1(a) is x to the last digit.
SMALLEST_STEEPNESS = 1e-6


@FEATURE_MAPS.register("norm_aware")
class NormAware(FeatureMap):
    """The query norm sets the power, so a larger query attends more sharply; both signs are kept. F = 2 D.

    u = q / |q|, p = lambda (tau + tanh(norm_scale |q|)):
    - direction="split" (the released code):  phi_q = [relu(u)^p ; relu(-u)^p],  phi_k = [relu(k)^3 ; relu(-k)^3]
    - direction="cosine" (the paper, with a safe angle):  a(x) = pi/4 tanh(alpha x / |x|),
      phi_q = |u|^p [cos a(q) ; sin a(q)],  phi_k = |k|^3 [cos a(k) ; sin a(k)]; approaches the split map as alpha grows.
      Both are turned by 45 degrees, [cos a + sin a ; cos a - sin a] / sqrt 2: the products are the same, and no feature is
      negative, so that opposite directions cancel in no sum and keep their digits

    norm_scale: with the published 1 the power is saturated at |q| = 3, while unit-variance queries of 64 channels have
        |q| = 8; "head" stands for 1/sqrt(head_dim), which leaves room on both sides.
    learnable: lambda and tau per head.
    powers="mild": p = 1 + softplus(a) tanh(norm_scale |q|) and 1 + softplus(b) for keys, a and b learned per head, both
        powers near 1 at first.
    start_gain: softplus(a) and softplus(b) at first.
    saturation="none": |q| in place of tanh |q| in the power, so that doubling a large query still sharpens it.
    keys="like_queries": the norm of a key sets its power by the same rule, with lambda and tau or the gain b, and its length
        stays: phi_k = |k| f / |f|, f = [relu(k)^p ; relu(-k)^p].
    growth="exponential": f = [expm1(g relu(x)) ; expm1(g relu(-x))] in place of powers, for queries and keys, with the gain g =
        softplus(a) norm_scale sqrt(D): the plain sign split for short vectors, exponentials for long ones.
        Needs direction="split", powers="mild", saturation="none" and keys="like_queries".
    The last four are forms of our own; kernels get saturation="none" and keys="like_queries" as ready features.

    A query of norm below 1e-5 has no direction; the published code gives NaN at zero. Ours fades it into a query that weighs
    all channels alike, so outputs and gradients stay bounded.
    """

    queries_are_bounded = True

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        direction: str = "split",
        lambda_: float = 3.0,
        tau: float = 0.5,
        alpha: float = 20.0,
        norm_scale: float | str = 1.0,
        key_power: float = 3.0,
        learnable: bool = False,
        powers: str = "published",
        start_gain: float = 0.126928,
        saturation: str = "tanh",
        keys: str = "powers",
        growth: str = "power",
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        if direction not in ("split", "cosine"):
            raise ValueError(f'direction must be "split" or "cosine", got {direction!r}')
        if powers not in ("published", "mild"):
            raise ValueError(f'powers must be "published" or "mild", got {powers!r}')
        if saturation not in ("tanh", "none"):
            raise ValueError(f'saturation must be "tanh" (as published) or "none", got {saturation!r}')
        if keys not in ("powers", "like_queries"):
            raise ValueError(f'keys must be "powers" (as published) or "like_queries", got {keys!r}')
        if growth not in ("power", "exponential"):
            raise ValueError(f'growth must be "power" (as published) or "exponential", got {growth!r}')
        is_open = (direction, powers, saturation, keys) == ("split", "mild", "none", "like_queries")
        if growth == "exponential" and not is_open:
            raise ValueError(
                'growth="exponential" needs direction="split", powers="mild", saturation="none" and keys="like_queries", got '
                f"{direction!r}, {powers!r}, {saturation!r} and {keys!r}; pass all four"
            )
        check_number("start_gain", start_gain, above=True, why="so that the power grows with the norm")
        for name, value in (("lambda_", lambda_), ("tau", tau)):
            check_number(name, value, above=True, why="so that the power grows with the norm")
        if not isinstance(norm_scale, str):
            check_number("norm_scale", norm_scale, above=True, why="so that the power grows with the norm")
        check_number("alpha", alpha, above=True, why="so that the angle tells the signs apart")
        check_number("key_power", key_power)
        check_flag("learnable", learnable)
        if lambda_ * tau < 1 or key_power < 1:
            raise ValueError(
                f"powers below 1 have no finite gradient at zero: lambda_ * tau and key_power must be at least 1, got "
                f"{lambda_} * {tau} and {key_power}"
            )
        if isinstance(norm_scale, str) and norm_scale != "head":
            raise ValueError(f'norm_scale must be a number or "head" (1/sqrt(head_dim)), got {norm_scale!r}')
        self.direction = direction
        self.alpha = alpha
        self.norm_scale = head_dim**-0.5 if isinstance(norm_scale, str) else norm_scale
        self.powers = powers
        self.learnable = learnable or powers == "mild"
        self.fixed_lambda, self.fixed_tau, self.fixed_key_power = lambda_, tau, float(key_power)
        if powers == "mild":
            # the inverse of softplus
            start = math.log(math.expm1(start_gain))
            self.query_gain = nn.Parameter(torch.full((num_heads,), start))
            self.key_gain = nn.Parameter(torch.full((num_heads,), start))
        elif learnable:
            self.lambda_ = nn.Parameter(torch.full((num_heads,), float(lambda_)))
            self.tau = nn.Parameter(torch.full((num_heads,), float(tau)))
        self.saturation, self.keys, self.growth = saturation, keys, growth
        # the power of a key may be a parameter of each head
        self.heads_have_own_keys = powers == "mild" or (learnable and keys == "like_queries")

    def query(self, q: Tensor) -> Tensor:
        q, size = with_size(q)
        norm = size.clamp(min=SMALLEST_NORM**2).sqrt()
        unit = q / norm
        # powers without a bound leave nothing of a channel of 1/8; what is divided out of a query cancels. The largest
        # channel of a unit vector is no smaller, and a query that has no direction stays small
        if self.saturation == "tanh":
            features = self.spread(unit.abs() ** self.query_power(norm), unit)
        else:
            peak = unit.abs().amax(-1, keepdim=True).clamp(min=self.head_dim**-0.5)
            features = self.grown(unit / peak, unit, norm, peak, self.query_gain if self.powers == "mild" else None)
        # 1 for a zero query, 0 from SMALLEST_NORM on; without gradient, which would be steep and point nowhere
        if cheap_to_look_at(size) and bool((size >= SMALLEST_NORM**2).all()):
            return features
        fading = (1 - size.detach() / SMALLEST_NORM**2).clamp(min=0) * self.head_dim**-0.75
        # the cosine map fades into [1 ; 0], which is turned as its features are
        return features + (fading if self.direction == "split" else fading * 0.5**0.5)

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        if self.keys == "like_queries":
            return self.key_like_query(k, log_scale)
        power = self.key_power(k)
        scaled = k * (-log_scale / power).exp() if isinstance(log_scale, Tensor) else k
        # the published power by multiplication, several times as fast as a general power
        is_cube = isinstance(power, float) and power == 3.0
        if self.direction == "split" and is_cube:
            return both_signs(scaled * scaled * scaled)
        size = scaled.abs()
        magnitude = size * size * size if is_cube else size**power
        k, squares = with_size(k)
        return self.spread(magnitude, k / squares.clamp(min=SMALLEST_NORM**2).sqrt())

    def key_like_query(self, k: Tensor, log_scale: Tensor | float) -> Tensor:
        """|k| f / |f|, times exp(-log_scale)."""
        shape, peak, length = in_shape(k)
        gain = self.key_gain if self.powers == "mild" else None
        features = self.grown(shape, shape / length, peak * length, 1 / length, gain)
        sharpened = features.square().sum(-1, keepdim=True).clamp(min=SMALLEST_NORM).sqrt()
        kept = peak * (-log_scale).exp() if isinstance(log_scale, Tensor) else peak
        return features * (kept * (length / sharpened))

    def grown(self, shape: Tensor, unit: Tensor, norm: Tensor, peak: Tensor, gain: Tensor | None) -> Tensor:
        """Features of the vector norm * unit, the largest of them 1. shape: unit divided by its largest channel, the peak."""
        power = self.power_of(norm, gain)
        if self.growth == "power":
            return self.spread(shape.abs() ** power, unit)
        # what grows above 1 in the power, times the size of the largest channel
        steepness = ((power - 1) * (self.head_dim**0.5 * peak)).clamp(min=SMALLEST_STEEPNESS)
        size = shape.abs()
        # expm1(a x) / expm1(a) of x up to 1, where exp(a) may fit into no float
        return by_sign(((size - 1) * steepness).exp() * torch.expm1(-steepness * size) / torch.expm1(-steepness), unit)

    def key_log_scale(self, k: Tensor) -> Tensor:
        if self.keys == "like_queries":
            _, peak, length = in_shape(k)
            return excess(peak.log() + length.log())
        return excess(self.key_power(k) * k.abs().amax(dim=-1, keepdim=True).log())

    def kernel_spec(self, device: torch.device) -> KernelSpec | None:
        if self.saturation == "none" or self.keys == "like_queries":
            return None
        if self.powers == "mild":
            slope, key_power = F.softplus(self.query_gain.float()), 1 + F.softplus(self.key_gain.float())
            rows = torch.stack((torch.ones_like(slope), slope, key_power), dim=1).to(device)
        elif self.learnable:
            lambda_, tau = self.lambda_.float(), self.tau.float()
            key_power = torch.full_like(lambda_, self.fixed_key_power)
            rows = torch.stack((lambda_ * tau, lambda_, key_power), dim=1).to(device)
        else:
            values = (self.fixed_lambda * self.fixed_tau, self.fixed_lambda, self.fixed_key_power)
            return kept_spec(self.direction, values, self.norm_scale, self.alpha, device=device)
        is_cube = self.powers == "published" and self.fixed_key_power == 3.0
        return spec_of(self.direction, rows, self.norm_scale, self.alpha, is_cube)

    def spread(self, magnitude: Tensor, unit: Tensor) -> Tensor:
        """Put the magnitudes on the two halves of the features by the direction of the input."""
        if self.direction == "split":
            return by_sign(magnitude, unit)
        # cos a + sin a = sqrt 2 sin(pi/4 + a), and 1 + tanh x = 2 sigmoid(2 x), which keeps its digits near zero
        turn = 2 * self.alpha * unit
        halves = [magnitude * (math.pi / 2 * side.sigmoid()).sin() for side in (turn, -turn)]
        return torch.cat(halves, dim=-1)

    def query_power(self, norm: Tensor) -> Tensor:
        """p of a query norm [B, N, H, 1]."""
        return self.power_of(norm, self.query_gain if self.powers == "mild" else None)

    def power_of(self, norm: Tensor, gain: Tensor | None) -> Tensor:
        """The power that a norm [B, N, H, 1] sets; gain: that of mild powers."""
        turn = self.norm_scale * norm
        turn = turn.tanh() if self.saturation == "tanh" else turn.clamp(max=LARGEST_TURN)
        if gain is not None:
            return 1 + F.softplus(self.per_head(gain, norm))[:, None] * turn
        if self.learnable:
            lambda_, tau = self.per_head(self.lambda_, norm), self.per_head(self.tau, norm)
            return (lambda_[:, None] * (tau[:, None] + turn)).clamp(min=1.0)
        return self.fixed_lambda * (self.fixed_tau + turn)

    def key_power(self, k: Tensor) -> Tensor | float:
        """The power of the keys: a number, or [H, 1] where it is learned."""
        if self.powers == "mild":
            return 1 + F.softplus(self.per_head(self.key_gain, k))[:, None]
        return self.fixed_key_power

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, direction={self.direction}, powers={self.powers}, norm_scale={self.norm_scale:g}"


def with_size(x: Tensor) -> tuple[Tensor, Tensor]:
    """x and its squared norm over the channels, [..., 1]; rows whose square would overflow are shortened, direction kept."""
    size = x.square().sum(-1, keepdim=True)
    if cheap_to_look_at(size) and bool((size < torch.inf).all()):
        return x, size
    # the factor has no gradient: what is made of the direction does not change with the length, and tanh has saturated
    x = x * (LARGEST_NORM / x.detach().abs().amax(-1, keepdim=True).clamp(min=LARGEST_NORM))
    return x, x.square().sum(-1, keepdim=True)


def in_shape(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x / peak, peak, |x / peak|), the peak being the largest size of a channel: |x| = peak |x / peak| overflows nowhere."""
    peak = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_PEAK)
    shape = x / peak
    return shape, peak, shape.square().sum(-1, keepdim=True).clamp(min=SMALLEST_NORM).sqrt()


def constant_row(values: tuple[float, ...], *, device: torch.device) -> Tensor:
    """One row of numbers on the device; filled there, since a CUDA graph cannot hold a copy from the host."""
    row = torch.empty(1, len(values), dtype=torch.float32, device=device)
    for place, value in enumerate(values):
        row[:, place] = value
    return row


def spec_of(direction: str, rows: Tensor, norm_scale: float, alpha: float, is_cube: bool) -> KernelSpec:
    return KernelSpec(
        f"norm_aware_{direction}",
        parts=2,
        parameters=rows,
        norm_scale=norm_scale,
        alpha=alpha,
        log2_key_shift=30.0,
        is_cube=is_cube,
    )


def spec_of_fixed_powers(
    direction: str, values: tuple[float, ...], norm_scale: float, alpha: float, *, device: torch.device
) -> KernelSpec:
    return spec_of(direction, constant_row(values, device=device), norm_scale, alpha, values[2] == 3.0)


# a copy to the GPU at each call would cost more than the op
kept_spec = kept(spec_of_fixed_powers, maxsize=128)
