"""Resampling of weights of another image size: position tables and relative biases."""

import math
from typing import Any

from timm.layers import resize_rel_pos_bias_table
from torch import Tensor, nn

from ...attention.position_table import PositionTable, resample_table
from ...attention.windows import RelativeBias


def resample_to(model: nn.Module, weights: dict[str, Any], prefix: str = "") -> list[str]:
    """Resample the tables among the weights in place to the model's sizes; return a line for each, "name: from -> to".

    Position tables are resampled as by `set_input_size`, relative biases as by timm. Like timm, this assumes that they were
    learned on square images; tables that fit no square image stay unchanged.
    """
    lines = []
    for name, module in model.named_modules():
        if not isinstance(module, PositionTable | RelativeBias):
            continue
        key = f"{prefix}{name}.table" if isinstance(module, PositionTable) else f"{prefix}{name}.bias"
        value = weights.get(key)
        if not isinstance(value, Tensor):
            continue
        if isinstance(module, PositionTable):
            side = math.isqrt(value.shape[1]) if value.dim() == 3 else 0
            fits = value.shape[1:2] == module.table.shape[1:2] or value.shape[2:] != module.table.shape[2:]
            if fits or not side or side**2 != value.shape[1]:
                continue
            weights[key] = resample_table(value, (side, side), module.grid)
            lines.append(f"{key}: {side} x {side} -> {module.grid[0]} x {module.grid[1]}")
        else:
            side = math.isqrt(value.shape[0]) if value.dim() == 2 else 0
            fits = value.shape[0:1] == module.bias.shape[0:1] or value.shape[1:] != module.bias.shape[1:]
            if fits or side % 2 == 0 or side**2 != value.shape[0]:
                continue
            window = (module.size, module.size)
            weights[key] = resize_rel_pos_bias_table(value, new_window_size=window, new_bias_shape=tuple(module.bias.shape))
            lines.append(f"{key}: windows of {(side + 1) // 2} -> {module.size}")
    return lines
