"""What is compared. A further one is one entry: a function that makes the call, its layout and its oracle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..feature_maps import feature_map
from ..ops import linear_attention, use_backend
from ..registry import Registry
from .cases import Case

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Oracle(Protocol):
    """The truth in float64 for some queries of one head."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor | None) -> Tensor: ...


OURS, PUBLISHED, SOFTMAX = "nalaformer", "published formula", "torch SDPA"


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A function of q, k, v that computes attention, and how to judge it."""

    make: Callable[[Case], Attend]
    """Everything that is done once: building modules, compiling."""
    oracle: Oracle
    """q rows [B, R, 1, D], k and v [B, N, 1, D] -> [B, R, 1, D]; places [R] for causal attention: each row's among the keys."""
    causal: bool = False
    """Whether it has a causal form."""
    heads_first: bool = False
    """True: it wants [B, H, N, D], and gets it in that order in memory; False: [B, N, H, D]."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    most_tokens: Mapping[str, int] = field(default_factory=dict)
    """Per device: beyond this, it takes minutes a call or more memory than most machines have."""

    def runs(self, case: Case, device: str) -> bool:
        fits = case.tokens <= self.most_tokens.get(device, case.tokens)
        return device in self.devices and fits and (self.causal or not case.causal)


IMPLEMENTATIONS: Registry[Implementation] = Registry("implementation")


def norm_aware_oracle(q: Tensor, k: Tensor, v: Tensor, places: Tensor | None) -> Tensor:
    phi = feature_map("norm_aware", num_heads=1, head_dim=q.shape[-1])
    if places is None:
        with use_backend("reference"):
            return linear_attention(q, k, v, feature_map=phi)
    weights = torch.einsum("bihf,bjhf->bhij", phi.query(q), phi.key(k)).masked_fill(later(places, k), 0)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-6 * (places[:, None] + 1))
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def softmax_oracle(q: Tensor, k: Tensor, v: Tensor, places: Tensor | None) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q * q.shape[-1] ** -0.5, k)
    if places is not None:
        scores = scores.masked_fill(later(places, k), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1), v)


def later(places: Tensor, k: Tensor) -> Tensor:
    """[R, N]: True for the keys that come after each row."""
    return torch.arange(k.shape[1], device=k.device) > places[:, None]


def make_ours(case: Case) -> Attend:
    phi = feature_map("norm_aware", num_heads=case.heads, head_dim=case.head_dim)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, feature_map=phi, causal=case.causal)

    return attend


def published_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The NaLaFormer map with lambda = 3, tau = 0.5 as its formula reads, eager and in float32; all [B, H, N, D]."""
    dtype = q.dtype
    q, k, v = q.float(), k.float(), v.float()
    norm = q.norm(dim=-1, keepdim=True)
    direction = q / norm
    power = 3 * (0.5 + torch.tanh(norm))
    phi_q = torch.cat((F.relu(direction) ** power, F.relu(-direction) ** power), dim=-1)
    phi_k = torch.cat((F.relu(k**3), F.relu((-k) ** 3)), dim=-1)
    state = phi_k.transpose(-2, -1) @ v / k.shape[-2]
    denominator = phi_q @ phi_k.mean(dim=-2, keepdim=True).transpose(-2, -1) + 1e-6
    return (phi_q @ state / denominator).to(dtype)


def make_torch_softmax(case: Case) -> Attend:
    return partial(F.scaled_dot_product_attention, is_causal=case.causal)


IMPLEMENTATIONS.register(OURS)(Implementation(make=make_ours, oracle=norm_aware_oracle, causal=True))
IMPLEMENTATIONS.register(PUBLISHED)(
    Implementation(
        make=lambda case: published_formula,
        oracle=norm_aware_oracle,
        heads_first=True,
    )
)
IMPLEMENTATIONS.register("published formula, compiled")(
    Implementation(
        make=lambda case: torch.compile(published_formula, dynamic=False),
        oracle=norm_aware_oracle,
        heads_first=True,
        devices=("cuda",),
    )
)
IMPLEMENTATIONS.register(SOFTMAX)(
    Implementation(
        make=make_torch_softmax,
        oracle=softmax_oracle,
        causal=True,
        heads_first=True,
        most_tokens={"cpu": 16384, "cuda": 131072},
    )
)
