"""Input checks of hybrid attention. Each error states the rule, the value, and the fix."""

from torch import Tensor

from ...feature_maps import FeatureMap
from ...ops import check_key_mask
from .settings import HybridSettings


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap,
    settings: HybridSettings,
    gate: Tensor | None,
    scores: Tensor | None,
    key_mask: Tensor | None,
) -> None:
    """Check the inputs of a call."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or not x.is_floating_point():
            raise ValueError(f"{name} must be floats [batch, tokens, heads, channels], got {tuple(x.shape)} {x.dtype}")
    if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(
            f"q, k and v must have the same samples and tokens, got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[1] == 0:
        raise ValueError(f"q must hold at least one token, got shape {tuple(q.shape)}")
    if k.shape[2] != v.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"the heads of q must be a multiple of those of k and v, got {q.shape[2]}, {k.shape[2]} and {v.shape[2]}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head size, got {q.shape[3]} and {k.shape[3]}")
    if feature_map.streams != 1:
        raise ValueError(f"feature_map must have one stream, got {feature_map.streams}; polarity maps are unsupported here")
    check_key_mask(key_mask, k)
    if gate is not None and (gate.shape[:3] != q.shape[:3] or gate.shape[3] not in (1, v.shape[3])):
        raise ValueError(f"gate must be {(*q.shape[:3], v.shape[3])}, or 1 in the last place, got {tuple(gate.shape)}")
    if settings.keeps_scores and settings.rule.needs_scores and (scores is None or scores.shape != k.shape[:3]):
        got = None if scores is None else tuple(scores.shape)
        raise ValueError(f"selection {settings.selection!r} needs scores for each key, {tuple(k.shape[:3])}, got {got}")
