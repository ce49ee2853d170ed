"""Windows of a fixed length out of documents of any length; no document sees another.

Sample i is {"input_ids", "targets", "position_ids"}, int64 [length] each: the tokens of window i, the token that follows each
(IGNORED where none is to be predicted), and each token's place in its document. Places that start again at 0 say where a
document begins, so that a model keeps apart what was packed together.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from .shards import Shard, TokenShards

# what cross-entropy leaves out
IGNORED = -100
PACKINGS = ("stream", "whole")


class PackedTokens(Dataset[dict[str, Tensor]]):
    """Windows of `length` tokens.

    packing "stream": the documents of a shard as one stream, cut every `length` tokens. Every token that follows another in
    its document is predicted once; a document that crosses a cut goes on in the next window without what was before.
    packing "whole": as many whole documents as fit, so that a prompt stays with its response; of a document longer than a
    window only the beginning is used, and `shortened` counts those.
    What is left of a window is filled and not predicted.
    """

    def __init__(self, data: TokenShards, *, length: int, packing: str = "stream") -> None:
        if length < 1:
            raise ValueError(f"the length of a window must be positive, got {length}")
        if packing not in PACKINGS:
            raise ValueError(f"packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
        self.data, self.length = data, length
        self.shortened = 0
        # a stream's windows follow from their number alone; whole documents need a list
        self.starts = [whole_windows(shard, length) for shard in data.shards] if packing == "whole" else None
        if self.starts is None:
            counts = [-(-len(shard.tokens) // length) for shard in data.shards]
        else:
            counts = [len(starts) for starts, _ in self.starts]
            self.shortened = sum(int((np.diff(shard.ends, prepend=0) > length).sum()) for shard in data.shards)
        self.offsets = np.cumsum([0, *counts])

    @property
    def predicted(self) -> int | None:
        """How many tokens are predicted in all windows together; None where that takes reading them."""
        if self.starts is not None or any(shard.learned is not None for shard in self.data.shards):
            return None
        return self.data.tokens - self.data.documents

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        number = int(np.searchsorted(self.offsets, index, side="right")) - 1
        shard, place = self.data.shards[number], index - int(self.offsets[number])
        if self.starts is None:
            start = place * self.length
            stop = min(start + self.length, len(shard.tokens))
        else:
            start, stop = (int(bounds[place]) for bounds in self.starts[number])
        return self.window(shard, start, stop)

    def window(self, shard: Shard, start: int, stop: int) -> dict[str, Tensor]:
        # one more than the window holds: the last token is asked for what follows it
        tokens = np.asarray(shard.tokens[start : stop + 1], dtype=np.int64)
        if tokens.max() >= self.data.vocab_size:
            raise ValueError(
                f"token ids must be below vocab_size ({self.data.vocab_size}), got {tokens.max()} in {self.data.place}; they "
                "were made with another tokenizer"
            )
        inputs = np.zeros(self.length, np.int64)
        targets = np.full(self.length, IGNORED, np.int64)
        size = stop - start
        inputs[:size] = tokens[:size]
        targets[: len(tokens) - 1] = tokens[1:]
        if shard.learned is not None:
            targets[: len(tokens) - 1][~shard.learned[start + 1 : stop + 1]] = IGNORED
        # where documents end, and so the next one or the filling begins
        first, last = np.searchsorted(shard.ends, [start, stop], side="right")
        begins = np.asarray(shard.ends[first:last]) - start
        # the first token of a document does not follow from the document before it
        targets[begins - 1] = IGNORED
        return {
            "input_ids": torch.from_numpy(inputs),
            "targets": torch.from_numpy(targets),
            "position_ids": torch.from_numpy(positions(self.length, begins)),
        }


def positions(length: int, begins: NDArray[Any]) -> NDArray[Any]:
    """0, 1, 2, ... starting again at each of the places."""
    marks = np.zeros(length, np.int64)
    inside = begins[begins < length]
    marks[inside] = inside
    return np.arange(length) - np.maximum.accumulate(marks)


def whole_windows(shard: Shard, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Start and stop of each window of whole documents, as many in each as fit in order."""
    ends = np.asarray(shard.ends)
    starts, stops = [], []
    document, start = 0, 0
    while document < len(ends):
        # the first document that does not fit any more; one that is too long stands alone
        after = max(int(np.searchsorted(ends, start + length, side="right")), document + 1)
        starts.append(start)
        stops.append(min(int(ends[after - 1]), start + length))
        document, start = after, int(ends[after - 1])
    return np.array(starts, np.int64), np.array(stops, np.int64)
