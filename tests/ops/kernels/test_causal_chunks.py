"""Causal attention in chunks, as large bfloat16 heads take it, here in small heads, against the float64 definition."""

import pytest
import torch

import nalaformer
from helpers.kernel_checks import DEVICE, check, check_half_precision, make, relative_error
from nalaformer import Rotary
from nalaformer.ops.backend import INTERPRETING

pytestmark = [
    pytest.mark.kernels,
    # compiled, tiles of small heads are not those that were seen right; test_gpu.py has the large ones
    pytest.mark.skipif(not INTERPRETING, reason="small heads walk with the state in registers where kernels are compiled"),
]

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")


@pytest.fixture(autouse=True)
def chunks(poisoned_memory, monkeypatch):
    """Two tiles of 32 tokens to a chunk; memory that nothing wrote is NaN, so a missing store fails."""
    from nalaformer.ops.kernels.linear import call

    monkeypatch.setattr(call, "CHUNKS", {16: 64, 32: 64})
    monkeypatch.setattr(call, "CALLS", {})


ONE, TWO = (1, 100), (64, 1)


@pytest.fixture
def spread(request, monkeypatch):
    """ONE stretch of tokens whatever their number, or TWO from two chunks on."""
    from nalaformer.ops.kernels.linear import call

    monkeypatch.setattr(call, "SPREAD", dict.fromkeys(call.SPREAD, request.param))


def stretches(*options):
    return pytest.mark.parametrize("spread", options, ids={ONE: "one stretch", TWO: "two stretches"}.get, indirect=True)


@pytest.mark.parametrize(
    ("name", "heads", "spread"),
    [("relu", 1, ONE), ("split", 1, TWO), ("norm_aware learnable", 2, TWO), ("focused head", 1, ONE)],
    ids=["relu", "split", "learned", "focused"],
    indirect=["spread"],
)
def test_chunks_are_causal_attention(name, heads, spread):
    check(name, make(*[(1, 150, heads, 8)] * 3), heads=heads, head_dim=8, causal=True)


@stretches(TWO)
def test_chunks_of_grouped_heads_with_hidden_keys(spread):
    tensors = make((1, 150, 4, 20), (1, 150, 2, 20), (1, 150, 2, 12))
    check("norm_aware", tensors, heads=4, head_dim=20, causal=True, key_mask=torch.rand(1, 150, device=DEVICE) > 0.3)


@stretches(TWO)
def test_packed_sequences_begin_their_own_chunks(spread):
    bounds = torch.tensor([0, 5, 5, 140, 150], device=DEVICE)
    check("norm_aware", make(*[(150, 1, 8)] * 3), heads=1, head_dim=8, causal=True, cu_seqlens=bounds)


@pytest.mark.parametrize(("spoilt", "spread"), [(torch.nan, ONE), (torch.inf, TWO)], ids=["nan", "inf"], indirect=["spread"])
def test_chunks_ignore_later_tokens_whatever_they_hold(spoilt, spread):
    tensors = make(*[(1, 150, 1, 8)] * 3)
    feature_map = nalaformer.feature_map("norm_aware", num_heads=1, head_dim=8)
    with nalaformer.use_backend("triton"):
        expected = nalaformer.linear_attention(*tensors, feature_map=feature_map, causal=True)
        for x in tensors:
            x[:, 81] = spoilt
        found = nalaformer.linear_attention(*tensors, feature_map=feature_map, causal=True)
    assert torch.equal(found[:, :81], expected[:, :81])
    assert not found[:, 81:].isfinite().any()


@stretches(TWO)
def test_gradients_flow_through_the_state_between_chunks(spread):
    """Of one stretch, without a state before and with one, then of two."""
    feature_map = nalaformer.feature_map("norm_aware", num_heads=1, head_dim=8)
    tensors, upstream = make(*[(1, 150, 1, 8)] * 3), torch.randn(1, 150, 1, 8, device=DEVICE)

    def outcome(backend, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
        state, outputs = None, []
        with nalaformer.use_backend(backend):
            for first, end in ((0, 5), (5, 20), (20, 150)):
                piece = (x[:, first:end] for x in inputs)
                out, state = nalaformer.recurrent_linear_attention(*piece, feature_map=feature_map, state=state)
                outputs.append(out)
        out = torch.cat(outputs, dim=1)
        return [out, *torch.autograd.grad(out, inputs, upstream.to(dtype))]

    for ours, exact in zip(outcome("triton", torch.float32), outcome("chunked", torch.float64), strict=True):
        assert relative_error(ours, exact) < 2e-6


@pytest.mark.parametrize(("mean", "is_packed"), [(0, False), (10, True)], ids=["masked", "packed far from zero"])
def test_chunks_of_bfloat16_stay_near_float64(mean, is_packed, monkeypatch):
    from helpers.bfloat16_in_the_interpreter import teach_bfloat16
    from nalaformer.ops.kernels.linear import call

    teach_bfloat16(monkeypatch)
    # a walk of larger steps than the tiles that it writes sums of keys for
    tiles = {name: {128: call.Tile(64 if name == "scan" else 32, 8, 1)} for name in call.TILES}
    monkeypatch.setattr(call, "TILES", tiles)
    batch = () if is_packed else (1,)
    tensors = [x.bfloat16() for x in make((*batch, 150, 2, 28), (*batch, 150, 1, 28), (*batch, 150, 1, 20))]
    tensors[2] += mean
    more = {"cu_seqlens": torch.tensor([0, 5, 5, 150])} if is_packed else {"key_mask": torch.rand(1, 150) > 0.3}
    upstream = torch.randn(*batch, 150, 2, 20).bfloat16()
    check_half_precision("norm_aware", torch.bfloat16, tensors, upstream, heads=2, head_dim=28, causal=True, **more)


def test_rotary_and_other_sizes_walk_with_the_state():
    from nalaformer.ops.kernels.linear import call

    chosen = []
    for size, rotary in ((8, None), (8, Rotary.sequence(5, 8, device=DEVICE)), (40, None)):
        call.CALLS.clear()
        feature_map = nalaformer.feature_map("relu", num_heads=1, head_dim=size)
        with nalaformer.use_backend("triton"):
            nalaformer.linear_attention(*make(*[(1, 5, 1, size)] * 3), feature_map=feature_map, causal=True, rotary=rotary)
        chosen += [made.chunk for made in call.CALLS.values() if isinstance(made, call.Call)]
    assert chosen == [64, 0, 0]
