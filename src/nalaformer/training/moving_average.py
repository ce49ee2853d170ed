"""The moving average of a model's weights."""

import torch
from timm.utils import ModelEmaV3
from torch import nn


class MovingAverage(ModelEmaV3):
    """timm's moving average, a <- decay a + (1 - decay) w, in which tied weights move once.

    They have several names in the state of a model, and timm moves the one tensor under each of them.
    """

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        states = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        pairs = {average.data_ptr(): (average, weight) for average, weight in states}.values()
        averages = [average for average, _ in pairs if average.is_floating_point()]
        weights = [weight for average, weight in pairs if average.is_floating_point()]
        # newer releases of timm round bfloat16 so that small moves are not lost
        move = getattr(self, "_foreach_lerp_", torch._foreach_lerp_)
        move(averages, weights, weight=1.0 - decay)
        for average, weight in pairs:
            if not average.is_floating_point():
                average.copy_(weight)
