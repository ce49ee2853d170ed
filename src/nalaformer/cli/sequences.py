"""Commands of the long-range benchmarks: data made once, and methods side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .console import make_console, progress_bar

if TYPE_CHECKING:
    import typer

    from ..studies.scoreboard import Board


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
        samples: Annotated[int, typer.Option(help="Sequences of the train split.")] = 96_000,
        val_samples: Annotated[int, typer.Option(help="Sequences of the val split; 0: none.")] = 2_000,
        test_samples: Annotated[int, typer.Option(help="Sequences of the test split; 0: none.")] = 20_000,
        seed: Annotated[int, typer.Option(help="Seed of the data.")] = 0,
        options: Annotated[str, typer.Option(help="Options of the data, as JSON: '{\"contour\": 9}'.")] = "{}",
        workers: Annotated[int, typer.Option(help="Processes.")] = 1,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, and end.")] = False,
    ) -> None:
        """Write generated sequences once; `data=FOLDER` in a recipe reads them. The same command goes on after a stop."""
        counts = {"train": samples, "val": val_samples, "test": test_samples}
        run_make(name, out, counts, seed, options, workers, dry_run)

    @app.command()
    def scoreboard(
        task: Annotated[
            str,
            typer.Argument(
                help="Rows of the scoreboard or recipes on sequences, by comma: mqar_80, lra_listops; all: every row.",
                autocompletion=of_tasks,
            ),
        ],
        settings: Annotated[
            list[str] | None, typer.Argument(help="key=value, any setting of the recipe.", autocompletion=completion.settings)
        ] = None,
        methods: Annotated[
            str,
            typer.Option(
                help='Attentions, by comma; options in braces: \'softmax, norm_aware {"powers": "mild"}\'; all: every rival.',
                autocompletion=completion.methods,
            ),
        ] = "softmax, relu, nalaformer",
        seeds: Annotated[int, typer.Option(help="Runs of each method at its best rate.")] = 3,
        learning_rates: Annotated[
            str, typer.Option(help="Learning rates, separated by commas.", show_default="those of the row or recipe")
        ] = "",
        steps: Annotated[int, typer.Option(help="Steps of each run; 0: those of the recipe.")] = 0,
        out: Annotated[Path | None, typer.Option(help="CSV file.", show_default="runs/scoreboard_<tasks>.csv")] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
        minutes: Annotated[
            float, typer.Option(help="Stop cleanly after that many; the same command goes on. 0: no limit.")
        ] = 0.0,
        data_folder: Annotated[Path | None, typer.Option(help="Keep generated data here for the next time.")] = None,
        workers: Annotated[int, typer.Option(help="Processes that make data.")] = 1,
        jobs: Annotated[int, typer.Option(help="Runs at a time, each in a process of its own.")] = 1,
        every_rate: Annotated[
            bool,
            typer.Option("--every-rate", help="All seeds with every rate; else the later ones at the rate of the first seed."),
        ] = False,
        smoke: Annotated[
            bool, typer.Option("--smoke", help="Two steps of the smallest form of each row: does everything run?")
        ] = False,
    ) -> None:
        """Train every method with every rate and seed on each task, data on the device; mean and spread, best rate by dev."""
        from ..studies.scoreboard import make_board, row_names

        rates = [float(rate) for rate in learning_rates.split(",")] if learning_rates else []
        names = row_names(task)
        asked: dict[str, Any] = {"methods": methods, "seeds": seeds, "learning_rates": rates, "settings": settings or []}
        boards = [make_board(name, **asked, steps=steps, smoke=smoke) for name in names]
        out = out or Path("runs") / f"scoreboard_{'smoke' if smoke else '_'.join(names)}.csv"
        run_boards_command(boards, out, device, minutes, data_folder, workers, jobs, every_rate)


def run_make(name: str, out: Path, samples: dict[str, int], seed: int, options: str, workers: int, dry_run: bool) -> None:
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


def run_boards_command(
    boards: "list[Board]",
    out: Path,
    device: str,
    minutes: float,
    data_folder: Path | None,
    workers: int,
    jobs: int,
    every_rate: bool,
) -> None:
    from ..studies.scoreboard import run_boards, scoreboard_table
    from ..training.ranks import find_device

    console = make_console(stderr=True)
    rows = run_boards(
        boards,
        out=out,
        device=find_device(device).type,
        seconds=60 * minutes if minutes else float("inf"),
        data_folder=data_folder,
        workers=workers,
        jobs=jobs,
        every_rate=every_rate,
        say=lambda line: console.print(line, soft_wrap=True),
    )
    for board in boards:
        make_console().print(scoreboard_table(board.title, [row for row in rows if row["task"] == board.title]))
    make_console().print(f"results: {out}", soft_wrap=True)
