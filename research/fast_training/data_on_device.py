"""Sequence data as tensors that stay on the device, in buckets of one length each, and the plan of which batch comes when."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..sequences import IGNORE, SequenceData
from ..sequences.base import Arrays

CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Samples of one length."""

    inputs: Tensor
    """[n, length] in the smallest integer type, or [n, length, C]."""
    at: Tensor | None
    """[n, A]: the positions that ask; None: the whole sequence, or every position."""
    targets: Tensor
    """[n] or [n, A], IGNORE where a sample asks less than others; or vectors [n, length, C]."""
    group: Tensor
    """[n]."""

    def __len__(self) -> int:
        return len(self.group)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """inputs, at, targets, group of some rows; nothing waits for the host."""
        inputs = self.inputs.index_select(0, rows)
        at = None if self.at is None else self.at.index_select(0, rows).long()
        inputs, targets = (
            each if each.is_floating_point() else each.long() for each in (inputs, self.targets.index_select(0, rows))
        )
        return inputs, at, targets, self.group.index_select(0, rows)


def load_to_device(
    data: SequenceData,
    device: str | torch.device,
    *,
    only_answers: bool = False,
    pool: Executor | None = None,
    advance: Callable[[int], None] = lambda samples: None,
) -> list[Bucket]:
    """All samples on the device. only_answers: targets are the answers, not every next token; pool: makes the samples."""
    lengths = np.asarray(data.group_lengths)
    pieces: dict[int, list[Arrays]] = {}
    indices = [np.arange(start, min(start + CHUNK, len(data))) for start in range(0, len(data), CHUNK)]
    for arrays in map(data.batch, indices) if pool is None else pool.map(data.batch, indices):
        if only_answers and "answers" in arrays:
            arrays["targets"] = np.where(arrays["answers"], arrays["targets"], IGNORE)
        arrays.pop("answers", None)
        of_sample = lengths[arrays["group"]]
        for length in np.unique(of_sample):
            pieces.setdefault(int(length), []).append({k: v[of_sample == length] for k, v in arrays.items()})
        advance(len(arrays["group"]))
    return [bucket(length, parts, device) for length, parts in sorted(pieces.items())]


def bucket(length: int, parts: list[Arrays], device: str | torch.device) -> Bucket:
    """Samples cut to their length, and their questions gathered."""
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    inputs, targets, at = arrays["inputs"], arrays["targets"], None
    if targets.ndim > 1:
        inputs, targets = inputs[:, :length], targets[:, :length]
    if targets.ndim == 2:
        asks = targets != IGNORE
        most = int(asks.sum(axis=1).max())
        if most < length:
            # in chunks: sorted places of a million sequences are gigabytes
            pieces = (asks[start : start + CHUNK] for start in range(0, len(asks), CHUNK))
            at = np.concatenate([np.argsort(~piece, axis=1, kind="stable")[:, :most] for piece in pieces])
            targets = np.take_along_axis(targets, at, axis=1)
    if inputs.dtype == np.uint16:
        inputs = inputs.astype(np.int32)
    return Bucket(
        inputs=torch.from_numpy(np.ascontiguousarray(inputs)).to(device),
        at=None if at is None else torch.from_numpy(at.astype(np.int32)).to(device),
        targets=torch.from_numpy(targets if targets.ndim == 3 else targets.astype(np.int32)).to(device),
        group=torch.from_numpy(arrays["group"]).to(device),
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Batch of each step."""

    bucket_of: NDArray[np.int64]
    """[steps]."""
    rows: list[Tensor]
    """For each bucket the rows of its batches, in order: [its steps, batch size], on the device."""

    def before(self, step: int) -> list[int]:
        """Count the batches of each bucket before a step."""
        return [int((self.bucket_of[:step] == number).sum()) for number in range(len(self.rows))]


def make_plan(buckets: list[Bucket], *, steps: int, batch_size: int, seed: int) -> Plan:
    """Plan epochs in which every sample comes once, but for those that fill no batch. The order follows from the seed."""
    device = buckets[0].group.device
    whole = [len(each) // batch_size for each in buckets]
    if not sum(whole):
        raise ValueError(f"some bucket must hold a batch of {batch_size}, got buckets of {[len(each) for each in buckets]}")
    order: list[NDArray[np.int64]] = []
    rows: list[list[NDArray[np.int64]]] = [[] for _ in buckets]
    epochs = -(-steps // sum(whole))
    for epoch in range(epochs):
        random = np.random.default_rng((seed, epoch))
        order.append(random.permutation(np.repeat(np.arange(len(buckets)), whole)))
        for number, (each, batches) in enumerate(zip(buckets, whole, strict=True)):
            rows[number].append(random.permutation(len(each))[: batches * batch_size].reshape(batches, batch_size))
    bucket_of = np.concatenate(order)[:steps]
    joined = [np.concatenate(parts) for parts in rows]
    return Plan(bucket_of=bucket_of, rows=[torch.from_numpy(part).to(device) for part in joined])
