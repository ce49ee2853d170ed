"""What tells a model and its data from others of the same shape: sums over every weight, and windows of tokens."""

from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import Tensor, nn

from ..data import Samples
from ..data.loading import random_state_of
from .batches import evenly_spread, inputs_and_targets

# windows of the data that are looked at: data of terabytes has a fingerprint in a second too
WINDOWS = 64
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def model_fingerprint(model: nn.Module) -> str:
    """A hash of names, shapes, types and bits of all parameters: sum_i bits_i and sum_i (i mod 8191) bits_i, in 64 bits.

    Integers have one sum in every order, so all devices and numbers of threads agree.
    """
    digest = sha256()
    for name, parameter in sorted(model.named_parameters()):
        value = whole_tensor(parameter).detach()
        digest.update(f"{name} {list(value.shape)} {value.dtype} {bit_sums(value)}\n".encode())
    return digest.hexdigest()[:16]


def bit_sums(value: Tensor) -> list[int]:
    bits = value.contiguous().view(-1).view(INTEGERS[value.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    # in pieces: the places of an embedding are gigabytes
    for start in range(0, len(bits), 1 << 24):
        piece = bits[start : start + (1 << 24)].long()
        places = torch.arange(start, start + len(piece), device=bits.device) % 8191
        sums += torch.stack((piece.sum(), (piece * places).sum()))
    return sums.tolist()


def whole_tensor(parameter: Tensor) -> Tensor:
    """All of a parameter that is spread over processes; every process must call it."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def data_fingerprint(data: Samples) -> str:
    """A hash of the number of windows, and of the tokens and targets of at most WINDOWS of them, evenly spread."""
    digest = sha256(f"{len(data)} windows\n".encode())
    for window in some_windows(data):
        for tokens in window:
            digest.update(tokens.long().numpy().tobytes())
    return digest.hexdigest()[:16]


def some_windows(data: Samples) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and targets [1, N] of at most WINDOWS samples, evenly spread and the same each time."""
    for index in evenly_spread(len(data), WINDOWS):
        # data that draws its samples draws the same ones
        with random_state_of(0, index):
            sample = data[index]
        batch = sample[None] if isinstance(sample, Tensor) else {name: value[None] for name, value in sample.items()}
        yield inputs_and_targets(batch)


def longest(data: Samples) -> int:
    """Return the tokens of the longest of these windows."""
    return max(tokens.shape[1] for tokens, _ in some_windows(data))
