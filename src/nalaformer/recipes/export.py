"""A trained language model as a folder that transformers reads, or its step or a network on images as an ONNX program."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import nn

from ..atomic_files import UNFINISHED, atomic_folder, refuse_unwritable, sync
from ..data.text import fingerprint, load_tokenizer
from ..tasks import LanguageModelling
from ..tasks.language import pretrained_model
from .image_programs import writer_of
from .run import LoadedRun, load_run


def export_run(folder: str | Path, out: str | Path, *, tokenizer: str | Path | None = None, step: int | None = None) -> Path:
    """Write a run's model and tokenizer as save_pretrained does: its best checkpoint, or that of a step.

    tokenizer: its folder, for a run whose data has moved. AutoModelForCausalLM and AutoTokenizer load the result.
    """
    run = load_language_run(folder, step)
    words = load_tokenizer(tokenizer) if tokenizer is not None else run.task.tokenizer
    if fingerprint(words) != run.facts["tokenizer"]:
        raise ValueError(
            f"the model must be exported with the tokenizer that it was trained with, got another with {len(words)} entries; "
            "name the right one (--tokenizer DIR)"
        )
    with atomic_folder(out) as aside:
        cast(Any, run.model).save_pretrained(str(aside))
        words.save_pretrained(str(aside))
    return Path(out)


def export_onnx(
    source: str | Path, out: str | Path, *, step: int | None = None, begin: Callable[[], None] = lambda: None
) -> Path:
    """Write an ONNX program in float32: of a network on images, or of one step of a language model with recurrent mixers.

    A network on images takes them as its task prepares them, [B, 3, H, W], and gives logits (classification, segmentation),
    boxes and scores of all anchors (RetinaNet) or larger images (super-resolution). The metadata of the file has the names of
    the classes and the normalization. A step takes a token and the states, and gives logits and states.
    source: the folder of a run (its best checkpoint, or that of a step), or one that save_pretrained wrote.
    begin: called before the long work, when everything that can be refused has been.
    """
    out = Path(out)
    refuse_unwritable(out)
    write = program_of(Path(source), step)
    begin()
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=UNFINISHED) as aside:
        write(Path(aside) / out.name)
        # the weights of a large model are a file of their own, which the program names: the program comes last
        for file in sorted(Path(aside).iterdir(), key=lambda file: file.name == out.name):
            sync(file)
            file.replace(out.parent / file.name)
    sync(out.parent)
    return out


def program_of(source: Path, step: int | None) -> Callable[[Path], object]:
    """What writes the program of the model in that folder to a file."""
    if not (source / "config.json").is_file():
        run = load_run(source, step=step)
        if hasattr(run.task, "answer"):
            return writer_of(run)
    from ..models.language import NaLaForCausalLM
    from ..models.language.onnx_step import LanguageStep, export_step

    model = language_model_of(source, step)
    if not isinstance(model, NaLaForCausalLM):
        raise ValueError(f"a step of a NaLaForCausalLM can be an ONNX program, got {type(model).__name__} in {source}")
    # refuses what has no states of one size
    LanguageStep(model)
    return partial(export_step, model.float())


def language_model_of(source: Path, step: int | None) -> nn.Module:
    if not (source / "config.json").is_file():
        return load_language_run(source, step).model
    if step is not None:
        raise ValueError(f"a folder for transformers holds one model, got step {step} with {source}; name the folder of a run")
    return pretrained_model(source, vocab_size=1, dtype=torch.float32).eval()


def load_language_run(folder: str | Path, step: int | None) -> LoadedRun:
    run = load_run(folder, step=step)
    if not isinstance(run.task, LanguageModelling):
        raise ValueError(
            f"a run that has learned language can be exported, got {folder}, which has learned something else; "
            "networks on images become ONNX programs (--out model.onnx), others by torch.onnx.export of load_run(...).model"
        )
    return run
