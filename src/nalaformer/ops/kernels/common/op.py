"""Make kernels functions of torch: an operator for torch.compile, and a plain function with gradients for eager calls.

torch.compile sees the shapes and gradients of an operator, not its code. Eager calls avoid torch's dispatcher: operators
written in Python cost more than small kernels do.
"""

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from itertools import islice
from types import GenericAlias
from typing import Any, get_args, get_origin

import torch
from torch import Tensor

Run = Callable[..., Any]
# Operators are plain entries of torch's dispatcher: torch.library.custom_op adds three layers of Python to each call.
LIBRARY = torch.library.Library("nalaformer", "FRAGMENT")


class OnceDifferentiable(torch.autograd.Function):
    """Return the first `count` tensors unchanged, with a first-order gradient, and raise an error for any higher one.

    The other tensors only stand in the graph: whatever the gradients were computed from must lead to the error. torch's own
    once_differentiable checks the gradients of the outputs alone, and those of a plain sum are constants.
    """

    @staticmethod
    def forward(ctx: Any, count: Any, *tensors: Any) -> Any:
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        raise NotImplementedError(
            "the fused kernels have first-order gradients only, but a gradient of their gradient was requested; "
            'compute inside nalaformer.use_backend("chunked"), whose gradients can be differentiated again'
        )


def guard_gradients(gradients: Sequence[Any], causes: Sequence[Any]) -> list[Any]:
    """Return the gradients, which raise an error when one of their causes differentiates them; both may hold None."""
    found, leading = list(gradients), [x for x in causes if x is not None and x.requires_grad]
    if leading:
        places = [place for place, x in enumerate(found) if x is not None]
        guarded = OnceDifferentiable.apply(len(places), *(found[place] for place in places), *leading)
        for place, x in zip(places, guarded, strict=True):
            found[place] = x
    return found


