"""One key far larger than the others, against the formula in float64 with true features and a true eps.

Nothing here shares code with the backends, which divide keys by the largest: a fault of the scale would be in all of them.
"""

import math

import pytest
import torch
from torch import Tensor

import nalaformer
from nalaformer import FeatureMap, LinearState, linear_attention, recurrent_linear_attention, recurrent_step_

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "one_thread"), pytest.mark.pairwise]

TOKENS, HEAD_DIM, LARGE = 9, 6, 3
MAPS = {
    "norm_aware": ("norm_aware", {}),
    "norm_aware+cosine": ("norm_aware", {"direction": "cosine"}),
    "polarity": ("polarity", {}),
    "polarity_exp": ("polarity_exp", {}),
}
# the largest features lie just inside float32
NAMES_AND_SIZES = [
    *((name, size) for name in ("norm_aware", "norm_aware+cosine", "polarity") for size in (1e2, 1e5, 1e9)),
    *(("polarity_exp", size) for size in (10.0, 40.0, 80.0)),
]
over_names_and_sizes = pytest.mark.parametrize(("name", "size"), NAMES_AND_SIZES, ids=str)
FORMS = [("reference", False), ("reference", True), ("chunked", False), ("chunked", True), ("triton", False)]
# a feature of e^80 has a relative error of 80 * 2^-24, which is 5e-6; three times that
BAR = 1.5e-5


def both_signs(x: Tensor) -> Tensor:
    return torch.cat((x.clamp(min=0), (-x).clamp(min=0)), dim=-1)


def norm_aware_split(q: Tensor, k: Tensor) -> tuple[list[Tensor], Tensor]:
    norm = q.norm(dim=-1, keepdim=True)
    return [both_signs(q / norm) ** (3 * (0.5 + norm.tanh()))], both_signs(k) ** 3


def norm_aware_cosine(q: Tensor, k: Tensor) -> tuple[list[Tensor], Tensor]:
    norm = q.norm(dim=-1, keepdim=True)
    sizes = (q / norm).abs() ** (3 * (0.5 + norm.tanh())), k.abs() ** 3
    # [cos a + sin a ; cos a - sin a] / sqrt 2, since float64 too would lose the products near zero
    angles = [math.pi / 2 * torch.cat((u, -u), dim=-1).mul(40).sigmoid() for u in (q / norm, k / k.norm(dim=-1, keepdim=True))]
    phi_q, phi_k = (torch.cat((size, size), dim=-1) * angle.sin() for size, angle in zip(sizes, angles, strict=True))
    return [phi_q], phi_k


def polarity(q: Tensor, k: Tensor) -> tuple[list[Tensor], Tensor]:
    same, opposite, phi_k = ((both_signs(x) / math.log(2)) ** 3 for x in (q, -q, k))
    return [same, opposite], phi_k


def polarity_exp(q: Tensor, k: Tensor) -> tuple[list[Tensor], Tensor]:
    return [torch.expm1(both_signs(q) / 2), torch.expm1(both_signs(-q) / 2)], torch.expm1(both_signs(k))


FEATURES = {
    "norm_aware": norm_aware_split,
    "norm_aware+cosine": norm_aware_cosine,
    "polarity": polarity,
    "polarity_exp": polarity_exp,
}


def exact(name: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, eps: float = 1e-6) -> Tensor:
    """The formula in float64 for maps as they start; [N, H, D] each."""
    streams, phi_k = FEATURES[name](q.double(), k.double())
    visible = torch.ones(len(q), len(k), dtype=torch.float64)
    visible = visible.tril() if causal else visible
    outputs = []
    for phi_q, values in zip(streams, v.double().chunk(len(streams), dim=-1), strict=True):
        weights = torch.einsum("ihf,jhf->hij", phi_q, phi_k) * visible
        total = weights.sum(-1, keepdim=True) + eps * visible.sum(-1)[:, None]
        outputs.append(torch.einsum("hij,jhv->ihv", weights / total, values))
    return torch.cat(outputs, dim=-1)


def inputs(size: float) -> list[Tensor]:
    """[N, 1, D]; channel 0 of one key is large. Queries look at it or away from it, in turn."""
    q, k, v = (torch.randn(TOKENS, 1, HEAD_DIM) for _ in range(3))
    k[LARGE, 0, 0] = size
    q[:, 0, 0] = (0.5 + q[:, 0, 0].abs()) * (-1.0) ** torch.arange(TOKENS)
    return [q, k, v]


