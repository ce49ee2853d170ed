"""Tensors that are made once and kept for later calls; a tensor that only one call can use is not kept."""

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def is_ordinary(x: Tensor) -> bool:
    """True if x holds its own numbers: tensors of tracers hold none, and those of function transforms die with them."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_traced() -> bool:
    """Whether a tracer watches: it follows no cache, and its tensors (of FakeTensorMode, make_fx) mix with no others."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    # where no mode and no transform is at work, a new tensor is an ordinary one
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if not modes and torch._C._functorch.peek_interpreter_stack() is None:
        return False
    # what mode it is does not matter: what it makes of a new tensor does
    return not is_ordinary(torch.empty(0, device="cpu"))


def is_plain_eager() -> bool:
    """Whether nothing watches or changes calls of torch: no tracer, no mode, no transform."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def is_transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp and what is made of them) is at work."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is captured: what is made now has no value before the graph runs."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def kept(make: Callable[..., T], *, maxsize: int) -> Callable[..., T]:
    """`make` with the last results kept, where they may be. Takes the device by name; the other arguments must be hashable.

    What is made in inference mode stays there: autograd cannot save it.
    """
    known: dict[Hashable, T] = {}

    def get(*arguments: Hashable, device: torch.device, **options: Hashable) -> T:
        if is_traced():
            return make(*arguments, device=device, **options)
        key = (torch.is_inference_mode_enabled(), arguments, device, *options.items())
        found = known.get(key)
        if found is None:
            found = make(*arguments, device=device, **options)
            if not is_captured(device):
                known[key] = found
                if len(known) > maxsize:
                    known.pop(next(iter(known)), None)
        return found

    return get
