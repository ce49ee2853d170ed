"""What a captured step takes from a model without asking again, and which models are not to be captured."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import get_backend
from .attention import ConvertedAttention, converted_attentions

# hooks of theirs do nothing unless hidden states are asked for, and then nothing is replayed
HARMLESS_HOOKS = "transformers.utils.output_capturing"


class Blueprint:
    """A model as it was when steps were captured. A graph reads weights by their address, so changes in place are no change."""

    def __init__(self, model: nn.Module) -> None:
        # weakly: the model holds this, and would outlive its last user
        self._model = weakref.ref(model)
        modules = list(model.modules())
        self._children = [(module._modules, dict(module._modules)) for module in modules]
        self._tensors = [
            (held, name, tensor, tensor.data_ptr() if _is_plain(tensor) else None)
            for module in modules
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        self._hooks = [hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self._number_of_hooks = sum(map(len, self._hooks))
        self._attentions = converted_attentions(model)
        self._chosen = self._choices()
        self.settings = self._attentions[0].hybrid.settings
        self.map_parameters = [parameter for attention in self._attentions for parameter in attention.hybrid.map.parameters()]
        self.refusal = why_not(modules, [tensor for _, _, tensor, _ in self._tensors])
        """Why the model's steps cannot be captured; None: they can."""

    def holds(self, model: nn.Module) -> bool:
        """Whether the model still is this one. Asked before every step, so it takes some microseconds a layer."""
        return (
            self._model() is model
            and all(now == then for now, then in self._children)
            and all(
                held.get(name) is tensor and (address is None or tensor.data_ptr() == address)
                for held, name, tensor, address in self._tensors
            )
            and sum(map(len, self._hooks)) == self._number_of_hooks
            and self._choices() == self._chosen
        )

    def _choices(self) -> list[Any]:
        """Settings, of the layers and of the process, that choose what is computed."""
        own = [(attention.mode, id(attention.hybrid.settings)) for attention in self._attentions]
        return [get_backend(), torch.are_deterministic_algorithms_enabled(), *own]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def why_not(modules: list[nn.Module], tensors: list[Tensor]) -> str | None:
    """The first thing that a replay would pass over, in words."""
    for module in modules:
        name = type(module).__name__
        if type(module).__module__.startswith("peft."):
            return f"adapters ({name}) may be switched and merged without a trace; merge them first"
        if module.training:
            return f"{name} is in training mode"
        if "forward" in vars(module):
            return f"the forward of {name} was replaced"
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if any(getattr(hook, "__module__", None) != HARMLESS_HOOKS for hook in hooks):
            return f"{name} has hooks"
        if any(kind in str(getattr(module, "rope_type", "")) for kind in ("dynamic", "longrope")):
            return f"{name} chooses its frequencies anew at every call"
        if isinstance(module, ConvertedAttention):
            settings = module.hybrid.settings
            if module.mode != "hybrid" or not settings.exact or settings.selection == "oracle":
                return "this kind of attention has no step in place"
    for tensor in tensors:
        if not _is_plain(tensor) or tensor.is_inference():
            return f"a weight is a {type(tensor).__name__} of a kind that is not followed"
        if tensor.device != tensors[0].device:
            return f"weights are on {tensors[0].device} and on {tensor.device}"
    return None
