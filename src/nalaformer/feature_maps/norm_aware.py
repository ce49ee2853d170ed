"""NaLaFormer: norm-aware linear attention (arXiv 2506.21137)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import KernelSpec, cheap_to_look_at
from ..ops.kept_tensors import kept
from .base import FeatureMap, both_signs, by_sign, check_flag, check_number, excess, safe_power
from .registry import FEATURE_MAPS

# Below this norm gradients cannot trust the direction of a query: it is blended into one that favors no channel.
SMALLEST_NORM = 1e-5
# Queries are shortened to this norm, since the square of 1e20 does not fit into float32.
LARGEST_NORM = 1e15


@FEATURE_MAPS.register("norm_aware")
class NormAware(FeatureMap):
    """The query norm sets the power, so a larger query attends more sharply; both signs are kept. F = 2 D.

    u = q / |q|, p = lambda (tau + tanh(norm_scale |q|)):
    - direction="split" (the released code):  phi_q = [relu(u)^p ; relu(-u)^p],  phi_k = [relu(k)^3 ; relu(-k)^3]
    - direction="cosine" (the paper, with a safe angle):  a(x) = pi/4 tanh(alpha x / |x|),
      phi_q = |u|^p [cos a(q) ; sin a(q)],  phi_k = |k|^3 [cos a(k) ; sin a(k)]; approaches the split map as alpha grows.
      Both are rotated by 45 degrees, [cos a + sin a ; cos a - sin a] / sqrt 2: the products stay the same, and no feature is
        negative, so that no sum cancels digits between opposite directions

    norm_scale: with the published 1 the power is saturated at |q| = 3, while unit-variance queries of 64 channels have
        |q| = 8; "head" stands for 1/sqrt(head_dim), which leaves room on both sides.
    learnable: lambda and tau per head; the power stays at least 1.
    powers="mild": p = 1 + softplus(a) tanh(norm_scale |q|) and 1 + softplus(b) for keys, a and b learned per head, both
        powers near 1 at first.
    start_gain: softplus(a) and softplus(b) at first; 2.5 starts about as sharp as published.

    A query of norm below 1e-5 has no direction, and the published code gives NaN at zero. Ours is blended into a query that
    weighs all channels alike, so outputs and gradients stay bounded.
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
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        if direction not in ("split", "cosine"):
            raise ValueError(f'direction must be "split" or "cosine", got {direction!r}')
        if powers not in ("published", "mild"):
            raise ValueError(f'powers must be "published" or "mild", got {powers!r}')
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
        # each head then learns the power of its keys
        self.heads_have_own_keys = powers == "mild"

    def query(self, q: Tensor) -> Tensor:
        q, size = with_size(q)
        norm = size.clamp(min=SMALLEST_NORM**2).sqrt()
        unit = q / norm
        features = self.place_magnitudes(safe_power(unit.abs(), self.query_power(norm)), unit)
        # 1 for a zero query, 0 from SMALLEST_NORM on; no gradient, since it would be steep and have no meaningful direction
        if cheap_to_look_at(size) and bool((size >= SMALLEST_NORM**2).all()):
            return features
        blend = (1 - size.detach() / SMALLEST_NORM**2).clamp(min=0) * self.head_dim**-0.75
        # the cosine map blends into [1 ; 0], rotated as its features are
        return features + (blend if self.direction == "split" else blend * 0.5**0.5)

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        power = self.key_power(k)
        scaled = k * (-log_scale / power).exp() if isinstance(log_scale, Tensor) else k
        # cubing by multiplication is several times as fast as a general power
        is_cube = isinstance(power, float) and power == 3.0
        if self.direction == "split" and is_cube:
            return both_signs(scaled * scaled * scaled)
        size = scaled.abs()
        magnitude = size * size * size if is_cube else safe_power(size, power)
        k, squares = with_size(k)
        return self.place_magnitudes(magnitude, k / squares.clamp(min=SMALLEST_NORM**2).sqrt())

    def key_log_scale(self, k: Tensor) -> Tensor:
        return excess(self.key_power(k) * k.abs().amax(dim=-1, keepdim=True).log())

    def kernel_spec(self, device: torch.device) -> KernelSpec:
        if self.powers == "mild":
            slope, key_power = F.softplus(self.query_gain.float()), 1 + F.softplus(self.key_gain.float())
            rows = torch.stack((torch.ones_like(slope), slope, key_power), dim=1).to(device)
        elif self.learnable:
            lambda_, tau = self.lambda_.float(), self.tau.float()
            key_power = torch.full_like(lambda_, self.fixed_key_power)
            rows = torch.stack((lambda_ * tau, lambda_, key_power), dim=1).to(device)
        else:
            values = (self.fixed_lambda * self.fixed_tau, self.fixed_lambda, self.fixed_key_power)
            return cached_spec(self.direction, values, self.norm_scale, self.alpha, device=device)
        is_cube = self.powers == "published" and self.fixed_key_power == 3.0
        return build_spec(self.direction, rows, self.norm_scale, self.alpha, is_cube)

    def place_magnitudes(self, magnitude: Tensor, unit: Tensor) -> Tensor:
        """Put the magnitudes on the two halves of the features by the direction of the input."""
        if self.direction == "split":
            return by_sign(magnitude, unit)
        # cos a + sin a = sqrt 2 sin(pi/4 + a); 1 + tanh x is written as 2 sigmoid(2 x), which keeps its digits near zero
        angle = 2 * self.alpha * unit
        halves = [magnitude * (math.pi / 2 * side.sigmoid()).sin() for side in (angle, -angle)]
        return torch.cat(halves, dim=-1)

    def query_power(self, norm: Tensor) -> Tensor:
        """Return the power p for a query norm [B, N, H, 1]."""
        growth = (self.norm_scale * norm).tanh()
        if self.powers == "mild":
            return 1 + F.softplus(self.per_head(self.query_gain, norm))[:, None] * growth
        if self.learnable:
            lambda_, tau = self.per_head(self.lambda_, norm), self.per_head(self.tau, norm)
            return (lambda_[:, None] * (tau[:, None] + growth)).clamp(min=1.0)
        return self.fixed_lambda * (self.fixed_tau + growth)

    def key_power(self, k: Tensor) -> Tensor | float:
        """Return the power of the keys: a float, or [H, 1] if it is learned."""
        if self.powers == "mild":
            return 1 + F.softplus(self.per_head(self.key_gain, k))[:, None]
        return self.fixed_key_power

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, direction={self.direction}, powers={self.powers}, norm_scale={self.norm_scale:g}"


