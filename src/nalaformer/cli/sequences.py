"""Commands of the long-range benchmarks: data made once, and methods side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .console import make_console

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Enter the commands."""
    import typer

    from . import completion, generation_data

    of_data, of_tasks = (completion.completing(names) for names in (completion.sequences, completion.sequence_recipes))

    data = typer.Typer(no_args_is_help=True, help="Data made on this machine.")
    app.add_typer(data, name="data")
    generation_data.add_to(data)

    @data.command("make")
    def make(
        name: Annotated[
            str, typer.Argument(help="Name of the sequence data, such as listops or pathfinder.", autocompletion=of_data)
        ],
        out: Annotated[Path, typer.Option(help="Folder; it gets a folder for each split.")],
        samples: Annotated[int, typer.Option(help="Of the train split.")] = 96_000,
        val_samples: Annotated[int, typer.Option(help="Of the val split; 0: none.")] = 2_000,
        test_samples: Annotated[int, typer.Option(help="Of the test split; 0: none.")] = 20_000,
        seed: Annotated[int, typer.Option(help="Of the data.")] = 0,
        options: Annotated[str, typer.Option(help="Of the data, as JSON: '{\"contour\": 9}'.")] = "{}",
        workers: Annotated[int, typer.Option(help="Processes.")] = 1,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, and end.")] = False,
    ) -> None:
        """Write generated sequences once; `data=FOLDER` in a recipe reads them. The same command goes on after a stop."""
        counts = {"train": samples, "val": val_samples, "test": test_samples}
        run_make(name, out, counts, seed, options, workers, dry_run)

    @app.command()
    def scoreboard(
        task: Annotated[
            str, typer.Argument(help="Name of a recipe on sequences, such as mqar or lra_listops.", autocompletion=of_tasks)
        ],
        settings: Annotated[
            list[str] | None, typer.Argument(help="key=value, any setting of the recipe.", autocompletion=completion.settings)
        ] = None,
        methods: Annotated[
            str,
            typer.Option(
                help='Attentions, by comma; options in braces: \'softmax, norm_aware {"powers": "mild"}\'.',
                autocompletion=completion.methods,
            ),
        ] = "softmax, relu, nalaformer",
        seeds: Annotated[int, typer.Option(help="Runs of each method and rate.")] = 3,
        learning_rates: Annotated[str, typer.Option(help="By comma.", show_default="that of the recipe")] = "",
        steps: Annotated[int, typer.Option(help="Of each run; 0: those of the recipe.")] = 0,
        out: Annotated[Path | None, typer.Option(help="CSV file.", show_default="runs/scoreboard_<task>.csv")] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
        minutes: Annotated[
            float, typer.Option(help="Stop cleanly after that many; the same command goes on. 0: no limit.")
        ] = 0.0,
        data_folder: Annotated[Path | None, typer.Option(help="Keep generated data here for the next time.")] = None,
        workers: Annotated[int, typer.Option(help="Processes that make data.")] = 1,
    ) -> None:
        """Train every method with every rate and seed on one task, data on the device; mean and spread, best rate by dev."""
        rates = [float(rate) for rate in learning_rates.split(",")] if learning_rates else []
        run_scoreboard_command(task, settings or [], methods, seeds, rates, steps, out, device, minutes, data_folder, workers)


def run_make(name: str, out: Path, samples: dict[str, int], seed: int, options: str, workers: int, dry_run: bool) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..data.sequences import plan_write, write
    from ..json_text import parse_json

    try:
        chosen = parse_json(options)
    except ValueError as error:
        raise ValueError(f"options must be a JSON object, got {options!r}") from error
    # all splits before the first: one that is refused should say so now
    asked = {split: count for split, count in samples.items() if count}
    lines = [plan_write(name, out, split=each, samples=asked[each], seed=seed, options=chosen) for each in asked]
    if dry_run:
        for line in lines:
            make_console().print(line, soft_wrap=True)
        return
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for split, count in asked.items():
            bar = progress.add_task(f"{name}, {split}", total=count)
            folder = write(
                name,
                out,
                split=split,
                samples=count,
                seed=seed,
                options=chosen,
                workers=workers,
                advance=lambda made, bar=bar: progress.advance(bar, made),  # type: ignore[misc]
            )
            make_console().print(f"{count} sequences: {folder}", soft_wrap=True)


def run_scoreboard_command(
    name: str,
    settings: list[str],
    methods: str,
    seeds: int,
    rates: list[float],
    steps: int,
    out: Path | None,
    device: str,
    minutes: float,
    data_folder: Path | None,
    workers: int,
) -> None:
    from ..recipes import RECIPES, recipe_with
    from ..studies.scoreboard import parse_methods, run_scoreboard, scoreboard_table
    from ..tasks import SequencesConfig
    from ..training.ranks import find_device

    recipe = recipe_with(name, settings)
    if not isinstance(recipe.task, SequencesConfig):
        raise ValueError(f"a scoreboard needs a recipe on sequences, got {name}")
    for setting, remedy in (("attention", "name it in --methods"), ("initial_weights", "models start as they are made")):
        value = getattr(recipe, setting)
        if value != getattr(RECIPES[name](), setting):
            raise ValueError(f"a scoreboard does not follow {setting}={value}; leave it out: {remedy}")
    out = out or Path("runs") / f"scoreboard_{name}.csv"
    console = make_console(stderr=True)
    rows = run_scoreboard(
        name,
        recipe,
        methods=parse_methods(methods),
        seeds=range(seeds),
        learning_rates=rates or [recipe.training.learning_rate],
        out=out,
        steps=steps,
        device=find_device(device).type,
        seconds=60 * minutes if minutes else float("inf"),
        data_folder=data_folder,
        workers=workers,
        say=lambda line: console.print(line, soft_wrap=True),
    )
    make_console().print(scoreboard_table(name, rows))
    make_console().print(f"results: {out}", soft_wrap=True)
