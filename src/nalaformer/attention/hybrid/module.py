"""Hybrid attention with its parameters: the feature map, the gate, and the scorer of learned selection."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...feature_maps import feature_map
from .distant import distant_attention
from .function import recurrent_hybrid_attention
from .settings import HybridSettings
from .state import HybridState
from .stepping import hybrid_step_, kernel_query_matrix, roll_

SCORER_WIDTH = 64


class HybridAttention(nn.Module):
    """STILL's attention over queries, keys and values from outside; converted models use it behind their own projections.

    dim: channels of the tokens, which are the inputs of gate and scorer.
    """

    def __init__(
        self,
        settings: HybridSettings,
        *,
        dim: int,
        num_heads: int,
        num_key_heads: int,
        head_dim: int,
        value_dim: int | None = None,
    ) -> None:
        super().__init__()
        if num_heads % num_key_heads:
            raise ValueError(f"num_heads must be a multiple of num_key_heads, got {num_heads} and {num_key_heads}")
        self.settings, self.num_heads, self.num_key_heads, self.head_dim = settings, num_heads, num_key_heads, head_dim
        self.map = feature_map(settings.feature_map, num_heads=num_heads, head_dim=head_dim, **settings.map_options)
        self.gate: nn.Linear | None = None
        if settings.gate != "none" and settings.linear:
            self.gate = nn.Linear(dim, num_heads * ((value_dim or head_dim) if settings.gate == "channel" else 1))
        self.scorer: nn.Sequential | None = None
        if settings.keeps_scores and settings.selection == "learned":
            self.scorer = nn.Sequential(nn.Linear(dim, SCORER_WIDTH), nn.SiLU(), nn.Linear(SCORER_WIDTH, num_key_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the gate to one half for every token."""
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        state: HybridState | None = None,
    ) -> tuple[Tensor, HybridState]:
        """Attend: q [B, N, H, D], k, v [B, N, K, D], rotary applied; x [B, N, dim] -> [B, N, H, D], and the next state."""
        given = self._arguments(q, k, x, scale, state)
        return recurrent_hybrid_attention(q, k, v, **given, key_mask=key_mask, state=state)

    def step_(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        *,
        state: HybridState,
        scale: float | None = None,
        query_matrix: Tensor | None = None,
    ) -> Tensor:
        """Decode one token, [B, 1, H, D], with a state that is written in place; see `hybrid_step_`."""
        return hybrid_step_(q, k, v, **self._arguments(q, k, x, scale, state), state=state, query_matrix=query_matrix)

    def _arguments(self, q: Tensor, k: Tensor, x: Tensor, scale: float | None, state: HybridState | None) -> dict[str, Any]:
        """Return the other arguments of the attention functions."""
        scores = self.scores(q, k, x, scale=scale, state=state)
        return {"feature_map": self.map, "settings": self.settings, "gate": self.gates(x), "scores": scores, "scale": scale}

    @property
    def has_steps(self) -> bool:
        """True if single tokens can be decoded in place."""
        return self.settings.exact and self.settings.selection != "oracle"

    def make_room_(self, state: HybridState) -> None:
        """Grow the state if needed for one more token of each sample."""
        state.make_room_(self.settings)

    def roll_(self, state: HybridState) -> None:
        """Move the window after a step that fills a chunk; see stepping.py."""
        roll_(state, feature_map=self.map, settings=self.settings)

    def query_matrix(self) -> Tensor | None:
        """Return the matrix of the feature map that captured steps use; see `kernel_query_matrix`."""
        return kernel_query_matrix(self.map, self.num_heads)

    def gates(self, x: Tensor) -> Tensor | None:
        """Return the factor of the linear branch, [B, N, H, D or 1]; None without a gate."""
        if self.gate is None:
            return None
        return torch.sigmoid(self.gate(_cast_to_weights(self.gate, x))).unflatten(-1, (self.num_heads, -1))

    def scores(self, q: Tensor, k: Tensor, x: Tensor, *, scale: float | None, state: HybridState | None) -> Tensor | None:
        """Return scores [B, N, K] for the rules that take them, else None."""
        if self.scorer is not None:
            return self._learned_scores(x)
        if self.settings.selection != "oracle" or not self.settings.keeps_scores:
            return None
        if state is not None and any(state.lengths):
            raise ValueError("selection 'oracle' looks at the whole sequence, which a cache does not hold; use it without one")
        return distant_attention(q, k, chunk_size=self.settings.chunk_size, scale=scale)

    def scorer_loss(self, q: Tensor, k: Tensor, x: Tensor, *, scale: float | None = None) -> Tensor | None:
        """Return the cross-entropy of the scorer against the largest weight that distant queries give to each token.

        The choice of tokens has no gradient, so the scorer learns to predict this weight. Tokens without a distant query do
        not count. None: there is no scorer.
        """
        if self.scorer is None:
            return None
        size = self.settings.chunk_size
        known = max(0, -(-q.shape[1] // size) - 2) * size
        if not known:
            # zero, but part of the graph: data parallelism waits for the gradient of every parameter
            return self._learned_scores(x[:, :0]).float().sum()
        wanted = distant_attention(q, k, chunk_size=size, scale=scale)[:, :known]
        return F.binary_cross_entropy_with_logits(self._learned_scores(x[:, :known]).float(), wanted)

    def _learned_scores(self, x: Tensor) -> Tensor:
        assert self.scorer is not None
        return self.scorer(_cast_to_weights(self.scorer, x))

    def extra_repr(self) -> str:
        return f"{self.settings}"


def _cast_to_weights(module: nn.Module, x: Tensor) -> Tensor:
    """Return x in the dtype of the module's weights, or unchanged if the module is quantized."""
    return x.to(next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), x.dtype))
