"""Compute the single weights of linear attention, which attention itself never computes, for diagnostics."""

from collections.abc import Sequence

from torch import Tensor

from . import reference
from .checks import (
    RotaryArgument,
    check_block,
    check_call,
    check_contrast,
    check_key_weight,
    check_log_decay,
    check_query_mask,
    check_rows,
)
from .contrast import make_contrast
from .decay import usable_decay
from .features import FeatureMapLike, compute_dtype, heads_for, outside_autocast
from .key_weight import per_key_for, weight_values


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    feature_map: FeatureMapLike,
    rows: Tensor | Sequence[int] | None = None,
    stream: int = 0,
    causal: bool = False,
    rotary: RotaryArgument = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    contrast: Tensor | str | None = None,
    key_weight: Tensor | str | None = None,
    log_decay: Tensor | None = None,
    block: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Return the exact weight that linear attention gives to each value: [B, H, R, M], for diagnostics.

    rows: the queries to return (all by default: a quadratic amount of memory). stream: which half of the values, for maps
    with two streams. Without rotary and contrast every weight is >= 0; without rotary a row sums to one, up to eps.
    """
    check_block(block, causal=causal, is_packed=False)
    rotaries = check_call(
        q, k, k, feature_map=feature_map, causal=causal, rotary=rotary, key_mask=key_mask, eps=eps, has_values=False
    )
    if not isinstance(stream, int) or not 0 <= stream < feature_map.streams:
        raise ValueError(f"stream must be below the map's number of streams ({feature_map.streams}), got {stream!r}")
    check_query_mask(query_mask, q)
    check_contrast(contrast, q)
    check_key_weight(key_weight, q, k, causal=causal, key_mask=key_mask, query_mask=query_mask)
    check_log_decay(log_decay, q, k, causal=causal, contrast=contrast, block=block)
    index = None if rows is None else check_rows(rows, q)
    given = k
    k, _ = heads_for(feature_map, q, k, k)
    key_weight, k, _ = per_key_for(q, k, k, key_weight)
    log_decay, k, _ = per_key_for(q, k, k, usable_decay(log_decay, key_mask))
    # a decay for each query head may have expanded the key heads
    key_weight, k, _ = per_key_for(q, k, k, key_weight)
    with outside_autocast(q):
        mapped = feature_map.given(q, k, key_mask=key_mask, query_mask=query_mask, causal=causal)
        weight = weight_values(key_weight, q, given, feature_map, key_mask, query_mask)
        return reference.attention_weights(
            q,
            k,
            feature_map=mapped,
            causal=causal,
            rotary=rotaries,
            key_mask=key_mask,
            eps=eps,
            rows=index,
            block=block,
            contrast=make_contrast(contrast, q, k, key_mask=key_mask, causal=causal, dtype=compute_dtype(q, k)),
            key_weight=weight,
            log_decay=log_decay,
        )[stream]
