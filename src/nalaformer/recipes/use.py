"""What a trained run is good for: figures on data, answers for images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..data import CorruptImage, find_images, read_image
from ..tasks import Answer
from ..training import evaluate
from ..training.precision import precision_on
from ..training.ranks import started
from .overrides import changed
from .run import LoadedRun, load_run


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures of a run's model."""

    model: str
    step: int
    step_name: str
    """The step in words, and that it is the best where it is."""
    metrics: dict[str, float]
    details: dict[str, float]
    """Figures of single classes, where the task has them; training does not log them."""
    rejected: tuple[str, ...]
    """Images that could not be read and were left out."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of one image."""

    path: Path
    answer: Answer | None
    error: str = ""
    """Why there is none."""


def evaluate_run(
    folder: Path,
    *,
    data: str | None = None,
    step: int | None = None,
    split: str = "val",
    device: str = "auto",
    settings: list[str] | None = None,
) -> Evaluation:
    """The metrics of a run's task, as training computes them; split "test": on samples that chose no checkpoint.

    settings: key=value of the task, such as eval_crop=0, in the place of those that the run was trained with.
    """
    run = load_run(folder, step=step, data=data, settings=settings)
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
        counted = run.task.metrics()
        metrics = evaluate(
            run.model.to(ranks.device),
            samples,
            counted,
            batch_size=training.batch_size,
            ranks=ranks,
            precision=precision_on(ranks.device, training.precision),
            workers=training.workers,
            rejected=rejected.append,
        )
    return Evaluation(
        model=run.recipe.model,
        step=run.step,
        step_name=run.step_name,
        metrics=metrics,
        details=counted.details() if hasattr(counted, "details") else {},
        rejected=tuple(rejected),
    )


def predict(paths: list[Path], folder: Path, *, options: list[str] | None = None, device: str = "auto") -> Iterator[Prediction]:
    """The run's answer for each image, one after the other; an image that cannot be read says why.

    options: key=value of what the task lets one choose, its `AnswerOptions`.
    """
    return answers_of(load_answering_run(folder), paths, options=options, device=device)


def load_answering_run(folder: Path) -> LoadedRun:
    """A run whose task answers for images."""
    run = load_run(folder)
    if not hasattr(run.task, "answer"):
        raise ValueError(f"images are answered by a run that has learned from images, got {folder}")
    return run


def answers_of(
    run: LoadedRun,
    paths: list[Path],
    *,
    options: list[str] | None = None,
    device: str = "auto",
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Prediction]:
    """Like `predict`, for a run that is loaded already; `advance` is told each layer of the network."""
    found = find_images(paths)
    chosen = changed(run.task.AnswerOptions(), options or [])
    with started(device) as ranks:
        model = run.model.to(ranks.device)
        watched = [layer.register_forward_hook(lambda *_: advance()) for layer in layers_of(model)]
        try:
            for path in found:
                try:
                    image = read_image(path)
                except CorruptImage as error:
                    yield Prediction(path=path, answer=None, error=str(error))
                    continue
                yield Prediction(path=path, answer=run.task.answer(model, image, run.facts, chosen))
        finally:
            for hook in watched:
                hook.remove()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks: members of lists of modules that have parts, and no such lists, of their own.

    What is watched runs module by module, so nothing smaller is: its kernels may join parts.
    """
    members = [each for module in model.modules() if isinstance(module, nn.ModuleList) for each in module]
    return [
        each
        for each in members
        if any(True for _ in each.children()) and not any(isinstance(part, nn.ModuleList) for part in each.modules())
    ]
