"""Statistics of each head of a recorded layer, computed over some queries at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.linear_form import LinearForm
from .compare import LEAST_DROP
from .entropy import attention_entropy, effective_rank, entropy_drop, spearman
from .records import LayerRecord, LinearRecord, as_shares, linear_forms

CURVE_POINTS = 24
# The numbers of windows and rows for effective ranks, each of which needs a singular value decomposition.
RANKED_WINDOWS, RANKED_ROWS = 8, 128
# Opposite signs count as lost if they get less than this fraction of the weight of equal ones.
LEAST_RESPONSE = 1e-3
PROBES = 16


@dataclass(frozen=True, kw_only=True)
class HeadStatistics:
    """Statistics of one head of one layer, over all queries of all samples. Entropies in nats."""

    entropy: float
    """Mean entropy of the shares: 0 for one token, log of the number of keys for equal shares."""
    spearman: float
    """Rank correlation of query norm and entropy; 0 if the entropy changes by less than 0.02 nats."""
    entropy_drop: float
    """Entropy at the 10th percentile of the query norms minus that at the 90th."""
    key_norm_correlation: float
    """Rank correlation of the norm of a key and the attention that it receives."""
    effective_rank: float
    """exp of the entropy of the singular values of the weights, mean over samples; see `head_statistics`."""
    lost_products: float
    """Fraction of |q_c k_c|, over all visible pairs and all channels, whose factors differ in sign and that the feature map
    ignores."""
    smallest_weight: float
    """The smallest weight of all visible pairs."""
    negative_share: float
    """The negative fraction of the weights' size: rotary positions in the numerator alone make such weights."""
    log_denominators: tuple[float, float]
    """Smallest and largest log of the denominators."""
    query_norm: float
    """The mean norm."""
    query_norm_spread: float
    """The standard deviation over the mean."""
    key_norm: float
    norms: tuple[float, ...]
    """The curve: mean query norm in bins with equally many queries ..."""
    entropies: tuple[float, ...]
    """... and the mean entropy there."""


@torch.no_grad()
def head_statistics(record: LayerRecord) -> list[HeadStatistics]:
    """Return the statistics of each head.

    The effective rank of linear attention that sees all keys follows from its features: QR decompositions of those of the
    queries (divided by the denominators) and of the keys, then the singular values of the product of both triangles. For other
    attention at most 128 evenly spaced rows are used, which bounds the rank. Rows of padding count as zeros, and samples of
    only padding do not count.
    """
    windows, places, heads, _ = record.q.shape
    real = _real_queries(record)
    if not bool(real.any()):
        raise ValueError(
            f"statistics need visible tokens, got {record.name} with all {real.numel()} masked; pass a mask with some tokens"
        )
    entropy = torch.zeros(windows, heads, places, dtype=torch.float64, device=record.q.device)
    received = torch.zeros(windows, heads, record.k.shape[1], dtype=torch.float64, device=record.q.device)
    smallest = torch.full((heads,), torch.inf, dtype=torch.float64, device=record.q.device)
    negative = torch.zeros(windows, heads, places, dtype=torch.float64, device=record.q.device)
    for chunk, weights in record.chunks():
        shares = as_shares(weights)
        entropy[:, :, chunk] = attention_entropy(shares).double()
        negative[:, :, chunk] = (shares * (weights < 0)).sum(-1).double()
        # a key that a query does not see has no weight
        visible = torch.where(real[:, None, chunk, None] & record.seen_keys(chunk), weights, torch.inf)
        smallest = torch.minimum(smallest, visible.amin((0, 2, 3)).double())
        received += (shares * real[:, None, chunk, None]).sum(2).double()
    query_norms, key_norms = (x.double().norm(dim=-1).transpose(1, 2) for x in (record.q, record.k))  # [P, H, T]
    keys = real if record.k.shape[1] == places else torch.ones_like(received[:, 0], dtype=torch.bool)
    rank = _effective_rank(record, real)
    lost = _lost_products(record, real)
    denominators = record.log_denominators().double().unflatten(-1, (-1, places))  # [P, H, streams, T]
    found = []
    for head in range(heads):
        norms, of_head = query_norms[:, head][real], entropy[:, head][real]
        order = norms.argsort()
        drop = entropy_drop(norms, of_head).item() if len(norms) >= 10 else 0.0
        bins = [part for part in order.tensor_split(CURVE_POINTS) if len(part)]
        # padding may see no key at all
        logs = denominators[:, head].movedim(1, -1)[real]
        low, high = logs.amin().item(), logs.amax().item()
        found.append(
            HeadStatistics(
                entropy=of_head.mean().item(),
                spearman=0.0 if abs(drop) < LEAST_DROP else spearman(norms, of_head).item(),
                entropy_drop=drop,
                key_norm_correlation=spearman(key_norms[:, head][keys], received[:, head][keys]).item(),
                effective_rank=rank[head].item(),
                lost_products=lost[head].item(),
                smallest_weight=smallest[head].item(),
                negative_share=negative[:, head][real].mean().item(),
                log_denominators=(low, high),
                query_norm=norms.mean().item(),
                query_norm_spread=(norms.std(correction=0) / norms.mean().clamp(min=1e-30)).item(),
                key_norm=key_norms[:, head][keys].mean().item(),
                norms=tuple(norms[part].mean().item() for part in bins),
                entropies=tuple(of_head[part].mean().item() for part in bins),
            )
        )
    return found


