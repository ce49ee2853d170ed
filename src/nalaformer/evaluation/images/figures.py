"""Figures of samples: named by what they are, FID only where it is FID."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...data.generation import SHAPES, judge_shapes
from ...registry import unknown_name
from .distances import frechet_distance, kernel_distance, precision_and_recall
from .extractors import Extractor
from .image_sets import ImageSet
from .inception import FILE

FIGURES = ("fid", "kid", "frechet", "kernel", "precision", "recall", "accuracy")
# defined by one network; their general forms may have any
OF_INCEPTION = {"fid": "frechet", "kid": "kernel"}


def image_figures(
    samples: ImageSet,
    reference: ImageSet,
    extractor: Extractor,
    *,
    figures: Sequence[str] = (),
    neighbours: int = 3,
    batch_size: int = 64,
    advance: Callable[[int], object] | None = None,
) -> dict[str, float]:
    """Figures of samples against a reference, by their full names, such as "frechet distance of NAME".

    figures: of FIGURES, by default all that the extractor and the samples have; fid and kid are refused with a network
    other than theirs. neighbours: of precision and recall.
    """
    chosen = check_figures(figures, extractor) or default_figures(samples, extractor)
    wanted = labels_for(samples, extractor) if "accuracy" in chosen else None
    found, logits = extractor.run(samples.images, batch_size=batch_size, advance=advance)
    result: dict[str, float] = {}
    if set(chosen) - {"accuracy"}:
        expected, _ = extractor.run(reference.images, batch_size=batch_size, advance=advance)
        if {"precision", "recall"} & set(chosen):
            near = dict(zip(("precision", "recall"), precision_and_recall(found, expected, neighbours=neighbours), strict=True))
    for name in chosen:
        if name == "accuracy":
            assert wanted is not None
            assert logits is not None
            result[f"accuracy under {extractor.name}"] = (logits.argmax(dim=1) == wanted).double().mean().item()
        elif name in ("fid", "frechet"):
            title = "FID" if name == "fid" else f"frechet distance of {extractor.name}"
            result[title] = frechet_distance(found, expected)
        elif name in ("kid", "kernel"):
            title = "KID" if name == "kid" else f"kernel distance of {extractor.name}"
            result[title] = kernel_distance(found, expected)
        else:
            result[f"{name} in features of {extractor.name}"] = near[name]
    return result


def check_figures(figures: Sequence[str], extractor: Extractor) -> list[str]:
    """The figures, each of which the extractor gives."""
    for name in figures:
        if name not in FIGURES:
            raise unknown_name("figure", name, FIGURES)
        if name in OF_INCEPTION and not extractor.is_fid:
            raise ValueError(
                f"{name.upper()} is defined by the network in {FILE}, got {extractor.name}; name that file as the extractor, "
                f"or ask for {OF_INCEPTION[name]}, which bears the name of its network"
            )
        if name == "accuracy" and not extractor.class_names:
            raise ValueError(f"accuracy needs a classifier, got {extractor.name}; name the run of one as the extractor")
    return list(figures)


def default_figures(samples: ImageSet, extractor: Extractor) -> list[str]:
    """All that can be had, the first first."""
    has_accuracy = extractor.class_names and samples.labels is not None
    distances = ["fid", "kid"] if extractor.is_fid else ["frechet", "kernel"]
    return [*(["accuracy"] if has_accuracy else []), *distances, "precision", "recall"]


def labels_for(samples: ImageSet, extractor: Extractor) -> Tensor:
    """The asked class of each sample as the classifier numbers it: by name, or by number where names are numbers."""
    places = {name: place for place, name in enumerate(extractor.class_names)}
    places |= {str(int(name)): place for name, place in places.items() if name.isdecimal()}
    names = samples.names()
    unknown = sorted(set(names) - set(places))
    if unknown:
        raise ValueError(
            f"the classifier must know the classes of the samples, got {', '.join(unknown[:3])}; {extractor.name} knows "
            f"{', '.join(extractor.class_names[:10])}"
        )
    return torch.tensor([places[name] for name in names])


def shape_figures(samples: ImageSet) -> dict[str, float]:
    """The exact figures of samples of shapes, see `judge_shapes`; classes by their names or numbers."""
    places = {name: label for label, name in enumerate(SHAPES)} | {str(label): label for label in range(len(SHAPES))}
    names = samples.names()
    unknown = sorted(set(names) - set(places))
    if unknown:
        raise ValueError(
            f"the classes of shapes are {', '.join(SHAPES)}, or 0 to {len(SHAPES) - 1}, got {', '.join(unknown[:3])}"
        )
    return judge_shapes(samples.images, torch.tensor([places[name] for name in names]))