def made(name: str) -> FeatureMap:
    kind, options = MAPS[name]
    return nalaformer.feature_map(kind, num_heads=1, head_dim=HEAD_DIM, **options)


@over_names_and_sizes
@pytest.mark.parametrize(("backend", "causal"), FORMS, ids=str)
@torch.no_grad()
def test_every_query_gets_what_the_formula_says(name, size, backend, causal):
    q, k, v = inputs(size)
    with nalaformer.use_backend(backend):
        out = linear_attention(q[None], k[None], v[None], feature_map=made(name), causal=causal)[0]
    assert (out - exact(name, q, k, v, causal=causal)).abs().max() < BAR


@pytest.mark.parametrize("size", [1e2, 1e5, 1e9], ids=str)
@torch.no_grad()
def test_every_query_gets_what_the_formula_says_in_the_causal_kernel(size):
    q, k, v = inputs(size)
    with nalaformer.use_backend("triton"):
        out = linear_attention(q[None], k[None], v[None], feature_map=made("norm_aware"), causal=True)[0]
    assert (out - exact("norm_aware", q, k, v, causal=True)).abs().max() < BAR


@over_names_and_sizes
@torch.no_grad()
def test_every_query_gets_what_the_formula_says_in_packed_sequences(name, size):
    q, k, v = inputs(size)
    bounds = torch.tensor([0, 2, 7, TOKENS])
    out = linear_attention(q, k, v, feature_map=made(name), cu_seqlens=bounds)
    for start, stop in bounds.unfold(0, 2, 1).tolist():
        expected = exact(name, *(x[start:stop] for x in (q, k, v)), causal=False)
        assert (out[start:stop] - expected).abs().max() < BAR


@over_names_and_sizes
@pytest.mark.parametrize("backend", ["chunked", "triton"])
@torch.no_grad()
def test_every_query_gets_what_the_formula_says_token_by_token(name, size, backend):
    q, k, v = inputs(size)
    feature_map = made(name)
    state = LinearState.empty(1, 1, 2 * HEAD_DIM, HEAD_DIM)
    with nalaformer.use_backend(backend):
        steps = [
            recurrent_step_(state, *(x[None, t : t + 1] for x in (q, k, v)), feature_map=feature_map) for t in range(TOKENS)
        ]
    assert (torch.cat(steps, dim=1)[0] - exact(name, q, k, v, causal=True)).abs().max() < BAR


@over_names_and_sizes
@torch.no_grad()
def test_merged_states_give_what_the_formula_says(name, size):
    # the large key in the first state and later small ones in the second
    q, k, v = inputs(size)
    feature_map = made(name)
    parts = [slice(0, 5), slice(5, TOKENS - 1)]
    states = [recurrent_linear_attention(*(x[None, part] for x in (q, k, v)), feature_map=feature_map)[1] for part in parts]
    last = [x[None, TOKENS - 1 :] for x in (q, k, v)]
    out, _ = recurrent_linear_attention(*last, feature_map=feature_map, state=LinearState.merge(*states))
    assert (out[0] - exact(name, q, k, v, causal=True)[-1:]).abs().max() < BAR


# not the cosine map: through the far side of its angle every query sees the large key, and hardly anything else
@pytest.mark.parametrize(("name", "size"), [("norm_aware", 1e5), ("polarity", 1e4), ("polarity_exp", 40.0)], ids=str)
@pytest.mark.parametrize("backend", ["reference", "chunked", "triton"])
def test_every_gradient_is_that_of_the_formula(name, size, backend):
    tensors = [x.requires_grad_() for x in inputs(size)]
    upstream = torch.randn(TOKENS, 1, HEAD_DIM)
    expected = torch.autograd.grad(exact(name, *tensors, causal=False), tensors, upstream.double())
    with nalaformer.use_backend(backend):
        out = linear_attention(*(x[None] for x in tensors), feature_map=made(name))[0]
        found = torch.autograd.grad(out, tensors, upstream)
    assert max(float((mine - right).norm() / right.norm()) for mine, right in zip(found, expected, strict=True)) < BAR


@over_names_and_sizes
@pytest.mark.parametrize("backend", ["reference", "chunked", "triton"])
def test_every_gradient_is_finite(name, size, backend):
    tensors = [x[None].requires_grad_() for x in inputs(size)]
    with nalaformer.use_backend(backend):
        out = linear_attention(*tensors, feature_map=made(name))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), tensors))
