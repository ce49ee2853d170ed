"""The feature maps: what their papers prove about them, and what their options do."""

import copy
import math

import pytest
import torch
from torch import nn

import nalaformer
from helpers.maps import MAP_NAMES, VARIANCE_AWARE, entropy
from nalaformer import FEATURE_MAPS, attention_weights, linear_attention

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "one_thread"), pytest.mark.pairwise]

# --- every map ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MAP_NAMES, VARIANCE_AWARE])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_attention_weights_are_never_negative(name, scale, make_map, make_qkv):
    q, k, _ = make_qkv(2, 49)
    feature_map = make_map(name, dtype=torch.float64)
    for stream in range(feature_map.streams):
        weights = attention_weights(q * scale, k * scale, feature_map=feature_map, stream=stream)
        assert weights.min() >= 0


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 30.0])
def test_no_feature_is_negative_in_float32(map_name, scale, make_map, make_qkv):
    # then no product of features is, whatever is rounded and however it is summed
    q, k, _ = make_qkv(2, 49, dtype=torch.float32)
    feature_map = make_map(map_name)
    assert min(x.min() for x in (feature_map.key(k * scale), *feature_map.streams_as_numbers(q * scale))) >= 0


def test_attention_weights_of_a_zero_query_are_never_negative(map_name, make_map, make_qkv):
    q, k, _ = make_qkv()
    weights = attention_weights(torch.zeros_like(q), k, feature_map=make_map(map_name, dtype=torch.float64))
    assert weights.min() >= 0


