"""`nalaformer <command>`: the table of commands. What they do lives in the packages."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer
    from rich.console import Console

# wide enough for every table; used where the output is no terminal that knows better
WIDTH = 100


def main() -> None:
    """Entry point: a wrong value or path is one line on stderr and exit code 2."""
    try:
        build_app()()
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        extra = {"typer": "cli", "rich": "cli", "matplotlib": "cli", "timm": "vision"}.get(missing)
        if extra is None:
            raise
        sys.exit(f"this command needs {missing}: pip install 'nalaformer[{extra}]'")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)


def build_app() -> "typer.Typer":
    """Every command with its options."""
    import rich  # noqa: F401  (asked for here, so that main can say what is missing)
    import typer

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)
    bench = typer.Typer(no_args_is_help=True, help="Speed and memory, side by side with peers.")
    app.add_typer(bench, name="bench")

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

    @app.command()
    def compare(
        out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("runs/compare"),
        tokens: Annotated[int, typer.Option(help="Number of tokens.")] = 256,
        seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0,
    ) -> None:
        """Compare softmax and every feature map: does attention sharpen as the query grows?"""
        run_compare(out, tokens, seed)

    @bench.command("ops")
    def ops(
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        out: Annotated[Path | None, typer.Option(help="CSV file.", show_default="benchmarks/results/ops_<device>.csv")] = None,
        quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller cases, shorter timing.")] = False,
    ) -> None:
        """Time and memory of linear attention, the published formula and torch's softmax attention."""
        run_bench_ops(device, out or Path(f"benchmarks/results/ops_{device}.csv"), quick)

    @bench.command("models")
    def bench_models(
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        out: Annotated[
            Path | None, typer.Option(help="CSV file.", show_default="benchmarks/results/models_<device>.csv")
        ] = None,
        size: Annotated[
            list[int] | None, typer.Option(help="Image size; may be repeated.", show_default="224; cuda: also 512, 1024, 2048")
        ] = None,
        seconds: Annotated[float, typer.Option(help="Of timing per measurement.")] = 3.0,
    ) -> None:
        """Images per second and memory of NaLaFormer-T: linear, its reference path, softmax, and as released."""
        run_bench_models(device, out, size, seconds)

    @app.command()
    def models(
        pattern: Annotated[str, typer.Argument(help="Names to show, for example 'nalaformer_*'.")] = "*",
    ) -> None:
        """List the backbones: which stages are linear, parameters, multiply-adds, published accuracy."""
        run_models(pattern)

    @app.command()
    def convert(
        file: Annotated[Path, typer.Argument(help="The authors' checkpoint, .pth or .safetensors.")],
        family: Annotated[str, typer.Option(help="nalaformer, polaformer, polaformerpp or flatten.")],
        out: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
        model: Annotated[str, typer.Option(help="A backbone that the weights must fit; checked before writing.")] = "",
    ) -> None:
        """Translate a published checkpoint into our names, as safetensors."""
        run_convert(file, family, out, model)

    @app.command()
    def info() -> None:
        """Versions, devices, which implementation would run here and why, and which extras are installed."""
        run_info()

    return app


HELP = "Linear attention that keeps what softmax has: it sharpens with the query norm and keeps the negative half."


def make_console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def show_version() -> None:
    from . import __version__

    make_console().print(f"nalaformer {__version__}")


def run_compare(out: Path, tokens: int, seed: int) -> None:
    from rich.progress import track

    from .analysis import HOW_TO_READ, compare_methods, comparison_table, draw_entropy_against_norm, methods

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
    picture = draw_entropy_against_norm(rows, out / "entropy_vs_norm.png", num_tokens=tokens)
    console.print(comparison_table(rows, num_tokens=tokens))
    console.print(HOW_TO_READ)
    # a path is for copying: never broken over two lines
    console.print(f"picture: {picture}", soft_wrap=True)


def run_bench_ops(device: str, out: Path, quick: bool) -> None:
    from rich.progress import Progress

    from .bench import cases_for, describe_machine, measure, plan, results_table, summary_lines, write_csv

    console = make_console()
    machine = describe_machine()
    measurements = plan(cases_for(device, quick=quick), device)
    # a path that cannot be written should say so now and not after minutes
    out.parent.mkdir(parents=True, exist_ok=True)
    dtype = str(measurements[0].dtype).removeprefix("torch.")
    threads = f", {machine.threads} threads" if device == "cpu" else ""
    console.print(f"{machine.device_name(device)}{threads}, {dtype}, torch {machine.torch}, commit {machine.commit}")
    results = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(measurements))
        for measurement in measurements:
            what = f"{measurement.case.shape}  {measurement.implementation}, {measurement.direction}"
            progress.update(task, description=what)
            results.append(measure(measurement, seconds=0.3 if quick else 2.0))
            # whatever stops a long run, what it has measured stays
            write_csv(results, out, machine)
            progress.advance(task)
    console.print(results_table(results))
    for line in summary_lines(results):
        console.print(line)
    console.print(f"results: {out}", soft_wrap=True)
    if not all(result.is_right for result in results):
        sys.exit(1)


def run_bench_models(device: str, out: Path | None, sizes: list[int] | None, seconds: float) -> None:
    from .bench import run_models
    from .bench.models import MEASURED, OUT_OF_MEMORY

    results = run_models(device, out, sizes or None, seconds=seconds)
    if not all(result.outcome in (MEASURED, OUT_OF_MEMORY) for result in results):
        sys.exit(1)


def run_models(pattern: str) -> None:
    from fnmatch import filter as matching

    from rich.progress import track

    from .models import VARIANTS, card, cards_table, notes_of

    console = make_console()
    names = matching(VARIANTS, pattern)
    if not names:
        raise ValueError(f"no backbone is named like {pattern!r}; `nalaformer models` lists all {len(VARIANTS)}")
    show = track(names, "counting", console=console, transient=True, disable=not console.is_terminal)
    found = [card(name) for name in show]
    console.print(cards_table(found))
    for line in notes_of(found):
        console.print(line)


def run_convert(file: Path, family: str, out: Path, model: str) -> None:
    from .published import convert_file

    names = convert_file(file, out, family, model=model)
    make_console().print(f"{len(names)} tensors: {out}", soft_wrap=True)


def run_info() -> None:
    from rich.table import Table

    from .bench import describe_machine, extras
    from .ops import backend

    console = make_console()
    machine = describe_machine()
    table = Table.grid(padding=(0, 2))
    for name in ("nalaformer", "commit", "python", "torch", "triton"):
        table.add_row(name, getattr(machine, name))
    table.add_row("cpu", f"{machine.cpu}, {machine.threads} threads")
    table.add_row("gpu", ", ".join(machine.gpus) or "none found")
    for name, value in backend.report().items():
        table.add_row(f"backend: {name}" if name != "backend" else name, value)
    for extra in extras():
        # brackets are markup to rich
        install = extra.install.replace("[", "\\[")
        state = f"missing {', '.join(extra.missing)}: {install}" if extra.missing else f"present: {', '.join(extra.present)}"
        table.add_row(f"extra {extra.name}", state)
    console.print(table)