def is_bundle(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def flatten_tuples(arguments: Sequence[Any]) -> list[Any]:
    """Expand named tuples to their fields, since an operator of torch takes no tuples."""
    return [leaf for x in arguments for leaf in (x if isinstance(x, tuple) else (x,))]


def gatherer(run: Run) -> Run:
    """Return a function that rebuilds the arguments of `run` from expanded ones."""
    kinds = [parameter.annotation for parameter in signature(run).parameters.values()]
    parts = [(kind._make, len(kind._fields)) if is_bundle(kind) else None for kind in kinds]
    if not any(parts):
        return lambda leaves: leaves

    def gather(leaves: Sequence[Any]) -> list[Any]:
        rest = iter(leaves)
        return [next(rest) if part is None else part[0](islice(rest, part[1])) for part in parts]

    return gather


def flatten_run(run: Run) -> Run:
    """Return `run` with expanded arguments and empty tensors for outputs that are None, and its signature."""
    plain, gather = signature(run), gatherer(run)
    leaves: list[Parameter] = []
    for parameter in plain.parameters.values():
        kind = parameter.annotation
        fields = kind.__annotations__ if is_bundle(kind) else {parameter.name: kind}
        leaves += [Parameter(field, Parameter.POSITIONAL_OR_KEYWORD, annotation=leaf) for field, leaf in fields.items()]

    given_back = plain.return_annotation
    kinds = get_args(given_back) if get_origin(given_back) is tuple else ()
    if Tensor | None in kinds:
        # an operator has no optional outputs
        run = without_none(run)
        given_back = GenericAlias(tuple, tuple(Tensor if kind == Tensor | None else kind for kind in kinds))

    def flat(*given: Any) -> Any:
        return run(*gather(given))

    flat.__signature__ = plain.replace(parameters=leaves, return_annotation=given_back)  # type: ignore[attr-defined]
    return flat


def without_none(run: Run) -> Run:
    """Return `run` with an empty float32 tensor for each output that is None; the first is not."""

    def fill(*given: Any) -> Any:
        outputs = run(*given)
        return tuple(torch.empty(0, device=outputs[0].device) if x is None else x for x in outputs)

    return fill


def custom_op(name: str, run: Run, shapes: Run, *, mutates: Sequence[str]) -> Any:
    """Register `run`, which changes some arguments, as nalaformer::name; `shapes` returns empty outputs for the same arguments.

    This operator and plain_op take expanded arguments.
    """
    made, gather = torch.library.custom_op(f"nalaformer::{name}", flatten_run(run), mutates_args=mutates), gatherer(run)
    made.register_fake(lambda *given: shapes(*gather(given)))
    return made


def plain_op(name: str, run: Run, shapes: Run) -> Any:
    """Register a `run` that changes nothing and returns new tensors. It has no gradient."""
    flat, gather = flatten_run(run), gatherer(run)

    def without_gradients(*given: Any) -> Any:
        # torch's own operators inside `run` would be recorded; compiled programs run it where nothing is
        if not torch.is_grad_enabled():
            return flat(*given)
        with torch.no_grad():
            return flat(*given)

    LIBRARY.define(name + torch.library.infer_schema(flat, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, without_gradients, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nalaformer::{name}", lambda *given: shapes(*gather(given)), lib=LIBRARY)
    return getattr(torch.ops.nalaformer, name).default


def operator(
    name: str,
    run: tuple[Run, Run],
    run_backward: tuple[Run, Run],
    *,
    save: Run,
    gradients: Run,
    outputs: int = 1,
    eager: tuple[Run, Run] | None = None,
) -> tuple[Run, Any, Any]:
    """Return a function with first-order gradients on the operators nalaformer::name and nalaformer::name_backward.

    A compiled program contains nalaformer::name_forward, which has no gradients and costs the host one layer of Python less.

    run, run_backward: each a function that computes, and one that returns empty outputs for the same arguments.
    save(ctx, inputs, output): saves what gradients need; inputs that have gradients come before named tuples.
    gradients(ctx, backward, *grad_outputs): the gradients of the first inputs, computed by `backward`; others are ignored.
    outputs: how many outputs the caller gets, whose gradients arrive; the others serve gradients alone.
    eager: replacements of `run` and `run_backward` outside compiled programs. They may take an object that was built from a
        named tuple and the tensors, so that both passes reuse it.
    """
    eager_forward, eager_backward = eager or (run[0], run_backward[0])
    gather = gatherer(run[0])
    forward_op, backward_op = plain_op(name, *run), plain_op(f"{name}_backward", *run_backward)
    run_op = plain_op(f"{name}_forward", *run)

    def caller_outputs(output: Any) -> Any:
        if not isinstance(output, tuple):
            return output
        return output[0] if outputs == 1 else output[:outputs]

    def make_backward(by: Run) -> Run:
        def backward(ctx: Any, *of_outputs: Any) -> Any:
            # enabled only for create_graph=True, which builds a graph of the backward pass
            if torch.is_grad_enabled():
                with torch.no_grad():
                    found = gradients(ctx, by, *of_outputs[:outputs])
                # everything that they were computed from has been saved
                found = guard_gradients(found, (*of_outputs, *ctx.saved_tensors))
            else:
                found = gradients(ctx, by, *of_outputs[:outputs])
            asked = ctx.needs_input_grad
            of_first = [x if is_asked else None for x, is_asked in zip(found, asked, strict=False)]
            return *of_first, *(None,) * (len(asked) - len(of_first))

        return backward

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = eager_forward(*inputs)
            save(ctx, inputs, output)
            return caller_outputs(output)

        backward = staticmethod(make_backward(eager_backward))

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *leaves: Any) -> Any:
            output = run_op(*leaves)
            save(ctx, gather(leaves), output)
            return output

        backward = staticmethod(make_backward(lambda *arguments: backward_op(*flatten_tuples(arguments))))

    def differentiable(*leaves: Any) -> Any:
        is_learned = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        return Traced.apply(*leaves) if is_learned else run_op(*leaves)

    LIBRARY.impl(name, differentiable, "Autograd")
    with_gradients = Eager.apply

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return caller_outputs(forward_op(*flatten_tuples(inputs)))
        # a function with gradients costs more than a small kernel
        return with_gradients(*inputs) if torch.is_grad_enabled() else caller_outputs(eager_forward(*inputs))

    return call, forward_op, backward_op
