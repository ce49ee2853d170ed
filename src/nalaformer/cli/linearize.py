"""`nalaformer linearize`: a pretrained language model whose cache is a sixteenth, or of one size."""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .console import make_console
from .packages import need

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Enter the command."""
    import typer

    from . import completion

    @app.command("linearize")
    def linearize_model(
        model: Annotated[Path, typer.Argument(help="Folder of a pretrained decoder and its tokenizer.")],
        settings: Annotated[
            list[str] | None, typer.Argument(help="key=value, any setting: selection=key_norm, transfer.batch_size=4, ...")
        ] = None,
        data: Annotated[
            list[Path] | None,
            typer.Option(help="Text files, folders of them, or a folder that `nalaformer tokenize` wrote; may be repeated."),
        ] = None,
        out: Annotated[Path, typer.Option(help="Folder for model, tokenizer, report and the runs.")] = Path("runs/linearized"),
        length: Annotated[int, typer.Option(min=1, help="Tokens of a window.")] = 1024,
        steps: Annotated[
            int | None, typer.Option(min=0, help="Steps of stage 1, attention transfer; 0: none.", show_default="2 epochs")
        ] = None,
        finetune_steps: Annotated[
            int | None, typer.Option(min=0, help="Steps of stage 2, LoRA; 0: none.", show_default="2 epochs")
        ] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, and end.")] = False,
    ) -> None:
        """Convert a pretrained model to hybrid attention. The same command again goes on where a stopped or killed run was."""
        run_linearize(model, settings or [], data or [], out, length, steps, finetune_steps, device, dry_run)


def run_linearize(
    model: Path,
    settings: list[str],
    data: list[Path],
    out: Path,
    length: int,
    steps: int | None,
    finetune_steps: int | None,
    device: str,
    dry_run: bool,
) -> None:
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    from ..atomic_files import free_bytes, megabytes, refuse_full_disk
    from ..data.text import load_tokenizer
    from ..folder_lock import only_writer, refuse_in_use
    from ..linearize import LinearizeConfig, linearize, save, token_windows, write_report
    from ..linearize.preflight import check_architecture, check_length, check_settings, check_windows, model_bytes, stage_line
    from ..linearize.saving import RUNS, TOKENS, check_folder, claim_folder, is_finished, is_tokenized, mark_finished
    from ..models.language.lengths import length_note
    from ..recipes import changed
    from ..tasks.language import pretrained_model, reading_model
    from ..training import TrainingConfig, TrainingStopped
    from ..training.ranks import find_device

    if not data:
        raise ValueError("the conversion learns from text, got none; name files or folders with --data")

    def in_steps(stage: TrainingConfig | None, number: int | None) -> TrainingConfig | None:
        if stage is None or number == 0:
            return None
        duration: dict[str, Any] = {} if number is None else {"epochs": 0.0, "steps": number}
        return replace(stage, device=device, **duration)

    console = make_console()
    # a bar of one file is no news
    disable_progress_bar()
    start = LinearizeConfig()
    config = replace(start, transfer=in_steps(start.transfer, steps), finetune=in_steps(start.finetune, finetune_steps))
    config = changed(config, settings)
    # before hours of work: what cannot be converted, trained, or be saved with its tokenizer and its report
    check_settings(config)
    check_length(config, length)
    if config.transfer is not None:
        need("matplotlib")
    with reading_model(model):
        pretrained_config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    parameters = check_architecture(pretrained_config)
    words = len(load_tokenizer(model))
    # names, shapes and sizes of files are known without the weights' values
    note = length_note(pretrained_model(model, vocab_size=words, dtype="auto", device="meta"), length)
    if note:
        console.print(note, soft_wrap=True)
    place = find_device(device)
    # one of torchrun's processes looks and writes for all
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        check_folder(out, model=model, data=data, length=length)
        refuse_in_use(out)
        refuse_full_disk(out, model_bytes(model), "a converted model")
    if is_finished(out, config):
        if is_first:
            console.print(
                f"finished already: {out} holds the model of these settings and its report, {out / 'report.html'}; remove the "
                "folder to convert anew",
                soft_wrap=True,
            )
        return
    has_tokens = is_tokenized(data) or (out / TOKENS).is_dir()
    windows = token_windows(data, length=length, tokenizer=model, tokens=out / TOKENS) if has_tokens else {}
    if windows:
        check_windows(config, windows["train"], windows["val"])
    if dry_run:
        known = windows.get("train")
        text = f"{len(windows['train']):,} windows to learn from, {len(windows['val']):,} to validate on" if windows else "new"
        for line in (
            f"model: {model}, {parameters:,} parameters, on {place.type}",
            f"attention: {config.attention}",
            f"tokens: {text}, of {length}",
            stage_line("transfer", config.transfer, known),
            stage_line("finetune", config.finetune, known),
            f"folder: {out}; the model takes {megabytes(model_bytes(model))}, {megabytes(free_bytes(out))} are free",
        ):
            console.print(line, soft_wrap=True)
        return
    with only_writer(out) if is_first else nullcontext():
        if is_first:
            claim_folder(out, model=model, data=data, length=length)
        if not windows:
            windows = token_windows(data, length=length, tokenizer=model, tokens=out / TOKENS)
            check_windows(config, windows["train"], windows["val"])
        pretrained = pretrained_model(model, vocab_size=words, dtype="auto")
        try:
            result = linearize(pretrained, windows["train"], windows["val"], folder=out / RUNS, config=config, console=console)
        except TrainingStopped as stopped:
            sys.stderr.write(f"stopped: {stopped}\n")
            sys.exit(1)
        if not is_first:
            return
        save(result, out, tokenizer=model, teacher=model)
        report = write_report(result, out)
        mark_finished(out, config)
    for stage, found in result.validations.items():
        console.print(
            f"after {stage}: perplexity {found.perplexity:.4g} (teacher {found.teacher_perplexity:.4g}), "
            f"KL to the teacher {found.divergence:.4g}"
        )
    console.print(f"model: {out}", soft_wrap=True)
    console.print(f"report: {report}", soft_wrap=True)
