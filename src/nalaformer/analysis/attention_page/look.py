"""The results of one model: what its attention layers did with some images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...data import CorruptImage, read_image
from .. import HeadStatistics, LayerRecord, attention_layers, record
from .explained import Explanation, explain_answers
from .maps import Layer, compute_maps, full_layout
from .page import Column, ModelOnPage, as_address
from .plots import Curve, as_inline_svg, draw_one_curve
from .subject import Subject, as_text

if TYPE_CHECKING:
    from PIL.Image import Image

# name, meaning, value of a head; entropies are shown in bits
COLUMNS: tuple[tuple[str, str, Callable[[HeadStatistics], float]], ...] = (
    ("entropy", "Mean entropy of attention, bits: 0 if a query looks at one token.", lambda head: bits(head.entropy)),
    (
        "drop",
        "Entropy at the 10th percentile of query norms minus that at the 90th, bits.",
        lambda head: bits(head.entropy_drop),
    ),
    ("Spearman", "Rank correlation of query norm and entropy; 0 where the drop is too small to count.", lambda h: h.spearman),
    (
        "key norms",
        "Rank correlation of the norm of a key and the attention that it receives.",
        lambda head: head.key_norm_correlation,
    ),
    (
        "rank",
        "Effective rank of the weights: exp of the entropy of their singular values; of softmax from at most 128 rows.",
        lambda head: head.effective_rank,
    ),
    ("lost", "Share of the products of query and key whose opposite signs the feature map loses.", lambda h: h.lost_products),
    ("smallest", "Smallest weight; below zero where rotary positions act on the numerator alone.", lambda h: h.smallest_weight),
    ("ln min", "Smallest logarithm of what the weights are divided by.", lambda head: head.log_denominators[0]),
    ("ln max", "Largest logarithm of what the weights are divided by.", lambda head: head.log_denominators[1]),
    ("‖q‖", "Mean norm of the queries.", lambda head: head.query_norm),
    ("‖k‖", "Mean norm of the keys.", lambda head: head.key_norm),
)


def bits(nats: float) -> float:
    return nats / math.log(2)


@dataclass(frozen=True, kw_only=True)
class Look:
    """Records of a model on some images, with their statistics."""

    subject: Subject
    first: "Image"
    """The first image, as the model saw it."""
    images: Sequence[dict[str, Any]]
    """The name, image and answer of each, as the page has them."""
    records: Sequence[LayerRecord]
    layers: Sequence[Layer]
    statistics: Sequence[Sequence[HeadStatistics]]
    """The statistics of each head of each layer."""
    explanations: Sequence[Explanation] = ()

    def curves(self) -> list[Curve]:
        """Return entropy against query norm of each layer."""
        return [
            Curve(
                name=layer.name,
                kind=layer.kind,
                norms=torch.tensor([head.norms for head in heads]),
                entropy=torch.tensor([head.entropies for head in heads]) / math.log(2),
                largest=math.log2(layer.keys),
            )
            for layer, heads in zip(self.layers, self.statistics, strict=True)
        ]

    def relative_entropy(self) -> list[list[float]]:
        """Return the entropy of each head of each layer as a fraction of the largest: 1 if it attends to all tokens equally."""
        return [
            # a single token has all the weight, so that its entropy of 0 says nothing
            [head.entropy / math.log(layer.keys) if layer.keys > 1 else 1.0 for head in heads]
            for layer, heads in zip(self.layers, self.statistics, strict=True)
        ]

    def preview(self) -> list[tuple[str, Any]]:
        """Return each layer's name and the map of the first image's middle patch, mean of the heads: [height, width]."""
        maps = [
            compute_maps(found, layer, torch.tensor([layer.query_at(0.5, 0.5)])).cells[0].mean(0)
            for found, layer in zip(self.records, self.layers, strict=True)
        ]
        return [(f"{layer.name}\n{layer.kind}", each) for layer, each in zip(self.layers, maps, strict=True)]

    def on_page(self, layers: Sequence[dict[str, Any]]) -> ModelOnPage:
        """Return the model for the page, with its layers as the page shows them."""
        columns = [
            Column(name=name, meaning=meaning, heads=[[value(head) for head in heads] for heads in self.statistics])
            for name, meaning, value in COLUMNS
        ]
        figures = [
            as_inline_svg(draw_one_curve(curve), f"Entropy against query norm, {self.subject.name}, {curve.name}, {curve.kind}")
            for curve in self.curves()
        ]
        return ModelOnPage(
            name=self.subject.name,
            notes=self.subject.notes,
            is_random=self.subject.is_random,
            images=self.images,
            layers=layers,
            columns=columns,
            figures=figures,
            explanations=[each.figure() for each in self.explanations],
        )


def read_images(paths: Sequence[Path]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return the readable images by name, and the errors of the others."""
    found, left_out = [], []
    for path in paths:
        try:
            found.append((as_text(path.name), read_image(path)))
        except CorruptImage as error:
            left_out.append(str(error))
    if not found:
        raise ValueError(f"at least one image must be readable, got none: {left_out[0] if left_out else 'no paths'}")
    return found, left_out


def look_into(subject: Subject, images: Sequence[tuple[str, Any]], *, advance: Callable[[str], None] = lambda _: None) -> Look:
    """Run the model once over the images and compute statistics of every layer; `advance` gets the name of each layer."""
    if not attention_layers(subject.model):
        raise ValueError(
            f"a model to look into must have attention, got {subject.name} with no attention layer that is known here; name "
            "one of `nalaformer models`, a ViT, DeiT, Swin or the like of timm, or a run of such a model"
        )
    device = next(subject.model.parameters()).device
    prepared = [subject.prepare(image) for _, image in images]
    batch = torch.stack(prepared).to(device)
    records = [found for found in record(subject.model, batch) if found.grid is not None]
    if not records:
        raise ValueError(f"{subject.name} has no attention over an image: none of its layers keeps the patches in a grid")
    statistics = []
    for found in records:
        statistics.append(found.statistics())
        if any(math.isnan(head.entropy) for head in statistics[-1]):
            raise ValueError(
                f"attention must be numbers to be shown, got NaN in {found.name} of {subject.name}; look for weights of the "
                "model that are not finite"
            )
        advance(found.name)
    seen = [subject.to_image(pixels) for pixels in prepared]
    shown = [
        {"name": name, "picture": as_address(picture), "answer": subject.answer(image) if subject.answer else ""}
        for (name, image), picture in zip(images, seen, strict=True)
    ]
    layers = [full_layout(found) for found in records]
    explanations = explain_answers(subject, [name for name, _ in images], batch)
    return Look(
        subject=subject,
        first=seen[0],
        images=shown,
        records=records,
        layers=layers,
        statistics=statistics,
        explanations=explanations,
    )
