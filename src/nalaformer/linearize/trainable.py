"""A model of which a small part learns: checkpoints hold that part alone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Trainable(nn.Module):
    """The model as the trainer sees it; its state is that of the parameters that learn."""

    is_collective = False
    """True if a forward pass takes all processes at once: frozen weights are spread over them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def learned(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return {name: parameter.detach() for name, parameter in self.learned().items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        learned = self.learned()
        if learned.keys() != state_dict.keys():
            odd = sorted(learned.keys() ^ state_dict.keys())
            raise ValueError(f"the checkpoint must hold the parameters that learn; only in one of them: {', '.join(odd[:3])}")
        for name, parameter in learned.items():
            parameter.copy_(state_dict[name])


def freeze(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
