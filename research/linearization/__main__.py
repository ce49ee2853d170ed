"""`python -m research.linearization`: what converted models still know, and what they cost."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nalaformer.cli import run_app
from nalaformer.registry import unknown_name

from . import PARTS, SIZES, run_linearization


def build_app() -> typer.Typer:
    """Return the command line."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

    @app.command()
    def linearize(
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
        out: Annotated[
            Path | None, typer.Option(help="CSV file.", show_default="benchmarks/results/linearization_<device>.csv")
        ] = None,
        part: Annotated[
            list[str] | None, typer.Option(help="recall, prompt or decode; may be repeated.", show_default="all")
        ] = None,
        minutes: Annotated[
            float | None, typer.Option(help="After which nothing new is begun.", show_default="9, small: 20")
        ] = None,
        teacher: Annotated[
            Path | None, typer.Option(help="Folder in which softmax teachers are kept: a later run takes them from there.")
        ] = None,
        teachers: Annotated[int, typer.Option(min=1, help="Teachers of the recall part, each with a seed of its own.")] = 1,
        teacher_minutes: Annotated[
            float | None, typer.Option(help="Minutes of a teacher's training.", show_default="4, small: 10")
        ] = None,
        method: Annotated[
            list[str] | None, typer.Option(help="Method of the recall part, by name; may be repeated.", show_default="all")
        ] = None,
        size: Annotated[str, typer.Option(help="full, small (recall on a CPU) or toy (only the way is tried).")] = "full",
    ) -> None:
        """Measure what converted models still know, by selection rule and baseline, and the cost of prompts and decoding."""
        recall = {"minutes": teacher_minutes, "methods": method, "teachers": teachers}
        run(device, out, part, size, minutes, teacher, recall)

    return app


def run(
    device: str,
    out: Path | None,
    parts: list[str] | None,
    size: str,
    minutes: float | None,
    teacher: Path | None,
    recall: dict[str, Any],
) -> None:
    """Run the study with what the command line chose."""
    if size not in SIZES:
        raise unknown_name("size", size, SIZES)
    study = SIZES[size]()
    if minutes is not None:
        study = replace(study, minutes=minutes)
    if recall["minutes"] is not None:
        study = replace(study, recall=replace(study.recall, teacher=replace(study.recall.teacher, minutes=recall["minutes"])))
    if recall["methods"]:
        study = replace(study, recall=replace(study.recall, methods=tuple(recall["methods"])))
    several = {"teacher_folder": teacher, "teachers": recall["teachers"]}
    run_linearization(study, device=device, out=out, parts=tuple(parts or PARTS), **several)


if __name__ == "__main__":
    run_app(build_app, "python -m research.linearization")
