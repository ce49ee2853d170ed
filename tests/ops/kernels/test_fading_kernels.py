"""The kernels of causal attention whose keys fade, against the float64 definition."""

import pytest
import torch

import nalaformer
from helpers.kernel_checks import (
    CAUSAL_KINDS,
    DEVICE,
    HALF_ULP,
    MAPS,
    check_errors,
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


@pytest.fixture(params=[False, True], ids=["one split", "several splits"])
def splits(request, monkeypatch):
    from nalaformer.ops.kernels.linear import call

    monkeypatch.setattr(call, "DECAY_SPLIT", 32 if request.param else 256)
    # compiled launches remember how the tokens were spread
    monkeypatch.setattr(call, "CALLS", {})


def outcome(name, backend, dtype, tensors, upstream, *, heads, head_dim, **arguments):
    """Output and the gradients of q, k, v, the logarithms of decays and the parameters of the map."""
    torch.manual_seed(0)
    feature_map = nalaformer.feature_map(name.split()[0], num_heads=heads, head_dim=head_dim, **MAPS[name])
    feature_map = feature_map.to(DEVICE, torch.float64 if dtype == torch.float64 else torch.float32)
    inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
    q, k, v, log_decay = inputs
    # large, so that what it does to the gradients of decays is seen
    options = {"feature_map": feature_map, "causal": True, "eps": 1e-2}
    with nalaformer.use_backend(backend):
        out = nalaformer.linear_attention(q, k, v, log_decay=log_decay, **options, **arguments)
    wanted = [*inputs, *feature_map.parameters()]
    return [out, *torch.autograd.grad(out, wanted, upstream.to(out.dtype), allow_unused=True, materialize_grads=True)]


def check(name, tensors, decay, *, heads, head_dim, **arguments):
    q, _, v = tensors
    tensors = [*tensors, -decay * torch.rand(v.shape[:-1], device=DEVICE)]
    upstream = torch.randn(*q.shape[:-1], v.shape[-1]).to(DEVICE)

    def run(backend, dtype, inputs):
        return outcome(name, backend, dtype, inputs, upstream, heads=heads, head_dim=head_dim, **arguments)

    # sums of gradients over the tokens after each one; and differences of running sums of logarithms, which are as large as the
    # decays of a tile of 32 tokens and have 24 digits
    check_errors(run, tensors, bar=1e-5 + 2**-23 * 32 * decay)


@pytest.mark.parametrize(
    ("name", "splits"), [*((name, True) for name in CAUSAL_KINDS), ("norm_aware", False)], indirect=["splits"]
)
def test_fading_keys_of_every_kind_of_map(name, splits):
    check(name, make(*[(1, 75, 2, 8)] * 3), 0.2, heads=2, head_dim=8)


@pytest.mark.parametrize(("decay", "splits"), [(0.01, True), (3.0, True), (3.0, False)], indirect=["splits"])
def test_fading_with_rotary_and_key_mask(decay, splits):
    arguments = {"rotary": Rotary.sequence(45, 8, device=DEVICE), "key_mask": torch.rand(2, 45, device=DEVICE) > 0.3}
    check("norm_aware", make(*[(2, 45, 1, 8)] * 3), decay, heads=1, head_dim=8, **arguments)


def test_fading_of_grouped_heads_with_a_contrast(splits):
    strength = torch.rand(1, 45, 4, device=DEVICE)
    tensors = make((1, 45, 4, 20), (1, 45, 2, 20), (1, 45, 2, 12))
    check("channel_softmax", tensors, 0.3, heads=4, head_dim=20, contrast=strength)


@pytest.mark.parametrize("decay", [-90.0, -1e30, -torch.inf])
def test_a_head_that_forgets_everything_sees_its_own_token_on_the_kernels(decay, splits):
    # elu: no feature is zero, so a token has weight for itself
    q, k, v = (x.requires_grad_() for x in make(*[(1, 75, 1, 8)] * 3))
    feature_map = nalaformer.feature_map("elu", num_heads=1, head_dim=8)
    log_decay = torch.full((1, 75, 1), decay, device=DEVICE, requires_grad=True)
    with nalaformer.use_backend("triton"):
        out = nalaformer.linear_attention(q, k, v, feature_map=feature_map, causal=True, eps=0.0, log_decay=log_decay)
    assert relative_error(out.detach(), v.detach().double()) < 1e-6
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), (q, k, v, log_decay)))


