"""Kernels with gradients without torch's dispatcher, whose operators written in Python cost more than small kernels do."""

from collections.abc import Callable
from typing import Any

import torch

Gradients = Callable[..., tuple[Any, ...]]


class OnceDifferentiable(torch.autograd.Function):
    """The first `count` tensors as they are, for the first-order gradient; an error for any higher one.

    The rest only stand in the graph: whatever the gradients were computed from must lead to the error. torch's own
    once_differentiable looks at the gradients of the outputs alone, and those of a plain sum are constants.
    """

    @staticmethod
    def forward(ctx, count, *tensors):  # type: ignore[no-untyped-def]
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *unused):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            "the fused kernels have first-order gradients only, and a gradient of their gradient was asked for; "
            'compute inside nalaformer.use_backend("chunked"), whose gradients can be differentiated again'
        )


def first_order(gradients: Gradients) -> Gradients:
    """gradients(ctx, *of the outputs) that refuse to be differentiated; ctx must have saved whatever they depend on."""

    def run(ctx, *of_outputs):  # type: ignore[no-untyped-def]
        # on only where a graph of the backward pass is wanted (create_graph)
        if not torch.is_grad_enabled():
            return gradients(ctx, *of_outputs)
        with torch.no_grad():
            found = list(gradients(ctx, *of_outputs))
        causes = [x for x in (*of_outputs, *ctx.saved_tensors) if x is not None and x.requires_grad]
        if causes:
            places = [place for place, x in enumerate(found) if x is not None]
            guarded = OnceDifferentiable.apply(len(places), *(found[place] for place in places), *causes)
            for place, x in zip(places, guarded, strict=True):
                found[place] = x
        return tuple(found)

    return run


def eager(
    run: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None],
    gradients: Gradients,
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

        backward = staticmethod(first_order(gradients))

    return Eager.apply
