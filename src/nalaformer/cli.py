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
        extras = {"typer": "cli", "rich": "cli", "matplotlib": "cli", "timm": "vision", "PIL": "vision"}
        extra = extras.get(missing)
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
    def train(
        recipe: Annotated[str, typer.Argument(help="Name of a recipe; `nalaformer recipes` lists them.")],
        settings: Annotated[list[str] | None, typer.Argument(help="key=value, any setting of the recipe.")] = None,
        out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/<recipe>")] = None,
    ) -> None:
        """Train a recipe. The same command again goes on where a stopped or killed run was."""
        run_train(recipe, settings or [], out or Path("runs") / recipe)

    @app.command("eval")
    def evaluate(
        run: Annotated[Path, typer.Argument(help="Folder of a run.")],
        data: Annotated[str | None, typer.Option(help="Another folder of images with the same classes.")] = None,
        step: Annotated[int | None, typer.Option(help="Step of the checkpoint.", show_default="the best")] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    ) -> None:
        """Evaluate a trained model."""
        run_eval(run, data, step, device)

    @app.command()
    def predict(
        images: Annotated[list[Path], typer.Argument(help="Images, or folders of them.")],
        run: Annotated[Path, typer.Option(help="Folder of the run whose model is asked.")],
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    ) -> None:
        """Name what images show: the five likeliest classes of each."""
        run_predict(images, run, device)

    @app.command()
    def recipes(
        recipe: Annotated[str | None, typer.Argument(help="One recipe, with all its settings.")] = None,
    ) -> None:
        """List the recipes, or show one with its cost, expected result and settings."""
        run_recipes(recipe)

    @app.command()
    def demo(
        out: Annotated[Path, typer.Option(help="Folder for report.html and the runs.")] = Path("runs/demo"),
        seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 2,
        steps: Annotated[int | None, typer.Option(help="Steps of each run.", show_default="those of the demo")] = None,
    ) -> None:
        """Train the same small network with every attention and compare: table and report.html, in minutes on a CPU."""
        run_demo(out, seeds, steps)

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


def run_train(name: str, settings: list[str], out: Path) -> None:
    from .recipes import RECIPES, changed, make_trainer
    from .training import TrainingStopped

    console = make_console()
    recipe = changed(RECIPES[name](), settings)
    try:
        outcome = make_trainer(recipe, out, title=name, console=console).fit()
    except TrainingStopped as stopped:
        sys.stderr.write(f"stopped: {stopped}\n")
        sys.exit(1)
    if outcome.is_finished:
        figures = ", ".join(f"{key} {value:.4g}" for key, value in outcome.metrics.items())
        console.print(f"finished: {figures}; run: {out}", soft_wrap=True)


def run_eval(run: Path, data: str | None, step: int | None, device: str) -> None:
    from rich.table import Table

    from .recipes import evaluate_run

    console = make_console()
    with console.status(f"evaluating {run}"):
        result = evaluate_run(run, data=data, step=step, device=device)
    table = Table(title=f"{run}, step {result.step}, {result.model}", title_justify="left")
    for name in ("figure", "value"):
        table.add_column(name)
    for name, value in result.metrics.items():
        table.add_row(name, f"{value:.4g}")
    console.print(table)
    for line in result.rejected:
        console.print(f"left out: {line}", soft_wrap=True, markup=False)


def run_predict(images: list[Path], run: Path, device: str) -> None:
    from rich.table import Table

    from .recipes import predict

    console = make_console()
    table = Table(title=f"by {run}", title_justify="left")
    for heading in ("image", "first", "second", "third", "fourth", "fifth"):
        table.add_column(heading, overflow="fold")
    failed = False
    for prediction in predict(images, run, device=device):
        cells = [f"{name} {100 * part:.1f}%" for name, part in prediction.likeliest]
        failed |= prediction.error != ""
        table.add_row(str(prediction.path), *(cells or [prediction.error]))
    console.print(table)
    if failed:
        sys.exit(1)


def run_recipes(name: str | None) -> None:
    from rich.table import Table

    from .recipes import RECIPES, describe, settings_of

    console = make_console()
    table = Table.grid(padding=(0, 2))
    if name is None:
        for each in RECIPES.names():
            table.add_row(each, describe(each).splitlines()[0])
        console.print(table)
        return
    console.print(describe(name), markup=False)
    for setting in settings_of(RECIPES[name]()):
        table.add_row(setting.key, str(setting.value), setting.meaning)
    console.print(table)


def run_demo(out: Path, seeds: int, steps: int | None) -> None:
    from .demo import HOW_TO_READ, demo_table, run_demo, write_report

    console = make_console()
    result = run_demo(out, seeds=seeds, steps=steps, console=console)
    report = write_report(result, out / "report.html")
    console.print(demo_table(result))
    console.print(HOW_TO_READ)
    for line in result.findings():
        console.print(line)
    console.print(f"report: {report}", soft_wrap=True)


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
