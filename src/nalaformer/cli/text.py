"""Commands about text: tokens to train on, and trained language models as folders for transformers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .console import make_console

if TYPE_CHECKING:
    import typer

MOST_LINES = 10


def add_to(app: "typer.Typer") -> None:
    """Enter the commands."""
    import typer

    @app.command()
    def tokenize(
        files: Annotated[list[Path], typer.Argument(help=".txt and .jsonl files, or folders of them.")],
        out: Annotated[Path, typer.Option(help="Folder to write: train/, val/ and tokenizer/.")],
        tokenizer: Annotated[Path | None, typer.Option(help="Folder of a tokenizer to use.")] = None,
        train_vocab: Annotated[int | None, typer.Option(help="Train a byte-level BPE tokenizer of this size instead.")] = None,
        val: Annotated[list[Path] | None, typer.Option(help="File or folder for evaluation; may be repeated.")] = None,
        val_part: Annotated[float, typer.Option(help="Part of the documents for evaluation, without --val.")] = 0.01,
        field: Annotated[str, typer.Option(help="Name of the text in .jsonl files.")] = "text",
        txt: Annotated[str, typer.Option(help="What of a .txt file is a document: file or line.")] = "file",
        most_bad: Annotated[int, typer.Option(help="Lines that may be left out before this stops.")] = 100,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, and end.")] = False,
    ) -> None:
        """Write text as tokens to train on. Lines that cannot be read are left out, counted and named."""
        corpus: dict[str, Any] = {
            "tokenizer": tokenizer,
            "train_vocab": train_vocab,
            "val_files": val or [],
            "val_part": val_part,
        }
        if dry_run:
            show_plan(files, out, corpus)
        else:
            run_tokenize(files, out, corpus, field, txt, most_bad)

    @app.command()
    def export(
        run: Annotated[Path, typer.Argument(help="Folder of a run; with .onnx also of a language model.")],
        out: Annotated[Path, typer.Option(help="Folder to write, for AutoModelForCausalLM and AutoTokenizer, or file .onnx.")],
        tokenizer: Annotated[
            Path | None, typer.Option(help="Folder of its tokenizer.", show_default="beside the run's data")
        ] = None,
        step: Annotated[int | None, typer.Option(help="Step of the checkpoint.", show_default="the best")] = None,
    ) -> None:
        """Write a trained language model with its tokenizer as transformers keeps them, or a model as an ONNX program.

        Of a network on images it takes images, and its metadata has the names of the classes and the normalization. Of a
        language model it is one step, which takes tokens, positions and the states, and gives logits and the states after the
        token.
        """
        from ..recipes import export_onnx, export_run

        is_program = out.suffix == ".onnx"
        # a network on images becomes a program without transformers
        if not is_program or (run / "config.json").is_file():
            from transformers.utils.logging import disable_progress_bar

            # a bar of one file is no news
            disable_progress_bar()
        if not is_program:
            folder = export_run(run, out, tokenizer=tokenizer, step=step)
            make_console().print(f"model and tokenizer: {folder}", soft_wrap=True)
        elif tokenizer is not None:
            raise ValueError(f"an ONNX program holds no tokenizer, got --tokenizer {tokenizer}; leave it out")
        else:
            console = make_console()

            def begin() -> None:
                console.print("tracing the network; this takes from seconds to a few minutes")

            console.print(f"ONNX program: {export_onnx(run, out, step=step, begin=begin)}", soft_wrap=True)


def show_plan(files: list[Path], out: Path, corpus: dict[str, Any]) -> None:
    from ..data.text import plan_corpus

    for line in plan_corpus(files, out, **corpus):
        make_console().print(line, soft_wrap=True, markup=False)


def run_tokenize(files: list[Path], out: Path, corpus: dict[str, Any], field: str, txt: str, most_bad: int) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from ..data.text import Reading, tokenize_corpus

    console = make_console()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None)
        result = tokenize_corpus(
            files,
            out,
            **corpus,
            reading=Reading(field=field, txt_document=txt, advance=lambda count: progress.advance(bar, count)),
            most_bad=most_bad,
            started=lambda what, total: progress.reset(bar, description=what, total=total),
        )
    for split, count in result.tokens.items():
        console.print(f"{split}: {result.documents[split]:,} documents, {count:,} tokens")
    console.print(f"vocabulary: {result.vocab_size:,}; tokens: {result.folder}", soft_wrap=True)
    if result.bad:
        console.print(f"left out: {len(result.bad):,}, listed in {result.folder / 'bad_lines.txt'}", soft_wrap=True)
        for line in result.bad[:MOST_LINES]:
            console.print(f"  {line}", soft_wrap=True)
