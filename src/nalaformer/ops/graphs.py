"""Capture calls as CUDA graphs, which the device runs without waiting for Python."""

import threading
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

WARM_UPS = 3
# torch captures one graph at a time
_lock = threading.RLock()


class NotCapturable(RuntimeError):
    """Report a call that runs by itself, but not as a CUDA graph: something in it waits for the host."""


@cache
def streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams for warming up and for capturing, the same for all calls of a device.

    torch keeps the memory that matrix products need for each stream that ever ran some. Its own stream for captures belongs to
    the device that first used it.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def captured(
    call: Callable[[], object], *, restore: Sequence[Tensor] = (), device: torch.device | None = None
) -> Callable[[], None]:
    """Return a function that replays the call as a CUDA graph. The call runs a few times first, to compile and allocate.

    restore: tensors that the call changes; they are restored before each of these runs, and when this returns or fails.
    device: the current one by default. NotCapturable: the call runs, but not as a graph; other errors are the call's own.
    """
    number = torch.cuda.current_device() if device is None or device.index is None else device.index
    with torch.cuda.device(number), _lock:
        return _capture(call, restore, *streams(number))


def _capture(
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
        # the mode checks this thread alone: other threads (loaders, servers) may allocate meanwhile
        with torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
            call()
    except Exception as error:
        # torch would stay on the stream of the failed capture, and its generator would still record
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        # the call has just run without a graph, so only the capture can have failed
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise NotCapturable(f"the call cannot be captured as a CUDA graph: {error}") from error
        raise
    return graph.replay
