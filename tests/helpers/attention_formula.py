"""Linear attention written out as a matrix of weights over tokens, and how near to it the op must be."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nalaformer import FeatureMap

# float64 inputs: what is left is rounding, and every mistake in the mathematics is far above it
EXACT = 1e-12
# float32: masks, mates, threads and cuts may change the order of sums and nothing else
ROUNDING = 1e-6


@dataclass(frozen=True)
class Turning:
    """Rotary positions for the formula: positions [N, A] or [B, N, A] of q and of k, `dim` channels, frequencies 10000^-t."""

    of_q: Tensor
    of_k: Tensor
    dim: int
    inclusive: bool
    normalised: bool = False

    def features(self, features: Tensor, positions: Tensor) -> Tensor:
        """Each channel pair as a complex number, turned by multiplication."""
        axes = positions.shape[-1]
        num_speeds = self.dim // (2 * axes)
        last = max(1, num_speeds - 1) if self.inclusive else num_speeds
        turned = torch.empty(*features.shape[:-1], features.shape[-1] // 2, dtype=torch.complex128, device=features.device)
        for pair in range(features.shape[-1] // 2):
            axis, speed = divmod(pair % (self.dim // 2), num_speeds)
            angle = positions[..., axis].double() * 10000.0 ** (-speed / last)
            number = torch.complex(features[..., 2 * pair], features[..., 2 * pair + 1])  # [B, N, H]
            turned[..., pair] = number * torch.exp(1j * angle)[..., None]
        result = torch.view_as_real(turned).flatten(-2)
        return torch.cat((result, turned.abs()), -1) if self.normalised else result


def formula_weights(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    turning: Turning | None = None,
    eps: float = 1e-6,
) -> list[Tensor]:
    """w_ij = rot(phi_q(q_i)).rot(phi_k(k_j)) / (sum_j phi_q(q_i).phi_k(k_j) + eps n), j over what i sees: [B, H, N, M] each."""
    exact = copy.deepcopy(feature_map).double()
    q, k = q.double(), k.double()
    group = q.shape[2] // k.shape[2]
    if exact.num_heads == k.shape[2]:
        phi_k = exact.key(k).repeat_interleave(group, 2)
    else:
        phi_k = exact.key(k.repeat_interleave(group, 2))

    batch, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    visible = torch.ones(batch, num_queries, num_keys, dtype=torch.bool, device=q.device)
    for i in range(num_queries):
        if causal:
            visible[:, i, i + 1 :] = False
        if key_mask is not None:
            visible[:, i] &= key_mask
    seen = visible.sum(-1).double()[:, None]  # [B, 1, N]

    streams = []
    for phi_q in exact.streams_as_numbers(q):
        above = below = weights_of(phi_q, phi_k, visible)
        if turning is not None:
            above = weights_of(turning.features(phi_q, turning.of_q), turning.features(phi_k, turning.of_k), visible)
            below = above if turning.normalised else below
        total = below.sum(-1) + eps * seen
        streams.append(above / torch.where(total == 0, 1.0, total)[..., None])
    return streams


def formula(feature_map: FeatureMap, q: Tensor, k: Tensor, v: Tensor, **arguments: object) -> Tensor:
    """out_i = sum_j w_ij v_j, with the arguments of `formula_weights`; each stream reads its part of the values."""
    weights = formula_weights(feature_map, q, k, **arguments)
    values = v.double().repeat_interleave(q.shape[2] // k.shape[2], 2).chunk(len(weights), -1)
    return torch.cat([(w @ part.transpose(1, 2)).transpose(1, 2) for w, part in zip(weights, values, strict=True)], -1)


def weights_of(phi_q: Tensor, phi_k: Tensor, visible: Tensor) -> Tensor:
    """[B, H, N, M]: the product of every query with every key that it sees."""
    return (phi_q.transpose(1, 2) @ phi_k.permute(0, 2, 3, 1)) * visible[:, None]


def distance(actual: Tensor, expected: Tensor) -> float:
    """Normwise; NaN anywhere makes it infinite, which passes no comparison: `max` of several may pass over a NaN."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    found = float((actual - expected).norm() / max(float(expected.norm()), 1e-6))
    return math.inf if math.isnan(found) else found


def row_positions(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens)[:, None]


def grid_positions(height: int, width: int) -> Tensor:
    return torch.tensor([(row, column) for row in range(height) for column in range(width)])
