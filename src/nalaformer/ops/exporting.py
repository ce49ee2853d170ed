"""Tells whether torch.export or torch.jit.trace is recording a program, which will run without Python."""

import torch

# older ones say of every torch.compile that it is an export
TELLS_EXPORT_FROM_COMPILE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def is_exporting() -> bool:
    """True inside of torch.export, false inside of torch.compile; before torch 2.15 a strict export cannot be told from it."""
    return torch.compiler.is_exporting() and (TELLS_EXPORT_FROM_COMPILE or not torch.compiler.is_dynamo_compiling())


def is_jit_tracing() -> bool:
    """True inside of torch.jit.trace, which keeps one side of every branch and one number of repetitions of every loop."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def is_recorded() -> bool:
    """Whether a program is made of this call that will serve other lengths: exported, or traced by torch.jit."""
    return is_exporting() or is_jit_tracing()
