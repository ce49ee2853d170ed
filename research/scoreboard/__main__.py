"""`python -m research.scoreboard run mqar_80`, and `... page PAGE.md FOLDER` for the tables of a page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nalaformer.cli import run_app
from nalaformer.cli.console import make_console

if TYPE_CHECKING:
    from . import Board


def build_app() -> typer.Typer:
    """Return the command line."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

    @app.command()
    def run(
        task: Annotated[
            str,
            typer.Argument(
                help="Rows of the scoreboard or recipes on sequences, by comma: mqar_80, lra_listops; all: every row."
            ),
        ],
        settings: Annotated[list[str] | None, typer.Argument(help="key=value, any setting of the recipe.")] = None,
        methods: Annotated[
            str,
            typer.Option(
                help='Attentions, by comma; options in braces: \'softmax, norm_aware {"powers": "mild"}\'; all: every rival.'
            ),
        ] = "softmax, relu, nalaformer",
        seeds: Annotated[int, typer.Option(help="Runs of each method at its best rate.")] = 3,
        learning_rates: Annotated[
            str, typer.Option(help="Learning rates, separated by commas.", show_default="those of the row or recipe")
        ] = "",
        steps: Annotated[int, typer.Option(help="Steps of each run; 0: those of the recipe.")] = 0,
        out: Annotated[Path | None, typer.Option(help="CSV file.", show_default="runs/scoreboard_<tasks>.csv")] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
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
        from . import make_board, row_names

        rates = [float(rate) for rate in learning_rates.split(",")] if learning_rates else []
        names = row_names(task)
        asked: dict[str, Any] = {"methods": methods, "seeds": seeds, "learning_rates": rates, "settings": settings or []}
        boards = [make_board(name, **asked, steps=steps, smoke=smoke) for name in names]
        out = out or Path("runs") / f"scoreboard_{'smoke' if smoke else '_'.join(names)}.csv"
        run_boards_command(boards, out, device, minutes, data_folder, workers, jobs, every_rate)

    @app.command()
    def page(
        page: Annotated[Path, typer.Argument(help="A page whose tables are filled, or a picture, by its ending .png.")],
        folder: Annotated[Path, typer.Argument(help="Folder of the CSV files.")],
    ) -> None:
        """Write the tables of a page, or draw them, from the CSV files in a folder."""
        from .picture import draw
        from .tables import fill, read_folder_rows

        if page.suffix == ".png":
            draw(read_folder_rows(folder), page)
        else:
            fill(page, folder)

    return app


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
    from nalaformer.training.ranks import find_device

    from . import run_boards, scoreboard_table

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


if __name__ == "__main__":
    run_app(build_app, "python -m research.scoreboard")
