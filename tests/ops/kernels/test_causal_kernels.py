"""The kernels of causal attention, in one go, in pieces and in steps, against the float64 definition."""

import pytest
import torch

import nalaformer
from helpers.kernel_checks import (
    CAUSAL_KINDS,
    CAUSAL_MAPS,
    DEVICE,
    MAPS,
    check,
    check_half_precision,
    every_map_once,
    make,
    relative_error,
)
from nalaformer import Rotary
from nalaformer.ops.backend import INTERPRETING

pytestmark = pytest.mark.kernels

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Memory that nothing wrote is NaN: a missing store fails."""


@pytest.fixture(params=[False, True], ids=["one stretch", "two stretches"])
def stretches(request, monkeypatch):
    """All tokens in one stretch of tokens, or over two programs: 75 tokens, or 37 in the smaller tiles of rotary."""
    from nalaformer.ops.kernels.linear import call

    spread = (64, 1) if request.param else (1, 100)
    monkeypatch.setattr(call, "SPREAD", dict.fromkeys(call.SPREAD, spread))
    # compiled launches remember how the tokens were spread
    monkeypatch.setattr(call, "CALLS", {})


# a map of each kind in two stretches, and one of them in one: how maps and stretches meet is seen in the first test
in_two_stretches = pytest.mark.parametrize(
    ("name", "stretches"), [*((name, True) for name in CAUSAL_KINDS), ("norm_aware", False)], indirect=["stretches"]
)


@pytest.mark.parametrize(("name", "stretches"), every_map_once(CAUSAL_MAPS, [True, False]), indirect=["stretches"])
def test_causal_attention(name, stretches):
    check(name, make(*[(1, 75, 2, 8)] * 3), heads=2, head_dim=8, causal=True)


@pytest.mark.parametrize("kernel", ["causal", "causal_dq", "causal_dsums", "causal_dk", "causal_dv"])
def test_tiles_of_one_kernel_may_be_longer_than_stretches(kernel, monkeypatch):
    from nalaformer.ops.kernels.linear import call

    # of 16 tokens, by the forward kernel's tile
    monkeypatch.setattr(call, "SPREAD", dict.fromkeys(call.SPREAD, (64, 1)))
    monkeypatch.setattr(call, "CALLS", {})
    sizes = dict.fromkeys(call.TILES, 32) | {kernel: 64}
    monkeypatch.setattr(call, "TILES", {name: {64: call.Tile(size, 4, 1)} for name, size in sizes.items()})
    check("norm_aware", make(*[(1, 80, 1, 8)] * 3), heads=1, head_dim=8, causal=True)


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "launches"),
    [
        (75, 2, 2, 8, ["causal_kernel", "causal_whole_gradient_kernel"]),
        # groups, and as many heads as fill a GPU, here four, with kernels of their own
        (75, 2, 1, 8, ["causal_kernel", "causal_dq_kernel", "causal_dk_kernel", "causal_dv_kernel"]),
        (20, 5, 5, 4, ["causal_kernel", "causal_dq_kernel", "causal_dk_kernel", "causal_dv_kernel"]),
    ],
)
def test_a_short_walk_takes_one_launch_each_way(tokens, heads, kv_heads, size, launches, monkeypatch):
    """What waits for the host waits for each launch."""
    from nalaformer.ops.kernels.linear import call

    started = []

    def start(self, key, kernel, *rest, original=call.Call.start):
        started.append(kernel.__name__)
        original(self, key, kernel, *rest)

    monkeypatch.setattr(call.Call, "start", start)
    monkeypatch.setattr(call, "WHOLE_PROGRAMS", 4)
    monkeypatch.setattr(call, "CALLS", {})
    q, k, v = (x.requires_grad_() for x in make(*[(1, tokens, n, size) for n in (heads, kv_heads, kv_heads)]))
    feature_map = nalaformer.feature_map("norm_aware", num_heads=heads, head_dim=size)
    with nalaformer.use_backend("triton"):
        nalaformer.linear_attention(q, k, v, feature_map=feature_map, causal=True).sum().backward()
    assert started == launches


@in_two_stretches
def test_causal_attention_with_rotary_and_key_mask(name, stretches):
    arguments = {"rotary": Rotary.sequence(37, 8, device=DEVICE), "key_mask": torch.rand(2, 37, device=DEVICE) > 0.3}
    check(name, make(*[(2, 37, 1, 8)] * 3), heads=1, head_dim=8, causal=True, **arguments)


@pytest.mark.parametrize(("size", "size_of_keys"), [(3e-6, 1), (1e-7, 1), (0, 0.01)])
@pytest.mark.parametrize("name", ["norm_aware", "norm_aware cosine"])
def test_causal_attention_of_queries_that_fade(name, size, size_of_keys):
    q, k, v = make(*[(1, 40, 2, 8)] * 3)
    check(name, (q * size, k * size_of_keys, v), heads=2, head_dim=8, causal=True)


def test_causal_attention_with_other_positions_of_keys(stretches):
    # three stretches where others have two: the last one follows on the sums of both before it
    rotary = Rotary.sequence(75, 8, start=3, device=DEVICE), Rotary.sequence(75, 8, device=DEVICE)
    check("norm_aware", make(*[(1, 75, 1, 8)] * 3), heads=1, head_dim=8, causal=True, rotary=rotary)


@pytest.mark.parametrize(
    ("name", "stretches"), [("relu", True), ("norm_aware", True), ("hedgehog", False)], indirect=["stretches"]
)
def test_causal_attention_of_packed_sequences_with_grouped_heads(name, stretches):
    bounds = torch.tensor([0, 5, 5, 42], device=DEVICE)
    tensors = make((42, 4, 20), (42, 2, 20), (42, 2, 12))
    check(name, tensors, heads=4, head_dim=20, causal=True, cu_seqlens=bounds, rotary=Rotary.packed(bounds, 20))


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_causal_outputs_ignore_later_tokens_whatever_they_hold(spoilt, stretches):
    tensors = make(*[(1, 75, 1, 8)] * 3)
    feature_map = nalaformer.feature_map("norm_aware", num_heads=1, head_dim=8)
    with nalaformer.use_backend("triton"):
        expected = nalaformer.linear_attention(*tensors, feature_map=feature_map, causal=True)
        for x in tensors:
            x[:, 41] = spoilt
        found = nalaformer.linear_attention(*tensors, feature_map=feature_map, causal=True)
    assert torch.equal(found[:, :41], expected[:, :41])
    assert not found[:, 41:].isfinite().any()


@in_two_stretches
def test_recurrent_pieces_and_steps_are_causal_attention(name, stretches):
    torch.manual_seed(0)
    feature_map = nalaformer.feature_map(name.split()[0], num_heads=4, head_dim=8, **MAPS[name]).to(DEVICE)
    kv_heads = 4 if feature_map.heads_have_own_keys else 2
    q, k, v = make((1, 44, 4, 8), (1, 44, kv_heads, 8), (1, 44, kv_heads, 8))
    rotary = Rotary.sequence(44, 8, device=DEVICE)
    state, outputs = None, []
    with nalaformer.use_backend("reference"), torch.no_grad():
        expected = nalaformer.linear_attention(
            *(x.double() for x in (q, k, v)), feature_map=feature_map.double(), causal=True, rotary=rotary
        )
    feature_map = feature_map.float()
    with nalaformer.use_backend("triton"), torch.no_grad():
        for piece in (slice(0, 7), slice(7, 42)):
            tokens = (x[:, piece] for x in (q, k, v))
            out, state = nalaformer.recurrent_linear_attention(
                *tokens, feature_map=feature_map, state=state, rotary=rotary.tokens(piece.start, piece.stop)
            )
            outputs.append(out)
        for t in range(42, 44):
            tokens = (x[:, t : t + 1] for x in (q, k, v))
            outputs.append(nalaformer.recurrent_step_(state, *tokens, feature_map=feature_map, rotary=rotary.tokens(t, t + 1)))
    assert relative_error(torch.cat(outputs, dim=1), expected) < 2e-6
    assert state.count.tolist() == [44]


@pytest.mark.parametrize("name", ["polarity", "polarity_exp"])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_steps_rescale_the_state_when_a_larger_key_comes(name, scale):
    feature_map = nalaformer.feature_map(name, num_heads=2, head_dim=8).to(DEVICE)
    q, k, v = make(*[(2, 6, 2, 8)] * 3)
    k = k * torch.linspace(0.1, scale, 6, device=DEVICE)[:, None, None]
    state = nalaformer.LinearState.empty(2, 2, 16, 8, device=DEVICE)
    with torch.no_grad():
        expected = nalaformer.linear_attention(q, k, v, feature_map=feature_map, causal=True)
        with nalaformer.use_backend("triton"):
            steps = [
                nalaformer.recurrent_step_(state, *(x[:, t : t + 1] for x in (q, k, v)), feature_map=feature_map)
                for t in range(6)
            ]
    assert relative_error(torch.cat(steps, dim=1), expected.double()) < 1e-5


def test_gradients_flow_through_the_state(stretches):
    feature_map = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8)
    tensors = make(*[(2, 75, 2, 8)] * 3)
    upstream = torch.randn(2, 75, 2, 8, device=DEVICE)

    def gradients(backend, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
        with nalaformer.use_backend(backend):
            first, state = nalaformer.recurrent_linear_attention(*(x[:, :40] for x in inputs), feature_map=feature_map)
            second, _ = nalaformer.recurrent_linear_attention(
                *(x[:, 40:] for x in inputs), feature_map=feature_map, state=state
            )
        return torch.autograd.grad(torch.cat((first, second), dim=1), inputs, upstream.to(dtype))

    for ours, exact in zip(gradients("triton", torch.float32), gradients("chunked", torch.float64), strict=True):
        assert relative_error(ours, exact) < 2e-6


def test_a_step_in_a_large_head_uses_the_kernel(monkeypatch):
    from nalaformer.ops import kernels

    calls = []
    monkeypatch.setattr(kernels, "step_", lambda ready, state: calls.append(1) or ready.q)
    q, k, v = make(*[(1, 1, 2, 80)] * 3)
    feature_map = nalaformer.feature_map("relu", num_heads=2, head_dim=80)
    with nalaformer.use_backend("triton"):
        nalaformer.recurrent_step_(nalaformer.LinearState.empty(1, 2, 80, 80, device=DEVICE), q, k, v, feature_map=feature_map)
    assert calls


if INTERPRETING:

    @pytest.mark.parametrize(
        ("name", "case"),
        [*((name, "plain") for name in ("relu", "norm_aware cosine", "focused head", "hedgehog"))]
        + [("norm_aware", case) for case in ("plain", "rotary", "values with a mean")]
        + [("hedgehog", "rotary")],
    )
    def test_causal_bfloat16_stays_near_float64(name, case, monkeypatch):
        from helpers.bfloat16_in_the_interpreter import teach_bfloat16
        from nalaformer.ops.kernels.linear import call

        teach_bfloat16(monkeypatch)
        # three stretches
        monkeypatch.setattr(call, "SPREAD", dict.fromkeys(call.SPREAD, (64, 1)))
        tensors = [x.bfloat16() for x in make((1, 150, 2, 28), (1, 150, 1, 28), (1, 150, 1, 20))]
        arguments = {"heads": 2, "head_dim": 28, "causal": True, "key_mask": torch.rand(1, 150) > 0.3}
        if case == "rotary":
            arguments["rotary"] = Rotary.sequence(150, 28)
        if case == "values with a mean":
            tensors[2] += 10
        check_half_precision(name, torch.bfloat16, tensors, torch.randn(1, 150, 2, 20).bfloat16(), **arguments)
