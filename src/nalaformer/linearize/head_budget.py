"""Which heads keep every token: those that look up what is far away, as many as the cache allows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.hybrid import HybridSettings, salient_tokens, settings_for
from ..data import Samples
from ..feature_maps import feature_map
from ..models.hybrid.attention import ConvertedAttention, attention_mode, converted_attentions
from .batches import inputs_and_targets
from .repeats import repeat_segments

TEXTS = 16
"""Texts in which heads are watched."""


@torch.no_grad()
def lookup_scores(
    model: nn.Module,
    data: Samples,
    *,
    texts: int = TEXTS,
    length: int = 2048,
    seed: int = 0,
    advance: Callable[[int], None] = lambda texts: None,
) -> Tensor:
    """Return how much each key head looks up: [layers, key heads], 0 to 1. advance: told how many more texts are done.

    In texts with segments that come again, the attention that the second coming pays to the token which followed the first: the
    mean over places, of the query head that pays most among those that share the keys.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    attentions = converted_attentions(model)
    sums: list[Tensor | float] = [0.0] * len(attentions)
    was_training = model.training
    model.eval()
    places: dict[str, Tensor] = {}

    def observe(attention: ConvertedAttention, q: Tensor, k: Tensor, scale: float) -> None:
        sums[attention.layer] = sums[attention.layer] + _paid(q, k, scale, places["rows"], places["sources"])

    try:
        for attention in attentions:
            attention.observer = observe
        with attention_mode(model, "softmax"):
            for number in range(min(texts, len(data))):
                sample: Any = data[number * len(data) // min(texts, len(data))]
                tokens = sample["input_ids"] if isinstance(sample, dict) else sample
                tokens, sources = repeat_segments(inputs_and_targets(tokens[None])[0][0][:length], generator)
                rows = (sources >= 0).nonzero()[:, 0]
                places |= {"rows": rows.to(device), "sources": sources[rows].to(device)}
                model(input_ids=tokens[None].to(device), use_cache=False, logits_to_keep=1)
                advance(1)
    finally:
        for attention in attentions:
            attention.observer = None
        model.train(was_training)
    return torch.stack([torch.as_tensor(each) for each in sums]).float().cpu() / min(texts, len(data))


def _paid(q: Tensor, k: Tensor, scale: float, rows: Tensor, sources: Tensor) -> Tensor:
    """Return the mean weight that rows give to their sources, of the best query head of each key head: [K]."""
    key_heads = k.shape[2]
    some = q[0, rows].float().unflatten(1, (key_heads, -1)) * scale  # [R, K, G, D]
    logits = torch.einsum("rkgd,nkd->kgrn", some, k[0].float())
    logits = logits.masked_fill(torch.arange(k.shape[1], device=k.device) > rows[:, None], -torch.inf)
    weights = logits.softmax(-1)
    paid = weights.gather(-1, sources.expand(*weights.shape[:2], -1)[..., None])[..., 0]
    return paid.mean(-1).amax(-1)


def head_bytes(budget: str, settings: HybridSettings, length: int, *, group: int, head_dim: int, itemsize: int) -> int:
    """Return the bytes that a key head and the `group` query heads that share it remember of `length` tokens."""
    own = settings_for(settings, budget)
    window = 2 * own.chunk_size if own.exact else 0
    stored = salient_tokens(length, own) if own.exact else 0
    scores = 4 * window * (group if own.rule.of_query_heads else 1) if own.keeps_scores else 0
    features = 0
    if own.linear:
        phi = feature_map(own.feature_map, num_heads=1, head_dim=head_dim, **own.map_options)
        features = phi.query(torch.zeros(1, 1, 1, head_dim)).shape[-1]
    stores = group if own.stores_per_query_head else 1
    return stores * (2 * (window + stored) * head_dim * itemsize + 4 * stored) + scores + 4 * group * features * (head_dim + 1)


def choose_budget(
    scores: Tensor, cache: float, settings: HybridSettings, length: int, *, group: int, head_dim: int, itemsize: int
) -> list[list[str]]:
    """Return "full" for the key heads with the highest scores [layers, K], as many as fit into the cache, else "salient".

    cache: bytes at `length` tokens as a part of softmax's.
    """
    sizes = {"group": group, "head_dim": head_dim, "itemsize": itemsize}
    softmax = 2 * length * head_dim * itemsize
    full, other = (head_bytes(name, settings, length, **sizes) for name in ("full", "salient"))
    heads = scores.numel()
    room = cache * heads * softmax - heads * other
    if room < 0:
        raise ValueError(
            f"cache must hold what every head remembers, {other / softmax:.3f} of softmax at {length} tokens, got {cache}; "
            "allow more, or let heads remember less: a smaller max_salient or chunk_size"
        )
    number = min(heads, int(room // max(1, full - other)))
    chosen = torch.zeros(heads, dtype=torch.bool)
    chosen[scores.flatten().sort(descending=True, stable=True).indices[:number]] = True
    return [["full" if is_full else "salient" for is_full in row] for row in chosen.view_as(scores).tolist()]
