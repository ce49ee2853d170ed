"""Calls as CUDA graphs: the device runs them without waiting for Python."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UPS = 3


def captured(call: Callable[[], object], *, restore: Sequence[Tensor] = ()) -> Callable[[], None]:
    """Replays of the call as a CUDA graph. It runs a few times before, since first calls compile and allocate.

    restore: tensors that the call changes, which are as they were when this returns.
    """
    before = [tensor.clone() for tensor in restore]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    for tensor, old in zip(restore, before, strict=True):
        tensor.copy_(old)
    del before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
