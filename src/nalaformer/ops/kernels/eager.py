"""Kernels with gradients without torch's dispatcher, whose operators written in Python cost more than small kernels do."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def eager(
    run: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None],
    gradients: Callable[..., Any],
    given: Callable[[Any], Any] = lambda output: output,
) -> Callable[..., Any]:
    """`run` as a function with gradients: what an operator is for torch.compile, this is for everybody else.

    save(ctx, inputs, output) keeps what gradients(ctx, *of the outputs) needs; `given`: which outputs the caller gets.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
            output = run(*inputs)
            save(ctx, inputs, output)
            return given(output)

        # kernels compute gradients that have none themselves: asking for them must be an error
        @staticmethod
        @once_differentiable
        def backward(ctx, *of_outputs):  # type: ignore[no-untyped-def]
            return gradients(ctx, *of_outputs)

    return Eager.apply
