"""`nalaformer <command>`: the table of commands. What they do lives in the packages."""

import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from ..stopping import clean_exit
from . import backbones, bench, compare, evaluate, generate, generation_data, inside, linearize, predict, text, train
from .console import make_console

if TYPE_CHECKING:
    import typer

HELP = "Linear-time attention for PyTorch: NaLaFormer and related methods, as layers, timm backbones and language models."


# which of our extras brings a package
EXTRAS = {"typer": "cli", "rich": "cli", "matplotlib": "cli"}
EXTRAS |= {"timm": "vision", "torchvision": "vision", "PIL": "vision"}
EXTRAS |= {"segmentation_models_pytorch": "segmentation"}
EXTRAS |= {"diffusers": "diffusion"}
EXTRAS |= {"transformers": "language", "tokenizers": "language", "peft": "language"}
EXTRAS |= {"captum": "explain"}
EXTRAS |= {"onnx": "export", "onnxscript": "export"}
EXTRAS |= {"lm_eval": "evaluation", "datasets": "evaluation"}


REFUSED_PATHS: dict[type[OSError], str] = {
    FileNotFoundError: "there is no such file or folder",
    FileExistsError: "a file stands where a folder is needed",
    NotADirectoryError: "a part of the path is a file and no folder",
    PermissionError: "this user may not read or write there",
}


def main() -> None:
    """Run the command line of the library."""
    # whatever file was started: usage lines and completion go by this name
    run_app(build_app, "nalaformer")


def run_app(build: "Callable[[], typer.Typer]", name: str) -> None:
    """Run a command line; a wrong value or path is one line on stderr and exit code 2."""
    print_what_streams_cannot_encode()
    try:
        with clean_exit():
            build()(prog_name=name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        extra = EXTRAS.get(missing)
        if extra is None:
            raise
        sys.exit(f"this command needs {missing}: pip install 'nalaformer[{extra}]'")
    except (ValueError, OSError) as error:
        # lines become one; spaces inside a line may belong to a name
        sys.stderr.write(f"error: {' '.join(line.strip() for line in in_words(error).splitlines())}\n")
        sys.exit(2)


def in_words(error: ValueError | OSError) -> str:
    """What it says; of a path that the system refuses, what stands in the way and what to do."""
    why = next((words for kind, words in REFUSED_PATHS.items() if isinstance(error, kind)), None)
    filename = getattr(error, "filename", None)
    return str(error) if why is None or filename is None else f"{filename}: {why}; name another place"


def print_what_streams_cannot_encode() -> None:
    """A name with bytes that are no text, or a sign that the terminal lacks, must not stop a command: it is spelt out."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def build_app() -> "typer.Typer":
    """Every command with its options."""
    import rich  # noqa: F401  (asked for here, so that main can say what is missing)
    import typer

    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)

    def version_and_exit(asked: bool) -> None:
        if asked:
            show_version()
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=version_and_exit)
        ] = False,
    ) -> None:
        pass

    for group in (train, predict, evaluate, text, generate, linearize, generation_data, backbones, inside, compare, bench):
        group.add_to(app)
    return app


def show_version() -> None:
    from .. import __version__

    make_console().print(f"nalaformer {__version__}")
