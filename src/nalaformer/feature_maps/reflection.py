"""MirrorLA (arXiv 2602.04346): reflect queries and keys so that little is lost to ReLU.

This is a reconstruction from the abstract and a figure of the paper, whose code is not public.
"""

import math

import torch
from torch import Tensor, nn

from ..ops import FeatureMapLike, KernelSpec, ScaledFeatures
from .base import FeatureMap, check_flag, within_reach
from .registry import FEATURE_MAPS

# names of the reflections in ops.kernels.common.compiled.maps, by (cross_head, blockwise)
KERNEL_NAMES = {
    (True, True): "reflection",
    (True, False): "reflection_across",
    (False, True): "reflection_in_pairs",
    (False, False): "relu",
}
CHUNK = 4096  # tokens whose statistics are computed at once, so that the float32 copies stay small


@FEATURE_MAPS.register("reflection")
class Reflection(FeatureMap):
    """phi(x) = relu(R x) with a learned reflection R, shared by queries and keys; F = D.

    (c) cross_head: I - 2 u u^T / |u|^2 over the channels of all heads together;
    (a) blockwise: on each channel pair (2i, 2i+1) of a head, I - 2 u_i u_i^T with u_i = (cos t_i, sin t_i);
    (b) variance: the angles of (a) move with the variance of the input, t = theta + delta,
        delta = pi/4 tanh(a) tanh(b (s - mean of s over the blocks)), s = log of the variance of a block over the tokens
        of q and k; a and b are learned per head, a = 0 at first. Bidirectional only, since it uses all tokens: with a
            key_mask it also needs a query_mask for padding among the queries.

    Each reflection is symmetric and its own inverse, and keeps products: (R q).(R k) = q.k. Training starts at a swap of
    channels, which is plain ReLU attention.
    """

    heads_have_own_keys = True

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        cross_head: bool = True,
        blockwise: bool = True,
        variance: bool = False,
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        for name, flag in (("cross_head", cross_head), ("blockwise", blockwise), ("variance", variance)):
            check_flag(name, flag)
        if variance and not blockwise:
            raise ValueError("variance=True moves the block angles and needs blockwise=True, got blockwise=False")
        if blockwise and head_dim % 2:
            raise ValueError(f"blockwise reflections act on channel pairs: head_dim must be even, got {head_dim}")
        self.cross_head, self.blockwise, self.variance = cross_head, blockwise, variance
        if cross_head:
            self.normal = nn.Parameter(torch.randn(num_heads * head_dim))
        if blockwise:
            self.theta = nn.Parameter(-math.pi / 4 + 0.02 * torch.randn(num_heads, head_dim // 2))
        if variance:
            self.strength = nn.Parameter(torch.zeros(num_heads))
            self.sensitivity = nn.Parameter(torch.ones(num_heads))

    def query(self, q: Tensor) -> Tensor:
        return self.phi(q, self.angles(q))

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        return self.phi(k, self.angles(k))

    def phi(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """Compute relu(R x); angles broadcast to [B, N, H, D/2]."""
        return self.reflect(x, angles).relu()

    def angles(self, x: Tensor) -> Tensor | None:
        """Return the block angles without the shift by the variance, [H, D/2]."""
        if not self.blockwise:
            return None
        if self.variance:
            raise ValueError(
                "the variance-aware reflection depends on q and k together; call it through linear_attention, or use "
                "feature_map.given(q, k, key_mask=None, causal=False).query(q)"
            )
        return self.per_head(self.theta, x)

    def reflect(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """Compute R x."""
        x = self.reflect_across_heads(x)
        if angles is None:
            return x
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        # I - 2uu^T with u = (cos t, sin t) is [[-cos 2t, -sin 2t], [-sin 2t, cos 2t]]
        cos, sin = (2 * angles).cos(), (2 * angles).sin()
        return torch.stack((-cos * even - sin * odd, cos * odd - sin * even), dim=-1).flatten(-2)

    def unit_normal(self, dtype: torch.dtype) -> Tensor:
        """Return the normal, [H, D], of length 1 over all heads."""
        normal = self.normal.to(dtype)
        return (normal / normal.norm().clamp(min=1e-12)).unflatten(0, (self.num_heads, self.head_dim))

    def reflect_across_heads(self, x: Tensor) -> Tensor:
        if not self.cross_head:
            return x
        self.check_heads(x)
        normal = self.unit_normal(x.dtype)
        return x - 2 * torch.einsum("bnhd,hd->bn", x, normal)[..., None, None] * normal

    def check_heads(self, x: Tensor) -> None:
        if self.cross_head and x.shape[2] != self.num_heads:
            raise ValueError(
                f"a reflection across heads needs the heads that it was made for ({self.num_heads}), got {x.shape[2]}; "
                "use cross_head=False with grouped heads"
            )

    def kernel_spec(self, device: torch.device) -> KernelSpec | None:
        return None if self.variance else self.kernel_spec_at(self.theta if self.blockwise else None, device)

    def kernel_spec_at(self, angles: Tensor | None, device: torch.device) -> KernelSpec:
        """Return the kernel spec for block angles [H, D/2], or for those of each sample [B, H, D/2]."""
        name = KERNEL_NAMES[self.cross_head, self.blockwise]
        if name == "relu":
            return KernelSpec(name, parts=1)
        if angles is None:
            rotations = torch.zeros(self.num_heads, self.head_dim, device=device)
        else:
            twice = 2 * angles.to(device, torch.float32)
            rotations = torch.stack((twice.cos(), twice.sin()), dim=-1).flatten(-2)
        normal = self.unit_normal(torch.float32).to(device) if self.cross_head else torch.zeros_like(rotations)
        rows = torch.cat((normal.expand_as(rotations), rotations), dim=-1)
        return KernelSpec(name, parts=1, parameters=rows, spans_heads=self.cross_head)

    def given(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None, causal: bool, query_mask: Tensor | None = None
    ) -> FeatureMapLike:
        # the kernels do not check the heads
        self.check_heads(q)
        self.check_heads(k)
        if not self.variance:
            return self
        if causal:
            raise ValueError(
                "the variance-aware reflection looks at all tokens and cannot be causal, got variance=True; "
                'use feature_map("reflection", variance=False, ...)'
            )
        if k.shape[2] != q.shape[2]:
            raise ValueError(
                f"the variance-aware reflection has angles per query head and needs keys for each, got {q.shape[2]} query "
                f"and {k.shape[2]} key heads; make the map with num_heads={q.shape[2]}, or use variance=False"
            )
        if key_mask is not None and query_mask is None and q.shape[1] == k.shape[1]:
            raise ValueError(
                f"the variance-aware reflection looks at the queries too and cannot know which of them are padding, got a "
                f"key_mask for as many keys as queries ({q.shape[1]}) and no query_mask; pass query_mask=key_mask in "
                "self-attention, and in cross-attention the mask of the queries (all True if there is no padding)"
            )
        spread = self.block_variance(q, k, key_mask, query_mask)
        log_variance = (spread + 1e-6).log()
        relative = log_variance - log_variance.mean(dim=-1, keepdim=True)
        # keep the dtype of the statistics: angles in half precision would cost the gradients most of their digits
        like = q.to(spread.dtype)
        strength = math.pi / 4 * self.per_head(self.strength, like).tanh()
        delta = strength[:, None] * (self.per_head(self.sensitivity, like)[:, None] * relative).tanh()
        return _ReflectionAt(self, (self.per_head(self.theta, like) + delta)[:, None])

    def block_variance(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, query_mask: Tensor | None = None) -> Tensor:
        """Return the variance of each channel pair over the pooled tokens of q and k that are visible, [B, H, D/2]."""
        total = mean = moment = torch.zeros((), device=q.device)
        for x, mask in ((q, query_mask), (k, key_mask)):
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            masks = [None] * math.ceil(x.shape[1] / CHUNK) if mask is None else mask.split(CHUNK, dim=1)
            for chunk, chunk_mask in zip(x.split(CHUNK, dim=1), masks, strict=True):
                shown = torch.ones(chunk.shape[:2], dtype=torch.bool, device=x.device) if chunk_mask is None else chunk_mask
                shown = shown[:, :, None, None, None]
                reflected = self.reflect_across_heads(torch.where(shown[..., 0], chunk, 0).to(dtype))
                pairs = torch.where(shown, reflected.unflatten(-1, (-1, 2)), 0)  # [B, n, H, D/2, 2]
                count = 2 * shown.sum(dim=(1, 4)).to(dtype)  # [B, 1, 1]
                chunk_mean = pairs.sum(dim=(1, 4)) / count.clamp(min=1)
                off = torch.where(shown, pairs - chunk_mean[:, None, :, :, None], 0)
                # means and squared differences of two sets combine exactly, without the cancellation of E[x^2] - E[x]^2
                after = (total + count).clamp(min=1)
                step = chunk_mean - mean
                moment = moment + off.square().sum(dim=(1, 4)) + step.square() * total * count / after
                mean = mean + step * count / after
                total = total + count
        return moment / total.clamp(min=1)

    def fold(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Fold R into the rows of a query or key projection, [H*D, in] and [H*D], so that plain `relu` gives the same features.

        Not for variance=True, which depends on the input.
        """
        if self.variance:
            raise ValueError("a variance-aware reflection depends on the input and cannot be folded; train with variance=False")
        channels = self.num_heads * self.head_dim
        if weight.shape[0] != channels:
            raise ValueError(f"the projection must have {channels} output channels, got {weight.shape[0]}")

        def apply(columns: Tensor) -> Tensor:  # [C, n], each column a vector over all channels
            x = columns.T.unflatten(-1, (self.num_heads, self.head_dim))[None]
            return self.reflect(x, self.angles(x))[0].flatten(-2).T

        return apply(weight), None if bias is None else apply(bias[:, None])[:, 0]


class _ReflectionAt:
    """A reflection with known angles for each sample, [B, 1, H, D/2]; lives for one call of the op."""

    streams = 1
    heads_have_own_keys = True

    def __init__(self, reflection: Reflection, angles: Tensor) -> None:
        self.num_heads, self.head_dim = reflection.num_heads, reflection.head_dim
        self.reflection, self.angles = reflection, angles

    def given(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None, causal: bool, query_mask: Tensor | None = None
    ) -> FeatureMapLike:
        return self

    def query(self, q: Tensor) -> Tensor:
        return self.reflection.phi(q, self.angles.to(q.dtype))

    def query_streams(self, q: Tensor) -> tuple[ScaledFeatures, ...]:
        return (within_reach(self.query(q)),)

    def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
        return self.reflection.phi(k, self.angles.to(k.dtype))

    def key_log_scale(self, k: Tensor) -> Tensor | None:
        return None

    def kernel_spec(self, device: torch.device) -> KernelSpec:
        return self.reflection.kernel_spec_at(self.angles[:, 0], device)
