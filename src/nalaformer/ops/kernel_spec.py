"""Describe to the fused kernels what a feature map computes. Needs no Triton."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class MapSettings(NamedTuple):
    """Hold the plain values of a call's feature map, from the call to the launch."""

    name: str
    parts: int
    streams: int
    norm_scale: float
    alpha: float
    eps: float
    """The eps for true features."""
    log2_key_shift: float
    is_guarded: bool
    is_cube: bool
    contrast: float = 0.0
    """Factor of the mean product of the kernels' features that gives the scale of a contrast; 0: no contrast."""
    has_weight: bool = False
    """True if keys have weights."""
    by_mean_query: bool = False
    """True if the kernels compute the weights of keys, by their products with the mean query."""
    has_decay: bool = False
    """True if keys decay (causal attention)."""


class KernelSpec(NamedTuple):
    """Describe a map that the kernels support by name (kernels/common/compiled/maps.py); its parameters are a row per head."""

    name: str
    parts: int
    """1, or 2 for maps that keep both signs: the halves of the features."""
    parameters: Tensor | None = None
    """float32 [heads of the map, P], laid out as in kernels/common/compiled/maps.py; the gradient reaches the map's own."""
    norm_scale: float = 1.0
    alpha: float = 0.0
    log2_key_shift: float = 0.0
    """Exponent by which the kernels reduce key features: they return features times 2^-this, and scale eps likewise."""
    is_guarded: bool = False
    """True if features have no bound: the kernels scale keys by the largest one so far."""
    is_cube: bool = False
    """True for norm-aware keys with the power 3 exactly, computed by multiplication."""
    before: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    """What torch computes of queries and of keys first, float32 [B, N, H, D] -> the same: a matrix product of the map. Half
    precision is too coarse: exponentials of a rounded product would be off by a percent."""
    spans_heads: bool = False
    """True if a row is all heads of a token together. With more than one head, features are written out before attention, and
    parameters may be [B, heads of the map, P], different for each sample."""

    def settings(
        self,
        *,
        streams: int,
        eps: float,
        contrast: float = 0.0,
        has_weight: bool = False,
        by_mean_query: bool = False,
        has_decay: bool = False,
    ) -> MapSettings:
        plain = (self.norm_scale, self.alpha, eps, self.log2_key_shift, self.is_guarded, self.is_cube)
        contrast *= 2.0**self.log2_key_shift
        return MapSettings(self.name, self.parts, streams, *plain, contrast, has_weight, by_mean_query, has_decay)

    @property
    def is_written_out(self) -> bool:
        """True if not even one head fits into the attention kernels."""
        return self.parameters is not None and self.parameters.dim() == 3
