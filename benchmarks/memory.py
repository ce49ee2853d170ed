"""Measure the peak memory of a call, beyond what its inputs held before.

On a CPU the kernel counts: Linux keeps the largest resident size of a process (VmHWM) and resets it when "5" is written to
/proc/self/clear_refs. Memory that the process had freed but kept would hide a need, so a call is measured in a process of
its own (fresh_process.py). On a GPU torch's allocator counts.
"""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 2**20


def peak_extra_mib(call: Callable[[], object], *, device: str = "cpu") -> float:
    """MiB that the call holds at its peak beyond what is held before it; what it returns is part of it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        _give_back_freed_memory()
        _reset_peak()
        before = _read_mib("VmRSS")
        call()
        peak = _read_mib("VmHWM")
    return max(0, peak - before) / MIB


def can_measure(device: str) -> bool:
    """Return True if this system counts the peak."""
    if device == "cuda":
        return True
    try:
        _reset_peak()
    except OSError:
        return False
    return True


def _read_mib(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{STATUS} has no {field}")


def _reset_peak() -> None:
    CLEAR_REFS.write_text("5")


def _give_back_freed_memory() -> None:
    """Let the C library return what it keeps: reused silently, it would not count."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
