"""Calls as CUDA graphs: the device runs them without waiting for Python."""

import threading
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

WARM_UPS = 3
# torch captures one graph at a time
_lock = threading.RLock()


class NotCapturable(RuntimeError):
    """A call that runs by itself, but not as a CUDA graph: something in it waits for the host."""


@cache
def streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """For warming up and for capturing, the same for all calls: torch keeps the memory that matrix products need for each
    stream that ever ran some. Of each device: torch's own stream for captures is of whichever was asked first."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def captured(
    call: Callable[[], object], *, restore: Sequence[Tensor] = (), device: torch.device | None = None
) -> Callable[[], None]:
    """Replays of the call as a CUDA graph. It runs a few times before, since first calls compile and allocate.

    restore: tensors that the call changes, which are as they were before each of these runs and when this returns or fails;
    device: the current one by default. NotCapturable: the call runs, but not as a graph; other errors are the call's own.
    """
    number = torch.cuda.current_device() if device is None or device.index is None else device.index
    with torch.cuda.device(number), _lock:
        return _captured(call, restore, *streams(number))


def _captured(
    call: Callable[[], object], restore: Sequence[Tensor], side: torch.cuda.Stream, own: torch.cuda.Stream
) -> Callable[[], None]:
    before = [tensor.clone() for tensor in restore]
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                try:
                    call()
                finally:
                    for tensor, old in zip(restore, before, strict=True):
                        tensor.copy_(old)
    finally:
        torch.cuda.current_stream().wait_stream(side)
    del before
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # of this thread alone: others may go on to allocate meanwhile, as loaders and servers do
        with torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
            call()
    except Exception as error:
        # torch would stay on the stream of a capture that failed, and its generator take itself to be captured still
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        # the same call has just run without a graph
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise NotCapturable(f"the call cannot be captured as a CUDA graph: {error}") from error
        raise
    return graph.replay
