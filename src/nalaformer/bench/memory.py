"""How much memory a call needs at its worst moment, beyond what its inputs held before.

On a CPU the kernel counts: Linux keeps the largest resident size of a process (VmHWM) and resets it when "5" is written to
/proc/self/clear_refs. Memory that the process had freed but kept would hide a need, so a call is measured in a process of
its own. On a GPU torch's allocator counts.
"""

import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .timing import median_ms

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
        before = _resident("VmRSS")
        call()
        peak = _resident("VmHWM")
    return max(0, peak - before) / MIB


def can_measure(device: str) -> bool:
    """Whether this system counts the peak."""
    if device == "cuda":
        return True
    try:
        _reset_peak()
    except OSError:
        return False
    return True


def in_fresh_process(target: str, arguments: dict[str, Any], *, seconds: float) -> tuple[float, float]:
    """Peak extra MiB and median milliseconds (repeated for about `seconds`) of a call in a new Python process.

    Time too: what earlier calls have left in the C library's heap spares later ones many page faults, or not, by their order.
    target: "package.module:function"; the function gets the arguments (plain values) and returns the call.
    """
    request = json.dumps(
        {"target": target, "arguments": arguments, "threads": torch.get_num_threads(), "seconds": seconds},
    )
    command = [sys.executable, "-c", f"from {__name__} import answer_request; answer_request()"]
    # it finds modules where this process finds them
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, input=request, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RuntimeError(f"the measurement of {target} with {arguments} failed: {last_line}")
    mebibytes, milliseconds = done.stdout.splitlines()[-1].split()
    return float(mebibytes), float(milliseconds)


def answer_request() -> None:
    """What the fresh process runs: request on stdin, MiB and milliseconds on stdout."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    module, function = request["target"].split(":")
    call = getattr(importlib.import_module(module), function)(**request["arguments"])
    mebibytes = peak_extra_mib(call)
    sys.stdout.write(f"{mebibytes} {median_ms(call, seconds=request['seconds'])}\n")


def _resident(field: str) -> int:
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
