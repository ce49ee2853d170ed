"""A comparison of softmax and every feature map, on tokens whose query norms sweep two decades."""

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..feature_maps import FEATURE_MAPS, FeatureMap, feature_map
from ..ops import attention_weights, linear_attention
from .entropy import (
    attention_entropy,
    channel_entropy,
    effective_rank,
    entropy_drop,
    falls_monotonically,
    norm_sweep,
    spearman,
)

NUM_HEADS, HEAD_DIM, SEEDS = 4, 64, 8
# Below this many nats the order of entropies is that of rounding errors: a constant curve has a rank correlation too.
LEAST_DROP = 0.02
# Enough tokens to hide the overhead of a call, whatever the comparison's own number of tokens.
TIMED_TOKENS = 4096
TIMED_CALLS = 7
CURVE_POINTS = 32

# Maps with several rows, by the options that differ.
VARIANTS: dict[str, tuple[dict[str, object], ...]] = {
    "norm_aware": (
        {"direction": "split"},
        {"direction": "cosine"},
        {"direction": "split", "norm_scale": "head"},
        {"direction": "cosine", "norm_scale": "head"},
    ),
}


@dataclass(frozen=True, kw_only=True)
class ComparedMethod:
    """A method of the comparison: softmax, or a feature map with its options."""

    map_name: str | None
    """The name in the registry of feature maps; None is softmax."""
    options: Mapping[str, object] = field(default_factory=dict)
    """The options of the map; the label shows their values."""

    @property
    def label(self) -> str:
        if self.map_name is None:
            return "softmax"
        return " ".join((self.map_name, *map(str, self.options.values())))

    def make(self, dtype: torch.dtype, *, seed: int = 0) -> FeatureMap | None:
        """Build the map with parameters of that dtype, random ones from `seed`; None for softmax."""
        if self.map_name is None:
            return None
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return feature_map(self.map_name, num_heads=NUM_HEADS, head_dim=HEAD_DIM, **self.options).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one method; means over heads and seeds."""

    label: str
    spearman: float
    """Rank correlation of query norm and entropy; 0 if the entropy changes by less than 0.02 nats."""
    entropy_drop: float
    """Entropy at the 10th norm percentile minus that at the 90th, nats."""
    channel_entropy_falls: bool | None
    """True if PSE(phi_q) falls monotonically in the norm for every direction tried; None for softmax, which has no phi."""
    smallest_weight: float
    effective_rank: float
    milliseconds: float | None
    """Median time of one forward call on [1, 4096, 4, 64], float32; None if it was not measured."""
    norms: tuple[float, ...]
    entropy: tuple[float, ...]
    """The curve of the plot: mean entropy (nats) in bins of the norm, at the bins' geometric centers."""


def methods() -> list[ComparedMethod]:
    """Return softmax, then every registered map in the order of the registry."""
    found = [ComparedMethod(map_name=None)]
    for name in FEATURE_MAPS.names():
        found.extend(ComparedMethod(map_name=name, options=options) for options in VARIANTS.get(name, ({},)))
    return found


def compare_methods(chosen: list[ComparedMethod], *, num_tokens: int = 256, seed: int = 0, timed: bool = True) -> Iterator[Row]:
    """Yield a row for each method once it is ready; `timed=False` skips the time."""
    norms, q, k = norm_sweep(num_tokens, num_heads=NUM_HEADS, head_dim=HEAD_DIM, seeds=SEEDS, seed=seed)
    for method in chosen:
        yield compare_one(method, norms, q, k, seed=seed, timed=timed)


@torch.no_grad()
def compare_one(method: ComparedMethod, norms: Tensor, q: Tensor, k: Tensor, *, seed: int = 0, timed: bool = True) -> Row:
    """Return the row of one method; norms [N], q and k [S, N, H, D] from `norm_sweep`."""
    phi = method.make(q.dtype, seed=seed)
    entropies, smallest, rank = [], math.inf, []
    # one seed at a time, since the weights of all would take S * H * N^2
    for q_seed, k_seed in zip(q.split(1), k.split(1), strict=True):
        weights = weights_of(phi, q_seed, k_seed)[0]  # [H, N, N]
        entropies.append(attention_entropy(weights))
        smallest = min(smallest, weights.min().item())
        rank.append(effective_rank(weights))
    entropy = torch.stack(entropies)  # [S, H, N]
    drop = entropy_drop(norms, entropy).mean().item()
    correlation = spearman(norms.expand_as(entropy), entropy).mean().item()
    bins = [part.log().mean().exp().item() for part in norms.tensor_split(CURVE_POINTS) if part.numel()]
    heights = [part.mean().item() for part in entropy.tensor_split(CURVE_POINTS, dim=-1) if part.numel()]
    return Row(
        label=method.label,
        spearman=0.0 if abs(drop) < LEAST_DROP else correlation,
        entropy_drop=drop,
        channel_entropy_falls=None if phi is None else channels_sharpen(phi, seed=seed),
        smallest_weight=smallest,
        effective_rank=torch.stack(rank).mean().item(),
        milliseconds=time_call(method.make(torch.float32, seed=seed)) if timed else None,
        norms=tuple(bins),
        entropy=tuple(heights),
    )


def weights_of(phi: FeatureMap | None, q: Tensor, k: Tensor) -> Tensor:
    """Return the attention weights, [B, H, N, M]; those of the first stream if there are two."""
    if phi is None:
        return torch.einsum("bihd,bjhd->bhij", q * q.shape[-1] ** -0.5, k).softmax(dim=-1)
    return attention_weights(q, k, feature_map=phi)


def channels_sharpen(phi: FeatureMap, *, directions: int = 64, steps: int = 64, seed: int = 0) -> bool:
    """True if the channel entropy of phi_q falls whenever a query grows and keeps its direction."""
    _, q, k = norm_sweep(directions, num_heads=NUM_HEADS, head_dim=HEAD_DIM, seed=seed)
    unit = q / q.norm(dim=-1, keepdim=True)
    scales = torch.logspace(-1, 1, steps, dtype=q.dtype)
    grown = scales[:, None, None, None] * unit  # [P, N, H, D]
    # a map that uses statistics of all tokens must see the same tokens at every step
    mapped = phi.given(unit, k, key_mask=None, causal=False)
    entropy = channel_entropy(mapped.query_streams(grown)[0].value)  # the scale of the features cancels
    return falls_monotonically(entropy.movedim(0, -1), least_fall=LEAST_DROP)


def time_call(phi: FeatureMap | None, *, num_tokens: int = TIMED_TOKENS) -> float:
    """Return the median milliseconds of a forward call in float32 on the CPU; softmax by torch's fused attention."""
    _, q, k = norm_sweep(num_tokens, num_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    v = k.flip(1)
    q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in (q, k, v))

    def call() -> Tensor:
        if phi is None:
            return F.scaled_dot_product_attention(q_heads, k_heads, v_heads)
        return linear_attention(q, k, v, feature_map=phi)

    seconds = []
    for _ in range(TIMED_CALLS + 1):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    # the first call warms up
    return 1e3 * statistics.median(seconds[1:])
