"""Compute decay (gated linear attention): in causal attention each token of a head reduces all earlier keys by a factor.

    out_i = sum_j exp(L_i - L_j) phi_q(q_i) . phi_k(k_j) v_j  /  ( sum_j exp(L_i - L_j) phi_q(q_i) . phi_k(k_j)  +  eps )

L_i is the sum of log_decay up to token i, so each later token multiplies the weight of key j by exp(log_decay). eps is not
multiplied by the number of keys: decay leaves only some of them, and eps must not outgrow these.
"""

import torch
from torch import Tensor

from .exporting import is_jit_tracing
from .features import hide

# tokens whose pairwise decays are computed as one matrix
CHUNK = 128
# exp of it is below the smallest float32, so a lower bound changes nothing, and larger sums would lose their digits
LEAST = -100.0


def usable_decay(log_decay: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Clamp decays to the usable range and set them to zero at masked tokens: [B, N, K]."""
    if log_decay is None:
        return None
    if key_mask is not None:
        log_decay = torch.where(key_mask[:, :, None], log_decay, log_decay.new_zeros(()))
    # Checks reject growing keys where values are cheap to read; elsewhere such keys do not decay, or sums would overflow.
    # No clamp at zero: it has no gradient there (torch 2.15), so a head with a decay of zero could never learn another.
    return torch.where(log_decay > 0, 0.0, log_decay).clamp(min=LEAST)


def decayed_mean(v: Tensor, log_decay: Tensor, *, key_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the mean value that each token sees if all features are alike: v [B, N, K, V], log_decay [B, N, K]."""
    visible = torch.ones_like(v[..., :1], dtype=dtype)
    both = torch.cat((hide(v, key_mask).to(dtype), hide(visible, key_mask)), dim=-1)
    total = decayed_sums(both, log_decay.to(dtype))
    count = total[..., -1:]
    return total[..., :-1] / torch.where(count == 0, 1.0, count)


def decayed_sums(x: Tensor, log_decay: Tensor) -> Tensor:
    """Return sum_{j <= i} exp(L_i - L_j) x_j: x [B, N, K, V], log_decay [B, N, K]."""
    before = torch.zeros_like(x[:, 0])
    parts = []
    # an exported program must support every number of tokens, so it cannot count chunks
    is_whole = torch.compiler.is_exporting() or is_jit_tracing()
    chunks = [(x, log_decay)] if is_whole else zip(x.split(CHUNK, dim=1), log_decay.split(CHUNK, dim=1), strict=True)
    for values, decay in chunks:
        decay_sum = decay.cumsum(1)
        within = pair_decay(decay_sum)
        sums = torch.einsum("bkij,bjkv->bikv", within, values) + decay_sum.exp()[..., None] * before[:, None]
        before = sums[:, -1]
        parts.append(sums)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def pair_decay(decay_sum: Tensor) -> Tensor:
    """Return exp(L_i - L_j) for j <= i and 0 for later ones: L [B, N, K] -> [B, K, i, j]."""
    by_head = decay_sum.transpose(1, 2)
    difference = by_head[..., :, None] - by_head[..., None, :]
    num_tokens = decay_sum.shape[1]
    lower = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=decay_sum.device).tril()
    # masked before exp: it may be infinite for later tokens, and infinity times zero has no gradient
    return torch.where(lower, torch.where(lower, difference, 0.0).exp(), 0.0)