@pytest.mark.parametrize(("heads", "splits"), [(2, False), (4, True)], indirect=["splits"])
def test_packed_sequences_fade_by_themselves_on_the_kernels(heads, splits):
    bounds = torch.tensor([0, 5, 5, 45, 46], device=DEVICE)
    tensors = make((46, heads, 20), (46, 2, 20), (46, 2, 12))
    rotary = Rotary.packed(bounds, 20)
    check("norm_aware", tensors, 0.3, heads=heads, head_dim=20, cu_seqlens=bounds, rotary=rotary)


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_outputs_of_fading_keys_ignore_later_tokens_whatever_they_hold(spoilt, splits):
    *tensors, log_decay = [*make(*[(1, 75, 1, 8)] * 3), -0.1 * torch.rand(1, 75, 1, device=DEVICE)]
    feature_map = nalaformer.feature_map("norm_aware", num_heads=1, head_dim=8)
    with nalaformer.use_backend("triton"):
        expected = nalaformer.linear_attention(*tensors, feature_map=feature_map, causal=True, log_decay=log_decay)
        for x in tensors:
            x[:, 41] = spoilt
        found = nalaformer.linear_attention(*tensors, feature_map=feature_map, causal=True, log_decay=log_decay)
    assert torch.equal(found[:, :41], expected[:, :41])
    assert not found[:, 41:].isfinite().any()


def test_a_state_of_fading_keys_goes_on_in_pieces_and_steps(splits):
    *tensors, log_decay = [*make(*[(1, 76, 2, 8)] * 3), -0.3 * torch.rand(1, 76, 2, device=DEVICE)]

    def run(backend, dtype):
        feature_map = nalaformer.feature_map("channel_softmax", num_heads=2, head_dim=8).to(DEVICE)
        inputs = [x.detach().to(dtype).requires_grad_() for x in (*tensors, log_decay)]
        with nalaformer.use_backend(backend):
            state, parts = None, []
            for start, stop in ((0, 30), (30, 75)):
                *here, decay = (x[:, start:stop] for x in inputs)
                out, state = nalaformer.recurrent_linear_attention(*here, feature_map=feature_map, state=state, log_decay=decay)
                parts.append(out)
            total = sum(out.sin().sum() for out in parts) + state.state.sin().sum() + state.key_sum.sum()
            *last, decay = (x[:, 75:].detach() for x in inputs)
            state = nalaformer.LinearState(**{name: x.detach().clone() for name, x in state.tensors().items()})
            step = nalaformer.recurrent_step_(state, *last, feature_map=feature_map, log_decay=decay)
        return [*parts, step, state.state, *torch.autograd.grad(total, inputs)]

    for ours, exact in zip(run("triton", torch.float32), run("reference", torch.float64), strict=True):
        assert relative_error(ours, exact) < 1e-5


@pytest.mark.parametrize(
    ("sizes", "splits"), [((72, 72), False), ((128, 20), True), ((20, 128), True)], indirect=["splits"], ids=str
)
def test_fading_keys_of_large_heads(sizes, splits):
    size, of_values = sizes
    arguments = {"rotary": Rotary.sequence(45, size, device=DEVICE), "key_mask": torch.rand(1, 45, device=DEVICE) > 0.3}
    tensors = make((1, 45, 2, size), (1, 45, 1, size), (1, 45, 1, of_values))
    check("norm_aware", tensors, 0.3, heads=2, head_dim=size, **arguments)


@pytest.mark.parametrize("size", [72, 128])
def test_a_step_of_large_heads_that_fade_has_its_kernel(size):
    *tensors, log_decay = [*make(*[(2, 1, 2, size)] * 3), -torch.rand(2, 1, 2, device=DEVICE)]
    start = make((2, 2, 2 * size, size), (2, 2, 2 * size))

    def run(backend, dtype):
        feature_map = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=size).to(DEVICE)
        count, zeros = torch.full((2,), 5, device=DEVICE), torch.zeros(2, 2, device=DEVICE)
        state = nalaformer.LinearState(start[0].to(dtype).abs(), start[1].to(dtype).abs(), count, zeros.to(dtype))
        with nalaformer.use_backend(backend):
            inputs = [x.to(dtype) for x in tensors]
            out = nalaformer.recurrent_step_(state, *inputs, feature_map=feature_map, log_decay=log_decay.to(dtype))
        return out, state.state, state.key_sum

    for ours, exact in zip(run("triton", torch.float32), run("reference", torch.float64), strict=True):
        assert relative_error(ours, exact) < 1e-5


