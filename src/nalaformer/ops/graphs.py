"""Calls as CUDA graphs: the device runs them without waiting for Python."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

WARM_UPS = 3


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """One for all captures: torch keeps the memory that matrix products need for each stream that ever ran some."""
    return torch.cuda.Stream(device)


def captured(
    call: Callable[[], object], *, restore: Sequence[Tensor] = (), device: torch.device | None = None
) -> Callable[[], None]:
    """Replays of the call as a CUDA graph. It runs a few times before, since first calls compile and allocate.

    restore: tensors that the call changes, which are as they were when this returns; device: the current one by default.
    """
    number = torch.cuda.current_device() if device is None or device.index is None else device.index
    with torch.cuda.device(number):
        replay = _captured(call, restore, side_stream(number))
    if number == torch.cuda.current_device():
        return replay

    def replay_there() -> None:
        with torch.cuda.device(number):
            replay()

    return replay_there


def _captured(call: Callable[[], object], restore: Sequence[Tensor], side: torch.cuda.Stream) -> Callable[[], None]:
    before = [tensor.clone() for tensor in restore]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    for tensor, old in zip(restore, before, strict=True):
        tensor.copy_(old)
    del before
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # of this thread alone: others may go on to allocate meanwhile, as loaders and servers do
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError:
        # torch would stay on the stream of a capture that failed, and its generator take itself to be captured still
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    return graph.replay
