"""Diagnose a network trained on pointing: entropy against query norm, and the weight of near and far keys."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from nalaformer.analysis import attention_entropy, entropy_drop, spearman
from nalaformer.analysis.compare import LEAST_DROP, weights_of
from nalaformer.attention import Attention
from nalaformer.recipes import load_run

from ..sequences.pointing import Pointing

SEQUENCES = 64
BINS = 24
# queries are multiplied by these, to show the effect of their norm
FACTORS = tuple(2.0 ** (step / 2) for step in range(-6, 7))


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Statistics of one trained network on the first eval sequences, over the tokens that ask; entropies in nats.

    Weights are those of the feature map. A contrast is skipped: it takes the same off the weight of every key, which may then
    be negative, and signed weights have no entropy.
    """

    correlation: float
    """Spearman of query norm and entropy over the tokens of a head, mean over heads; 0 below a drop of 0.02 nats."""
    drop: float
    """Entropy at the 10th norm percentile minus that at the 90th, mean over heads."""
    norms: tuple[float, ...]
    entropies: tuple[float, ...]
    """Mean entropy in bins of the norm, all heads together."""
    grown: tuple[float, ...]
    """Mean entropy if every query were longer by each of FACTORS and nothing else changed."""
    by_nearness: Tensor
    """[16, keys]: weights of the probes of one sequence on its keys, nearest first, by the head that finds the nearest best."""
    mean_by_nearness: Tensor
    """[keys]: the same, mean over all probes of all sequences."""
    parameters: int

    @property
    def sharpening(self) -> float:
        """Nats that attention loses when its queries grow from half to twice their norm."""
        return self.grown[FACTORS.index(0.5)] - self.grown[FACTORS.index(2.0)]


@torch.no_grad()
def diagnose(folder: Path) -> Diagnosis:
    run = load_run(folder)
    data = run.task.eval_data
    inputs = torch.stack([torch.as_tensor(data[index]["inputs"]) for index in range(min(SEQUENCES, len(data)))])
    assert isinstance(data, Pointing)
    keys, dimensions = data.keys, data.dimensions
    layers = queries_and_keys(run.model, inputs)
    asking = slice(keys, None)
    norms = [q[:, asking].norm(dim=-1).transpose(1, 2) for _, q, _ in layers]  # [B, H, probes]
    entropies = [attention_entropy(weights_of(layer.map, q, k))[..., asking] for layer, q, k in layers]
    drops, correlations = [], []
    for layer_norms, layer_entropy in zip(norms, entropies, strict=True):
        for head in range(layer_norms.shape[1]):
            x, y = (each[:, head].flatten().double() for each in (layer_norms, layer_entropy))
            drop = entropy_drop(x, y).item()
            drops.append(drop)
            correlations.append(0.0 if abs(drop) < LEAST_DROP else spearman(x, y).item())
    all_norms = torch.cat([each.flatten() for each in norms])
    all_entropy = torch.cat([each.flatten() for each in entropies])[all_norms.argsort()]
    by_nearness = weights_by_nearness(layers, inputs, keys, dimensions)
    return Diagnosis(
        correlation=sum(correlations) / len(correlations),
        drop=sum(drops) / len(drops),
        norms=tuple(part.mean().item() for part in all_norms.sort().values.tensor_split(BINS)),
        entropies=tuple(part.mean().item() for part in all_entropy.tensor_split(BINS)),
        grown=tuple(
            torch.stack([attention_entropy(weights_of(layer.map, f * q, k))[..., asking].mean() for layer, q, k in layers])
            .mean()
            .item()
            for f in FACTORS
        ),
        by_nearness=by_nearness[0],
        mean_by_nearness=by_nearness.mean(dim=(0, 1)),
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
    )


def queries_and_keys(model: nn.Module, inputs: Tensor) -> list[tuple[Attention, Tensor, Tensor]]:
    """For every attention layer: the layer, and q and k [B, N, H, D] as it sees them."""
    found: list[tuple[Attention, Tensor, Tensor]] = []

    def look(layer: nn.Module, given: tuple[Tensor]) -> None:
        assert isinstance(layer, Attention)
        # without positions inside attention the grid says nothing
        q, k, *_ = layer.project(given[0], (1, given[0].shape[1]), None)
        found.append((layer, q, k))

    hooks = [module.register_forward_pre_hook(look) for module in model.modules() if isinstance(module, Attention)]
    try:
        model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def weights_by_nearness(layers: list[tuple[Attention, Tensor, Tensor]], inputs: Tensor, keys: int, dimensions: int) -> Tensor:
    """[B, probes, keys]: what each probe gives to its keys, the nearest first, by the head that gives most to the nearest."""
    heads = torch.cat([weights_of(layer.map, q, k) for layer, q, k in layers], dim=1)
    heads = heads / heads.sum(-1, keepdim=True).clamp(min=1e-12)
    heads = heads[:, :, keys:, :keys]  # [B, heads of all layers, probes, keys]
    directions = inputs[..., :dimensions]
    nearest_first = (directions[:, keys:] @ directions[:, :keys].mT).argsort(dim=-1, descending=True)
    ordered = heads.gather(-1, nearest_first[:, None].expand_as(heads))
    return ordered[:, ordered[..., 0].mean(dim=(0, 2)).argmax()]
