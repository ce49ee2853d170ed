"""What a trained network attends to: entropy against query norm, and where the marked cell looks."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...analysis import attention_entropy, entropy_drop, spearman
from ...analysis.compare import LEAST_DROP, weights_of
from ...attention import Attention
from ...data import CueGrid
from ...recipes import load_run

IMAGES = 64
SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Of one trained network, on the first eval images."""

    correlation: float
    """Spearman of query norm and entropy over all tokens of a head, mean over heads; 0 below a drop of 0.02 nats."""
    drop: float
    """Entropy at the 10th norm percentile minus that at the 90th, nats, mean over heads."""
    norms: tuple[float, ...]
    entropies: tuple[float, ...]
    """Mean entropy in bins of the norm, all heads together."""
    images: tuple[Tensor, ...]
    """The first eval images, [3, H, W] in 0..1."""
    maps: tuple[Tensor, ...]
    """What the marked cell attends to in each of them, [cells, cells], by the head that finds the answer best."""
    answers: tuple[int, ...]
    """The answer's cell in each."""
    weight_on_answer: float
    """Mean weight that that head puts on the answer."""
    classes: tuple[str, ...]
    tokens: int
    parameters: int


@torch.no_grad()
def diagnose(folder: Path) -> Diagnosis:
    run = load_run(folder)
    data = run.task.eval_data
    assert isinstance(data, CueGrid)
    images = torch.stack([data[index][0] for index in range(IMAGES)])
    places = [data.cue_and_answer(index) for index in range(IMAGES)]
    norms, weights = attention_of(run.model, images)
    entropy = [attention_entropy(layer) for layer in weights]  # [B, H, N] for each layer
    by_head = [(n.movedim(1, 0).flatten(1), e.movedim(1, 0).flatten(1)) for n, e in zip(norms, entropy, strict=True)]
    drops, correlations = [], []
    for layer_norms, layer_entropy in by_head:
        for head_norms, head_entropy in zip(layer_norms.double(), layer_entropy.double(), strict=True):
            drop = entropy_drop(head_norms, head_entropy).item()
            drops.append(drop)
            correlations.append(spearman(head_norms, head_entropy).item() if abs(drop) >= LEAST_DROP else 0.0)
    all_norms = torch.cat([n.flatten() for n, _ in by_head])
    all_entropy = torch.cat([e.flatten() for _, e in by_head])[all_norms.argsort()]
    bins = all_norms.sort().values.tensor_split(24)
    found = best_head(weights, places)
    maps = tuple(found[index, places[index][0]].reshape(data.cells, data.cells) for index in range(SHOWN))
    rows = found[torch.arange(IMAGES), [cue for cue, _ in places]]
    return Diagnosis(
        correlation=sum(correlations) / len(correlations),
        drop=sum(drops) / len(drops),
        norms=tuple(part.mean().item() for part in bins),
        entropies=tuple(part.mean().item() for part in all_entropy.tensor_split(24)),
        images=tuple(images[index] + 0.5 for index in range(SHOWN)),
        maps=maps,
        answers=tuple(answer for _, answer in places[:SHOWN]),
        weight_on_answer=rows[torch.arange(IMAGES), [answer for _, answer in places]].mean().item(),
        classes=tuple(run.facts["classes"]),
        tokens=images.shape[-1] ** 2 // data.cell_size**2,
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
    )


def attention_of(model: nn.Module, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Query norms [B, H, N] and attention weights [B, H, N, N] of every layer; of two streams the first."""
    norms: list[Tensor] = []
    weights: list[Tensor] = []

    def look(layer: nn.Module, inputs: tuple[Tensor, tuple[int, int]]) -> None:
        assert isinstance(layer, Attention)
        x, grid = inputs
        q, k, *_ = layer.project(x, grid, None)
        norms.append(q.norm(dim=-1).movedim(1, 2))
        weights.append(weights_of(layer.map, q, k))

    hooks = [module.register_forward_pre_hook(look) for module in model.modules() if isinstance(module, Attention)]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return norms, weights


def best_head(weights: list[Tensor], places: list[tuple[int, int]]) -> Tensor:
    """The weights [B, N, N] of the head whose marked cells look at their answers most."""
    heads = torch.cat(weights, dim=1)
    heads = heads / heads.sum(-1, keepdim=True).clamp(min=1e-12)
    cues, answers = (torch.tensor([place[side] for place in places]) for side in (0, 1))
    on_answer = heads[torch.arange(len(places)), :, cues, answers]  # [B, heads of all layers]
    return heads[:, on_answer.mean(0).argmax()]
