"""The delta rule as a layer of small sequence models: a language model's mixer without its convolution and cache."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nalaformer.attention.fading import Fading
from nalaformer.feature_maps import feature_map
from nalaformer.ops import compute_dtype, delta_rule, rms_norm, unit_features

DELTA_RULES = ("delta", "gated_delta")


class DeltaLayer(nn.Module):
    """Causal: projection(norm(delta rule)), norm over the channels of a head. x: [B, N, C] -> [B, N, C].

    Queries and keys are unit vectors: SiLU, then length one, as DeltaNet has it; or the features of a map, made length one.
    beta = sigmoid(W x). gated: the state of a head decays at each token, as in Gated DeltaNet.
    """

    def __init__(self, *, dim: int, num_heads: int, gated: bool, feature_map_name: str | None, **map_options: Any) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got dim {dim} and {num_heads} heads")
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.map = None
        if feature_map_name is not None:
            self.map = feature_map(feature_map_name, num_heads=num_heads, head_dim=self.head_dim, **map_options)
        elif map_options:
            raise ValueError(f"options of a map need a map, got {', '.join(map_options)}; name it by feature_map")
        self.qkv = nn.Linear(dim, 3 * dim)
        self.beta = nn.Linear(dim, num_heads)
        self.fading = Fading(dim=dim, num_heads=num_heads) if gated else None
        self.norm = nn.RMSNorm(self.head_dim, eps=1e-6)
        self.projection = nn.Linear(dim, dim)

    @property
    def features(self) -> int:
        """Size of a key as the state sees it."""
        if self.map is None:
            return self.head_dim
        token = torch.zeros(1, 1, self.num_heads, self.head_dim, device=self.qkv.weight.device)
        return self.map.key(token).shape[-1]

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        if self.map is None:
            q, k = (F.normalize(F.silu(y.to(compute_dtype(y))), dim=-1, eps=1e-6) for y in (q, k))
        else:
            q, k = unit_features(self.map, q, k)
        beta = self.beta(x).to(compute_dtype(x)).sigmoid()
        log_decay = None if self.fading is None else self.fading(x)
        out, _ = delta_rule(q, k, F.silu(v), beta, log_decay=log_decay, key_mask=key_mask)
        return self.projection(rms_norm(out, self.norm.weight, eps=1e-6).flatten(2))
