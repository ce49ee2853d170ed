"""Fold factors per channel into the layers before them, for inference."""

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..attention import Attention
from ..watched_modules import is_watched

# exactly these types: a subclass may standardize its weight, or be a norm and an activation in one
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def fold(model: nn.Module) -> nn.Module:
    """Return a copy for inference with batch norms, layer scales and static reflections folded into the layers before them.

    norm(W x + b) = (f W) x + (f (b - mean) + shift), f = weight / sqrt(var + eps); a layer scale is an f alone. Outputs are
    the same except for rounding. `folded` of the copy lists the folds; the input model is unchanged. Fold before you convert
    to half precision, so that the new weights are rounded once.
    """
    learning = [name or "the model itself" for name, module in model.named_modules() if module.training]
    if learning:
        raise ValueError(
            f"only a model in evaluation mode can be folded, got one in training mode ({learning[0]}); call model.eval() first"
        )
    copy = deepcopy(model)
    folded = []
    with torch.no_grad():
        for (before, layer), (parent, name, place), factor, shift in list(factors_in(copy)):
            scale_outputs(layer, factor, shift)
            setattr(parent, name, nn.Identity())
            folded.append(f"{place} -> {before}")
        for place, module in copy.named_modules():
            if isinstance(module, Attention) and module.is_foldable:
                module.fold()
                folded.append(f"{place}.map -> the projection of {place}")
    copy.folded = tuple(folded)  # type: ignore[assignment]
    return copy


Found = tuple[tuple[str, nn.Module], tuple[nn.Module, str, str], Tensor, Tensor | None]


def factors_in(model: nn.Module) -> Iterator[Found]:
    """Yield the layer before a factor, the place of the factor's module, and factor and shift [C]."""
    names = {module: name for name, module in model.named_modules()}
    # children() and parameters() would list shared modules once
    uses = Counter(id(part) for module in names for part in (*module._modules.values(), *module._parameters.values()))

    def is_alone(module: nn.Module) -> bool:
        """True if nothing else uses or hooks the layer, so that it may change."""
        is_free = not is_watched(module) and not is_parametrized(module)
        return is_free and all(uses[id(part)] == 1 for part in (module, *module.parameters()))

    for module, name in names.items():
        prefix = f"{name}." if name else ""
        if type(module).forward is nn.Sequential.forward:
            for (_, layer), (place, norm) in pairwise(module._modules.items()):
                is_pair = type(layer) in CONVOLUTIONS and type(norm) in BATCH_NORMS
                if is_pair and norm.running_var is not None and is_alone(layer) and is_alone(norm):
                    yield (names[layer], layer), (module, place, prefix + place), *batch_norm_factors(norm)
        elif hasattr(module, "scaled_layers"):
            for place, layer in module.scaled_layers().items():
                scale = getattr(module, place)
                gamma = getattr(scale, "gamma", None)
                if gamma is not None and type(layer) is nn.Linear and is_alone(layer) and is_alone(scale):
                    yield (names[layer], layer), (module, place, prefix + place), gamma, None


def batch_norm_factors(norm: Any) -> tuple[Tensor, Tensor]:
    """Return factor and shift [C] of a batch norm in evaluation mode."""
    factor = (exact(norm.running_var) + norm.eps).rsqrt()
    factor = factor if norm.weight is None else factor * exact(norm.weight)
    shift = -exact(norm.running_mean) * factor
    return factor, shift if norm.bias is None else shift + exact(norm.bias)


def scale_outputs(layer: Any, factor: Tensor, shift: Tensor | None) -> None:
    """Make a linear layer or convolution return factor * output + shift, in place; both [C]."""
    factor = exact(factor)
    layer.weight.copy_(exact(layer.weight) * factor.view(-1, *[1] * (layer.weight.dim() - 1)))
    if layer.bias is not None:
        layer.bias.copy_(exact(layer.bias) * factor + (0 if shift is None else shift))
    elif shift is not None:
        layer.bias = nn.Parameter(shift.to(layer.weight), requires_grad=layer.weight.requires_grad)


def exact(x: Tensor) -> Tensor:
    """Return the tensor in float64, so that only the result is rounded; on the CPU, since not every device has float64."""
    return x.detach().to("cpu", torch.float64)
