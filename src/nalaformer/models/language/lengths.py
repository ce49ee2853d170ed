"""Checks of text lengths against the number of positions and the trained length of a language model."""

from itertools import chain
from typing import Any


def length_note(model: Any, length: int) -> str:
    """Reject more tokens than a model has positions for; return a note if it was only trained on fewer, else ""."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or length <= most:
        return ""
    if _has_table(model, most):
        raise ValueError(
            f"{type(model).__name__} has a table of positions for {most} tokens, got {length}; give a shorter text, fewer new "
            "tokens or a smaller window"
        )
    return f"the model was trained for {most:,} tokens, got {length:,}: expect lower quality beyond"


def _has_table(model: Any, most: int) -> bool:
    """True if positions are rows of a table, which ends; rotary positions are computed."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        # OPT and similar models have two more rows
        if ("wpe" in name or "pos" in name) and tensor.dim() == 2 and most <= tensor.shape[0] <= most + 2:
            return True
    return False
