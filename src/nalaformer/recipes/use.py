"""What a trained run is good for: figures on data, names for images."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..data import CorruptImage, find_images, read_image
from ..tasks import Classification
from ..training import evaluate
from ..training.config import PRECISIONS
from ..training.ranks import started
from .run import load_run

MOST_CLASSES = 5


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures of a run's model."""

    model: str
    step: int
    metrics: dict[str, float]
    rejected: tuple[str, ...]
    """Images that could not be read and were left out."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of one image."""

    path: Path
    likeliest: tuple[tuple[str, float], ...]
    """Up to five classes with their probabilities, the likeliest first."""
    error: str = ""
    """Why there is none."""


def evaluate_run(
    folder: Path, *, data: str | None = None, step: int | None = None, split: str = "val", device: str = "auto"
) -> Evaluation:
    """The metrics of a run's task, as training computes them; split "test": on samples that chose no checkpoint."""
    run = load_run(folder, step=step, data=data)
    if run.task.facts() != run.facts:
        raise ValueError(
            f"the data must have the {', '.join(run.facts)} of the run's own data, got others in {run.recipe.task.data}"
        )
    if split not in ("val", "test"):
        raise ValueError(f'split must be "val" or "test", got {split!r}')
    samples = run.task.eval_data if split == "val" else getattr(run.task, "test_data", None)
    if samples is None:
        raise ValueError(f"the task of {folder} has no test split; leave split at val, or name other data")
    rejected: list[str] = []
    with started(device) as ranks:
        training = run.recipe.training
        metrics = evaluate(
            run.model.to(ranks.device),
            samples,
            run.task.metrics(),
            batch_size=training.batch_size,
            ranks=ranks,
            precision=PRECISIONS[training.precision],
            workers=training.workers,
            rejected=rejected.append,
        )
    return Evaluation(model=run.recipe.model, step=run.step, metrics=metrics, rejected=tuple(rejected))


def predict(paths: list[Path], folder: Path, *, device: str = "auto") -> Iterator[Prediction]:
    """The likeliest classes of each image, one after the other; an image that cannot be read says why."""
    found = find_images(paths)
    run = load_run(folder)
    if not isinstance(run.task, Classification):
        raise ValueError(f"images are named by a run that has learned classification, got {folder}")
    classes = tuple(run.facts["classes"])
    with started(device) as ranks:
        model = run.model.to(ranks.device)
        for path in found:
            try:
                image = run.task.prepare(read_image(path))
            except CorruptImage as error:
                yield Prediction(path=path, likeliest=(), error=str(error))
                continue
            yield Prediction(path=path, likeliest=likeliest(model, image.to(ranks.device), classes))


@torch.no_grad()
def likeliest(model: nn.Module, image: Tensor, classes: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """Names and probabilities for one image [3, H, W]."""
    probabilities = model(image[None]).float().softmax(dim=1)[0]
    top = probabilities.topk(min(MOST_CLASSES, len(classes)))
    return tuple((classes[label], value) for value, label in zip(top.values.tolist(), top.indices.tolist(), strict=True))