def _real_queries(record: LayerRecord) -> Tensor:
    """Return which queries are real tokens, [P, T] bool."""
    real = torch.ones(record.q.shape[:2], dtype=torch.bool, device=record.q.device)
    if record.key_mask is not None and record.key_mask.shape == real.shape:
        real = real & record.key_mask
    if record.windows is not None:
        real = real & (record.windows >= 0).repeat(record.batch, 1)
    return real


def _effective_rank(record: LayerRecord, real: Tensor) -> Tensor:
    """Return the effective rank of each head, [H]."""
    # a window of only padding has no rank, but 1 would be computed
    shown = real.any(dim=1).nonzero()[:, 0]
    places = torch.linspace(0, len(shown) - 1, min(RANKED_WINDOWS, len(shown))).round().long().unique()
    windows = shown[places.to(shown.device)]
    if isinstance(record, LinearRecord) and not record.causal and record.groups is None:
        ranks = [_product_rank(form, windows, real[windows]) for form in linear_forms(record, record.key_mask)]
        return torch.stack(ranks).mean(0)
    rows = torch.linspace(0, record.q.shape[1] - 1, min(RANKED_ROWS, record.q.shape[1])).round().long().unique()
    rows = rows.to(record.q.device)
    weights = torch.where(real[windows][:, None, rows, None], record.piece_weights(rows)[windows], 0.0)
    return effective_rank(weights.double()).mean(0)


def _product_rank(form: LinearForm, windows: Tensor, real: Tensor) -> Tensor:
    """Return exp of the entropy of the singular values of queries keys^T, from the product of both triangles, [H]."""
    visible = torch.where(real[:, None, :, None], form.queries[windows], 0.0)
    queries, keys = (torch.linalg.qr(x.double(), mode="r").R for x in (visible, form.keys[windows]))
    return effective_rank(queries @ keys.mT).mean(0)


def _lost_products(record: LayerRecord, real: Tensor) -> Tensor:
    """Return the fraction of the size of opposite products, if the feature map ignores them, [H].

    The size over all pairs follows from sums per channel of the positive and of the negative parts of q and k.
    """
    if not isinstance(record, LinearRecord):
        return torch.zeros(record.num_heads, dtype=torch.float64)
    opposite = total = torch.zeros(record.num_heads, dtype=torch.float64, device=record.q.device)
    for queries, keys in record.visible():
        q_up, q_down = _parts(record.q, real if queries is None else real & queries)
        # the sums over the keys that each query sees
        k_up, k_down = (_sum_visible(x, record) for x in _parts(record.k, keys))
        if not record.causal:
            q_up, q_down = q_up.sum(1, keepdim=True), q_down.sum(1, keepdim=True)
        opposite = opposite + (q_up * k_down + q_down * k_up).sum((0, 1, 3))
        total = total + ((q_up + q_down) * (k_up + k_down)).sum((0, 1, 3))
    return opposite / total.clamp(min=1e-30) * ~_sees_opposites(record, real)


def _parts(x: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sizes of the positive and of the negative entries, [P, T, H, D]; 0 at masked tokens."""
    x = x.double() if visible is None else torch.where(visible[:, :, None, None], x.double(), 0.0)
    return x.clamp(min=0), (-x).clamp(min=0)


def _sum_visible(x: Tensor, record: LinearRecord) -> Tensor:
    """Sum over all tokens, [P, 1, H, D], or in causal attention up to the end of each token's block, [P, T, H, D]."""
    if not record.causal:
        return x.sum(1, keepdim=True)
    tokens = torch.arange(x.shape[1], device=x.device)
    last = ((tokens // record.block + 1) * record.block - 1).clamp(max=x.shape[1] - 1)
    return x.cumsum(1)[:, last]


def _sees_opposites(record: LinearRecord, real: Tensor) -> Tensor:
    """True if keys that differ from a query in the sign of every channel get any weight beside the query itself, [H] bool.

    Tested on random signs in all channels, with the sizes of queries and keys in the record.
    """
    shape = (1, PROBES, record.num_heads, record.q.shape[-1])
    signs = 2.0 * torch.randint(2, shape, generator=torch.Generator().manual_seed(0)).double().to(record.q.device) - 1
    mapped = record.feature_map.given(record.q, record.k, key_mask=None, causal=record.causal)
    tokens = (record.q[real], record.k if record.key_mask is None else record.k[record.key_mask])
    size_of_query, size_of_key = (x.double().square().mean().sqrt() for x in tokens)
    same, opposite = (mapped.key(sign * size_of_key * signs) for sign in (1.0, -1.0))
    streams = [stream.value for stream in mapped.query_streams(size_of_query * signs)]
    # one stream sees equal signs, the other opposite ones
    products = torch.stack([torch.stack([(x * y).sum(-1)[0] for y in (same, opposite)]) for x in streams])  # [., 2, probes, H]
    return (products[:, 1].abs().amax(0) > LEAST_RESPONSE * products.abs().amax((0, 1))).any(0)
