"""The part of a model that a captured step depends on, and the reasons why a model cannot be captured."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import get_backend
from ...watched_modules import global_hooks
from .attention import ConvertedAttention, converted_attentions

# its hooks do nothing unless hidden states are requested, and then nothing is replayed
HARMLESS_HOOKS = "transformers.utils.output_capturing"


class Blueprint:
    """A model as it was when steps were captured. A graph reads weights by address, so changes in place are allowed.

    Parts are referenced weakly, so that replaced ones are freed at once, not with the next step.
    """

    def __init__(self, model: nn.Module) -> None:
        modules, attentions = list(model.modules()), converted_attentions(model)
        owns = list(map(vars, modules))
        parts = _parts(owns)
        self._modules, self._attentions, self._parts = _weakly(modules), _weakly(attentions), _weakly(parts)
        # these hold no part of the model, and collecting them from the modules takes longer
        self._hooks = [hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self.is_bounded = all(attention.hybrid.is_bounded for attention in attentions)
        groups = [group for attention in attentions for group in attention.hybrid.parts]
        self.map_parameters = [parameter for group in groups for parameter in group.map.parameters()]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        self.refusal = why_not(modules, tensors)
        """The reason why the model's steps cannot be captured; None: they can."""
        self._addressed = _weakly([tensor for tensor in tensors if _is_plain(tensor)])
        self._seen = self._look(modules, owns)

    def holds(self, model: nn.Module) -> bool:
        """True if the model is unchanged. This runs before every step, so it takes only microseconds per layer."""
        modules = [reference() for reference in self._modules]
        if modules[0] is not model or any(map(is_, modules, repeat(None))):
            return False
        owns = list(map(vars, modules))
        parts = _parts(owns)
        return (
            len(parts) == len(self._parts)
            and all(map(is_, parts, [reference() for reference in self._parts]))
            and self._look(modules, owns) == self._seen
        )

    def _look(self, modules: Sequence[Any], owns: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return what is compared besides the parts: their types and addresses, and settings of layers and the process."""
        attentions: list[Any] = [reference() for reference in self._attentions]
        return [
            list(map(type, modules)),
            ["forward" in own or own.get("training") for own in owns],
            [reference().data_ptr() for reference in self._addressed],
            # handles of hooks have unique ids
            list(chain.from_iterable(self._hooks)),
            list(chain.from_iterable(global_hooks())),
            [(attention.mode, [group.settings for group in attention.hybrid.parts]) for attention in attentions],
            get_backend(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.matmul.fp32_precision,
        ]


def _parts(owns: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return children, parameters and buffers, including those that are None. owns: vars of modules."""
    helds = [held for own in owns for name in ("_modules", "_parameters", "_buffers") if (held := own[name])]
    return [part for held in helds for part in held.values()]


def _weakly(parts: Sequence[Any]) -> list[Callable[[], Any]]:
    """Return weak references; type(None) serves as one to None."""
    return [type(part) if part is None else weakref.ref(part) for part in parts]


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def why_not(modules: list[nn.Module], tensors: list[Tensor]) -> str | None:
    """Return the first reason against a replay, in words."""
    if any(global_hooks()):
        return "all modules have hooks (torch.nn.modules.module.register_module_forward_hook)"
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
        if isinstance(module, ConvertedAttention) and (module.mode != "hybrid" or not module.hybrid.has_steps):
            return "this kind of attention has no step in place"
    for tensor in tensors:
        if not _is_plain(tensor) or tensor.is_inference():
            return f"a weight is a {type(tensor).__name__} whose changes cannot be tracked"
        if tensor.device != tensors[0].device:
            return f"weights are on {tensors[0].device} and on {tensor.device}"
    return None
