"""What is compared. A further one is one entry: a function that makes the call, its layout and its oracle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..feature_maps import feature_map
from ..ops import linear_attention, use_backend
from ..registry import Registry
from .cases import Case

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

OURS, PUBLISHED = "nalaformer", "published formula"


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A function of q, k, v that computes attention, and how to judge it."""

    make: Callable[[Case], Attend]
    """Everything that is done once: building modules, compiling."""
    oracle: Attend
    """The truth in float64 for one head: q rows [B, R, 1, D], k and v [B, N, 1, D] -> [B, R, 1, D]."""
    heads_first: bool = False
    """True: it wants [B, H, N, D], and gets it in that order in memory; False: [B, N, H, D]."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    most_tokens: Mapping[str, int] = field(default_factory=dict)
    """Per device: beyond this, it takes minutes a call or more memory than most machines have."""

    def runs(self, case: Case, device: str) -> bool:
        return device in self.devices and case.tokens <= self.most_tokens.get(device, case.tokens)


IMPLEMENTATIONS: Registry[Implementation] = Registry("implementation")


def norm_aware_oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    phi = feature_map("norm_aware", num_heads=1, head_dim=q.shape[-1])
    with use_backend("reference"):
        return linear_attention(q, k, v, feature_map=phi)


def softmax_oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bihd,bjhd->bhij", q * q.shape[-1] ** -0.5, k).softmax(dim=-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def make_ours(case: Case) -> Attend:
    phi = feature_map("norm_aware", num_heads=case.heads, head_dim=case.head_dim)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, feature_map=phi)

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


def torch_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


IMPLEMENTATIONS.register(OURS)(Implementation(make=make_ours, oracle=norm_aware_oracle))
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
IMPLEMENTATIONS.register("torch SDPA")(
    Implementation(
        make=lambda case: torch_softmax,
        oracle=softmax_oracle,
        heads_first=True,
        most_tokens={"cpu": 16384, "cuda": 69696},
    )
)
