"""Make torch.compile call functions eagerly, because they read values on the host."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def run_eagerly(function: Function) -> Function:
    """Return the function with tracing switched off inside.

    torch.compiler.disable does that, but as a decorator it would import torch._dynamo with this library, which takes as long
    as torch itself. Here it is imported once the compiler is there.
    """

    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled and "torch._dynamo" in sys.modules:
            disabled.append(torch.compiler.disable(function))
        return (disabled[0] if disabled else function)(*args, **kwargs)

    # torch.compiler.disable leaves these attributes on its results: the compiler then breaks the graph here
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "the lengths of packed sequences are part of the launch"  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
