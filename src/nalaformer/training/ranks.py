"""The processes of a run: one, or those that torchrun started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which process this is, of how many, on which device."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """The one that writes and shows."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same everywhere."""
        if self.count == 1:
            return values
        values = values.to(self.device, copy=True)
        dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in order, the same everywhere; anything that can be pickled, in no great size."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the first one's buffers: each has statistics of its own batches in its batch norms."""
        if self.count == 1:
            return
        for buffer in model.buffers():
            values = buffer.contiguous()
            dist.broadcast(values, 0)
            buffer.copy_(values)

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


@contextmanager
def started(device: str) -> Iterator[Ranks]:
    """Join torchrun's processes (DDP) if there are any, and leave them at the end."""
    count, rank, local = (int(os.environ.get(name, default)) for name, default in RANK_VARIABLES)
    place = find_device(device, local)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if count == 1 or dist.is_initialized():
        yield Ranks(rank=rank, count=count, device=place)
        return
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Ranks(rank=rank, count=count, device=place)
    finally:
        dist.destroy_process_group()


def find_device(device: str, number: int = 0) -> torch.device:
    """The device of that name, a GPU where there is one for "auto"; `number`: which of several GPUs."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device, number) if device == "cuda" else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'device must be "cpu", "cuda" or "auto", got {device!r}') from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'device={device} needs a CUDA device, and torch sees none; use device=cpu or "auto"')
    return place


# set by torchrun
RANK_VARIABLES = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))
