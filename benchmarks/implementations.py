"""The implementations that are compared. A new one is one entry: a function that makes the call, its layout, its oracle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nalaformer.feature_maps import feature_map
from nalaformer.ops import linear_attention, recurrent_linear_attention, recurrent_step_, use_backend
from nalaformer.registry import Registry

from .cases import Case

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
MakeStep = Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]


class Truth(Protocol):
    """The truth in float64 for some queries of one head."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor | None) -> Tensor: ...


OURS, PUBLISHED, SOFTMAX = "nalaformer", "published formula", "torch SDPA"


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A function of q, k, v that computes attention, and how to judge it."""

    make: Callable[[Case], Attend]
    """Everything that is done once: building modules, compiling."""
    oracle: Truth
    """q rows [B, R, 1, D], k and v [B, N, 1, D] -> [B, R, 1, D]; places [R] for causal attention: each row's among the keys."""
    causal: bool = False
    """Whether it has a causal form."""
    bidirectional: bool = True
    """Whether it has a form in which every token sees every token."""
    make_step: MakeStep | None = None
    """q [B, 1, H, D], k and v [B, N, H, D] -> a call that gives the last token's output, all that came before it ready."""
    package: str | None = None
    """Module that only this implementation needs: a peer, skipped where that cannot be imported."""
    features: bool = False
    """True: it is given the norm-aware features of q and k, made before the clock starts, in place of q and k."""
    slack: float = 1.0
    """How many times the error of our bar it may have. A peer may be less precise than we are; a wrong formula is far off."""
    needs_all_queries: bool = False
    """True: an output depends on all queries, so the oracle is given all of them."""
    heads_first: bool = False
    """True: it wants [B, H, N, D], and gets it in that order in memory; False: [B, N, H, D]."""
    beside_softmax: bool = False
    """Whether it is also measured where ours stands beside softmax alone."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    most_tokens: Mapping[str, int] = field(default_factory=dict)
    """Per device: beyond this, it takes minutes a call or more memory than most machines have."""

    def runs(self, case: Case, device: str) -> bool:
        fits = case.tokens <= self.most_tokens.get(device, case.tokens)
        has_form = self.make_step is not None if case.step else self.causal if case.causal else self.bidirectional
        is_wanted = self.beside_softmax or not case.beside_softmax
        return device in self.devices and fits and has_form and is_wanted

    def why_missing(self) -> str | None:
        """Return why its package cannot be imported; None if it can be, or if none is needed."""
        if self.package is None:
            return None
        try:
            import_module(self.package)
        except Exception as error:  # a package that breaks while it is imported is as good as none
            return " ".join(f"{type(error).__name__}: {error}".split())
        return None

    def why_not_on(self, device: str) -> str | None:
        return self.why_missing() if device in self.devices else f"it does not run on {device}"

    def select_inputs(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k, or their features where the implementation takes features."""
        if not self.features:
            return q, k
        phi = feature_map("norm_aware", num_heads=q.shape[2], head_dim=q.shape[3])
        return phi.query(q.float()).to(q.dtype), phi.key(k.float()).to(k.dtype)


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


def make_our_step(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Each call adds the last token once more: the cost of a step does not depend on what came before."""
    phi = feature_map("norm_aware", num_heads=q.shape[2], head_dim=q.shape[3])
    before = k[:, :-1]
    # the queries of earlier tokens leave nothing behind: any will do
    _, state = recurrent_linear_attention(before, before, v[:, :-1], feature_map=phi)
    token = q, k[:, -1:].contiguous(), v[:, -1:].contiguous()
    return lambda: recurrent_step_(state, *token, feature_map=phi)


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


def make_softmax_step(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """One query against a cache of all keys and values."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def make_compiled(case: Case) -> Attend:
    # after some shapes torch.compile takes a function for one that has too many, and runs it as it is without a word
    torch.compiler.reset()
    return torch.compile(published_formula, dynamic=False)


IMPLEMENTATIONS.register(OURS)(
    Implementation(make=make_ours, oracle=norm_aware_oracle, causal=True, make_step=make_our_step, beside_softmax=True)
)
IMPLEMENTATIONS.register(PUBLISHED)(
    Implementation(make=lambda case: published_formula, oracle=norm_aware_oracle, heads_first=True)
)
IMPLEMENTATIONS.register("published formula, compiled")(
    Implementation(make=make_compiled, oracle=norm_aware_oracle, heads_first=True, devices=("cuda",))
)
IMPLEMENTATIONS.register(SOFTMAX)(
    Implementation(
        make=make_torch_softmax,
        oracle=softmax_oracle,
        causal=True,
        make_step=make_softmax_step,
        beside_softmax=True,
        heads_first=True,
        most_tokens={"cpu": 16384, "cuda": 131072},
    )
)
