"""Detect hooks on modules: a hooked module must be called and cannot be replaced by a fused kernel."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules


def is_watched(module: nn.Module) -> bool:
    """True if a call runs more than the class's forward: hooks, or a forward set on the instance."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(own) or "forward" in module.__dict__:
        return True
    # the compiler traces only the hooks of the module itself
    return not torch.compiler.is_compiling() and any(global_hooks())


def global_hooks() -> tuple[dict[int, Any], ...]:
    """Return the hooks that torch calls around every module."""
    # torch has no public access to them
    return (
        torch_modules._global_forward_pre_hooks,
        torch_modules._global_forward_hooks,
        torch_modules._global_backward_pre_hooks,
        torch_modules._global_backward_hooks,
    )
