"""How many tokens a language model takes, and how many it has learned from."""

from itertools import chain
from typing import Any


def length_note(model: Any, length: int) -> str:
    """Refuse more tokens than a model has positions for; of one that only was trained on fewer, return a note, else ""."""
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
    return f"the model was made for {most:,} tokens, got {length:,}: expect less of those beyond"


def _has_table(model: Any, most: int) -> bool:
    """True if a position is a row of a table, which ends; rotary positions are computed."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        # OPT and its kin have two rows more
        if ("wpe" in name or "pos" in name) and tensor.dim() == 2 and most <= tensor.shape[0] <= most + 2:
            return True
    return False
