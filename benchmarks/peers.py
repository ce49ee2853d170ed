"""Linear attention of other packages: measured where they can be imported, needed nowhere.

They attend to features and know no norm-aware map. So they are given ready-made features, which favours them: their time leaves
out the map, and their inputs are twice as wide as ours. Each is judged by its own formula on the features that it was given.
"""

from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .implementations import IMPLEMENTATIONS, Attend, Implementation, later

# they keep sums in half precision, which costs digits; a wrong formula is off by more
SLACK = 10.0


def features_oracle(q: Tensor, k: Tensor, v: Tensor, places: Tensor | None) -> Tensor:
    """Attention with weights q_i . k_j, normalised; all keys, or those up to each row's place."""
    if places is None:
        state, key_sum = torch.einsum("bjhf,bjhd->bhfd", k, v), k.sum(1)
        denominator = torch.einsum("bihf,bhf->bih", q, key_sum) + 1e-6 * k.shape[1]
        return torch.einsum("bihf,bhfd->bihd", q, state) / denominator[..., None]
    weights = torch.einsum("bihf,bjhf->bhij", q, k).masked_fill(later(places, k), 0)
    return torch.einsum("bhij,bjhd->bihd", weights / (weights.sum(-1, keepdim=True) + 1e-10), v)


def make_fla(case: Case) -> Attend:
    from fla.ops.linear_attn import chunk_linear_attn

    return lambda q, k, v: chunk_linear_attn(q, k, v, scale=1.0, normalize=True)[0]


def make_flash_bla(case: Case) -> Attend:
    from flash_bla.ops.linear_attn.fused import linear_attention

    return lambda q, k, v: linear_attention(q, k, v)


PEER: dict[str, Any] = {"oracle": features_oracle, "features": True, "slack": SLACK, "devices": ("cuda",)}
IMPLEMENTATIONS.register("fla chunk_linear_attn")(
    Implementation(make=make_fla, causal=True, bidirectional=False, package="fla.ops.linear_attn", **PEER)
)
IMPLEMENTATIONS.register("flash-bla")(
    Implementation(make=make_flash_bla, heads_first=True, package="flash_bla.ops.linear_attn.fused", **PEER)
)


def skipped_peers(device: str) -> dict[str, str]:
    """Peers that could be measured on this device but cannot be imported, with the reason."""
    here = [name for name in IMPLEMENTATIONS.names() if device in IMPLEMENTATIONS[name].devices]
    reasons = {name: IMPLEMENTATIONS[name].why_missing() for name in here}
    return {name: reason for name, reason in reasons.items() if reason is not None}
