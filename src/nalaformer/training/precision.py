"""In which numbers a run computes."""

from pathlib import Path

import torch

from .config import PRECISIONS

CPU_FACTS = Path("/proc/cpuinfo")
# how Linux names the instructions: x86, x86 with tiles, Arm
BFLOAT16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}


def precision_on(device: torch.device, name: str) -> torch.dtype:
    """The precision of that name; "auto" is bfloat16 on a GPU that computes in it, else float32."""
    if name != "auto":
        return PRECISIONS[name]
    is_quick = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_quick else torch.float32


def slowness_of(device: torch.device, precision: torch.dtype) -> str:
    """Why this precision is slow here, and what to do; empty if it is not slow, or if the device does not tell."""
    if device.type != "cpu" or precision != torch.bfloat16 or not CPU_FACTS.exists():
        return ""
    if BFLOAT16_UNITS & set(CPU_FACTS.read_text().split()):
        return ""
    return "this CPU has no units for bfloat16, which is many times slower here than float32; set precision=auto"
