"""Tensors that are made once and kept for later calls: only such as serve any later call."""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def is_ordinary(x: Tensor) -> bool:
    """Whether x holds numbers of its own: tensors of tracers hold none, and those of function transforms die with them."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def may_keep(device: torch.device) -> bool:
    """Whether what is made now serves later calls, and what was made before serves this one.

    A tracer follows no cache, and its tensors (FakeTensorMode, torch.export, make_fx) do not mix with others; a tensor made
    while a CUDA graph is captured has no value yet.
    """
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return False
    # what mode it is does not matter: what it makes of a new tensor does
    return is_ordinary(torch.empty(0, device="cpu"))


def kept(make: Callable[..., T], *, maxsize: int) -> Callable[..., T]:
    """`make` with the last results kept, where they may be. Takes the device by name; the other arguments must be hashable.

    What is made in inference mode stays there: autograd cannot save it.
    """

    @lru_cache(maxsize=maxsize)
    def known(in_inference_mode: bool, *arguments: Hashable, device: torch.device, **options: Hashable) -> T:
        return make(*arguments, device=device, **options)

    def get(*arguments: Hashable, device: torch.device, **options: Hashable) -> T:
        if not may_keep(device):
            return make(*arguments, device=device, **options)
        return known(torch.is_inference_mode_enabled(), *arguments, device=device, **options)

    return get