def with_size(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and its squared norm over the channels, [..., 1]; rows whose square would overflow are shortened."""
    size = x.square().sum(-1, keepdim=True)
    if cheap_to_look_at(size) and bool((size < torch.inf).all()):
        return x, size
    # the factor needs no gradient: results depend on the direction alone, and tanh has saturated
    x = x * (LARGEST_NORM / x.detach().abs().amax(-1, keepdim=True).clamp(min=LARGEST_NORM))
    return x, x.square().sum(-1, keepdim=True)


def constant_row(values: tuple[float, ...], *, device: torch.device) -> Tensor:
    """Return one row of values on the device; filled there, since a CUDA graph cannot hold a copy from the host."""
    row = torch.empty(1, len(values), dtype=torch.float32, device=device)
    for place, value in enumerate(values):
        row[:, place] = value
    return row


def build_spec(direction: str, rows: Tensor, norm_scale: float, alpha: float, is_cube: bool) -> KernelSpec:
    return KernelSpec(
        f"norm_aware_{direction}",
        parts=2,
        parameters=rows,
        norm_scale=norm_scale,
        alpha=alpha,
        log2_key_shift=30.0,
        is_cube=is_cube,
    )


def build_fixed_spec(
    direction: str, values: tuple[float, ...], norm_scale: float, alpha: float, *, device: torch.device
) -> KernelSpec:
    return build_spec(direction, constant_row(values, device=device), norm_scale, alpha, values[2] == 3.0)


# a copy to the GPU at each call would cost more than the op
cached_spec = kept(build_fixed_spec, maxsize=128)
