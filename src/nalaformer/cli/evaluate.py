"""`nalaformer eval ...`: how good a trained model is."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .console import make_console, print_table, progress_bar, table_of

if TYPE_CHECKING:
    import typer

    from ..evaluation import LanguageModel


def add_to(app: "typer.Typer") -> None:
    """Enter the commands."""
    import typer

    from . import completion
    from .default_command import DEFAULT, DefaultCommandGroup

    group = typer.Typer(
        cls=DefaultCommandGroup,
        no_args_is_help=True,
        help="Evaluate a trained model: `nalaformer eval RUN`, or one of the commands below.",
    )
    app.add_typer(group, name="eval")

    @group.command(DEFAULT)
    def run(
        run: Annotated[Path, typer.Argument(help="Folder of a run.")],
        data: Annotated[str | None, typer.Option(help="Other data of the same classes or tokenizer.")] = None,
        step: Annotated[int | None, typer.Option(help="Step of the checkpoint.", show_default="the best")] = None,
        split: Annotated[
            str, typer.Option(help="val, or test where the task has one.", autocompletion=completion.splits)
        ] = "val",
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
    ) -> None:
        """Evaluate a run on its own data. The word "run" may be left out."""
        run_eval(run, data, step, split, device)

    @group.command()
    def language(
        model: Annotated[Path, typer.Option(help="Folder of a causal model, ours or another of transformers.")],
        text: Annotated[list[Path] | None, typer.Option(help="Perplexity of this .txt or .jsonl file; repeatable.")] = None,
        tasks: Annotated[str, typer.Option(help="Tasks of lm-eval, with commas: piqa,hellaswag,...")] = "",
        data: Annotated[Path | None, typer.Option(help="Folder with <task>.jsonl for each task.")] = None,
        window: Annotated[int | None, typer.Option(help="Tokens seen at once.", show_default="the model's, 2048")] = None,
        stride: Annotated[int | None, typer.Option(help="Tokens scored in each window.", show_default="a quarter")] = None,
        field: Annotated[str, typer.Option(help="Name of the text in .jsonl files.")] = "text",
        limit: Annotated[int | None, typer.Option(help="Rows of each task, for a quick look.", show_default="all")] = None,
        shots: Annotated[int, typer.Option(help="Solved examples before each question.")] = 0,
        batch_size: Annotated[int, typer.Option(help="Windows or questions at once.")] = 8,
        dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as saved.")] = "auto",
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
    ) -> None:
        """Perplexity of local text in overlapping windows, and lm-eval's tasks on local files. Nothing is downloaded."""
        if not text and not tasks:
            raise ValueError("there is nothing to evaluate on: give --text FILE, or --tasks NAMES with --data FOLDER")
        if tasks and data is None:
            raise ValueError("tasks read local files: give --data FOLDER with a file <task>.jsonl for each of --tasks")
        from transformers.utils.logging import disable_progress_bar

        from ..evaluation import load_language_model

        # a bar of 20 weights is no news
        disable_progress_bar()
        loaded = load_language_model(model, device=device, dtype=dtype)
        if text:
            show_perplexity(loaded, model, text, field, window, stride, batch_size)
        if tasks:
            assert data is not None
            names = [name.strip() for name in tasks.split(",")]
            show_tasks(loaded, model, names, data, limit, shots, window, batch_size)

    @group.command()
    def images(
        samples: Annotated[Path, typer.Argument(help="Generated images: a folder, or a .npz file with images and labels.")],
        reference: Annotated[
            str, typer.Option(help='What they should be like: a folder, a .npz file, or "shapes", which needs no extractor.')
        ],
        extractor: Annotated[
            Path | None, typer.Option(help="Inception weights of FID (.pth), or the folder of a classifier's run.")
        ] = None,
        figure: Annotated[
            list[str] | None,
            typer.Option(
                help="fid, kid, frechet, kernel, precision, recall or accuracy; repeatable.", show_default="all that fit"
            ),
        ] = None,
        split: Annotated[
            str, typer.Option(help="Split of the reference: train or val.", autocompletion=completion.splits)
        ] = "val",
        size: Annotated[int, typer.Option(help="Cut and resize images of folders to this side; 0: as they are.")] = 0,
        limit: Annotated[int, typer.Option(help="Images of each set, spread over it; 0: all.")] = 0,
        neighbours: Annotated[int, typer.Option(help="Neighbours that precision and recall look at.")] = 3,
        batch_size: Annotated[int, typer.Option(help="Images at once.")] = 64,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
    ) -> None:
        """How good generated images are: FID and its like, or what a reader of shapes reads. Nothing is downloaded."""
        from .image_figures import show_image_figures

        options = {"figures": figure or [], "neighbours": neighbours, "batch_size": batch_size}
        show_image_figures(samples, reference, extractor, split, size, limit, device, options)


def run_eval(run: Path, data: str | None, step: int | None, split: str, device: str) -> None:
    from rich.text import Text

    from ..recipes import evaluate_run

    console = make_console()
    with console.status(Text(f"evaluating {run}")):
        result = evaluate_run(run, data=data, step=step, split=split, device=device)
    table = table_of("figure", "value")
    for name, value in result.metrics.items():
        table.add_row(name, f"{value:.4g}")
    print_table(f"{run}, step {result.step}, {result.model}", table)
    for line in result.rejected:
        console.print(f"left out: {line}", soft_wrap=True)


def show_perplexity(
    loaded: "LanguageModel", model: Path, files: list[Path], field: str, window: int | None, stride: int | None, batch_size: int
) -> None:
    from ..evaluation import score_text
    from ..models.language.lengths import length_note

    console = make_console()
    if window is None:
        window = min(getattr(loaded.model.config, "max_position_embeddings", None) or 2048, 2048)
    stride = max(1, window // 4) if stride is None else stride
    # before minutes of scoring
    if note := length_note(loaded.model, window):
        console.print(note, soft_wrap=True)
    with progress_bar(console, "scoring", count="{task.completed:.0f} tokens") as (progress, bar):
        score = score_text(
            loaded,
            files,
            window=window,
            stride=stride,
            batch_size=batch_size,
            field=field,
            advance=lambda count: progress.advance(bar, count),
        )
    table = table_of("figure", "value")
    for name in ("perplexity", "word_perplexity", "bits_per_byte", "loss"):
        table.add_row(name.replace("_", " "), f"{getattr(score, name):.5g}")
    for name in ("tokens", "words", "bytes", "documents"):
        table.add_row(name, f"{getattr(score, name):,}")
    print_table(f"{model}, windows of {window}, stride {stride}", table)
    for line in score.bad:
        console.print(f"left out: {line}", soft_wrap=True)


def show_tasks(
    loaded: "LanguageModel",
    model: Path,
    tasks: list[str],
    data: Path,
    limit: int | None,
    shots: int,
    window: int | None,
    batch_size: int,
) -> None:
    from ..evaluation import evaluate_tasks

    # it warns of every default that it takes
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    results = evaluate_tasks(loaded, tasks, data, limit=limit, shots=shots, window=window, batch_size=batch_size)
    title = f"{model}, {shots} examples given" + (f", the first {limit} rows only" if limit else "")
    table = table_of("task", "metric", "value", "standard error", "rows")
    for result in results:
        error = f"{result.error:.4g}" if result.error is not None else ""
        table.add_row(result.task, result.metric, f"{result.value:.4g}", error, str(result.samples))
    print_table(title, table)
