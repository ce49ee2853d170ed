"""Matrices in low precision beside the parameters that are trained."""

from typing import Any

import torch
from torch import Tensor, nn


class LowCopies:
    """A model that computes with copies of its matrices in low precision, made for all of them at once.

    Autocast casts each weight of each linear layer and each of their gradients by itself: some fifty kernels in a step of a
    small model, whose own are not many more. The numbers are the same.
    """

    def __init__(self, model: nn.Module, precision: torch.dtype) -> None:
        self.model = model
        linear = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        is_low = precision in (torch.bfloat16, torch.float16)
        self.sources = {
            name: p for name, p in model.named_parameters() if is_low and p.requires_grad and name.rpartition(".")[0] in linear
        }
        self.copies = {name: p.detach().to(precision).requires_grad_() for name, p in self.sources.items()}

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        outputs: Tensor = torch.func.functional_call(self.model, self.copies, inputs, named)
        return outputs

    @torch.no_grad()
    def follow(self) -> None:
        """The copies become what the parameters are."""
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), list(self.sources.values()))

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Copy the gradients of the copies to the parameters."""
        found = {name: copy.grad for name, copy in self.copies.items() if copy.grad is not None}
        if found:
            given = [torch.empty_like(self.sources[name]) for name in found]
            torch._foreach_copy_(given, list(found.values()))
            for name, gradient in zip(found, given, strict=True):
                self.sources[name].grad = gradient
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for copy in self.copies.values():
            copy.grad = None
