"""Tells whether somebody watches a module: then it has to be called, and nothing may take its place."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules


def is_watched(module: nn.Module) -> bool:
    """True if a call does more than the class says: hooks run around it, or another forward was put into its place."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(own) or "forward" in module.__dict__:
        return True
    # the compiler follows the hooks of a module alone
    return not torch.compiler.is_compiling() and any(global_hooks())


def global_hooks() -> tuple[dict[int, Any], ...]:
    """The hooks that torch calls around every module."""
    # torch has no other way to ask for them
    return (
        torch_modules._global_forward_pre_hooks,
        torch_modules._global_forward_hooks,
        torch_modules._global_backward_pre_hooks,
        torch_modules._global_backward_hooks,
    )
