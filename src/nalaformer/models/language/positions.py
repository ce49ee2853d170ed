"""Rotary positions, and their scaling for texts longer than those of training."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import Rotary, rotary_frequencies
from .config import NaLaConfig


class RotaryPositions(nn.Module):
    """The angles by which channel pairs rotate at each position, from config.rope_parameters. It has no weights.

    Frequencies are those of transformers for the same rope_parameters, in float64.
    """

    def __init__(self, config: NaLaConfig) -> None:
        super().__init__()
        self.config = config

    def at(self, positions: Tensor) -> Rotary:
        """Return the rotation at positions [B, N]."""
        return Rotary(positions[..., None], self.frequencies(positions.device, positions))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the angles [B, N, D / 2], times the temperature, in the dtype of x, for transformers."""
        cos, sin = self.at(position_ids).cos_sin(x.dtype)
        temperatures = self.temperatures(x)
        return (cos, sin) if temperatures is None else (cos * temperatures, sin * temperatures)

    @property
    def inv_freq(self) -> Tensor:
        """The frequencies of the channel pairs [D / 2], up to the trained length."""
        return self.frequencies(torch.get_default_device(), None)

    @property
    def temperature(self) -> float:
        """The factor of "yarn" on rotated channels, which keeps attention over more tokens as sharp; 1 otherwise."""
        settings = self._settings
        if settings["rope_type"] != "yarn":
            return 1.0
        given = settings.get("attention_factor")
        if given is not None:
            return float(given)
        if settings.get("mscale") and settings.get("mscale_all_dim"):
            return _yarn_temperature(settings["factor"], settings["mscale"]) / _yarn_temperature(
                settings["factor"], settings["mscale_all_dim"]
            )
        return _yarn_temperature(settings["factor"], 1.0)

    def temperatures(self, like: Tensor) -> Tensor | None:
        """Return the temperature of each channel pair [D / 2], 1 for those that do not rotate; None: 1 for all."""
        if self.temperature == 1.0:
            return None
        rotating, fixed = self._pairs
        return F.pad(like.new_full((rotating,), self.temperature), (0, fixed), value=1.0)

    def frequencies(self, device: torch.device, positions: Tensor | None) -> Tensor:
        """Return the frequencies [D / 2]; positions: those of the call, from which "dynamic" takes the longest row."""
        settings = self._settings
        rotating, fixed = self._pairs
        speeds = rotary_frequencies(rotating, base=settings["rope_theta"], device=device)
        speeds = SCALINGS[settings["rope_type"]](speeds, settings, self.config, positions)
        return F.pad(speeds, (0, fixed)) if fixed else speeds

    @property
    def _pairs(self) -> tuple[int, int]:
        """The numbers of channel pairs that rotate, and of the last ones that do not."""
        assert self.config.head_dim is not None
        rotating = int(self.config.head_dim * self._settings["partial_rotary_factor"]) // 2
        return rotating, self.config.head_dim // 2 - rotating

    @property
    def _settings(self) -> dict[str, Any]:
        # read at every call, since the config may have changed
        self.config.check_rotary()
        return self.config.rotary


def _keep_speeds(speeds: Tensor, _: dict[str, Any], __: NaLaConfig, ___: Tensor | None) -> Tensor:
    return speeds


def _scale_linear(speeds: Tensor, settings: dict[str, Any], _: NaLaConfig, __: Tensor | None) -> Tensor:
    return speeds / settings["factor"]


def _scale_dynamic(speeds: Tensor, settings: dict[str, Any], config: NaLaConfig, positions: Tensor | None) -> Tensor:
    """Scale by NTK: base' = base (factor length / trained - factor + 1)^(D / (D - 2)) from the trained length on."""
    if positions is None or len(speeds) < 2:
        return speeds
    # keep a tensor: reading it would wait for the device, and freeze it in a traced program
    length = (positions.max() + 1).clamp(min=config.max_position_embeddings).to(speeds.dtype)
    growth = settings["factor"] * length / config.max_position_embeddings - (settings["factor"] - 1)
    # base'^-t with t = i / pairs and D / (D - 2) = pairs / (pairs - 1)
    exponents = torch.arange(len(speeds), dtype=speeds.dtype, device=speeds.device) / (len(speeds) - 1)
    return speeds * growth**-exponents


def _scale_yarn(speeds: Tensor, settings: dict[str, Any], config: NaLaConfig, _: Tensor | None) -> Tensor:
    """Scale as YaRN: fast pairs stay, those with less than one rotation in the trained length are slowed, a ramp between."""
    trained = settings.get("original_max_position_embeddings") or config.max_position_embeddings
    pairs = len(speeds)

    def pair_with_rotations(times: float) -> float:
        return pairs * math.log(trained / (times * 2 * math.pi)) / math.log(settings["rope_theta"])

    first, last = pair_with_rotations(settings.get("beta_fast") or 32), pair_with_rotations(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    places = torch.arange(pairs, dtype=speeds.dtype, device=speeds.device)
    ramp = ((places - first) / (last - first or 0.001)).clamp(0, 1)
    return speeds * (1 - ramp) + speeds / settings["factor"] * ramp


def _scale_llama3(speeds: Tensor, settings: dict[str, Any], config: NaLaConfig, _: Tensor | None) -> Tensor:
    """Scale as Llama 3: like YaRN, with the ramp over the rotations in the trained length."""
    trained = settings.get("original_max_position_embeddings") or config.max_position_embeddings
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    rotations = trained * speeds / (2 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return speeds * kept + speeds / settings["factor"] * (1 - kept)


def _yarn_temperature(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


Scaling = Callable[[Tensor, dict[str, Any], NaLaConfig, Tensor | None], Tensor]
SCALINGS: dict[str, Scaling] = {
    "default": _keep_speeds,
    "linear": _scale_linear,
    "dynamic": _scale_dynamic,
    "yarn": _scale_yarn,
    "llama3": _scale_llama3,
}
"""Functions that scale the frequencies, by the names of config.ROTARY_KINDS."""
