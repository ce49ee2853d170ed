"""Entropies, ranks and rank correlations of attention: pure functions of tensors."""

import torch
from torch import Tensor

# Rounding may push a zero weight below zero by this fraction of the largest one; lower weights are signed.
ROUNDING = 1e-6


def attention_entropy(weights: Tensor) -> Tensor:
    """Return -sum_j w_j log w_j of each row in nats, rows scaled to sum to one: [..., M] -> [...].

    It is 0 for all weight on one token, log M for equal weights, and 0 for a row without any weight.
    """
    if weights.numel() and weights.min() < -ROUNDING * weights.max():
        raise ValueError(
            f"entropy needs weights >= 0, got {weights.min().item():.3g}; rotary positions in the numerator alone make "
            "signed weights: omit the rotary or make it with normalised=True"
        )
    return _entropy(weights.clamp(min=0))


def channel_entropy(features: Tensor) -> Tensor:
    """Return PSE(x) = -sum_c (x_c / s) log(x_c / s), s = sum_c x_c, in nats: [..., F] -> [...].

    This is the positive sequence entropy of PolaFormer and NaLaFormer. Signed features enter by absolute value.
    """
    return _entropy(features.abs())


def _entropy(x: Tensor) -> Tensor:
    total = x.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return torch.special.entr(x / total).sum(dim=-1)


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Return Spearman's rank correlation along the last dimension, ties by their mean rank: [..., N], [..., N] -> [...].

    It is 0 if one of them is constant.
    """
    x, y = (rank - rank.mean(dim=-1, keepdim=True) for rank in (ranks(x), ranks(y)))
    spread = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return (x * y).sum(-1) / spread.clamp(min=torch.finfo(x.dtype).tiny)


def ranks(x: Tensor) -> Tensor:
    """Return the ranks of the last dimension from 1, float64; equal entries share the mean of their ranks.

    All ranks of a row with NaN are NaN.
    """
    ordered = x.sort(dim=-1).values
    below = torch.searchsorted(ordered, x.contiguous())
    not_above = torch.searchsorted(ordered, x.contiguous(), right=True)
    found = (below + not_above + 1).double() / 2
    return found.masked_fill(x.isnan().any(dim=-1, keepdim=True), torch.nan)


def entropy_drop(norms: Tensor, entropy: Tensor, *, low: float = 0.1, high: float = 0.9, width: float = 0.1) -> Tensor:
    """Return the entropy at the 10th norm percentile minus that at the 90th, in nats: [N], [..., N] -> [...].

    Each end is the mean over the `width` of the tokens around its percentile, which averages over random directions. The result
    is NaN if a norm or an entropy is.
    """
    num_tokens = norms.shape[-1]
    by_norm = entropy[..., norms.argsort()]

    def around(percentile: float) -> Tensor:
        start = round((percentile - width / 2) * num_tokens)
        stop = max(start + 1, round((percentile + width / 2) * num_tokens))
        return by_norm[..., start:stop].mean(-1)

    is_number = ~(norms.isnan().any() | entropy.isnan().any(dim=-1))
    return (around(low) - around(high)).masked_fill(~is_number, torch.nan)


def effective_rank(weights: Tensor) -> Tensor:
    """Return exp of the entropy of the singular values scaled to sum to one (Roy and Vetterli, 2007): [..., N, M] -> [...].

    It is n for the identity of size n, 1 for a matrix with equal rows, NaN for one that is not finite.
    """
    is_finite = weights.isfinite().all(dim=(-2, -1))
    # the decomposition raises an error for the whole batch if one entry is not finite
    values = torch.linalg.svdvals(weights.masked_fill(~is_finite[..., None, None], 0.0))
    return _entropy(values).exp().masked_fill(~is_finite, torch.nan)


def falls_monotonically(curve: Tensor, *, least_fall: float) -> bool:
    """True if every curve [..., P] never rises along the last dimension and falls by `least_fall` in total."""
    # a flat curve may vary in its last digits
    trembling = 1e-9 * (1 + curve.abs().max())
    never_rises = (curve.diff(dim=-1) <= trembling).all()
    return bool(never_rises) and bool((curve[..., 0] - curve[..., -1] >= least_fall).all())


def norm_sweep(
    num_tokens: int,
    *,
    num_heads: int = 4,
    head_dim: int = 64,
    seeds: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw random tokens whose query norms run from 0.1 to 10 in equal logarithmic steps: (norms [N], q, k [S, N, H, D]).

    The directions are uniform and independent, all heads of a token have the same norm, and keys are standard normal. The
    global random state is not changed.
    """
    if num_tokens < 16:
        raise ValueError(f"a sweep over norms needs at least 16 tokens, got {num_tokens}")
    generator = torch.Generator().manual_seed(seed)
    norms = torch.logspace(-1, 1, num_tokens, dtype=torch.float64)
    # drawn in float64 for every dtype, so that the same seed means the same tokens
    q, k = torch.randn(2, seeds, num_tokens, num_heads, head_dim, generator=generator, dtype=torch.float64)
    q = q / q.norm(dim=-1, keepdim=True) * norms[:, None, None]
    return norms.to(dtype), q.to(dtype), k.to(dtype)
