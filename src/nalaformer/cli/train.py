"""Commands that train and use what was trained."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .console import make_console, print_table, progress_bar

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Enter the commands."""
    import typer

    from . import completion

    of_recipes = completion.completing(completion.recipes)

    @app.command()
    def train(
        recipe: Annotated[
            str, typer.Argument(help="Name of a recipe; `nalaformer recipes` lists them.", autocompletion=of_recipes)
        ],
        settings: Annotated[
            list[str] | None, typer.Argument(help="key=value, any setting of the recipe.", autocompletion=completion.settings)
        ] = None,
        out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/<recipe>")] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, and end.")] = False,
    ) -> None:
        """Train a recipe. The same command again goes on where a stopped or killed run was."""
        run_train(recipe, settings or [], out or Path("runs") / recipe, dry_run)

    @app.command()
    def predict(
        images: Annotated[list[Path], typer.Argument(help="Images, or folders of them.")],
        run: Annotated[Path, typer.Option(help="Folder of the run whose model is asked.")],
        out: Annotated[
            Path | None, typer.Option(help="File (of one image) or folder for pictures.", show_default="RUN/predictions")
        ] = None,
        choose: Annotated[
            list[str] | None, typer.Option("--set", help="key=value that the task offers; a wrong key lists them.")
        ] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
    ) -> None:
        """Ask a run about images: a table of answers and, where the task has pictures, a picture of each."""
        run_predict(images, run, out, choose or [], device)

    @app.command()
    def recipes(
        recipe: Annotated[
            str | None, typer.Argument(help="One recipe, with all its settings.", autocompletion=of_recipes)
        ] = None,
    ) -> None:
        """List the recipes, or show one with its cost, expected result and settings."""
        run_recipes(recipe)


def run_train(name: str, settings: list[str], out: Path, dry_run: bool) -> None:
    from ..recipes import make_trainer, recipe_with
    from ..training import TrainingStopped, plan_lines
    from ..training.display import figures_line

    console = make_console()
    recipe = recipe_with(name, settings)
    trainer = make_trainer(recipe, out, title=name, console=console)
    if dry_run:
        for line in plan_lines(trainer):
            console.print(line, soft_wrap=True, markup=False)
        return
    try:
        outcome = trainer.fit()
    except TrainingStopped as stopped:
        sys.stderr.write(f"stopped: {stopped}\n")
        sys.exit(1)
    if outcome.is_finished:
        which = ", the best" if outcome.best_step == outcome.step else ""
        console.print(f"finished: {figures_line(outcome.metrics)} (step {outcome.step}{which}); run: {out}", soft_wrap=True)
        if outcome.metrics and outcome.best_step != outcome.step:
            figure = next(iter(outcome.metrics))
            console.print(
                f"best: {figure} {outcome.best_value:.4g} (step {outcome.best_step}); other commands use these weights",
                soft_wrap=True,
            )


def run_predict(images: list[Path], run: Path, out: Path | None, options: list[str], device: str) -> None:
    from rich.table import Table

    from ..recipes import answers_of, load_answering_run
    from .pictures import PictureWriter

    # the images first: a model takes seconds to load
    writer = PictureWriter(out or run / "predictions", inputs=images)
    loaded = load_answering_run(run)
    table = Table()
    for heading in ("image", *loaded.task.headings):
        table.add_column(heading, overflow="fold")
    errors = []
    with image_bar(images) as advance:
        for prediction in answers_of(loaded, images, options=options, device=device):
            advance()
            if prediction.answer is None:
                errors.append(prediction.error)
                table.add_row(str(prediction.path), "-")
                continue
            if prediction.answer.picture is not None:
                writer.write(prediction.path, prediction.answer.picture)
            table.add_row(str(prediction.path), *prediction.answer.cells)
    print_table(f"by {run}, {loaded.step_name}", table)
    console = make_console()
    if writer.written:
        console.print(f"pictures: {writer.target}", soft_wrap=True, markup=False)
    for error in errors:
        console.print(f"left out: {error}", soft_wrap=True, markup=False)
    if errors:
        sys.exit(1)


@contextmanager
def image_bar(paths: list[Path]) -> Iterator[Callable[[], None]]:
    """A progress bar over the images, on a terminal; within, call to say that one is done."""
    from ..data import find_images

    with progress_bar(make_console(), "images", total=len(find_images(paths))) as (progress, bar):
        yield lambda: progress.advance(bar)


def run_recipes(name: str | None) -> None:
    from rich.table import Table

    from ..recipes import RECIPES, recipe_words, settings_of

    console = make_console()
    table = Table.grid(padding=(0, 2))
    # a name is for copying, and no word of the others may be cut
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    if name is None:
        for each in RECIPES.names():
            table.add_row(each, recipe_words(each).splitlines()[0])
        console.print(table)
        return
    console.print(recipe_words(name))
    for setting in settings_of(RECIPES[name]()):
        table.add_row(setting.key, str(setting.value), setting.meaning)
    console.print(table)
