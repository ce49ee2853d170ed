"""Launch a kernel and pay for Triton's front end only once per kind of input."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...backend import INTERPRETING
from . import machine_code

T = TypeVar("T")


class Bounded(dict[object, T]):
    """Cache the results of earlier calls. A full cache drops everything, and the next calls make their results again."""

    MOST = 4096

    def __setitem__(self, key: object, value: T) -> None:
        if len(self) >= self.MOST:
            self.clear()
        super().__setitem__(key, value)


Launches = Bounded[Any]
# options of the compiler, not of a kernel
OPTIONS = ("num_warps", "num_stages")
# Other options for a kernel that the assembler breaks (machine_code.py). The last is slow and always correct, since the
# assembler breaks products of warp groups, which take four warps.
OTHER_FORMS: tuple[dict[str, int], ...] = ({"num_warps": 8}, {"num_stages": 1}, {"num_warps": 2})
# three tf32 products make one of float32 quality; a single one would cost float16 three of its eleven bits
PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "tf32x3"}
# grid, numbers, constants (a kernel gets only the constants that it has)
Description = tuple[tuple[int, ...], tuple[float, ...], dict[str, Any]]


def start(launches: Launches, key: object, kernel: Any, tensors: Sequence[Tensor], describe: Callable[[], Description]) -> None:
    """Launch a kernel. The first call with a key runs `describe`; later calls with the same key only pass the pointers.

    The key must tell apart whatever the launch depends on: shapes, strides, types, alignment, device.
    """
    known = launches.get(key)
    if known is not None:
        known(tensors)
        return
    grid, numbers, constants = describe()
    taken = {name: value for name, value in constants.items() if name in kernel.arg_names or name in OPTIONS}
    with use_device(tensors[0]):
        if machine_code.IS_FOUND_HERE and not INTERPRETING:
            taken = working_options(kernel, (*tensors, *numbers), grid, taken)
        compiled = kernel[grid](*tensors, *numbers, **taken)
    if not INTERPRETING:
        in_order = kernel.arg_names[len(tensors) + len(numbers) :]
        rest = (*numbers, *(taken[name] for name in in_order))
        launches[key] = make_runner(compiled, (*grid, 1, 1)[:3], rest, tensors[0].get_device())


def make_runner(compiled: Any, grid: tuple[int, ...], rest: tuple[Any, ...], device: int) -> Callable[[Sequence[Tensor]], None]:
    """Return a function that launches a compiled kernel with tensors and the `rest` of its arguments, on the current stream.

    Triton's own runner calls its hooks and describes the launch for them each time; this one skips that without hooks.
    """
    from triton import knobs

    of_triton, listeners = compiled[grid], knobs.runtime
    # these calls skip torch.cuda's check that CUDA has started, since the tensors already lie on the device
    current_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    run, then = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)

    def launch(tensors: Sequence[Tensor]) -> None:
        if current_device() != device:
            with torch.cuda.device(device):
                return launch(tensors)
        # addresses instead of tensors: for a tensor, Triton queries the driver at every launch
        addresses = [x.data_ptr() for x in tensors]
        if has_hook(listeners.launch_enter_hook) or has_hook(listeners.launch_exit_hook):
            of_triton(*addresses, *rest)
        else:
            run(*grid, current_stream(device), *then, *addresses, *rest)

    return launch


def has_hook(hook: Any) -> bool:
    """True if a hook is set: it is None, a chain of functions that may be empty, or a function."""
    return hook is not None and bool(getattr(hook, "calls", True))


def working_options(kernel: Any, arguments: Sequence[Any], grid: tuple[int, ...], constants: dict[str, Any]) -> dict[str, Any]:
    """Return the constants with the first options under which the assembler breaks nothing."""
    for options in ({}, *OTHER_FORMS):
        form = constants | options
        # compiled but not started: a kernel that changes its inputs must not run twice
        compiled = kernel.warmup(*arguments, grid=grid, **form)
        if not machine_code.is_miscompiled(compiled.asm.get("cubin", b"")):
            return form
    raise RuntimeError(f"Triton's assembler breaks {kernel.__name__} in every form; use nalaformer.set_backend('chunked')")


HERE = nullcontext()


def use_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current device, whatever device its tensors are on."""
    return HERE if is_current(tensor) else torch.cuda.device(tensor.device)


def is_current(tensor: Tensor) -> bool:
    """True if a tensor lies on the current device, or on no GPU at all."""
    # this call skips torch.cuda's check that CUDA has started, since the tensor already lies on a device
    return not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice()


def kind(*tensors: Tensor | None) -> tuple[object, ...]:
    """Return the properties of tensors that a compiled launch depends on."""
    described: list[object] = []
    alignment = 0
    for x in tensors:
        if x is None:
            described.append(None)
        else:
            alignment |= x.data_ptr()
            described += x.shape, x.stride(), x.dtype
            device = x.device
    # at least one tensor is not None
    described += alignment % 16, device
    return tuple(described)


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy whose rows kernels can read: dense rows, and the strides that tiles.row_strides needs."""
    is_fit = x.stride(-1) == 1
    if x.shape[-1] % 16 == 8:
        # a dimension of one has no second row, whatever its stride
        is_fit = is_fit and all(size == 1 or stride % 8 == 0 for size, stride in zip(x.shape[:-1], x.stride(), strict=False))
    return x if is_fit else x.contiguous()


def empty_as(x: Tensor) -> Tensor:
    """Return an empty dense tensor like x; torch.empty with the same facts takes the host twice as long."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, token and head; packed tensors have no batch."""
    return (0, x.stride(0), x.stride(1)) if x.dim() == 3 else (x.stride(0), x.stride(1), x.stride(2))


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; a small number in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def reads_ahead(device: torch.device) -> bool:
    """True if a multiprocessor holds several tiles of each input, as data centre GPUs since Hopper (227 KiB) do."""
    return device.type != "cuda" or torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 200 * 1024
