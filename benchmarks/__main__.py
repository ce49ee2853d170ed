"""`python -m benchmarks CASE`: speed and memory, side by side with peers."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nalaformer.cli.app import run_app
from nalaformer.cli.console import make_console, progress_bar
from nalaformer.cli.packages import need

if TYPE_CHECKING:
    import typer


def build_app() -> "typer.Typer":
    """Return the command line of the benchmarks."""
    import typer

    bench = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        help="Speed and memory, side by side with peers.",
    )

    @bench.command("ops")
    def ops(
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        out: Annotated[Path | None, typer.Option(help="CSV file.", show_default="benchmarks/results/ops_<device>.csv")] = None,
        quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller cases, shorter timing.")] = False,
        shape: Annotated[
            list[str] | None,
            typer.Option(help='Only this case, by its shape in the table ("B1 H4 N4096 D64"); may be repeated.'),
        ] = None,
        seconds: Annotated[
            float | None, typer.Option(help="Seconds of timing per measurement.", show_default="2; with --quick 0.3")
        ] = None,
    ) -> None:
        """Time and memory of linear attention, the published formula, torch's softmax attention, and peers on a GPU."""
        seconds = (0.3 if quick else 2.0) if seconds is None else seconds
        run_bench_ops(device, out or Path(f"benchmarks/results/ops_{device}.csv"), quick, shape or [], seconds)

    @bench.command("models")
    def bench_models(
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        out: Annotated[
            Path | None, typer.Option(help="CSV file.", show_default="benchmarks/results/models_<device>.csv")
        ] = None,
        size: Annotated[
            list[int] | None, typer.Option(help="Image size; may be repeated.", show_default="224; cuda: also 512, 1024, 2048")
        ] = None,
        seconds: Annotated[float, typer.Option(help="Seconds of timing per measurement.")] = 3.0,
        case: Annotated[
            str,
            typer.Option(
                help="backbones; peers: timm's beside ours, eager and compiled; super_resolution: whole images of up to 280K "
                "tokens, with a picture; or generation: a denoising step of up to 65K tokens, with a picture."
            ),
        ] = "backbones",
    ) -> None:
        """Images per second and memory of NaLaFormer-T: linear, its reference path, softmax, and as released."""
        run_bench_models(device, out, size, seconds, case)

    @bench.command("language")
    def bench_language(
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        out: Annotated[
            Path | None,
            typer.Option(help="CSV file; a picture lies beside it.", show_default="benchmarks/results/language_<device>.csv"),
        ] = None,
        size: Annotated[str | None, typer.Option(help="Layout by name.", show_default="340m on cuda, tiny on cpu")] = None,
        context: Annotated[
            list[int] | None, typer.Option(help="Tokens before; may be repeated.", show_default="1K to 128K, cpu: to 16K")
        ] = None,
        batch: Annotated[list[int] | None, typer.Option(help="Rows; may be repeated.", show_default="1 and 8, cpu: 1")] = None,
        prefill: Annotated[int | None, typer.Option(help="Tokens of one layer.", show_default="131072, cpu: 8192")] = None,
        seconds: Annotated[float, typer.Option(help="Seconds of timing per measurement.")] = 0.5,
    ) -> None:
        """Tokens per second and memory against the context, for linear mixers and softmax."""
        run_bench_language(device, out, seconds, {"size": size, "contexts": context, "batches": batch, "prefill": prefill})

    @bench.command("training")
    def bench_training(
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        out: Annotated[
            Path | None, typer.Option(help="CSV file.", show_default="benchmarks/results/training_<device>.csv")
        ] = None,
        size: Annotated[str | None, typer.Option(help="Layout by name.", show_default="340m on cuda, nano on cpu")] = None,
        model: Annotated[
            list[str] | None, typer.Option(help="A mixer, or llama; may be repeated.", show_default="all of them")
        ] = None,
        form: Annotated[
            list[str] | None, typer.Option(help="eager, blocks or whole (compiled); may be repeated.", show_default="eager")
        ] = None,
        shape: Annotated[
            list[str] | None,
            typer.Option(help="Rows x tokens; may be repeated.", show_default="16x2048, 4x8192, 1x32768; cpu: 2x128"),
        ] = None,
        seconds: Annotated[float, typer.Option(help="Seconds of timing per measurement.")] = 1.5,
        profile: Annotated[bool, typer.Option("--profile", help="Then show the kernels of a step of the first one.")] = False,
    ) -> None:
        """Tokens per second and memory of training steps: our mixers, and transformers' Llama of the same widths."""
        from . import run_training

        plan: dict[str, Any] = {"size": size, "models": model, "forms": form, "shapes": shape}
        exit_by(run_training(device, out, seconds=seconds, profile=profile, **plan))

    return bench


def run_bench_language(device: str, out: Path | None, seconds: float, plan: dict[str, Any]) -> None:
    # the plot comes last
    need("matplotlib")
    from . import run_language

    exit_by(run_language(device, out, seconds=seconds, **plan))


def run_bench_ops(device: str, out: Path, quick: bool, shapes: list[str], seconds: float) -> None:
    from . import cases_for, describe_machine, skipped_peers
    from .ops import plan
    from .ops_report import COLUMNS, results_table, summary_lines
    from .runner import headline, record_results

    console = make_console()
    machine, measurements = describe_machine(), plan(cases_for(device, quick=quick, shapes=shapes), device)
    console.print(headline(machine, measurements[0]))
    results = []
    with progress_bar(console, measurements[0].label, total=len(measurements)) as (progress, bar):
        for result in record_results(measurements, out, COLUMNS, machine, seconds=seconds):
            results.append(result)
            # the bar names the measurement that starts now
            coming = measurements[min(len(results), len(measurements) - 1)].label
            progress.update(bar, description=coming, completed=len(results))
            if not console.is_terminal:
                # without a terminal there is no bar, and minutes would pass in silence
                console.print(f"[{len(results)}/{len(measurements)}] {result.line}", soft_wrap=True)
    console.print(results_table(results))
    for line in summary_lines(results, skipped_peers(device)):
        console.print(line)
    console.print(f"results: {out}", soft_wrap=True)
    exit_by(results)


def run_bench_models(device: str, out: Path | None, sizes: list[int] | None, seconds: float, case: str) -> None:
    from nalaformer.registry import unknown_name

    from . import run_backbone_peers, run_generation, run_models, run_super_resolution

    cases: dict[str, Callable[..., Sequence[Any]]] = {
        "backbones": run_models,
        "peers": run_backbone_peers,
        "super_resolution": run_super_resolution,
        "generation": run_generation,
    }
    if case not in cases:
        raise unknown_name("case", case, cases)
    if case in ("super_resolution", "generation"):
        # the plot comes last
        need("matplotlib")
    exit_by(cases[case](device, out, sizes or None, seconds=seconds))


def exit_by(results: Sequence[Any]) -> None:
    """Exit with 1 if something of ours was wrong or failed."""
    from .runner import are_ours_right

    if not are_ours_right(results):
        sys.exit(1)


if __name__ == "__main__":
    run_app(build_app, "python -m benchmarks")
