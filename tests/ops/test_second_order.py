"""Gradients of gradients: right in plain torch, refused by the kernels, never silently wrong."""

import sys
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nalaformer
from helpers.maps import KINDS, MAP_NAMES
from nalaformer import LinearState, feature_map, global_query_weight, linear_attention, recurrent_linear_attention
from nalaformer.attention.hybrid import HybridSettings, function, recurrent_hybrid_attention
from nalaformer.ops import (
    add_layer_norm,
    add_rms_norm,
    chunked,
    delta_rule,
    depthwise_conv,
    gated_linear,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    scaled_residual,
    short_convolution,
    unit_features,
)
from nalaformer.ops.backend import INTERPRETING, TRITON_FOUND

DEVICE = "cpu" if INTERPRETING else "cuda"
SETTINGS = HybridSettings(chunk_size=2, salient_per_chunk=1)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.pairwise]
needs_triton = pytest.mark.skipif(not TRITON_FOUND, reason="the kernels need Triton, which this platform has no build of")


def with_map(name: str, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """attend with this map, the same at each call."""

    def call(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        torch.manual_seed(1)
        return attend(q, k, v, *more, feature_map=feature_map(name, num_heads=2, head_dim=4).to(q.device, q.dtype))

    return call


def continued(q: Tensor, k: Tensor, v: Tensor, state: Tensor, key_sum: Tensor, *, feature_map: nalaformer.FeatureMap) -> Tensor:
    empty = LinearState.empty(1, 2, key_sum.shape[-1], 4, dtype=q.dtype, device=q.device)
    before = LinearState(state=state, key_sum=key_sum, count=empty.count + 3, log_scale=empty.log_scale)
    out, after = recurrent_linear_attention(q, k, v, feature_map=feature_map, state=before)
    return torch.cat((out.flatten(), after.state.flatten()))


def hybrid(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *, feature_map: nalaformer.FeatureMap) -> Tensor:
    state = None
    for cut in (slice(0, 5), slice(5, None)):
        tokens = (x[:, cut] for x in (q, k, v))
        out, state = recurrent_hybrid_attention(
            *tokens, feature_map=feature_map, settings=SETTINGS, state=state, gate=gate[:, cut]
        )
    return out


def contrasted(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, feature_map: nalaformer.FeatureMap) -> Tensor:
    return linear_attention(q, k, v, feature_map=feature_map, contrast="mean_score", key_weight=weight)


def weights(q: Tensor, k: Tensor) -> Tensor:
    # squared: weights have a mean of 1, so the gradient of their sum is zero
    return global_query_weight(q, k, feature_map=feature_map("elu", num_heads=2, head_dim=4)).square()


def tokens(count: int) -> list[tuple[int, ...]]:
    return [(1, count, 2, 4)] * 3


# the call, and the shapes of the tensors that it takes gradients of
CALLS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "convolution": (lambda x, w: depthwise_conv(x, w, None, grid=(2, 3)), [(1, 6, 2), (2, 1, 3, 3)]),
    "convolution, residual": (lambda x, w: depthwise_conv(x, w, None, grid=(2, 3), plus=x), [(1, 6, 2), (2, 1, 3, 3)]),
    "convolution of GELU": (
        lambda x, w: depthwise_conv(x, w, None, grid=(2, 3), residual=True, gelu=True),
        [(1, 6, 2), (2, 1, 3, 3)],
    ),
    "convolution, plus": (
        lambda x, w, b: depthwise_conv(x, w, b, grid=(2, 3), plus=2 * x),
        [(1, 6, 2), (2, 1, 3, 3), (2,)],
    ),
    "layer norm": (lambda x, w, b: layer_norm(x, w, b, eps=1e-6), [(3, 4), (4,), (4,)]),
    "gated layer norm": (lambda x, g, w, b: layer_norm(x, w, b, eps=1e-6, gate=g), [(3, 4), (3, 4), (4,), (4,)]),
    "layer norm of a sum": (lambda x, y, w, b: sum(add_layer_norm(x, y, w, b, eps=1e-6)), [(3, 4), (3, 4), (4,), (4,)]),
    "residual": (lambda x, y, s: scaled_residual(x, y, scale=s), [(1, 3, 4), (1, 3, 4), (4,)]),
    "short convolution": (
        lambda x, w: torch.cat(short_convolution(x, w, sizes=(2, 1, 1), silu=1), -1),
        [(1, 3, 4), (4, 2)],
    ),
    "gated RMSNorm": (lambda x, g, w: rms_norm(x, w, eps=1e-6, gate=g), [(3, 4), (3, 4), (4,)]),
    "RMSNorm of a sum": (lambda x, y, w: sum(add_rms_norm(x, y, w, eps=1e-6)), [(3, 4), (3, 4), (4,)]),
    "gated linear": (gated_linear, [(3, 4), (3, 4), (2, 4)]),
    "unit features": (
        lambda q, k: sum(unit_features(feature_map("split", num_heads=2, head_dim=4), q, k)),
        tokens(3)[:2],
    ),
    "delta rule": (
        lambda q, k, v, b, g: delta_rule(q, k, v, b, log_decay=-g)[0],
        [(1, 3, 1, 4), (1, 3, 1, 4), (1, 3, 1, 2), (1, 3, 1), (1, 3, 1)],
    ),
    "loss": (lambda x, w: linear_cross_entropy(x, w, torch.arange(3, device=x.device)), [(3, 4), (5, 4)]),
    "bidirectional": (with_map("norm_aware", linear_attention), tokens(5)),
    "contrast and weights": (with_map("elu", contrasted), [*tokens(5), (1, 5, 2)]),
    "weights of the global query": (weights, tokens(5)[:2]),
    "causal": (with_map("split", lambda *qkv, **map_: linear_attention(*qkv, causal=True, **map_)), tokens(5)),
    "continued": (with_map("elu", continued), [*tokens(3), (1, 2, 4, 4), (1, 2, 4)]),
    "across heads": (with_map("focused", linear_attention), tokens(5)),
    "hybrid": (with_map("norm_preserving", hybrid), [*tokens(7), (1, 7, 2, 4)]),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> tuple[Callable[..., Tensor], list[Tensor]]:
    compute, shapes = CALLS[request.param]
    return compute, [torch.rand(shape, dtype=torch.float64) + 0.2 for shape in shapes]


@pytest.fixture(params=["eager", "operator"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As everybody calls the kernels, and as torch.compile does."""
    if request.param == "operator":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return request.param


def first_gradients(call: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    out = call(*(leaf.requires_grad_() for leaf in leaves))
    weights = torch.linspace(1, 2, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    return torch.autograd.grad((out * weights).sum(), leaves, create_graph=True)


@needs_triton
def test_kernels_refuse_each_second_derivative_that_is_not_zero(call, path):
    """Of each gradient by each input: torch would take what it has no graph of for a constant."""
    compute, inputs = call
    with nalaformer.use_backend("reference"):
        exact = first_gradients(compute, inputs)
    with nalaformer.use_backend("triton"):
        leaves = [x.detach().to(DEVICE, torch.float32) for x in inputs]
        ours = first_gradients(compute, leaves)
    refused = 0
    for of, by in product(range(len(inputs)), repeat=2):
        # with a term that has a graph of its own, as a penalty beside another loss has
        loss = exact[of].sum() + inputs[by].sum()
        (second,) = torch.autograd.grad(loss, inputs[by], retain_graph=True)
        if (second - 1).abs().max() > 1e-9:
            refused += 1
            with pytest.raises(NotImplementedError, match=r'first-order gradients only.*use_backend\("chunked"\)'):
                torch.autograd.grad(ours[of].sum() + leaves[by].sum(), leaves[by], retain_graph=True)
    assert refused


@needs_triton
def test_every_operator_with_gradients_is_among_the_calls(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    called = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            called.add(operator.name())
            return operator(*args, **(kwargs or {}))

    for compute, shapes in CALLS.values():
        leaves = [torch.rand(shape, device=DEVICE, requires_grad=True) for shape in shapes]
        with nalaformer.use_backend("triton"), Record():
            compute(*leaves).sum().backward()
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("nalaformer::")}
    # an operator with gradients shows itself as the one without that it calls
    called |= {name.removesuffix("_forward") for name in called}
    # a step changes its state in place, without gradients
    assert names - called <= {"nalaformer::step", "nalaformer::hybrid_step", "nalaformer::short_convolution_step"}


@pytest.fixture
def small_pieces(monkeypatch):
    """More than one piece of tokens, each computed again in the backward pass."""
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(chunked, "SMALLEST_CHUNK", 2)
    monkeypatch.setattr(chunked, "CAUSAL_CHUNK", 2)
    monkeypatch.setattr(sys.modules[linear_cross_entropy.__module__], "LOGITS", 10)
    monkeypatch.setattr(function, "segment_size", lambda *given, **settings: SETTINGS.chunk_size)


def test_second_derivatives_of_plain_torch_are_right(call, backend, small_pieces):
    compute, inputs = call
    assert torch.autograd.gradgradcheck(compute, [x.requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.parametrize(("map_name", "causal"), [*((name, False) for name in MAP_NAMES), *((name, True) for name in KINDS)])
def test_second_derivatives_of_every_map_are_right(map_name, causal, make_map, make_qkv, small_pieces):
    mapped = make_map(map_name, head_dim=4, dtype=torch.float64)
    leaves = [*(x.requires_grad_() for x in make_qkv(batch=1, tokens=3, head_dim=4)), *mapped.parameters()]

    def compute(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        return linear_attention(q, k, v, feature_map=mapped, causal=causal)

    assert torch.autograd.gradgradcheck(compute, leaves, fast_mode=True)


@pytest.mark.parametrize("normalised", [False, True])
def test_second_derivatives_are_finite_where_tokens_are_zero(map_name, causal, normalised, make_map, make_qkv, small_pieces):
    """Channels and rows of zeros, such as padding, and hidden keys, which are made zero."""
    mapped = make_map(map_name, head_dim=4, dtype=torch.float64)
    q, k, v = make_qkv(batch=1, tokens=6, head_dim=4)
    q[:, 1], k[:, 2], q[:, 3, :, 1], k[:, 3, :, 1] = 0, 0, 0, 0
    visible = torch.tensor([[True, True, True, True, False, True]])
    rotary = nalaformer.Rotary.sequence(6, 4, normalised=True) if normalised else None
    weight = torch.rand(1, 6, 2, dtype=torch.float64)
    leaves = [*(x.requires_grad_() for x in (q, k, v, weight)), *mapped.parameters()]
    out = linear_attention(
        q, k, v, feature_map=mapped, causal=causal, rotary=rotary, key_mask=visible, query_mask=visible, key_weight=weight
    )
    first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True, allow_unused=True, materialize_grads=True)
    second = torch.autograd.grad(sum(x.sin().sum() for x in first), leaves, allow_unused=True, materialize_grads=True)
    assert all(x.isfinite().all() for x in (*first, *second))
