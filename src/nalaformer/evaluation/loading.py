"""Language models from local folders, ours and those of transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..data.text import load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    from transformers import AutoModelForCausalLM

    if not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"a model must be a folder that save_pretrained wrote, got no config.json in {folder}; "
            "`nalaformer export RUN --out DIR` writes one from a run"
        )
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    words = load_tokenizer(tokenizer or folder)
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, dtype=DTYPES.get(dtype, dtype)
    )
    known = model.get_input_embeddings().weight.shape[0]
    if len(words) > known:
        raise ValueError(
            f"the tokenizer must not have more entries than the model knows ({known}), got {len(words)}; it is another model's"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return LanguageModel(model=model.to(device).eval(), tokenizer=words)