def test_attention_weights_sum_to_one_but_for_eps(map_name, make_map, make_qkv):
    q, k, _ = make_qkv(2, 49, head_dim=20)
    feature_map = make_map(map_name, head_dim=20, dtype=torch.float64)
    without, with_eps = (attention_weights(q, k, feature_map=feature_map, eps=eps).sum(-1) for eps in (0.0, 1e-2))
    assert (without - 1).abs().max() < 1e-12
    assert (with_eps < 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_keep_the_dtype_of_the_input(map_name, dtype, make_map, make_qkv):
    q, k, _ = make_qkv(dtype=dtype)
    feature_map = make_map(map_name)
    assert {x.dtype for x in (feature_map.key(k), *feature_map.streams_as_numbers(q))} == {dtype}


def test_a_token_is_mapped_by_itself(map_name, make_map, make_qkv):
    # what makes a map usable for causal attention, packing and recurrent decoding
    q, k, _ = make_qkv(2, 9)
    feature_map = make_map(map_name, dtype=torch.float64)
    one = slice(3, 4)
    assert (feature_map.key(k)[:, one] - feature_map.key(k[:, one])).abs().max() < 1e-12
    assert (feature_map.query(q)[:, one] - feature_map.query(q[:, one])).abs().max() < 1e-12


def test_the_representation_names_the_sizes(map_name, make_map):
    assert "num_heads=2, head_dim=8" in repr(make_map(map_name))


@pytest.mark.parametrize("name", FEATURE_MAPS.names())
def test_a_map_needs_positive_sizes(name):
    with pytest.raises(ValueError, match="num_heads and head_dim must be positive whole numbers, got 0 and 8"):
        nalaformer.feature_map(name, num_heads=0, head_dim=8)


# --- polarity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 0.7])
def test_same_minus_opposite_sign_products_are_the_dot_product(scale, make_qkv):
    q, k, _ = make_qkv()
    # alpha = 0 makes every power 1; both sides are divided by softplus(scale)
    feature_map = nalaformer.feature_map("polarity", num_heads=2, head_dim=8, alpha=0.0).double()
    nn.init.constant_(feature_map.scale, scale)
    same, opposite = feature_map.streams_as_numbers(q)
    phi_k = feature_map.key(k)
    difference = torch.einsum("bihf,bjhf->bhij", same, phi_k) - torch.einsum("bihf,bjhf->bhij", opposite, phi_k)
    divisor = math.log1p(math.exp(scale)) ** 2
    assert (difference - torch.einsum("bihd,bjhd->bhij", q, k) / divisor).abs().max() < 1e-12


def test_polarity_powers_are_one_plus_alpha_sigmoid(make_map, make_qkv):
    _, k, _ = make_qkv()
    feature_map = make_map("polarity", dtype=torch.float64)
    power = 1 + 4 / (1 + torch.exp(-feature_map.power))
    size = k / torch.log1p(feature_map.scale.exp())
    expected = torch.cat((size.relu() ** power, (-size).relu() ** power), -1)
    assert (feature_map.key(k) - expected).norm() / expected.norm() < 1e-12


def test_the_opposite_stream_asks_with_the_negated_query(make_map, make_qkv):
    q, _, _ = make_qkv()
    feature_map = make_map("polarity", dtype=torch.float64)
    _, opposite = feature_map.streams_as_numbers(q)
    assert (opposite - feature_map.streams_as_numbers(-q)[0]).abs().max() < 1e-12


def test_polarity_exp_features_are_those_of_the_paper(make_map, make_qkv):
    q, k, _ = make_qkv()
    feature_map = make_map("polarity_exp", dtype=torch.float64)
    same, opposite = feature_map.streams_as_numbers(q)
    signs = [torch.cat((x.relu(), (-x).relu()), -1) for x in (q, -q)]
    assert (same - (torch.exp(signs[0] * feature_map.same.sigmoid()) - 1)).abs().max() < 1e-12
    assert (opposite - (torch.exp(signs[1] * feature_map.opposite.sigmoid()) - 1)).abs().max() < 1e-12
    assert (feature_map.key(k) - (torch.exp(torch.cat((k.relu(), (-k).relu()), -1)) - 1)).abs().max() < 1e-12


@pytest.mark.parametrize("stream", [0, 1])
def test_each_stream_reads_its_own_half_of_the_values(stream, make_map, make_qkv):
    for name in ("polarity", "polarity_exp"):
        q, k, v = make_qkv()
        feature_map = make_map(name, dtype=torch.float64)
        before = linear_attention(q, k, v, feature_map=feature_map)
        v[..., 4 * stream : 4 * stream + 4] += 1
        moved = (linear_attention(q, k, v, feature_map=feature_map) - before).abs() > 1e-6
        assert moved[..., 4 * stream : 4 * stream + 4].all()
        assert not moved[..., 4 * (1 - stream) : 4 * (1 - stream) + 4].any()


@pytest.mark.parametrize("log_scale", [0.0, 1e-3, 3.0, 50.0])
@pytest.mark.parametrize("name", ["norm_aware", "norm_aware+cosine", "norm_aware+mild", "polarity", "polarity_exp"])
def test_scaled_key_features_are_the_features_divided_by_the_scale(name, log_scale, make_map, make_qkv):
    # to the last digits of each feature, small ones too: a query may overlap with nothing but those
    _, k, _ = make_qkv()
    feature_map = make_map(name, dtype=torch.float64)
    scale = torch.full((2, 7, 2, 1), log_scale, dtype=torch.float64)
    scaled, plain = feature_map.key(k, scale), feature_map.key(k)
    assert (scaled * math.exp(log_scale) - plain).abs().le(1e-12 * plain.abs()).all()


# --- focused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [1.0, 3.0, 7.5])
@pytest.mark.parametrize(("norm_over", "dims"), [("all", (-2, -1)), ("head", (-1,))])
def test_focusing_keeps_the_norm(power, norm_over, dims, make_qkv):
    q, _, _ = make_qkv()
    feature_map = nalaformer.feature_map("focused", num_heads=2, head_dim=8, power=power, norm_over=norm_over).double()
    nn.init.normal_(feature_map.scale)
    before = (q.relu() + 1e-6) / torch.log1p(feature_map.scale.exp())
    after = feature_map.query(q)
    assert (after.norm(dim=dims) - before.norm(dim=dims)).abs().max() < 1e-12


def test_focusing_sharpens(make_qkv):
    q, _, _ = make_qkv()
    flat, sharp = (
        nalaformer.feature_map("focused", num_heads=2, head_dim=8, power=power, norm_over="head").double()
        for power in (1.0, 3.0)
    )
    assert (entropy(sharp.query(q)) < entropy(flat.query(q))).all()


# --- norm-preserving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_turning_keeps_the_norm(size, make_map, make_qkv):
    q, _, _ = make_qkv()
    feature_map = make_map("norm_preserving", dtype=torch.float64)
    for weight, normal in (
        (feature_map.query_weight, feature_map.query_normal),
        (feature_map.key_weight, feature_map.key_normal),
    ):
        turned = feature_map.change_direction(size * q, weight, normal)
        assert (turned.norm(dim=-1) / (size * q).norm(dim=-1) - 1).abs().max() < 1e-12
        assert (turned - size * q).abs().max() > 0.1 * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norm_preserving_matrix_of_queries_is_float32_whatever_the_map_is(make_map, make_qkv, dtype):
    feature_map = make_map("norm_preserving", dtype=dtype)
    matrix, wide = feature_map.query_matrix(), copy.deepcopy(feature_map).double()
    assert matrix.dtype == torch.float32
    q = make_qkv()[0]
    turned = torch.einsum("bnhd,hed->bnhe", q, matrix.double())
    turned = turned * (q.norm(dim=-1, keepdim=True) / turned.norm(dim=-1, keepdim=True))
    exact = wide.change_direction(q, wide.query_weight, wide.query_normal)
    # 8 products in float32; in bfloat16 the error would be some 1e-2
    torch.testing.assert_close(turned, exact, rtol=0, atol=2e-6)


def test_norm_preserving_features_are_two_distributions(make_map, make_qkv):
    _, k, _ = make_qkv()
    for name in ("norm_preserving", "hedgehog", "channel_softmax"):
        halves = make_map(name, dtype=torch.float64).key(k).unflatten(-1, (2, 8))
        assert (halves.sum(-1) - 1).abs().max() < 1e-12


# --- names and options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEATURE_MAPS.names())
def test_a_misspelt_map_name_suggests_the_nearest(name):
    misspelt = name[:-1] if len(name) > 4 else name + "x"
    with pytest.raises(ValueError, match=f"unknown feature map '{misspelt}'; did you mean .*'{name}'"):
        nalaformer.feature_map(misspelt, num_heads=2, head_dim=8)


def test_a_map_name_like_no_other_lists_them_all():
    with pytest.raises(ValueError, match="unknown feature map 'qqq'; known: channel_softmax, elu, focused, hedgehog, norm_"):
        nalaformer.feature_map("qqq", num_heads=2, head_dim=8)


def test_a_misspelt_option_suggests_the_nearest():
    with pytest.raises(ValueError, match="option of the feature map 'norm_aware': 'directon'; did you mean 'direction'"):
        nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8, directon="cosine")


