"""Calls as CUDA graphs: the device runs them without waiting for Python."""

import threading
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

WARM_UPS = 3
# torch captures one graph at a time
_lock = threading.RLock()


@cache
def streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """For warming up and for capturing, the same for all calls: torch keeps the memory that matrix products need for each
    stream that ever ran some. Of each device: torch's own stream for captures is of whichever was asked first."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def captured(
    call: Callable[[], object], *, restore: Sequence[Tensor] = (), device: torch.device | None = None
) -> Callable[[], None]:
    """Replays of the call as a CUDA graph. It runs a few times before, since first calls compile and allocate.

    restore: tensors that the call changes, which are as they were when this returns; device: the current one by default.
    """
    number = torch.cuda.current_device() if device is None or device.index is None else device.index
    with torch.cuda.device(number), _lock:
        return _captured(call, restore, *streams(number))


def _captured(
    call: Callable[[], object], restore: Sequence[Tensor], side: torch.cuda.Stream, own: torch.cuda.Stream
) -> Callable[[], None]:
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
        with torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
            call()
    except Exception:
        # torch would stay on the stream of a capture that failed, and its generator take itself to be captured still
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    return graph.replay
