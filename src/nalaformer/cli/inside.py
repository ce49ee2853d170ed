"""Commands that show where a model's attention looks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .console import make_console
from .packages import need

if TYPE_CHECKING:
    import typer

    from ..analysis.attention_page import Look

MODEL_HELP = "Folder of a run, or NAME of a backbone or of timm; NAME@FILE loads weights, NAME:ATTENTION converts."


def add_to(app: "typer.Typer") -> None:
    """Enter the commands."""
    import typer

    from . import completion

    of_backbones = completion.completing(completion.backbones)

    @app.command()
    def analyze(
        model: Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=of_backbones)],
        images: Annotated[list[Path], typer.Option(help="An image or a folder of them; repeatable.")],
        out: Annotated[Path, typer.Option(help="Folder for the page and its figures.")] = Path("report"),
        beside: Annotated[
            str | None, typer.Option(help="A second model, shown side by side.", autocompletion=of_backbones)
        ] = None,
        most: Annotated[int, typer.Option(help="Images to look at, the first in order of their names.", min=1)] = 4,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
    ) -> None:
        """Write one page that shows where each head looks, with the figures of every layer. It needs nothing beside itself."""
        run_analyze(model, images, out, beside, most, device)

    @app.command()
    def explore(
        model: Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=of_backbones)],
        images: Annotated[list[Path], typer.Argument(help="Images, or folders of them.")],
        beside: Annotated[
            str | None, typer.Option(help="A second model, shown side by side.", autocompletion=of_backbones)
        ] = None,
        port: Annotated[int, typer.Option(help="Port of 127.0.0.1; 0: a free one.", min=0, max=65535)] = 0,
        most: Annotated[int, typer.Option(help="Images to look at, the first in order of their names.", min=1)] = 4,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
    ) -> None:
        """Serve that page on this machine, with exact maps of every patch that you click. Ctrl-C ends it."""
        run_explore(model, images, beside, port, most, device)


def run_analyze(model: str, images: list[Path], out: Path, beside: str | None, most: int, device: str) -> None:
    from ..analysis.attention_page import PAGE_NAME, write_report
    from ..atomic_files import refuse_unwritable

    # the figures come last
    need("matplotlib")
    refuse_unwritable(out / PAGE_NAME)
    console = make_console()
    with looking(model, images, beside, most, device) as (looks, advance):
        page, *others = write_report(looks, out, advance=advance)
    console.print(f"page: {page}", soft_wrap=True)
    console.print(f"beside it: {', '.join(path.name for path in others)}", soft_wrap=True)


def run_explore(model: str, images: list[Path], beside: str | None, port: int, most: int, device: str) -> None:
    from ..analysis.attention_page import explorer_of, refuse_used_port, serve

    need("matplotlib")
    refuse_used_port(port)
    console = make_console()
    with looking(model, images, beside, most, device) as (looks, _):
        explorer = explorer_of(looks)

    def say(url: str) -> None:
        console.print(f"open {url} (Ctrl-C ends it)" if url else "ended", soft_wrap=True)

    serve(explorer, port=port, say=say)


@contextmanager
def looking(
    model: str, images: list[Path], beside: str | None, most: int, device: str
) -> "Iterator[tuple[list[Look], Callable[[str], None]]]":
    """Looks into the models that the command names; a progress bar moves with each layer, and `advance` moves it within."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..analysis.attention_page import load_subject, look_into, read_images
    from ..data import find_images
    from ..training.ranks import find_device

    console = make_console()
    # the images first: a model takes seconds to load
    found, left_out = read_images(find_images(images)[:most])
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} layers"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("loading", total=None)

        def advance(name: str) -> None:
            progress.update(bar, advance=1, description=name)

        subjects = [load_subject(text, device=find_device(device)) for text in (model, beside) if text is not None]
        yield [look_into(subject, found, advance=advance) for subject in subjects], advance
    for line in left_out:
        console.print(f"left out: {line}", soft_wrap=True)
    for subject in subjects:
        if subject.is_random:
            console.print(f"{subject.name}: random weights, so this is its start and not a trained model", soft_wrap=True)
