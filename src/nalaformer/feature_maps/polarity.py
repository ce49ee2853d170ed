"""PolaFormer (Meng et al., 2025) and PolaFormer++: same-sign and opposite-sign products in two streams."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import KernelSpec, ScaledFeatures
from .base import LOG_LARGEST_FEATURE, FeatureMap, both_signs, by_sign, check_number, excess, safe_power, swap_halves
from .registry import FEATURE_MAPS


@FEATURE_MAPS.register("polarity")
class Polarity(FeatureMap):
    """phi(x)_c = [x+ ; x-]^p_c with p_c = 1 + alpha * sigmoid(w_c), after x / softplus(scale); F = 2 D, two streams.

    The second stream reads [q- ; q+]: it collects the keys of opposite sign and the second half of the values.
    w and scale are learned, w per head and channel (the same for q, k and both signs), scale per channel; zero at first.
    """

    streams = 2
    heads_have_own_keys = True

    def __init__(self, *, num_heads: int, head_dim: int, alpha: float = 4.0) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        check_number("alpha", alpha, why="so that the power is at least 1")
        self.alpha = alpha
        self.power = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.scale = nn.Parameter(torch.zeros(num_heads, head_dim))

    def query_streams(self, q: Tensor) -> tuple[ScaledFeatures, ...]:
        size, power = self._size_and_power(q)
        scale = power_log_scale(size, power)
        same = by_sign(scaled_power(size, power, scale), q)
        return ScaledFeatures(same, scale), ScaledFeatures(swap_halves(same), scale)

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        size, power = self._size_and_power(k)
        return by_sign(scaled_power(size, power, log_scale), k)

    def key_log_scale(self, k: Tensor) -> Tensor:
        return power_log_scale(*self._size_and_power(k))

    def kernel_spec(self, device: torch.device) -> KernelSpec:
        power = 1 + self.alpha * self.power.float().sigmoid()
        rows = torch.cat((power, 1 / F.softplus(self.scale.float())), dim=1)
        return KernelSpec("polarity", parts=2, parameters=rows.to(device), is_guarded=True)

    def _size_and_power(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size = x.abs() / F.softplus(self.per_head(self.scale, x))
        return size, 1 + self.alpha * self.per_head(self.power, x).sigmoid()


def power_log_scale(size: Tensor, power: Tensor) -> Tensor:
    """Return how far the log of the largest size^power exceeds LOG_LARGEST_FEATURE, [B, N, H, 1]."""
    with torch.no_grad():
        return excess((power * size.log()).amax(dim=-1, keepdim=True))


def scaled_power(size: Tensor, power: Tensor, log_scale: Tensor | float) -> Tensor:
    """Return size^power * exp(-log_scale), with the scale applied before the power so that nothing overflows."""
    if isinstance(log_scale, Tensor):
        size = size * (-log_scale / power).exp()
    return safe_power(size, power)


@FEATURE_MAPS.register("polarity_exp")
class PolarityExp(FeatureMap):
    """PolaFormer++: phi_q = exp(t * [q+ ; q-]) - 1, phi_k = exp([k+ ; k-]) - 1; F = 2 D, two streams.

    t = sigmoid(s): one learned vector of 2 D temperatures per head for the same-sign stream and one for the opposite-sign
    stream, which reads [q- ; q+].
    """

    streams = 2

    def __init__(self, *, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        self.same = nn.Parameter(torch.zeros(num_heads, 2 * head_dim))
        self.opposite = nn.Parameter(torch.zeros(num_heads, 2 * head_dim))

    def query_streams(self, q: Tensor) -> tuple[ScaledFeatures, ...]:
        signs = both_signs(q)
        streams = []
        for argument, temperature in ((signs, self.same), (swap_halves(signs), self.opposite)):
            argument = argument * self.per_head(temperature, q).sigmoid()
            scale = excess(argument.detach().amax(dim=-1, keepdim=True))
            streams.append(ScaledFeatures(scaled_expm1(argument, scale), scale))
        return tuple(streams)

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        return scaled_expm1(both_signs(k), log_scale)

    def key_log_scale(self, k: Tensor) -> Tensor:
        return excess(k.abs().amax(dim=-1, keepdim=True))

    def kernel_spec(self, device: torch.device) -> KernelSpec:
        rows = torch.cat((self.same, self.opposite), dim=1).float().sigmoid()
        return KernelSpec("polarity_exp", parts=2, parameters=rows.to(device), is_guarded=True)


def scaled_expm1(x: Tensor, log_scale: Tensor | float) -> Tensor:
    """Return (exp(x) - 1) * exp(-log_scale) for x >= 0."""
    if not isinstance(log_scale, Tensor):
        return torch.expm1(x)
    # (1 - exp(-x)) keeps the digits of small x when features are scaled
    plain = torch.expm1(x.clamp(max=LOG_LARGEST_FEATURE + 1))
    return torch.where(log_scale > 0, torch.exp(x - log_scale) * -torch.expm1(-x), plain)
