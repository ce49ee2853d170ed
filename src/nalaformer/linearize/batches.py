"""Tokens to learn from, and what a batch of them predicts."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ..data import Samples

# what cross-entropy leaves out
IGNORED = -100


class TokenWindows(Dataset[Tensor]):
    """Windows of `length` tokens of one long row of token ids; what does not fill a window is left out."""

    def __init__(self, tokens: Tensor, *, length: int) -> None:
        if tokens.dim() != 1 or len(tokens) < length or length < 2:
            raise ValueError(
                f"tokens must be one row of at least {max(length, 2)} ids (the length of a window), got {tuple(tokens.shape)}"
            )
        self.windows = tokens[: len(tokens) // length * length].view(-1, length).long()

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class SomeSamples(Dataset[Any]):
    """At most `most` samples of the data, evenly spread."""

    def __init__(self, data: Samples, most: int) -> None:
        self.data, self.places = data, evenly_spread(len(data), most)
        self.collate = getattr(data, "collate", default_collate)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.places[index]]


def evenly_spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, evenly spread from the first to the last."""
    places: list[int] = np.unique(np.linspace(0, max(0, count - 1), most).astype(int)).tolist()
    return places[:count]


def inputs_and_targets(batch: Any) -> tuple[Tensor, Tensor]:
    """Token ids [B, N] and the id that follows each, IGNORED where none is to be predicted.

    A batch is a tensor of ids, or a dictionary with "input_ids" and perhaps "targets". Places of documents that were packed
    into one window are not looked at: attention runs over the whole window.
    """
    if isinstance(batch, Tensor):
        batch = {"input_ids": batch}
    tokens = batch["input_ids"]
    targets = batch.get("targets")
    return tokens, F.pad(tokens[:, 1:], (0, 1), value=IGNORED) if targets is None else targets


def next_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """[B, N] float32, 0 where nothing is predicted."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets)


def divergences(logits: Tensor, expected: Tensor, targets: Tensor) -> Tensor:
    """Return KL(expected || logits) of the next token [B, N] in nats, 0 where nothing is predicted."""
    given = expected.log_softmax(-1)
    found = F.kl_div(logits.float().log_softmax(-1), given, reduction="none", log_target=True).sum(-1)
    return found.masked_fill(targets == IGNORED, 0)


def count_predicted(targets: Tensor) -> Tensor:
    return torch.count_nonzero(targets != IGNORED)