def test_a_compiled_program_of_fading_keys_is_the_same():
    *tensors, log_decay = [*make(*[(1, 40, 2, 8)] * 3), -0.3 * torch.rand(1, 40, 2, device=DEVICE)]
    feature_map = nalaformer.feature_map("relu", num_heads=2, head_dim=8)

    def total(q, k, v, log_decay):
        out = nalaformer.linear_attention(q, k, v, feature_map=feature_map, causal=True, log_decay=log_decay)
        return out.square().sum()

    inputs = [x.requires_grad_() for x in (*tensors, log_decay)]
    with nalaformer.use_backend("triton"):
        plain = torch.autograd.grad(total(*inputs), inputs)
        compiled = torch.autograd.grad(torch.compile(total, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for ours, exact in zip(compiled, plain, strict=True):
        assert relative_error(ours, exact.double()) < 1e-6


@pytest.mark.parametrize("is_packed", [False, True])
def test_what_is_rounded_in_one_split_stays_out_of_the_gradients_of_earlier_ones(is_packed):
    """Added up from the end of a text without a halt, the roundings of all tokens would outgrow the gradient of one decay."""
    from nalaformer.ops.kernels.linear.decay_splits import Splits, sums_over_later_tokens

    # two samples of 5 and 3 tokens, or 2 of 4, in splits of two tokens, with three key heads
    starts, stops = ([[0, 2, 4], [5, 7, 8]], [[2, 4, 5], [7, 8, 8]]) if is_packed else ([0, 2], [2, 4])
    of_token = [0, 0, 1, 1, 2, 3, 3, 4] if is_packed else [0, 0, 1, 1]
    splits = Splits(torch.tensor(starts), torch.tensor(stops), torch.tensor(of_token))
    count, shape = (3, (3, 8)) if is_packed else (2, (2, 3, 4))
    before, after = torch.randn(2, count, 6, 2, 4, 5).unbind()
    by_token = torch.randn(shape)
    found = sums_over_later_tokens(splits, by_token, before, after, 3)
    # the last token of the first sample's first split: itself, and what the sums say of all later splits
    products = (after[0, :3, ..., :-1] * before[1, :3, ..., :-1]).sum((1, 2, 3))
    first = (slice(None), 1) if is_packed else (0, slice(None), 1)
    torch.testing.assert_close(found[first], by_token[first] + products)
    torch.testing.assert_close(found[..., 0], by_token[..., 0] + found[..., 1])
    spoilt = by_token.clone()
    spoilt[..., 2:] += 100
    torch.testing.assert_close(sums_over_later_tokens(splits, spoilt, before, after, 3)[..., :2], found[..., :2])


if INTERPRETING:

    @pytest.mark.parametrize("name", ["relu", "norm_aware", "channel_softmax"])
    def test_fading_in_bfloat16_stays_near_float64(name, monkeypatch):
        from helpers.bfloat16_in_the_interpreter import teach_bfloat16
        from nalaformer.ops.kernels.linear import call

        teach_bfloat16(monkeypatch)
        # the gradients of decays add up over splits
        monkeypatch.setattr(call, "DECAY_SPLIT", 64)
        monkeypatch.setattr(call, "CALLS", {})
        tensors = [x.bfloat16() for x in make((1, 150, 2, 28), (1, 150, 1, 28), (1, 150, 1, 20))]
        tensors.append((-0.1 * torch.rand(1, 150, 1)).bfloat16())
        upstream = torch.randn(1, 150, 2, 20).bfloat16()

        def run(backend, dtype):
            return outcome(name, backend, dtype, tensors, upstream, heads=2, head_dim=28)

        outcomes = run("triton", torch.bfloat16), run("reference", torch.float64), run("reference", torch.bfloat16)
        for place, (ours, exact, plain) in enumerate(list(zip(*outcomes, strict=True))[:5]):
            bar = relative_error(plain, exact) + HALF_ULP[torch.bfloat16]
            # room: half a unit is the most that the rounding of an operand costs, and none reaches it everywhere; the gradient
            # of a decay adds up over the tokens of a split, and so do their roundings
            assert relative_error(ours, exact) < bar * (3 if place == 4 else 1)
