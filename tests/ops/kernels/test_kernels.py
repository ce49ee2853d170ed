"""The kernels of bidirectional attention against the float64 definition: small odd shapes, forward and backward."""

from dataclasses import replace

import pytest
import torch

import nalaformer
from helpers.kernel_checks import (
    DEVICE,
    KINDS,
    MAPS,
    check,
    check_half_precision,
    every_map_once,
    make,
    outcome,
    relative_error,
)
from nalaformer import Rotary
from nalaformer.ops.backend import INTERPRETING

pytestmark = pytest.mark.kernels

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")


@pytest.fixture(params=MAPS)
def name(request):
    return request.param


@pytest.fixture(params=KINDS)
def kind(request):
    """A map of each kind, where the others take the same way; sizes that are no powers of two see all maps."""
    return request.param


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Memory that nothing wrote is NaN: a missing store fails."""


@pytest.fixture(params=[False, True], ids=["by sums", "by weights"])
def one_launch(request, monkeypatch):
    """Both forms of the kernels that own a sample and head; that by weights is taken for bfloat16."""
    from nalaformer.ops.kernels.linear import call

    monkeypatch.setattr(call, "SHORT_TYPES", (torch.float32,) if request.param else ())
    monkeypatch.setattr(call, "CALLS", {})


def test_short_inputs_in_one_launch(kind, one_launch):
    check(kind, make(*[(2, 37, 2, 8)] * 3), heads=2, head_dim=8)


def test_long_inputs_are_split_over_programs(kind, monkeypatch):
    from nalaformer.ops.kernels.linear import call

    # what counts as long is a setting, and the interpreter is slow
    monkeypatch.setattr(call, "WHOLE_TOKENS", 100)
    monkeypatch.setattr(call, "SPREAD", dict.fromkeys(call.SPREAD, (2, 1)))
    monkeypatch.setattr(call, "CALLS", {})
    # three programs: two tiles, two tiles, and a part of one
    check(kind, make(*[(1, 150, 1, 8)] * 3), heads=1, head_dim=8)


def test_hidden_keys_of_short_inputs_count_nowhere(one_launch):
    visible = torch.rand(2, 64, device=DEVICE) > 0.3
    check("norm_aware", make((2, 1, 2, 8), (2, 64, 2, 8), (2, 64, 2, 8)), heads=2, head_dim=8, key_mask=visible)


def test_head_and_value_sizes_that_are_no_powers_of_two(name, one_launch):
    check(name, make((1, 50, 2, 20), (1, 23, 2, 20), (1, 23, 2, 12)), heads=2, head_dim=20)


def test_rotary_and_key_mask(kind):
    rotary = Rotary.sequence(37, 8, device=DEVICE), Rotary.sequence(21, 8, device=DEVICE)
    visible = torch.rand(2, 21, device=DEVICE) > 0.3
    check(kind, make((2, 37, 2, 8), (2, 21, 2, 8), (2, 21, 2, 8)), heads=2, head_dim=8, rotary=rotary, key_mask=visible)


def test_packed_sequences_with_positions(kind):
    bounds = torch.tensor([0, 5, 5, 40], device=DEVICE)
    check(kind, make(*[(40, 2, 8)] * 3), heads=2, head_dim=8, cu_seqlens=bounds, rotary=Rotary.packed(bounds, 8))


# a reflection across heads belongs to the heads that it was made for
@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("reflection")] + ["reflection pairs"])
def test_grouped_heads(name):
    check(name, make((2, 21, 4, 8), (2, 21, 2, 8), (2, 21, 2, 8)), heads=2, head_dim=8)


def test_grouped_heads_with_a_map_for_each_query_head(kind):
    check(kind, make((2, 21, 4, 8), (2, 21, 2, 8), (2, 21, 2, 8)), heads=4, head_dim=8)


def test_large_inputs(name):
    # powers and exponentials of these leave every float format: the scale of keys and queries must cancel
    check(name, make(*[(1, 37, 2, 8)] * 3, scale=30.0), heads=2, head_dim=8, bar=2e-5)


@pytest.mark.parametrize("name", ["norm_aware", "norm_aware cosine"])
def test_huge_keys(name):
    q, k, v = make(*[(1, 37, 2, 8)] * 3)
    check(name, (q, k * 1e9, v), heads=2, head_dim=8, bar=2e-5)


@pytest.mark.parametrize("scale", [1e9, 1e12])
@pytest.mark.parametrize("name", ["norm_aware", "norm_aware cosine"])
def test_huge_keys_with_normalised_rotary(name, scale):
    # cubes of these, and their squares in the lengths of channel pairs, leave float32 unless keys are scaled
    q, k, v = make(*[(1, 35, 2, 8)] * 3)
    rotary = Rotary.grid(5, 7, 8, normalised=True, device=DEVICE)
    check(name, (q, k * scale, v), heads=2, head_dim=8, rotary=rotary)


@pytest.mark.parametrize("name", ["polarity", "polarity_exp"])
def test_large_inputs_with_rotary_stay_finite(name):
    # the numerator alone is turned: its largest features may meet a denominator of the smallest ones
    tensors = make(*[(2, 9, 2, 8)] * 3, scale=30.0)
    upstream = torch.ones(2, 9, 2, 8, device=DEVICE)
    rotary = Rotary.sequence(9, 8, device=DEVICE)
    found = outcome("triton", name, torch.float32, tensors, upstream, heads=2, head_dim=8, rotary=rotary)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("name", ["polarity", "polarity_exp", "norm_aware", "split"])
def test_rotary_over_both_halves_of_the_features(name):
    check(name, make(*[(2, 35, 2, 8)] * 3), heads=2, head_dim=8, rotary=Rotary.grid(5, 7, 16, device=DEVICE))


@pytest.mark.parametrize("name", ["relu", "norm_aware", "focused"])
def test_normalised_rotary(name):
    check(name, make(*[(2, 35, 2, 8)] * 3), heads=2, head_dim=8, rotary=Rotary.grid(5, 7, 8, normalised=True, device=DEVICE))


def test_views_of_one_projection_are_read_in_place(kind):
    check(kind, torch.randn(2, 21, 3, 2, 8, device=DEVICE).unbind(2), heads=2, head_dim=8)


def test_channels_that_do_not_lie_side_by_side_are_read_where_they_are(kind):
    # as they come from images or from a convolution over tokens
    tensors = [x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0) for x in make(*[(2, 21, 2, 8)] * 3)]
    check(kind, tensors, heads=2, head_dim=8)


@pytest.mark.parametrize(
    "name",
    ["norm_aware", "norm_aware cosine", "polarity", "polarity_exp", "focused", "focused head", "channel_softmax", "reflection"],
)
def test_degenerate_tokens_stay_finite(name):
    q, k, v = make(*[(2, 21, 2, 8)] * 3)
    q[0, 3], k[0, 5], q[1] = 0, 0, q[1] * 1e-20
    visible = torch.ones(2, 21, dtype=torch.bool, device=DEVICE)
    visible[1] = False
    v[1], k[1] = torch.nan, torch.nan
    out, *gradients = outcome(
        "triton", name, torch.float32, (q, k, v), torch.ones(2, 21, 2, 8, device=DEVICE), heads=2, head_dim=8, key_mask=visible
    )
    assert (out[1] == 0).all()
    assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["elu", "norm_aware"])
def test_an_infinite_value_leaves_no_number_in_its_channel_of_the_rows_that_see_it(name, causal):
    tensors = make(*[(1, 21, 2, 8)] * 3)
    tensors[2][0, 3, 1, 2] = torch.inf
    feature_map = nalaformer.feature_map(name, num_heads=2, head_dim=8).to(DEVICE)
    with nalaformer.use_backend("triton"):
        out = nalaformer.linear_attention(*tensors, feature_map=feature_map, causal=causal)
    expected = torch.ones(1, 21, 2, 8, dtype=torch.bool, device=DEVICE)
    expected[0, 3 if causal else 0 :, 1, 2] = False
    assert torch.equal(out.isfinite(), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["norm_aware", "norm_aware cosine"])
def test_a_query_whose_square_is_infinite_stays_finite(name, causal):
    tensors = make(*[(1, 21, 2, 8)] * 3)
    tensors[0][0, 3] *= 1e20
    upstream = torch.ones(1, 21, 2, 8, device=DEVICE)
    found = outcome("triton", name, torch.float32, tensors, upstream, heads=2, head_dim=8, causal=causal)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("name", ["norm_aware", "focused", "hedgehog"])
def test_tokens_cut_out_of_longer_samples_are_read_in_place(name):
    check(name, [x[:, 3:20] for x in make(*[(2, 25, 2, 8)] * 3)], heads=2, head_dim=8)


class Exponential(nalaformer.FeatureMap):
    """A map that the kernels do not know, whose features are smaller and larger than any number of float16."""

    def query(self, q):
        return (4 * q - 2 * q.square().sum(-1, keepdim=True)).exp()

    def key(self, k):
        return (4 * k).exp()


@pytest.mark.parametrize("causal", [False, True])
def test_features_made_outside_of_the_kernels_may_leave_float16(causal):
    q, k, v = (x.half() for x in make(*[(1, 21, 1, 8)] * 3))
    k[0, 0] = 3
    mapped = Exponential(num_heads=1, head_dim=8)
    with nalaformer.use_backend("triton"):
        out = nalaformer.linear_attention(q, k, v, feature_map=mapped, causal=causal, eps=0.0)
    with nalaformer.use_backend("reference"):
        exact = nalaformer.linear_attention(q.double(), k.double(), v.double(), feature_map=mapped, causal=causal, eps=0.0)
    assert relative_error(out, exact) < 5e-4


def test_a_weak_head_beside_a_strong_one_keeps_its_digits_in_float16():
    tensors = [x.half() for x in make(*[(2, 21, 2, 8)] * 3)]
    for x in tensors[:2]:
        # cubes of a hundredth, in numbers that float16 has few of
        x[:, :, 1] *= 0.01
    upstream = torch.ones(2, 21, 2, 8, device=DEVICE)
    arguments = {"heads": 2, "head_dim": 8, "eps": 0.0}
    exact = outcome("reference", "focused", torch.float64, tensors, upstream, **arguments)[0]
    ours = outcome("triton", "focused", torch.float16, tensors, upstream, **arguments)[0]
    assert relative_error(ours[:, :, 1], exact[:, :, 1]) < 5e-4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["norm_aware", "hedgehog", "channel_softmax", "focused", "focused head", "reflection"])
def test_float16_stays_near_float64(name, causal):
    tensors = [x.half() for x in make(*[(1, 37, 2, 16)] * 3)]
    upstream = torch.randn(1, 37, 2, 16, device=DEVICE).half()
    arguments = {"heads": 2, "head_dim": 16, "causal": causal}
    exact = outcome("reference", name, torch.float64, tensors, upstream, **arguments)
    ours = outcome("triton", name, torch.float16, tensors, upstream, **arguments)
    assert ours[0].dtype == torch.float16
    # gradients pass through one rounding more where features are written out
    for x, y, bar in zip(ours[:4], exact[:4], (5e-4, 1e-3, 1e-3, 5e-4), strict=True):
        # room: the last rounding alone may cost 2^-11 = 4.9e-4, and is most of the error
        assert relative_error(x, y) < bar


@pytest.mark.parametrize("name", ["focused", "reflection"])
def test_rows_of_one_head_stay_in_registers(name, monkeypatch):
    from nalaformer.ops.kernels.linear import cross_head_op

    monkeypatch.setattr(cross_head_op, "features", None)
    check(name, make(*[(2, 21, 1, 8)] * 3), heads=1, head_dim=8)


@pytest.mark.parametrize("tokens", [3, 30])
def test_rows_of_many_heads_are_mapped_in_several_programs(tokens, monkeypatch):
    from nalaformer.ops.kernels.linear import cross_head_op

    # two programs for all tokens: each walks over several tiles, the last of them not full
    monkeypatch.setattr(cross_head_op, "TILE_CHANNELS", 256)
    monkeypatch.setattr(cross_head_op, "PROGRAMS_PER_PROCESSOR", 1)
    for name in ("focused", "reflection"):
        check(name, make(*[(2, tokens, 5, 12)] * 3), heads=5, head_dim=12)


def test_positions_may_be_a_transposed_view():
    positions = torch.randint(0, 50, (37, 2, 1), device=DEVICE).transpose(0, 1)
    rotary = replace(Rotary.sequence(37, 8, device=DEVICE), positions=positions.double())
    check("norm_aware", make(*[(2, 37, 2, 8)] * 3), heads=2, head_dim=8, rotary=rotary)


def test_sums_of_stretches_are_merged_by_group_and_by_scale():
    from nalaformer.ops.kernels.common.split_sums_launch import merge, merge_scaled

    # more stretches than a program reads at once, and more numbers than one holds
    (sums,) = make((21, 6, 2, 9, 10))
    assert relative_error(merge({}, sums, group=3), sums.double().unflatten(1, (2, 3)).sum((0, 2))) < 1e-6
    scale = torch.rand(21, 6, device=DEVICE) * 8
    weight = torch.exp2(scale - scale.amax(0)).double()[..., None, None, None].expand(sums.shape).clone()
    weight[..., -1] = 1  # the number of keys is not scaled
    total, largest = merge_scaled({}, sums, scale)
    assert relative_error(total, (sums * weight).sum(0)) < 1e-6
    torch.testing.assert_close(largest, scale.amax(0), rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["split", "cosine"])
def test_a_zero_query_has_no_side_to_grow_to(direction, causal):
    # its power is 1, with which a slope at zero does not vanish by itself
    feature_map = nalaformer.feature_map("norm_aware", num_heads=1, head_dim=8, direction=direction, lambda_=1.0, tau=1.0).to(
        DEVICE
    )
    q, k, v, upstream = make(*[(1, 21, 1, 8)] * 4)
    q[0, 3] = 0

    def gradient(backend, dtype):
        own = q.to(dtype).requires_grad_()
        with nalaformer.use_backend(backend):
            out = nalaformer.linear_attention(own, k.to(dtype), v.to(dtype), feature_map=feature_map, causal=causal)
        return torch.autograd.grad(out, own, upstream.to(dtype))[0]

    assert relative_error(gradient("triton", torch.float32), gradient("reference", torch.float64)) < 1e-5


if INTERPRETING:

    @pytest.mark.parametrize(("name", "with_rotary"), every_map_once(MAPS, [False, True]))
    def test_products_in_place_of_conversions(name, with_rotary, monkeypatch):
        """What bfloat16 takes, in a type that shows more of its digits."""
        from nalaformer.ops.kernels.linear import call
        from nalaformer.ops.kernels.linear.compiled import bidirectional, bidirectional_gradient

        asked = []
        for module in (bidirectional, bidirectional_gradient):
            monkeypatch.setattr(module, "is_lean", lambda DOT, BD, BV: asked.append(BD) or True)
        monkeypatch.setattr(call, "WHOLE_TOKENS", 16)
        tensors = make((1, 50, 2, 12), (1, 23, 2, 12), (1, 23, 2, 20))
        arguments = {"key_mask": torch.rand(1, 23) > 0.3}
        if with_rotary:
            arguments["rotary"] = Rotary.sequence(50, 12), Rotary.sequence(23, 12)
        # a zero query fades into one that favours no channel
        tensors[0][0, 3] = 0
        # a row's factor goes into the exponent of its features, and the 2^30 of norm-aware keys takes five bits there
        check(name, tensors, heads=2, head_dim=12, bar=1e-5, **arguments)
        assert asked

    @pytest.mark.parametrize(
        ("name", "case"),
        every_map_once(
            [name for name in MAPS if "variance" not in name],
            ["split", "one launch", "split with rotary", "values with a mean"],
        ),
    )
    def test_bfloat16_stays_near_float64(name, case, monkeypatch):
        """Compiled, tests/test_gpu.py sees the same."""
        from helpers.bfloat16_in_the_interpreter import teach_bfloat16
        from nalaformer.ops.kernels.linear import call

        teach_bfloat16(monkeypatch)
        monkeypatch.setattr(call, "WHOLE_TOKENS", 100 if case == "one launch" else 16)
        tensors = [x.bfloat16() for x in make((1, 50, 2, 28), (1, 43, 2, 28), (1, 43, 2, 20))]
        if case == "values with a mean":
            # the output has few digits beside it, and gradients of queries do not contain it
            tensors[2] += 10
        # a zero query fades into one that favours no channel
        tensors[0][0, 3] = 0
        arguments = {"heads": 2, "head_dim": 28, "key_mask": torch.rand(1, 43) > 0.3}
        if case == "split with rotary":
            arguments["rotary"] = Rotary.sequence(50, 28), Rotary.sequence(43, 28)
        check_half_precision(name, torch.bfloat16, tensors, torch.randn(1, 50, 2, 20).bfloat16(), **arguments)

    @pytest.mark.parametrize("name", ["relu", "norm_aware"])
    def test_a_mean_that_no_query_sees_costs_no_digits(name, monkeypatch):
        """Large keys of a channel, and the mean of their values, decide the mean of all; taken out, it would drown the rest."""
        from helpers.bfloat16_in_the_interpreter import teach_bfloat16

        teach_bfloat16(monkeypatch)
        q, k, v = (x.bfloat16() for x in make(*[(1, 150, 1, 16)] * 3))
        q[..., 0] = -q[..., 0].abs()
        k[:, ::10, :, 0], k[:, ::10, :, 1:] = 30, 0
        v[:, ::10] += 100
        check_half_precision(name, torch.bfloat16, (q, k, v), torch.randn(1, 150, 1, 16).bfloat16(), heads=1, head_dim=16)
