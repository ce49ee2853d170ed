"""Simple feature maps, the baselines of the others."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import KernelSpec
from .base import FeatureMap, both_signs, check_number
from .registry import FEATURE_MAPS


class SameForBoth(FeatureMap):
    """A feature map that is the same for queries and keys."""

    def phi(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def query(self, q: Tensor) -> Tensor:
        return self.phi(q)

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        return self.phi(k)


@FEATURE_MAPS.register("relu")
class Relu(SameForBoth):
    """phi(x) = relu(x). The query norm cancels and every negative channel is lost."""

    def phi(self, x: Tensor) -> Tensor:
        return x.relu()

    def kernel_spec(self, device: torch.device) -> KernelSpec:
        return KernelSpec("relu", parts=1)


@FEATURE_MAPS.register("elu")
class Elu(SameForBoth):
    """phi(x) = elu(x) + 1 (Katharopoulos et al., 2020)."""

    def phi(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1

    def kernel_spec(self, device: torch.device) -> KernelSpec:
        return KernelSpec("elu", parts=1)


@FEATURE_MAPS.register("split")
class Split(SameForBoth):
    """phi(x) = [relu(x) ; relu(-x)]: keeps both signs, F = 2 D."""

    def phi(self, x: Tensor) -> Tensor:
        return both_signs(x)

    def kernel_spec(self, device: torch.device) -> KernelSpec:
        return KernelSpec("split", parts=2)


@FEATURE_MAPS.register("hedgehog")
class Hedgehog(FeatureMap):
    """phi(x) = [softmax(W_h x) ; softmax(-W_h x)] over the channels, W_h learned per head, one for q and one for k.

    Hedgehog (Zhang et al., 2024); W starts as the identity. F = 2 D.
    """

    queries_are_bounded = True
    heads_have_own_keys = True

    def __init__(self, *, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        self.query_weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))
        self.key_weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))

    def query(self, q: Tensor) -> Tensor:
        return softmax_both_signs(self.project(q, self.query_weight))

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        return softmax_both_signs(self.project(k, self.key_weight))

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute W_h x."""
        return torch.einsum("bnhd,hed->bnhe", x, self.per_head(weight, x))

    def kernel_spec(self, device: torch.device) -> KernelSpec:
        before = partial(self.project, weight=self.query_weight), partial(self.project, weight=self.key_weight)
        return KernelSpec("softmax", parts=2, before=before)


@FEATURE_MAPS.register("channel_softmax")
class ChannelSoftmax(SameForBoth):
    """phi(x) = [softmax(gain x) ; softmax(-gain x)] over the channels, for queries and keys; F = 2 D. Our own map.

    A longer query has fewer, larger features, without a bound, so its norm sets how sharp attention is. The features of a key
    sum to two, so no key outweighs the others. It is Hedgehog without its matrices, which the projections before attention
    contain, and with a gain: at gain 1, random keys get too much of each query's weight to learn recall.
    """

    queries_are_bounded = True

    def __init__(self, *, num_heads: int, head_dim: int, gain: float = 2.0) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        check_number("gain", gain, above=True, why="so that a larger channel gets a larger feature")
        self.gain = gain

    def phi(self, x: Tensor) -> Tensor:
        return softmax_both_signs(self.gain * x)

    def kernel_spec(self, device: torch.device) -> KernelSpec:
        return KernelSpec("channel_softmax", parts=2, alpha=self.gain)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gain={self.gain:g}"


def softmax_both_signs(x: Tensor) -> Tensor:
    """Return [softmax(x) ; softmax(-x)] over the channels."""
    return torch.cat((x.softmax(-1), (-x).softmax(-1)), dim=-1)
