"""How a feature map tells the fused kernels what it computes. Needs no Triton."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class MapSettings(NamedTuple):
    """The plain values of a call's feature map: one bundle from the call to the launch."""

    name: str
    parts: int
    streams: int
    norm_scale: float
    alpha: float
    eps: float
    """For true features."""
    log2_key_shift: float
    is_guarded: bool
    is_cube: bool
    contrast: float = 0.0
    """What multiplies the mean product of the kernels' features to give the strength of a contrast; 0: no contrast."""
    has_weight: bool = False
    """Keys have weights."""
    by_mean_query: bool = False
    """The kernels weigh keys themselves, by their products with the mean query."""
    fades: bool = False
    """Keys fade (causal attention)."""


class KernelSpec(NamedTuple):
    """A map that the kernels know by name (kernels/common/compiled/maps.py), with its parameters as one row per head."""

    name: str
    parts: int
    """1, or 2 for maps that keep both signs: the halves of the features."""
    parameters: Tensor | None = None
    """float32 [heads of the map, P], laid out as kernels/common/compiled/maps.py says; the gradient reaches the map's own."""
    norm_scale: float = 1.0
    alpha: float = 0.0
    log2_key_shift: float = 0.0
    """Key features come out multiplied by 2^-this; eps must be as well."""
    is_guarded: bool = False
    """Features have no bound: keys are scaled by their largest as they come."""
    is_cube: bool = False
    """Norm-aware keys to the power 3 exactly: by multiplication."""
    before: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    """What torch computes of queries and of keys first, float32 [B, N, H, D] -> the same: a matrix product of the map. Not in
    half precision: exponentials of a rounded product would be off by a percent."""
    spans_heads: bool = False
    """Rows are all heads of a token together; with more than one head, features are written out before attention. Then
    parameters may be [B, heads of the map, P], other ones for each sample."""

    def settings(
        self,
        *,
        streams: int,
        eps: float,
        contrast: float = 0.0,
        has_weight: bool = False,
        by_mean_query: bool = False,
        fades: bool = False,
    ) -> MapSettings:
        plain = (self.norm_scale, self.alpha, eps, self.log2_key_shift, self.is_guarded, self.is_cube)
        contrast *= 2.0**self.log2_key_shift
        return MapSettings(self.name, self.parts, streams, *plain, contrast, has_weight, by_mean_query, fades)

    @property
    def is_written_out(self) -> bool:
        """Whether even one head does not fit into the attention kernels."""
        return self.parameters is not None and self.parameters.dim() == 3
