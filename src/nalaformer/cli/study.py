"""Commands that look at attention and at this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .console import make_console
from .packages import need

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Enter the commands."""
    import typer

    @app.command()
    def compare(
        out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("runs/compare"),
        tokens: Annotated[int | None, typer.Option(help="Number of random tokens.", show_default="256")] = None,
        seed: Annotated[int, typer.Option(help="Seed of the random tokens, or of the trained networks.")] = 0,
        trained: Annotated[
            bool, typer.Option("--trained", help="Train a small network with each method and look at these, in minutes.")
        ] = False,
        steps: Annotated[
            int | None, typer.Option(help="With --trained: steps of each run.", show_default="those of the demo")
        ] = None,
    ) -> None:
        """Compare softmax and every feature map: does attention sharpen as the query grows?"""
        if trained and tokens is not None:
            raise ValueError(
                f"--tokens chooses random tokens, which --trained does without, got {tokens}; leave one of them out"
            )
        if steps is not None and not trained:
            raise ValueError(f"--steps is for networks that are trained, got {steps} without --trained; add it")
        if trained:
            run_compare_trained(out, seed, steps)
        else:
            run_compare(out, 256 if tokens is None else tokens, seed)

    @app.command()
    def demo(
        out: Annotated[Path, typer.Option(help="Folder for report.html and the runs.")] = Path("runs/demo"),
        seeds: Annotated[int, typer.Option(help="Runs of each method at each task.")] = 3,
        steps: Annotated[int | None, typer.Option(help="Steps of each run.", show_default="those of the demo")] = None,
        all_methods: Annotated[
            bool, typer.Option("--all-methods", help="With 1 + ELU, and our map without its contrast: a quarter longer.")
        ] = False,
    ) -> None:
        """Train the same small network with every attention and compare: table and report.html, in minutes on a CPU."""
        run_demo(out, seeds, steps, all_methods)

    @app.command()
    def info() -> None:
        """Versions, devices, which implementation would run here and why, and which extras are installed."""
        run_info()


def run_compare(out: Path, tokens: int, seed: int) -> None:
    from rich.progress import track

    from ..analysis import HOW_TO_READ, compare_methods, comparison_table, draw_entropy_against_norm, methods
    from ..atomic_files import refuse_unwritable

    # the picture comes last
    need("matplotlib")
    refuse_unwritable(out / "entropy_vs_norm.png")
    console = make_console()
    chosen = methods()
    rows = list(
        track(
            compare_methods(chosen, num_tokens=tokens, seed=seed),
            "comparing",
            len(chosen),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
    )
    for form in ("svg", "png"):
        picture = draw_entropy_against_norm(rows, out / f"entropy_vs_norm.{form}", num_tokens=tokens)
    console.print(comparison_table(rows, num_tokens=tokens))
    console.print(HOW_TO_READ)
    # a path is for copying: never broken over two lines
    console.print(f"picture: {picture}", soft_wrap=True)


def run_compare_trained(out: Path, seed: int, steps: int | None) -> None:
    from ..atomic_files import refuse_unwritable
    from ..studies.demo.trained import HOW_TO_READ, NAME, diagnose_trained, draw_trained, trained_table

    need("matplotlib")
    refuse_unwritable(out / f"{NAME}.png")
    console = make_console()
    diagnosed = diagnose_trained(out, seed=seed, steps=steps, console=console)
    picture = draw_trained(diagnosed, out)
    console.print(trained_table(diagnosed))
    console.print(HOW_TO_READ)
    console.print(f"picture: {picture}", soft_wrap=True)


def run_demo(out: Path, seeds: int, steps: int | None, all_methods: bool) -> None:
    from ..atomic_files import refuse_unwritable
    from ..studies.demo import ENTRIES, HOW_TO_READ, MORE_ENTRIES, demo_table, run_demo, write_report

    need("matplotlib")
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


def run_info() -> None:
    from rich.table import Table

    from ..bench import describe_machine, extras
    from ..ops import backend

    console = make_console()
    machine = describe_machine()
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in ("nalaformer", "commit", "python", "torch", "triton"):
        table.add_row(name, getattr(machine, name))
    table.add_row("cpu", f"{machine.cpu}, {machine.threads} threads")
    table.add_row("gpu", ", ".join(machine.gpus) or "none found")
    for name, value in backend.report().items():
        table.add_row(f"backend: {name}" if name != "backend" else name, value)
    for extra in extras():
        state = (
            f"missing {', '.join(extra.missing)}: {extra.install}" if extra.missing else f"present: {', '.join(extra.present)}"
        )
        table.add_row(f"extra {extra.name}", state)
    console.print(table)
