"""Texts in which earlier parts come again: who copies them looks far back, and to a known place.

They tell which heads look up (`head_budget.py`) and, mixed into training, keep a student doing it. They are made of the tokens
of any text, so no tokenizer, language or phrase is built in.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data import Samples
from .batches import inputs_and_targets

SEGMENT = 32


def repeat_segments(
    tokens: Tensor, generator: torch.Generator, *, segments: int = 8, size: int = SEGMENT
) -> tuple[Tensor, Tensor]:
    """Write earlier segments of a text [N] over its end; return the tokens and, for each place, what it looks up.

    sources: [N], the place of the token that follows the first coming of this one, -1 where nothing comes again.
    """
    length = len(tokens)
    size = min(size, max(2, length // 8))
    segments = max(1, min(segments, length // (4 * size)))
    tokens, sources = tokens.clone(), torch.full((length,), -1)
    end = length - segments * size
    # one segment out of each part of what is left, so that all distances are drawn
    part = end // segments
    for number, place in enumerate(torch.randperm(segments, generator=generator).tolist()):
        start = place * part + int(torch.randint(max(1, part - size), (1,), generator=generator))
        target = end + number * size
        tokens[target : target + size] = tokens[start : start + size]
        # the last token of a segment is not followed by what followed it first
        sources[target : target + size - 1] = torch.arange(start + 1, start + size)
    return tokens, sources


class WithRepeats(Dataset[dict[str, Tensor]]):
    """Samples of which every `every`-th has segments that come again; the same ones each time."""

    def __init__(self, samples: Samples, *, every: int, seed: int = 0) -> None:
        self.samples, self.every, self.seed = samples, every, seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample: Any = self.samples[index]
        tokens, targets = (x[0] for x in inputs_and_targets(_batch_of_one(sample)))
        if index % self.every == 0:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
            tokens, _ = repeat_segments(tokens, generator)
            targets = inputs_and_targets(tokens[None])[1][0]
        return {"input_ids": tokens, "targets": targets}


def _batch_of_one(sample: Any) -> Any:
    if isinstance(sample, dict):
        return {name: x[None] for name, x in sample.items() if name in ("input_ids", "targets")}
    return sample[None]
