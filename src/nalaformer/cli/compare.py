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
        tokens: Annotated[int, typer.Option(help="Number of random tokens.")] = 256,
        seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
    ) -> None:
        """Compare softmax and every feature map: does attention sharpen as the query grows?"""
        run_compare(out, tokens, seed)

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


def run_info() -> None:
    from rich.table import Table

    from ..machine import describe_machine, extras
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
