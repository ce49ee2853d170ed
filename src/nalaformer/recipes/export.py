"""A trained language model as a folder that transformers reads."""

from pathlib import Path
from typing import Any, cast

from ..data.text import fingerprint, load_tokenizer
from ..tasks import LanguageModelling
from ..whole_files import whole_folder
from .run import load_run


def export_run(folder: str | Path, out: str | Path, *, tokenizer: str | Path | None = None, step: int | None = None) -> Path:
    """Write a run's model and tokenizer as save_pretrained does: its best checkpoint, or that of a step.

    tokenizer: its folder, for a run whose data has moved. AutoModelForCausalLM and AutoTokenizer load the result.
    """
    run = load_run(folder, step=step)
    if not isinstance(run.task, LanguageModelling):
        raise ValueError(f"a run that has learned language can be exported, got {folder}, which has learned something else")
    words = load_tokenizer(tokenizer) if tokenizer is not None else run.task.tokenizer
    if fingerprint(words) != run.facts["tokenizer"]:
        raise ValueError(
            f"the model must be exported with the tokenizer that it was trained with, got another with {len(words)} entries; "
            "name the right one (--tokenizer DIR)"
        )
    with whole_folder(out) as aside:
        cast(Any, run.model).save_pretrained(str(aside))
        words.save_pretrained(str(aside))
    return Path(out)
