"""Cache tensors for later calls; a tensor that only one call can use is not cached."""

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def is_ordinary(x: Tensor) -> bool:
    """True if x holds its own values: tensors of tracers hold none, and those of function transforms end with them."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_traced() -> bool:
    """True if a tracer records: it ignores caches, and its tensors (FakeTensorMode, make_fx) mix with no others."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    # without a mode or a transform every new tensor is an ordinary one
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if not modes and torch._C._functorch.peek_interpreter_stack() is None:
        return False
    # the kind of mode does not matter, only what it makes of a new tensor
    return not is_ordinary(torch.empty(0, device="cpu"))


def is_plain_eager() -> bool:
    """True if no tracer, mode or transform observes or changes calls of torch."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def is_transformed() -> bool:
    """True inside a transform of torch.func (grad, vmap, jvp and those built on them)."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_captured(device: torch.device) -> bool:
    """True while a CUDA graph is captured: a tensor that is made now has no values before the graph runs."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def kept(make: Callable[..., T], *, maxsize: int) -> Callable[..., T]:
    """Return `make` with a cache of its last results. It takes the device by name; its other arguments are hashable.

    An inference tensor is cached for inference only: autograd cannot save it.
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
