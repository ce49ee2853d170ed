"""Commands that train, and list what there is to train."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .console import make_console

if TYPE_CHECKING:
    import typer
    from rich.table import Table


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


def run_recipes(name: str | None) -> None:
    from ..recipes import RECIPES, grouped_recipes, recipe_words, settings_of

    console = make_console()
    if name is None:
        longest = max(map(len, RECIPES.names()))
        for group, names in grouped_recipes().items():
            console.print(f"\n{group}")
            console.print(table_of_words([(f"  {each}", recipe_words(each).splitlines()[0]) for each in names], longest + 2))
        console.print("\n`nalaformer recipes NAME` shows one with its cost, expected result and settings")
        return
    console.print(recipe_words(name))
    settings = settings_of(RECIPES[name]())
    console.print(table_of_words([(each.key, str(each.value), each.meaning) for each in settings]))


def table_of_words(rows: list[tuple[str, ...]], width: int | None = None) -> "Table":
    """The first column is for copying and never cut, nor is a word of the others; width: of the first, at least."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=width)
    for _ in rows[0][1:]:
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
