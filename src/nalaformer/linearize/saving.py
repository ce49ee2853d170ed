"""From files to a folder that transformers loads: text in, a converted model out."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.text import PackedTokens, TokenShards, tokenize_corpus
from .run import Linearized


def token_windows(
    data: Sequence[str | Path], *, length: int, tokenizer: str | Path, tokens: str | Path
) -> dict[str, PackedTokens]:
    """Windows of "train" and "val": of a folder that `nalaformer tokenize` wrote, or of text files, tokenized into `tokens`.

    Every tenth document of text files or so is for validation; files that were tokenized before are not read again.
    """
    folder = Path(data[0])
    if not (len(data) == 1 and (folder / "train").is_dir() and (folder / "val").is_dir()):
        folder = Path(tokens)
        if not folder.exists():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ValueError("under torchrun the text must be tokens already; write them with `nalaformer tokenize` first")
            tokenize_corpus(data, folder, tokenizer=tokenizer, val_part=0.1)
    return {split: PackedTokens(TokenShards.open(folder / split), length=length) for split in ("train", "val")}


def save(result: Linearized, folder: str | Path, *, tokenizer: str | Path | None = None) -> Path:
    """Write model, and tokenizer where one is given, for AutoModelForCausalLM and AutoTokenizer; an adapter beside them."""
    folder = Path(folder)
    model: Any = result.model
    if hasattr(model, "unload"):
        model.save_pretrained(folder / "adapter")
        model = model.unload()
    model.save_pretrained(folder)
    if tokenizer is not None:
        from ..data.text import load_tokenizer

        load_tokenizer(tokenizer).save_pretrained(str(folder))
    return folder
