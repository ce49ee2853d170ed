"""`nalaformer eval images`: how good generated images are."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import make_console, print_table, progress_bar, table_of

if TYPE_CHECKING:
    from ..evaluation.images import Extractor


def show_image_figures(
    samples: Path,
    reference: str,
    extractor: Path | None,
    split: str,
    size: int,
    limit: int,
    device: str,
    options: dict[str, Any],
) -> None:
    from ..evaluation.images import image_figures, read_image_set, shape_figures

    if extractor is None and reference != "shapes":
        raise ValueError(
            'images are compared by the features of a network: give --extractor FILE or RUN; only "shapes" are read without one'
        )
    if extractor is None and options["figures"]:
        raise ValueError(
            f"--figure chooses among the figures of a network, got {', '.join(options['figures'])} without one; "
            "give --extractor, or leave --figure out"
        )
    generated = read_image_set(samples, size=size).thinned(limit)
    figures: dict[str, float] = {}
    count = {"samples": len(generated.images)}
    if reference == "shapes" and (extractor is None or generated.labels is not None):
        figures |= shape_figures(generated)
        figures.pop("samples")
    if extractor is not None:
        network = load_extractor(extractor, device)
        real = read_image_set(reference, split=split, size=size).thinned(limit)
        count["reference"] = len(real.images)
        with progress_bar(make_console(stderr=True), "features", total=sum(count.values())) as (progress, bar):
            figures |= image_figures(generated, real, network, advance=lambda number: progress.advance(bar, number), **options)
    table = table_of("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}")
    counted = " and ".join(f"{number:,} {name}" for name, number in count.items())
    print_table(f"{samples} against {reference}: {counted}", table)


def load_extractor(path: Path, device: str) -> "Extractor":
    """The network of a file, or of a classifier's run."""
    from ..evaluation.images import classifier_extractor, inception_extractor
    from ..training.ranks import find_device

    place = find_device(device)
    if not path.is_dir():
        return inception_extractor(path, device=place)
    from ..recipes import load_run

    run = load_run(path)
    if "classes" not in run.facts or not hasattr(run.task, "prepare"):
        raise ValueError(f"an extractor must be the run of a classifier, got {path}, which has learned something else")
    name = f"{run.recipe.model} ({path.name})"
    return classifier_extractor(run.model.to(place), run.task.prepare, class_names=run.facts["classes"], name=name)
