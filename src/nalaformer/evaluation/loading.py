"""Language models from local folders, ours and those of transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.text import load_tokenizer
from ..tasks.language import check_model_folder, pretrained_model
from ..training.config import PRECISIONS
from ..training.ranks import find_device


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A model with its tokenizer."""

    model: Any
    tokenizer: Any


def load_language_model(
    folder: str | Path, *, tokenizer: str | Path | None = None, device: str = "auto", dtype: str = "auto"
) -> LanguageModel:
    """A causal model as save_pretrained wrote it, on a device. Nothing is downloaded and no code of the folder is run.

    tokenizer: another folder that holds it. dtype: "float32", "bfloat16", "float16", or "auto": as it was saved.
    """
    check_model_folder(folder)
    if dtype != "auto" and dtype not in PRECISIONS:
        raise ValueError(f"dtype must be one of auto, {', '.join(PRECISIONS)}, got {dtype!r}")
    words = load_tokenizer(tokenizer or folder)
    model = pretrained_model(folder, vocab_size=len(words), dtype=PRECISIONS.get(dtype, dtype))
    return LanguageModel(model=model.to(find_device(device)).eval(), tokenizer=words)
