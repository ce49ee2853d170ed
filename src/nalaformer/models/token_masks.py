"""Checks of tokens, masks and positions in the form that transformers passes them."""

from torch import Tensor


def check_input_ids(input_ids: Tensor) -> None:
    """Reject token ids that are not [batch, tokens]."""
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids must be [batch, tokens] with at least one token, got shape {tuple(input_ids.shape)}; "
            "a single row needs a batch dimension: input_ids[None]"
        )


def check_mask(attention_mask: Tensor, batch: int, total: int) -> None:
    """Reject a mask that is not [batch, total]: earlier and new tokens."""
    if attention_mask.shape != (batch, total):
        raise ValueError(
            f"attention_mask must be [batch, earlier and new tokens] = {(batch, total)}, got {tuple(attention_mask.shape)}; "
            "1 marks a real token, 0 padding"
        )


def begins_again(key_mask: Tensor, starts: Tensor, position_ids: Tensor | None) -> bool:
    """True if the real tokens of a row belong to several sequences, even if the first token of one is masked.

    key_mask, starts: [B, N] bool, True where a sequence begins. position_ids: [B or 1, N] or None; padding may have any.
    """
    if position_ids is None:
        sequence = starts.flatten().cumsum(0).view_as(starts)
        first, last = sequence.masked_fill(~key_mask, sequence.numel()), sequence.masked_fill(~key_mask, -1)
        return bool((first.amin(1) < last.amax(1)).any())
    is_inner = key_mask & (key_mask.cumsum(1) > 1)
    highest = position_ids.expand_as(key_mask).masked_fill(~key_mask, -1).cummax(1).values
    return bool((is_inner & (starts | (position_ids < highest))).any())
