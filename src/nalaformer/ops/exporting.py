"""Check if torch.export or torch.jit.trace is recording a program, which will run without Python."""

import torch

# older releases report every torch.compile as an export
TELLS_EXPORT_FROM_COMPILE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def is_exporting() -> bool:
    """True inside torch.export, false inside torch.compile; before torch 2.15 a strict export looks like a compile."""
    return torch.compiler.is_exporting() and (TELLS_EXPORT_FROM_COMPILE or not torch.compiler.is_dynamo_compiling())


def is_jit_tracing() -> bool:
    """True inside torch.jit.trace, which records one side of every branch and a fixed number of repetitions of every loop."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def is_recorded() -> bool:
    """True if this call is exported, or traced by torch.jit, into a program that will run with other lengths."""
    return is_exporting() or is_jit_tracing()
