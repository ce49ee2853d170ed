"""The definition of hybrid attention, as the formula reads: one query after another, quadratic.

Which tokens are salient is an argument, so that a comparison looks at the choice first and at the outputs then.
"""

import torch
from torch import Tensor

from nalaformer.attention.hybrid import HybridSettings
from nalaformer.attention.hybrid.branches import EPS
from nalaformer.feature_maps import FeatureMap


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_salient: Tensor,
    *,
    feature_map: FeatureMap,
    settings: HybridSettings,
    gate: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """q: [N, H, D]; k, v: [N, H, *]; is_salient: [N, N, H] bool, whether key j is salient for query i; -> [N, H, V]."""
    tokens, heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    query_features, key_features = feature_map.query(q[None])[0], feature_map.key(k[None])[0]
    rows = []
    for i in range(tokens):
        near = max(0, (i // settings.chunk_size - 1) * settings.chunk_size)
        for h in range(heads):
            exact = [j for j in range(i + 1) if j >= near or is_salient[i, j, h]]
            rest = [j for j in range(near) if not is_salient[i, j, h]] if settings.linear else []
            logits = (k[exact, h] @ q[i, h]) * scale
            row_max = logits.max()
            weights = (logits - row_max).exp()
            factor = (-row_max).exp() if settings.merge == "exact" else 1.0
            if settings.linear_mass is not None:
                factor = factor * min(1.0, settings.linear_mass / max(1, len(rest)))
            linear = factor * (key_features[rest, h] @ query_features[i, h])
            linear_values = linear @ v[rest, h] if rest else torch.zeros_like(v[0, h])
            if gate is not None:
                linear_values = linear_values * gate[i, h]
            # relative to max(exp(m), 1): where m < 0, both sums and eps are exp(m) smaller
            rows.append((weights @ v[exact, h] + linear_values) / (weights.sum() + linear.sum() + EPS))
    return torch.stack(rows).view(tokens, heads, -1)


def salient_by_score(scores: Tensor, *, settings: HybridSettings) -> Tensor:
    """[N, H] scores, as they are compared -> [N, N, H]: is key j salient for query i, found chunk after chunk."""
    tokens, heads = scores.shape
    size = settings.chunk_size
    salient = torch.zeros(tokens, tokens, heads, dtype=torch.bool)
    for h in range(heads):
        order = scores[:, h].tolist()
        if settings.keep_first and settings.salient_per_chunk:
            order[0] = float("inf")
        kept: list[int] = []
        for chunk in range((tokens - 1) // size + 1):
            if chunk >= 2:
                members = range((chunk - 2) * size, (chunk - 1) * size)
                kept += sorted(members, key=lambda j: -order[j])[: settings.salient_per_chunk]
                if settings.largest_store is not None:
                    kept = sorted(sorted(kept), key=lambda j: -order[j])[: settings.largest_store]
            salient[chunk * size : (chunk + 1) * size, kept, h] = True
    return salient
