"""Measure how well explanations find evidence whose place is known.

python -m research.evidence explanations benchmarks/training/explanations_cpu.csv
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.runner import Say, say_on_stdout
from nalaformer.analysis.explanations import EXPLANATIONS, explain
from nalaformer.data.glyph_grids import CueGrid

from .glyph_pair import (
    BLACK,
    CELLS,
    GlyphPair,
    cue_batch,
    make_cue_vit,
    make_pyramid,
    make_vit,
    pair_accuracy,
    pair_batch,
    pair_loss,
    train,
    write_rows,
)

CUE_CELLS = 5
POINTS = 12
COLUMNS = (
    "task",
    "model",
    "seed",
    "method",
    "pointing",
    "heat_on_evidence",
    "deletion",
    "insertion",
    "accuracy",
    "images",
    "steps",
)


@dataclass(frozen=True)
class Judged:
    """Images, the class that is asked about, and the cells of the evidence; which function of the logits is the score."""

    images: Tensor
    targets: Tensor
    evidence: Tensor
    cells: int
    sigmoid: bool

    def scores(self, model: nn.Module, images: Tensor) -> Tensor:
        with torch.no_grad():
            logits = model(images)
        probabilities = logits.sigmoid() if self.sigmoid else logits.softmax(1)
        return probabilities.gather(1, self.targets[:, None])[:, 0]


def study_explanations(
    out: Path, *, seeds: int = 1, steps: int = 500, images: int = 96, say: Say = say_on_stdout
) -> list[dict[str, object]]:
    """Train, explain, judge; the rows are written after each model."""
    rows = (row for seed in range(seeds) for row in explanation_rows(seed=seed, steps=steps, images=images))
    return write_rows(out, COLUMNS, rows, say)


def explanation_rows(*, seed: int, steps: int, images: int) -> Iterator[dict[str, object]]:
    """A row for each task, model and method."""
    data = GlyphPair(split="train", samples=2**31, seed=seed)
    shown, kinds, places = pair_batch(GlyphPair(split="val", samples=images, seed=seed), range(images))
    # both glyphs are asked for: an explanation that ignores the class finds one of two at best
    asked = Judged(torch.cat((shown, shown)), kinds.T.flatten(), places.T.flatten()[:, None], CELLS, True)
    networks: dict[str, Callable[[str], nn.Module]] = {
        "vit softmax": make_vit,
        "vit nalaformer": make_vit,
        "pyramid nalaformer": make_pyramid,
    }
    for name, make in networks.items():
        torch.manual_seed(seed)
        model = train(make(name.split()[1]), partial(pair_batch, data), pair_loss, steps=steps)
        common = {"task": "glyph_pair", "model": name, "seed": seed, "accuracy": pair_accuracy(model, shown, kinds)}
        yield from judged_rows(model, asked, common | {"images": images, "steps": steps})
    options = {"seed": seed, "cells": CUE_CELLS, "separation": 20.0}
    cues = CueGrid(split="train", samples=2**31, **options)  # type: ignore[arg-type]
    shown, labels, places = cue_batch(CueGrid(split="val", samples=images, **options), range(images))  # type: ignore[arg-type]
    for attention in ("softmax", "nalaformer"):
        torch.manual_seed(seed)
        model = make_cue_vit(attention, cells=CUE_CELLS)
        train(model, partial(cue_batch, cues), F.cross_entropy, steps=steps, batch=64)
        with torch.no_grad():
            accuracy = (model(shown).argmax(1) == labels).double().mean().item()
        common = {"task": "cue_grid", "model": f"vit {attention}", "seed": seed, "accuracy": accuracy}
        judged = Judged(shown, labels, places, CUE_CELLS, False)
        yield from judged_rows(model, judged, common | {"images": images, "steps": steps})


def judged_rows(model: nn.Module, judged: Judged, common: dict[str, object]) -> Iterator[dict[str, object]]:
    for method in (*EXPLANATIONS, "random"):
        if method == "random":
            generator = torch.Generator().manual_seed(0)
            heat = torch.rand(len(judged.images), judged.cells, judged.cells, generator=generator)
        else:
            heat = explain(model, judged.images, judged.targets, method=method, steps=16, baseline=BLACK)
        yield common | {"method": method} | judge(model, judged, heat)


def judge(model: nn.Module, judged: Judged, heat: Tensor) -> dict[str, object]:
    """heat: [B, h, w], any grid.

    pointing: how often the hottest cell is evidence. heat_on_evidence: the share of heat there. deletion: mean probability of
    the class while cells go black, hottest first (low is good); insertion: while they appear on black (high is good).
    """
    cells = F.adaptive_avg_pool2d(heat[:, None], judged.cells).flatten(1)
    hottest = cells.argmax(1, keepdim=True)
    on_evidence = cells.gather(1, judged.evidence).sum(1) / cells.sum(1).clamp(min=1e-30)
    rank = cells.argsort(1, descending=True).argsort(1)
    deletion, insertion = [], []
    for count in torch.linspace(0, cells.shape[1], POINTS).round().int().tolist():
        hot = (rank < count).to(heat.dtype).unflatten(1, (judged.cells, judged.cells))
        mask = F.interpolate(hot[:, None], size=judged.images.shape[2:], mode="nearest")
        deletion.append(judged.scores(model, judged.images * (1 - mask) + BLACK * mask).mean())
        insertion.append(judged.scores(model, judged.images * mask + BLACK * (1 - mask)).mean())
    return {
        "pointing": round((hottest == judged.evidence).any(1).double().mean().item(), 4),
        "heat_on_evidence": round(on_evidence.mean().item(), 4),
        "deletion": round(torch.stack(deletion).mean().item(), 4),
        "insertion": round(torch.stack(insertion).mean().item(), 4),
    }
