"""Statistics of trained attention on a few sequences: entropy against query norms, and effective rank."""

import torch
from torch import Tensor, nn

from nalaformer.analysis import LayerRecord, attention_entropy, attention_layers, effective_rank, entropy_drop, record, spearman
from nalaformer.analysis.compare import LEAST_DROP
from nalaformer.analysis.records import as_shares
from nalaformer.ops.reference import last_of_block

from ..fast_training.data_on_device import Bucket
from ..models import SequenceClassifier

INSIDE = ("entropy_norm", "entropy_drop", "effective_rank")
# tokens that are looked at, of at most so many sequences
TOKENS, SEQUENCES_AT_MOST = 4096, 8
# rows of the weights whose rank is taken, of so many sequences
RANKED_ROWS, RANKED = 64, 2


@torch.no_grad()
def attention_metrics(model: nn.Module, bucket: Bucket) -> dict[str, str]:
    """Return the metrics of INSIDE, means over layers and heads; empty where attention has no weights, as in delta rules.

    entropy_norm: Spearman's correlation of query norm and entropy, 0 for a head whose entropy_drop is under 0.02 nats.
    entropy_drop: entropy at the 10th percentile of the norms minus that at the 90th, in nats. Entropies are counted from that
    of equal weights, since queries differ in how many keys they see. effective_rank: of 64 rows of the weights.
    Weights may be negative where a method has a contrast: entropies are those of their absolute values.
    """
    if not attention_layers(model):
        return dict.fromkeys(INSIDE, "")
    is_pair = bucket.inputs.dim() == 3 and not bucket.inputs.is_floating_point()
    length = bucket.inputs.shape[1:3].numel() if is_pair else bucket.inputs.shape[1]
    rows = torch.arange(min(len(bucket), max(1, min(SEQUENCES_AT_MOST, TOKENS // length))), device=bucket.group.device)
    inputs = bucket.batch(rows)[0]
    # a pair is two sequences
    tokens = inputs.flatten(0, 1) if is_pair else inputs
    is_real = model.visible(tokens) if isinstance(model, SequenceClassifier) else None
    try:
        found = torch.cat([head_metrics(each, is_real) for each in record(model, inputs)])
    except torch.OutOfMemoryError:
        # a run of minutes is worth more than what it looks like inside
        return dict.fromkeys(INSIDE, "")
    means = found.mean(0).tolist()
    return {name: f"{value:.4f}" if value == value else "" for name, value in zip(INSIDE, means, strict=True)}


def head_metrics(layer: LayerRecord, is_real: Tensor | None = None) -> Tensor:
    """Return the three metrics of each head, [H, 3] float64 on the CPU; NaN where weights are NaN. is_real: [B, N], or all."""
    if is_real is None:
        # as many as the layer sees: those of a backbone differ from stage to stage
        is_real = layer.q.new_ones(layer.q.shape[:2], dtype=torch.bool)
    seen = is_real.sum(1, keepdim=True).expand(is_real.shape)
    if getattr(layer, "causal", False):
        places = torch.arange(is_real.shape[1], device=is_real.device)
        seen = is_real.cumsum(1)[:, last_of_block(places, getattr(layer, "block", 1), len(places))]
    entropies = []
    for places, weights in layer.chunks():
        if not bool(weights.isfinite().all()):
            return torch.full((layer.num_heads, 3), torch.nan, dtype=torch.float64)
        entropies.append(attention_entropy(as_shares(weights)) - seen[:, None, places].clamp(min=1).log())
    entropy = torch.cat(entropies, dim=-1).double()  # [B, H, N]
    norms = layer.q.double().norm(dim=-1).transpose(1, 2)
    places = torch.linspace(0, norms.shape[-1] - 1, min(RANKED_ROWS, norms.shape[-1])).round().long().unique()
    # a CPU finds the singular values of small matrices sooner
    ranks = effective_rank(layer.piece_weights(places.to(norms.device))[:RANKED].double().cpu()).mean(0)
    found = []
    for head in range(layer.num_heads):
        x, y = (each[:, head][is_real].cpu() for each in (norms, entropy))
        drop = entropy_drop(x, y) if len(x) >= 10 else x.new_zeros(())
        found.append(torch.stack((spearman(x, y) * (drop.abs() >= LEAST_DROP), drop, ranks[head])))
    return torch.stack(found)
