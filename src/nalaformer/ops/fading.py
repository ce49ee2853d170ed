"""Keys that fade: in causal attention a head may forget, at each token by a factor of its own.

    out_i = sum_j exp(L_i - L_j) phi_q(q_i) . phi_k(k_j) v_j  /  ( sum_j exp(L_i - L_j) phi_q(q_i) . phi_k(k_j)  +  eps )

L_i = sum of log_decay up to token i, so the key of token j counts exp(log_decay) less at each token after it. eps is not
multiplied by the number of keys: however many there were, only some are left, and eps must not outgrow them.
"""

import torch
from torch import Tensor

from .exporting import is_jit_tracing
from .features import hide

# tokens whose decays are multiplied out pair by pair
PIECE = 128
# exp of it is no number of float32: more than everything cannot be forgotten, and sums of larger ones would lose their digits
LEAST = -100.0


def usable_decay(log_decay: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Within bounds, and zero at hidden tokens, which do nothing: [B, N, K]."""
    if log_decay is None:
        return None
    if key_mask is not None:
        log_decay = torch.where(key_mask[:, :, None], log_decay, log_decay.new_zeros(()))
    # keys that grow are refused where a look is cheap, and elsewhere do not fade: sums would overflow. No clamp at zero: there
    # it has no gradient (torch 2.15), and a head that forgets nothing yet would never learn to
    return torch.where(log_decay > 0, 0.0, log_decay).clamp(min=LEAST)


def faded_mean(v: Tensor, log_decay: Tensor, *, key_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What each token sees of the values in the mean if all features are alike: v [B, N, K, V], log_decay [B, N, K]."""
    visible = torch.ones_like(v[..., :1], dtype=dtype)
    both = torch.cat((hide(v, key_mask).to(dtype), hide(visible, key_mask)), dim=-1)
    total = faded_sums(both, log_decay.to(dtype))
    count = total[..., -1:]
    return total[..., :-1] / torch.where(count == 0, 1.0, count)


def faded_sums(x: Tensor, log_decay: Tensor) -> Tensor:
    """sum_{j <= i} exp(L_i - L_j) x_j: x [B, N, K, V], log_decay [B, N, K]."""
    before = torch.zeros_like(x[:, 0])
    parts = []
    # an exported program must serve every number of tokens, so it cannot count pieces
    is_whole = torch.compiler.is_exporting() or is_jit_tracing()
    pieces = [(x, log_decay)] if is_whole else zip(x.split(PIECE, dim=1), log_decay.split(PIECE, dim=1), strict=True)
    for values, decay in pieces:
        faded = decay.cumsum(1)
        within = pair_decay(faded)
        sums = torch.einsum("bkij,bjkv->bikv", within, values) + faded.exp()[..., None] * before[:, None]
        before = sums[:, -1]
        parts.append(sums)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def pair_decay(faded: Tensor) -> Tensor:
    """exp(L_i - L_j) for j <= i and 0 for later ones: L [B, N, K] -> [B, K, i, j]."""
    by_head = faded.transpose(1, 2)
    difference = by_head[..., :, None] - by_head[..., None, :]
    num_tokens = faded.shape[1]
    lower = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=faded.device).tril()
    # hidden before exp: of later tokens it may be infinite, and zero times that has no gradient
    return torch.where(lower, torch.where(lower, difference, 0.0).exp(), 0.0)
