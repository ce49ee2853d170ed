"""The next-token loss from hidden states, without the logits of all tokens."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import linear_cross_entropy
from .layers import is_plain


def can_do_without_logits(head: nn.Module, loss_function: object) -> bool:
    """True if the loss is transformers' own of a plain head; a loss of the user needs the logits."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return loss_function is ForCausalLMLoss and is_plain(head)


def next_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **unused: Any,
) -> Tensor:
    """Return transformers' ForCausalLMLoss of hidden [B, N, C] weight^T, with its options: a sum over the number of labels.

    labels: [B, N], the tokens themselves; shift_labels: the token after each instead. num_items_in_batch: divides the sum.
    """
    if shift_labels is None:
        # shift the labels, not the hidden states: one row less would give matrix products an odd size
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    total = linear_cross_entropy(hidden, weight, shift_labels, ignore_index=ignore_index)
    if num_items_in_batch is None:
        return total / (shift_labels != ignore_index).sum().to(total.device)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
