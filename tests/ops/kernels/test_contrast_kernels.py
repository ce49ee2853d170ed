"""The kernels with a contrast and with weights of keys against the float64 definition, forward and backward."""

import pytest
import torch

import nalaformer
from helpers.contrast_formula import weighted_and_contrasted
from helpers.kernel_checks import BAR, DEVICE, HALF_ULP, check_errors, make, relative_error
from nalaformer import Rotary, feature_map, global_query_weight, linear_attention
from nalaformer.ops.backend import INTERPRETING
from nalaformer.ops.kernels.linear import call

pytestmark = pytest.mark.kernels

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")

BOTH = {"contrast": "mean_score", "has_weight": True}
PARTS = ({"contrast": "mean_score"}, {"has_weight": True}, BOTH)


@pytest.fixture(params=PARTS, ids=lambda parts: "+".join(parts))
def parts(request):
    return request.param


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Memory that nothing wrote is NaN: a missing store fails."""


def outcome(backend, dtype, name, tensors, upstream, *, has_weight=False, **arguments):
    """Output and gradients of q, k, v and the weights."""
    (q, k, v), weight = tensors[:3], tensors[3]
    single = feature_map(name, num_heads=q.shape[-2], head_dim=q.shape[-1]).to(DEVICE)
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    if has_weight:
        # weights are numbers of float32 whatever the rest is
        inputs.append(weight.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_())
        arguments["key_weight"] = inputs[3]
    with nalaformer.use_backend(backend):
        out = linear_attention(*inputs[:3], feature_map=single.to(inputs[-1].dtype), **arguments)
    return [out, *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]


def with_weight(*shapes):
    tensors = make(*shapes)
    return [*tensors, torch.rand(shapes[1][:-1]).to(DEVICE) + 0.1]


def check(name, tensors, **arguments):
    """As near to float64 as plain float32, some times over; of inputs that differ by a rounding, the most that that misses."""
    upstream = torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1]).to(DEVICE)

    def run(backend, dtype, given):
        return outcome(backend, dtype, name, given, upstream, **arguments)

    check_errors(run, tensors)


def test_short_inputs_in_one_launch(parts):
    check("elu", with_weight(*[(2, 37, 2, 8)] * 3), **parts)


# both signs, and keys that the kernels divide by a power of two
@pytest.mark.parametrize("name", ["split", "norm_aware"])
def test_maps_of_two_halves(name):
    check(name, with_weight(*[(1, 37, 2, 8)] * 3), **BOTH)


def test_long_inputs_with_positions_and_padding_are_split_over_programs(parts, monkeypatch):
    monkeypatch.setattr(call, "WHOLE_TOKENS", 16)
    monkeypatch.setattr(call, "SPREAD", dict.fromkeys(call.SPREAD, (2, 1)))
    monkeypatch.setattr(call, "CALLS", {})
    rotary = Rotary.sequence(70, 8, device=DEVICE), Rotary.sequence(81, 8, device=DEVICE)
    visible = torch.rand(1, 81, device=DEVICE) > 0.3
    check("elu", with_weight((1, 70, 2, 8), (1, 81, 2, 8), (1, 81, 2, 8)), rotary=rotary, key_mask=visible, **parts)


def test_odd_sizes_and_grouped_heads(parts):
    check("elu", with_weight((2, 21, 4, 20), (2, 33, 2, 20), (2, 33, 2, 12)), **parts)


def test_packed_sequences(parts):
    bounds = torch.tensor([0, 5, 5, 40], device=DEVICE)
    check("elu", with_weight(*[(40, 2, 8)] * 3), cu_seqlens=bounds, rotary=Rotary.packed(bounds, 8), **parts)


@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("size", [8, 64])
def test_bfloat16_is_as_near_as_the_plain_reference_and_half_an_ulp(size, has_positions, monkeypatch):
    if INTERPRETING:
        from helpers.bfloat16_in_the_interpreter import teach_bfloat16

        teach_bfloat16(monkeypatch)
    tensors = with_weight(*[(1, 67, 1, size)] * 3)
    upstream = torch.randn(1, 67, 1, size, device=DEVICE).bfloat16()
    arguments = BOTH | ({"rotary": Rotary.sequence(67, size, device=DEVICE)} if has_positions else {})
    exact = outcome("reference", torch.float64, "elu", tensors, upstream, **arguments)
    plain = outcome("reference", torch.bfloat16, "elu", tensors, upstream, **arguments)
    ours = outcome("triton", torch.bfloat16, "elu", tensors, upstream, **arguments)
    for x, y, z in zip(ours, exact, plain, strict=True):
        # room: half a unit is the most that the rounding of an operand costs, and none reaches it everywhere
        assert relative_error(x, y) < relative_error(z, y) + HALF_ULP[torch.bfloat16]


def test_a_given_strength_moves_what_the_kernels_return():
    q, k, v = make(*[(2, 37, 2, 8)] * 3)
    single = feature_map("elu", num_heads=2, head_dim=8).to(DEVICE)
    strength = torch.rand(2, 37, 2, device=DEVICE)
    for causal in (False, True):
        with nalaformer.use_backend("triton"):
            found = linear_attention(q, k, v, feature_map=single, contrast=strength, causal=causal)
        with nalaformer.use_backend("reference"):
            exact = [x.double() for x in (q, k, v, strength)]
            expected = linear_attention(*exact[:3], feature_map=single.double(), contrast=exact[3], causal=causal)
            single.float()
        assert relative_error(found, expected) < 2e-6


def test_degenerate_tokens_stay_finite(parts):
    q, k, v, weight = with_weight(*[(2, 21, 2, 8)] * 3)
    q[0, 3], k[0, 5], q[1] = 0, 0, q[1] * 1e-20
    q[0, 7], k[0, 8] = 1e4, 1e4
    visible = torch.ones(2, 21, dtype=torch.bool, device=DEVICE)
    visible[1] = False
    v[1], k[1] = torch.nan, torch.nan
    upstream = torch.ones(2, 21, 2, 8, device=DEVICE)
    for name in ("elu", "relu"):
        found = outcome("triton", torch.float32, name, (q, k, v, weight), upstream, key_mask=visible, **parts)
        assert (found[0][1] == 0).all()
        assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("name", ["elu", "relu", "split"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_weights_of_the_global_query_and_their_gradients(name, is_masked):
    q, k = make((2, 150, 4, 12), (2, 37, 2, 12))
    masks = {}
    if is_masked:
        masks = {"key_mask": torch.rand(2, 37) > 0.3, "query_mask": torch.rand(2, 150) > 0.3}
        masks = {key: mask.to(DEVICE) for key, mask in masks.items()}
        k[~masks["key_mask"]], q[~masks["query_mask"]] = torch.nan, torch.nan
    single = feature_map(name, num_heads=4, head_dim=12).to(DEVICE)
    upstream = torch.randn(2, 37, 4, device=DEVICE)

    def weights_and_gradients(backend, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k)]
        with nalaformer.use_backend(backend):
            found = global_query_weight(*inputs, feature_map=single, **masks)
        return [found, *torch.autograd.grad(found, inputs, upstream.to(dtype))]

    pairs = zip(weights_and_gradients("triton", torch.float32), weights_and_gradients("reference", torch.float64), strict=True)
    for ours, exact in pairs:
        assert relative_error(ours, exact) < BAR


@pytest.mark.parametrize(("name", "kv_heads", "is_masked"), [("elu", 2, False), ("elu", 1, True), ("norm_aware", 2, True)])
def test_a_causal_contrast_by_the_mean_score(name, kv_heads, is_masked):
    tensors = with_weight((2, 83, 2, 8), (2, 83, kv_heads, 8), (2, 83, kv_heads, 12))
    arguments = {"contrast": "mean_score", "causal": True}
    if is_masked:
        arguments["key_mask"] = torch.rand(2, 83, device=DEVICE) > 0.3
    check(name, tensors, **arguments)


def test_packed_sequences_have_running_scores_of_their_own():
    q, k, v = make(*[(40, 2, 8)] * 3)
    single = feature_map("elu", num_heads=2, head_dim=8).to(DEVICE)
    ends = torch.tensor([0, 17, 17, 40], device=DEVICE)
    options = {"feature_map": single, "causal": True, "contrast": "mean_score"}
    with nalaformer.use_backend("triton"):
        found = linear_attention(q, k, v, cu_seqlens=ends, **options)
    for start, end in ((0, 17), (17, 40)):
        exact = weighted_and_contrasted(
            single, *(x[None, start:end] for x in (q, k, v)), contrast="mean_score", causal=True, eps=1e-6
        )
        assert relative_error(found[None, start:end], exact) < BAR


def test_huge_queries_and_keys_have_finite_weights():
    q, k = make(*[(1, 20, 2, 8)] * 2)
    inputs = [x.mul(1e10).requires_grad_() for x in (q, k)]
    single = feature_map("elu", num_heads=2, head_dim=8).to(DEVICE)
    with nalaformer.use_backend("triton"):
        weight = global_query_weight(*inputs, feature_map=single)
    assert all(x.isfinite().all() for x in (weight, *torch.autograd.grad(weight.sum(), inputs)))


def test_what_the_kernels_cannot_do_says_why():
    q, k, v = make(*[(1, 5, 2, 8)] * 3)
    with nalaformer.use_backend("triton"):
        single = feature_map("elu", num_heads=2, head_dim=8).to(DEVICE)
        with pytest.raises(ValueError, match="no causal kernel"):
            linear_attention(q, k, v, feature_map=single, key_weight=torch.ones(1, 5, 2, device=DEVICE), causal=True)
        # normalised positions change the features of every map
        turned = {"rotary": Rotary.sequence(5, 8, normalised=True, device=DEVICE)}
        with pytest.raises(ValueError, match="needs a map that the kernels compute"):
            linear_attention(q, k, v, feature_map=single, contrast="mean_score", causal=True, **turned)
        scaled = feature_map("polarity", num_heads=2, head_dim=8).to(DEVICE)
        with pytest.raises(ValueError, match="features without a bound have no mean score"):
            linear_attention(q, k, v, feature_map=scaled, contrast="mean_score")
