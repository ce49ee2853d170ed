"""`python -m research.sequences NAME --out FOLDER`: write generated sequences once."""

from pathlib import Path
from typing import Annotated

import typer

from nalaformer.cli import run_app
from nalaformer.cli.console import make_console, progress_bar


def build_app() -> typer.Typer:
    """Return the command line."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

    @app.command()
    def make(
        name: Annotated[str, typer.Argument(help="Name of the sequence data, such as listops or pathfinder.")],
        out: Annotated[Path, typer.Option(help="Folder; it gets a folder for each split.")],
        samples: Annotated[int, typer.Option(help="Sequences of the train split.")] = 96_000,
        val_samples: Annotated[int, typer.Option(help="Sequences of the val split; 0: none.")] = 2_000,
        test_samples: Annotated[int, typer.Option(help="Sequences of the test split; 0: none.")] = 20_000,
        seed: Annotated[int, typer.Option(help="Seed of the data.")] = 0,
        options: Annotated[str, typer.Option(help="Options of the data, as JSON: '{\"contour\": 9}'.")] = "{}",
        workers: Annotated[int, typer.Option(help="Processes.")] = 1,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, and end.")] = False,
    ) -> None:
        """Write generated sequences once; `data=FOLDER` in a recipe reads them. Run the same command again to resume."""
        counts = {"train": samples, "val": val_samples, "test": test_samples}
        run_make(name, out, counts, seed, options, workers, dry_run)

    return app


def run_make(name: str, out: Path, samples: dict[str, int], seed: int, options: str, workers: int, dry_run: bool) -> None:
    from nalaformer.json_text import parse_json

    from . import plan_write, write

    try:
        chosen = parse_json(options)
    except ValueError as error:
        raise ValueError(f"options must be a JSON object, got {options!r}") from error
    # check all splits before the first is made: an error should come now
    asked = {split: count for split, count in samples.items() if count}
    lines = [plan_write(name, out, split=each, samples=asked[each], seed=seed, options=chosen) for each in asked]
    if dry_run:
        for line in lines:
            make_console().print(line, soft_wrap=True)
        return
    for split, count in asked.items():
        with progress_bar(make_console(stderr=True), f"{name}, {split}", total=count) as (progress, bar):
            folder = write(
                name,
                out,
                split=split,
                samples=count,
                seed=seed,
                options=chosen,
                workers=workers,
                advance=lambda made, progress=progress, bar=bar: progress.advance(bar, made),  # type: ignore[misc]
            )
        make_console().print(f"{count} sequences: {folder}", soft_wrap=True)


if __name__ == "__main__":
    run_app(build_app, "python -m research.sequences")
