"""MALA's contrast, RALA's weights and keys that fade written out over all pairs of tokens, apart from the library."""

import copy

import torch
from torch import Tensor

from nalaformer import FeatureMap


def visible_pairs(q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor:
    """[B, 1, N, M], 1 where token i sees key j."""
    seen = torch.ones(q.shape[0], 1, q.shape[1], k.shape[1], dtype=torch.float64, device=q.device)
    seen = seen.tril() if causal else seen
    return seen if key_mask is None else seen * key_mask[:, None, None, :]


def weighted_and_contrasted(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    contrast: Tensor | str | None = None,
    key_weight: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    turning: object = None,
    log_decay: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """o + z (o - mean v) with o = sum_j a_j p_ij v_j / (sum_j a_j p_ij + eps n), p = phi_q . phi_k; float64, differentiable.

    key_weight a: [B, M, H]; contrast z: [B, N, H], or "mean_score": D^-1/2 mean_j a_j p_ij.
    log_decay [B, M, H]: both p_ij and the mean count key j exp(sum of log_decay from j + 1 to i) times, and eps is not times n.
    """
    exact = copy.deepcopy(feature_map).double()
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    seen = visible_pairs(q, k, causal, key_mask)
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    times_eps = seen.sum(-1, keepdim=True)
    if log_decay is not None:
        if key_mask is not None:
            log_decay = torch.where(key_mask[:, :, None], log_decay, 0.0)
        passed = log_decay.double().clamp(min=-100).transpose(1, 2).cumsum(-1)  # [B, H, M]
        seen = seen * torch.exp((passed[..., :, None] - passed[..., None, :]).tril())
        count, times_eps = seen.sum(-1, keepdim=True), torch.ones_like(times_eps)
        count = torch.where(count == 0, 1.0, count)
    if key_mask is not None:
        k, v = (torch.where(key_mask[:, :, None, None], x, 0.0) for x in (k, v))
    phi_k = exact.key(k)
    outputs = []
    streams = exact.streams_as_numbers(q)
    for phi_q, values in zip(streams, v.chunk(len(streams), -1), strict=True):
        plain = torch.einsum("bihf,bjhf->bhij", phi_q, phi_k) * seen
        turned = plain
        if turning is not None:
            turned_q, turned_k = turning.features(phi_q, turning.of_q), turning.features(phi_k, turning.of_k)
            turned = torch.einsum("bihf,bjhf->bhij", turned_q, turned_k) * seen
        if key_weight is not None:
            weight = key_weight.double().transpose(1, 2)[:, :, None]  # [B, H, 1, M]
            plain, turned = plain * weight, turned * weight
        total = plain.sum(-1, keepdim=True)
        out = turned @ values.transpose(1, 2) / (total + eps * times_eps + (total == 0))
        if contrast is not None:
            mean = seen @ values.transpose(1, 2) / count
            strength = total / count * q.shape[3] ** -0.5
            if isinstance(contrast, Tensor):
                strength = contrast.double().transpose(1, 2)[..., None]
            out = out + strength * (out - mean)
        outputs.append(out.transpose(1, 2))
    return torch.cat(outputs, -1)


def rala_weight(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> Tensor:
    """a_j = n exp(s_j) / sum_j exp(s_j), s_j = D^-1/2 mean_i phi_q(q_i) . phi_k(k_j), of the visible tokens of each sample."""
    exact = copy.deepcopy(feature_map).double()
    weights = torch.zeros(*k.shape[:2], q.shape[2], dtype=torch.float64, device=k.device)
    for sample in range(q.shape[0]):
        keys = slice(None) if key_mask is None else key_mask[sample]
        queries = slice(None) if query_mask is None else query_mask[sample]
        shown = q[sample, queries].double()
        mean = exact.streams_as_numbers(shown[None])[0][0].sum(0) / max(1, len(shown))  # [H, F]
        # as many heads as the map has, before it is applied: their parameters differ
        repeated = k[sample, keys].double().repeat_interleave(q.shape[2] // k.shape[2], 1)
        phi_k = exact.key(repeated[None])[0]
        scores = (phi_k * mean).sum(-1) * q.shape[3] ** -0.5  # [n, H]
        weights[sample, keys] = len(scores) * scores.exp() / scores.exp().sum(0)
    return weights
