"""`python -m research.demo`: train the same small network with every attention and compare."""

from pathlib import Path
from typing import Annotated

import typer

from nalaformer.atomic_files import refuse_unwritable
from nalaformer.cli import run_app
from nalaformer.cli.console import make_console
from nalaformer.cli.packages import need

SEEDS = 3


def build_app() -> typer.Typer:
    """Return the command line."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

    @app.command()
    def demo(
        out: Annotated[Path, typer.Option(help="Folder for report.html and the runs.")] = Path("runs/demo"),
        seeds: Annotated[int, typer.Option(help="Runs of each method at each task.")] = SEEDS,
        steps: Annotated[int | None, typer.Option(help="Steps of each run.", show_default="those of the demo")] = None,
        all_methods: Annotated[
            bool, typer.Option("--all-methods", help="With 1 + ELU, and our map without its contrast: a quarter longer.")
        ] = False,
        only_sharpening: Annotated[
            bool,
            typer.Option("--only-sharpening", help="One seed of each method; draw entropy against the query norm and end."),
        ] = False,
    ) -> None:
        """Train the same small network with every attention and compare: table and report.html, in minutes on a CPU."""
        # the plots come last
        need("matplotlib")
        if only_sharpening:
            if (seeds != 1 and seeds != SEEDS) or all_methods:
                raise ValueError("--only-sharpening trains one network of each method; leave --seeds and --all-methods out")
            compare_trained(out, steps)
        else:
            compare(out, seeds, steps, all_methods)

    return app


def compare(out: Path, seeds: int, steps: int | None, all_methods: bool) -> None:
    """Train every method at every task; print the table and write the report."""
    from . import ENTRIES, HOW_TO_READ, MORE_ENTRIES, demo_table, run_demo, write_report

    refuse_unwritable(out / "report.html")
    console = make_console()
    entries = (*ENTRIES, *MORE_ENTRIES) if all_methods else ENTRIES
    result = run_demo(out, seeds=seeds, steps=steps, entries=entries, console=console)
    report = write_report(result, out / "report.html")
    console.print(demo_table(result))
    console.print(HOW_TO_READ)
    for line in result.findings():
        console.print(line)
    console.print(f"report: {report}", soft_wrap=True)


def compare_trained(out: Path, steps: int | None) -> None:
    """Train one network with each method; draw entropy against the query norm."""
    from .trained import HOW_TO_READ, NAME, diagnose_trained, draw_trained, trained_table

    refuse_unwritable(out / f"{NAME}.png")
    console = make_console()
    diagnosed = diagnose_trained(out, seed=0, steps=steps, console=console)
    picture = draw_trained(diagnosed, out)
    console.print(trained_table(diagnosed))
    console.print(HOW_TO_READ)
    console.print(f"picture: {picture}", soft_wrap=True)


if __name__ == "__main__":
    run_app(build_app, "python -m research.demo")