def test_a_name_cannot_be_registered_twice():
    with pytest.raises(ValueError, match="the feature map 'relu' is registered already; choose another name"):
        FEATURE_MAPS.register("relu")(FEATURE_MAPS["relu"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("norm_aware", {"direction": "sine"}, 'direction must be "split" or "cosine", got \'sine\''),
        ("norm_aware", {"powers": "strong"}, 'powers must be "published" or "mild", got \'strong\''),
        ("norm_aware", {"tau": 0.2}, r"lambda_ \* tau and key_power must be at least 1, got 3.0 \* 0.2 and 3.0"),
        ("norm_aware", {"key_power": 0.5}, "key_power must be at least 1, got .* and 0.5"),
        ("norm_aware", {"norm_scale": "root"}, "norm_scale must be a number or \"head\" .*, got 'root'"),
        # negative ones turn the power downwards, through 1 and below 0, where features of small channels are infinite
        ("norm_aware", {"norm_scale": -1.0}, "norm_scale must .*, got -1.0"),
        ("norm_aware", {"lambda_": -3.0, "tau": -0.5}, "lambda_ .*must .*, got -3.0"),
        ("polarity", {"alpha": -1.0}, "alpha must be a finite number at least 0, .*, got -1.0"),
        ("focused", {"power": 0.5}, "power must be a finite number at least 1, .*, got 0.5"),
        ("focused", {"norm_over": "tokens"}, 'norm_over must be "all" .* or "head", got \'tokens\''),
        ("reflection", {"variance": True, "blockwise": False}, "needs blockwise=True, got blockwise=False"),
    ],
)
def test_an_option_out_of_range_is_refused_with_rule_and_value(name, options, message):
    with pytest.raises(ValueError, match=message):
        nalaformer.feature_map(name, num_heads=2, head_dim=8, **options)


def test_block_reflections_need_an_even_head_size():
    with pytest.raises(ValueError, match="head_dim must be even, got 7"):
        nalaformer.feature_map("reflection", num_heads=2, head_dim=7)
