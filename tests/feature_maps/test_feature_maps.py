"""The feature maps: what their papers prove about them, and what their options do."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import nalaformer
from helpers.maps import MAP_NAMES, VARIANCE_AWARE
from nalaformer import FEATURE_MAPS, attention_weights, linear_attention
from nalaformer.attention import build

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


def norm_aware(head_dim: int = 8, num_heads: int = 2, **options) -> nn.Module:
    return nalaformer.feature_map("norm_aware", num_heads=num_heads, head_dim=head_dim, **options).double()


def reflection(head_dim: int = 8, num_heads: int = 2, **options) -> nn.Module:
    """With its parameters anywhere, not only where training starts."""
    made = nalaformer.feature_map("reflection", num_heads=num_heads, head_dim=head_dim, **options).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return made


def entropy(features: Tensor) -> Tensor:
    """PSE: the entropy of the features over the channels."""
    share = features / features.sum(-1, keepdim=True)
    return -torch.xlogy(share, share).sum(-1)


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


# --- norm-aware ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"direction": "cosine"},
        {"direction": "cosine", "alpha": 1.0},
        {"norm_scale": "head"},
        {"powers": "mild"},
        {"lambda_": 2.0, "tau": 0.6},
    ],
    ids=str,
)
def test_channel_entropy_falls_with_the_query_norm(options):
    direction = torch.nn.functional.normalize(torch.randn(200, 1, 2, 8, dtype=torch.float64), dim=-1)
    norms = torch.logspace(-3, 1.5, 60, dtype=torch.float64)
    feature_map = norm_aware(**options)
    entropies = torch.stack([entropy(feature_map.query(norm * direction)) for norm in norms])
    # where tanh is flat the entropy stays equal up to rounding
    assert entropies.diff(dim=0).max() < 1e-12
    assert (entropies[0] - entropies[-1]).min() > 1e-3


def test_channel_entropy_of_a_plain_map_ignores_the_query_norm(make_qkv):
    # the diagnosis of the paper, and the proof that the test above can fail
    q, _, _ = make_qkv()
    plain = nalaformer.feature_map("split", num_heads=2, head_dim=8)
    assert (entropy(plain.query(q)) - entropy(plain.query(5 * q))).abs().max() < 1e-12


def test_a_larger_query_attends_more_sharply_on_random_keys(make_qkv):
    # over tokens this is no theorem, but a strong tendency
    q, k, _ = make_qkv(4, 49)
    feature_map = norm_aware()
    flat, sharp = (
        entropy(attention_weights(size * q / q.norm(dim=-1, keepdim=True), k, feature_map=feature_map)) for size in (0.1, 3.0)
    )
    assert (sharp < flat).double().mean() > 0.9


def test_token_entropy_can_rise_with_the_query_norm():
    # the counter-example of two tokens, kept so that nobody claims the theorem
    k = torch.tensor([[1.0, 0.0], [1.0, 10.0]], dtype=torch.float64)[None, :, None]
    direction = torch.tensor([0.8, 0.6], dtype=torch.float64)[None, None, None]
    feature_map = norm_aware(head_dim=2, num_heads=1)
    flat, sharp = (entropy(attention_weights(size * direction, k, feature_map=feature_map)) for size in (0.1, 3.0))
    assert (sharp > flat).all()


def test_split_features_are_the_published_ones(make_qkv):
    q, k, _ = make_qkv()
    feature_map = norm_aware()
    norm = q.norm(dim=-1, keepdim=True)
    power = 3 * (0.5 + norm.tanh())
    expected = torch.cat(((q / norm).relu() ** power, (-q / norm).relu() ** power), -1)
    assert (feature_map.query(q) - expected).abs().max() < 1e-12
    assert (feature_map.key(k) - torch.cat(((k**3).relu(), ((-k) ** 3).relu()), -1)).abs().max() < 1e-12


def test_cosine_features_are_those_of_the_paper_with_a_safe_angle_turned_by_45_degrees(make_qkv):
    q, k, _ = make_qkv()
    feature_map = norm_aware(direction="cosine", alpha=1.0)

    def turned(size: Tensor, angle: Tensor) -> Tensor:
        return torch.cat((size * (angle.cos() + angle.sin()), size * (angle.cos() - angle.sin())), -1) / math.sqrt(2)

    norm = q.norm(dim=-1, keepdim=True)
    expected = turned((q / norm).abs() ** (3 * (0.5 + norm.tanh())), math.pi / 4 * (q / norm).tanh())
    assert (feature_map.query(q) - expected).abs().max() < 1e-12
    expected = turned(k.abs() ** 3, math.pi / 4 * (k / k.norm(dim=-1, keepdim=True)).tanh())
    assert (feature_map.key(k) - expected).abs().max() < 1e-12


def test_cosine_weights_of_opposite_directions_keep_their_digits():
    # cos a cos b + sin a sin b is then about zero: a difference of rounded numbers would have no digit right
    k = torch.tensor([[1.0, 2.0], [2.0, 1.0]])[None, :, None]
    q = torch.tensor([-1.0, -1.5])[None, None, None]
    weights = attention_weights(q, k, feature_map=norm_aware(head_dim=2, num_heads=1, direction="cosine").float(), eps=0.0)
    exact = attention_weights(
        q.double(), k.double(), feature_map=norm_aware(head_dim=2, num_heads=1, direction="cosine"), eps=0.0
    )
    assert (weights - exact).abs().max() < 1e-5


def test_cosine_weights_approach_split_weights_as_alpha_grows(make_qkv):
    q, k, _ = make_qkv(2, 20)
    split = attention_weights(q, k, feature_map=norm_aware(), eps=0.0)
    gaps = [
        float((attention_weights(q, k, feature_map=norm_aware(direction="cosine", alpha=alpha), eps=0.0) - split).abs().max())
        for alpha in (1.0, 10.0, 100.0, 1e9)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.01
    assert gaps[-1] < 1e-12


def test_norm_scale_head_stands_for_one_over_the_root_of_the_head_size(make_qkv):
    q, _, _ = make_qkv(head_dim=20)
    by_name, by_number = norm_aware(head_dim=20, norm_scale="head"), norm_aware(head_dim=20, norm_scale=20**-0.5)
    assert torch.equal(by_name.query(q), by_number.query(q))
    assert not torch.equal(by_name.query(q), norm_aware(head_dim=20).query(q))


def test_the_published_power_is_saturated_where_the_scaled_one_is_not():
    norms = torch.tensor([4.0, 8.0], dtype=torch.float64)[:, None]
    published, scaled = (norm_aware(head_dim=64, norm_scale=scale).query_power(norms) for scale in (1.0, "head"))
    assert published.diff(dim=0).abs().max() < 0.01
    assert scaled.diff(dim=0).abs().min() > 0.5


def test_learnable_powers_start_as_the_published_ones(make_qkv):
    q, k, _ = make_qkv()
    fixed, learnable = norm_aware(), norm_aware(learnable=True)
    assert (fixed.query(q) - learnable.query(q)).abs().max() < 1e-12
    assert torch.equal(fixed.key(k), learnable.key(k))


@pytest.mark.parametrize("options", [{"learnable": True}, {"powers": "mild"}], ids=str)
@pytest.mark.parametrize("direction", ["split", "cosine"])
def test_learned_powers_get_gradients(options, direction, causal, make_qkv):
    q, k, v = make_qkv()
    feature_map = norm_aware(direction=direction, **options)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    out.square().sum().backward()
    assert len(list(feature_map.parameters())) == 2
    assert all((parameter.grad != 0).all() for parameter in feature_map.parameters())


def test_fixed_powers_are_no_parameters():
    assert not list(norm_aware().parameters())


def test_learned_powers_never_fall_below_one(make_qkv):
    # a power below 1 has no finite gradient at zero
    feature_map = norm_aware(learnable=True)
    with torch.no_grad():
        feature_map.lambda_.fill_(0.1)
    assert feature_map.query_power(torch.ones(1, 1, 2, 1, dtype=torch.float64)).min() >= 1


def test_mild_powers_start_near_one():
    feature_map = norm_aware(powers="mild")
    norms = torch.tensor([0.0, 1.0, 100.0], dtype=torch.float64).view(1, 3, 1, 1).expand(1, 3, 2, 1)
    powers = feature_map.query_power(norms)
    assert powers.min() >= 1
    assert powers.max() < 1.2
    assert 1 < feature_map.key_power(norms).max() < 1.2


@pytest.mark.parametrize("direction", ["split", "cosine"])
def test_a_zero_query_favours_no_channel(direction, make_qkv):
    _, k, v = make_qkv(1, 9)
    feature_map = norm_aware(direction=direction)
    features = feature_map.query(torch.zeros_like(k))
    assert features.min() > 0
    assert features.max() - features.min() < 1e-12
    # a weighted mean of the values, finite and inside their range
    out = linear_attention(torch.zeros_like(k), k, v, feature_map=feature_map)
    assert (out <= v.amax(1, keepdim=True)).all()
    assert (out >= v.amin(1, keepdim=True)).all()


def test_query_features_are_continuous_at_the_smallest_trusted_norm():
    direction = torch.nn.functional.normalize(torch.randn(50, 1, 2, 8, dtype=torch.float64), dim=-1)
    for made in (norm_aware(), norm_aware(direction="cosine")):
        below, above = (made.query(size * direction) for size in (0.999999e-5, 1.000001e-5))
        assert (below - above).abs().max() < 1e-4


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
        turned = feature_map.turn(size * q, weight, normal)
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
    exact = wide.turn(q, wide.query_weight, wide.query_normal)
    # 8 products in float32; in bfloat16 the error would be some 1e-2
    torch.testing.assert_close(turned, exact, rtol=0, atol=2e-6)


def test_norm_preserving_features_are_two_distributions(make_map, make_qkv):
    _, k, _ = make_qkv()
    for name in ("norm_preserving", "hedgehog"):
        halves = make_map(name, dtype=torch.float64).key(k).unflatten(-1, (2, 8))
        assert (halves.sum(-1) - 1).abs().max() < 1e-12


# --- reflection ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"cross_head": False}, {"blockwise": False}, {"cross_head": False, "blockwise": False}],
    ids=["both", "blocks", "across", "none"],
)
class TestReflection:
    """R as a matrix over the channels of all heads, whichever of its parts are on."""

    @staticmethod
    def matrix(feature_map) -> Tensor:
        basis = torch.eye(16, dtype=torch.float64).view(1, 16, 2, 8)
        return feature_map.reflect(basis, feature_map.angles(basis)).flatten(2)[0].T

    def test_each_reflection_undoes_itself(self, options):
        x = torch.randn(1, 3, 2, 8, dtype=torch.float64)
        across = reflection(**options)
        assert (across.reflect_across_heads(across.reflect_across_heads(x)) - x).abs().max() < 1e-12
        blocks = reflection(**(options | {"cross_head": False}))
        angles = blocks.angles(x)
        assert (blocks.reflect(blocks.reflect(x, angles), angles) - x).abs().max() < 1e-12

    def test_dot_products_stay(self, options, make_qkv):
        made = reflection(**options)
        q, k, _ = make_qkv()
        reflected = [made.reflect(x, made.angles(x)).flatten(2) for x in (q, k)]
        before, after = (x @ y.transpose(1, 2) for x, y in ((q.flatten(2), k.flatten(2)), reflected))
        assert (before - after).abs().max() < 1e-12

    def test_folding_into_a_projection_gives_the_same_features(self, options):
        made = reflection(**options)
        x = torch.randn(2, 5, 12, dtype=torch.float64)
        linear = nn.Linear(12, 16).double()
        weight, bias = made.fold(linear.weight, linear.bias)
        folded = nn.functional.linear(x, weight, bias).relu().unflatten(-1, (2, 8))
        assert (folded - made.query(linear(x).unflatten(-1, (2, 8)))).abs().max() < 1e-12

    def test_folding_a_layer_keeps_its_output(self, options):
        layer = build("mirrorla", dim=16, num_heads=2, variance=False, **options).double()
        x = torch.randn(2, 12, 16, dtype=torch.float64)
        before = layer(x, (3, 4))
        assert (layer.fold()(x, (3, 4)) - before).abs().max() < 1e-12


def test_single_reflections_are_symmetric():
    for options in ({"cross_head": False}, {"blockwise": False}):
        matrix = TestReflection.matrix(reflection(**options))
        assert (matrix - matrix.T).abs().max() < 1e-12
        assert (matrix @ matrix - torch.eye(16)).abs().max() < 1e-12
        assert (matrix - torch.eye(16)).abs().max() > 0.1


def test_a_folded_layer_with_reduced_keys_keeps_its_output():
    layer = build("mirrorla", dim=16, num_heads=2, variance=False, key_reduction=2).double()
    x = torch.randn(2, 15, 16, dtype=torch.float64)
    before = layer(x, (3, 5))
    assert (layer.fold()(x, (3, 5)) - before).abs().max() < 1e-12


def test_a_folded_layer_with_a_position_table_keeps_its_output():
    layer = build("mirrorla", dim=16, num_heads=2, variance=False, position="table", table_grid=(4, 4)).double()
    layer.table.table.data.normal_()
    x = torch.randn(2, 15, 16, dtype=torch.float64)
    before = layer(x, (3, 5))
    assert (layer.fold()(x, (3, 5)) - before).abs().max() < 1e-12


def test_folding_without_bias_gives_no_bias():
    weight, bias = reflection().fold(torch.randn(16, 12, dtype=torch.float64))
    assert weight.shape == (16, 12)
    assert bias is None


def test_training_starts_near_a_swap_of_channels(make_qkv):
    q, _, _ = make_qkv()
    made = nalaformer.feature_map("reflection", num_heads=2, head_dim=8, cross_head=False).double()
    swapped = q.unflatten(-1, (4, 2)).flip(-1).flatten(-2).relu()
    assert (made.query(q) - swapped).abs().max() < 0.3


def test_the_variance_aware_part_starts_at_zero(make_qkv):
    q, k, v = make_qkv()
    aware = nalaformer.feature_map("reflection", num_heads=2, head_dim=8, variance=True).double()
    static = nalaformer.feature_map("reflection", num_heads=2, head_dim=8).double()
    static.load_state_dict({"normal": aware.normal, "theta": aware.theta})
    assert torch.equal(linear_attention(q, k, v, feature_map=aware), linear_attention(q, k, v, feature_map=static))


def test_the_variance_aware_angles_move_at_most_a_quarter_of_pi(make_qkv):
    q, k, _ = make_qkv()
    aware = reflection(variance=True)
    with torch.no_grad():
        aware.strength.fill_(100.0)
        aware.sensitivity.fill_(100.0)
    moved = (aware.given(q, k, key_mask=None, causal=False).angles - aware.theta).abs()
    assert moved.max() <= math.pi / 4 + 1e-6
    assert moved.max() > 0.5


def test_the_block_variance_is_that_of_queries_and_keys_pooled(make_qkv):
    q, k, _ = make_qkv(2, 31, keys=17)
    made = reflection(variance=True, cross_head=False)
    key_mask = torch.rand(2, 17) < 0.5
    for sample in range(2):
        pooled = torch.cat((q[sample], k[sample, key_mask[sample]])).unflatten(-1, (4, 2))  # [T, H, D/2, 2]
        expected = pooled.permute(1, 2, 0, 3).flatten(2).var(-1, correction=0)
        assert (made.block_variance(q, k, key_mask)[sample] - expected).abs().max() < 1e-12


def test_the_block_variance_does_not_depend_on_its_pieces(monkeypatch, make_qkv):
    q, k, _ = make_qkv(2, 31)
    made = reflection(variance=True)
    key_mask = torch.rand(2, 31) < 0.5
    whole = made.block_variance(q, k, key_mask)
    monkeypatch.setattr("nalaformer.feature_maps.reflection.PIECE", 4)
    assert (made.block_variance(q, k, key_mask) - whole).abs().max() < 1e-12


def test_the_block_variance_survives_a_large_mean(make_qkv):
    q, k, _ = make_qkv(2, 31, dtype=torch.float32)
    made = reflection(variance=True, cross_head=False).float()
    near, far = (made.block_variance(q + offset, k + offset, None) for offset in (0.0, 1000.0))
    assert ((far - near) / near).abs().max() < 1e-3


def test_the_variance_aware_reflection_refuses_to_be_causal(make_qkv):
    q, k, v = make_qkv()
    with pytest.raises(ValueError, match=r"cannot be causal, got variance=True; use feature_map\(.*variance=False"):
        linear_attention(q, k, v, feature_map=reflection(variance=True), causal=True)


def test_the_variance_aware_reflection_refuses_to_fold():
    with pytest.raises(ValueError, match="cannot be folded; train with variance=False"):
        reflection(variance=True).fold(torch.randn(16, 12))


def test_the_variance_aware_reflection_does_not_map_a_query_by_itself(make_qkv):
    with pytest.raises(ValueError, match="call it through linear_attention"):
        reflection(variance=True).query(make_qkv()[0])


def test_folding_wants_the_projection_of_its_own_size():
    with pytest.raises(ValueError, match="must have 16 output channels, got 17"):
        reflection().fold(torch.randn(17, 12))


def test_only_a_reflection_folds_into_a_layer():
    with pytest.raises(ValueError, match="only a reflection folds into the projection, got norm_aware"):
        build("nalaformer", dim=16, num_heads=2).fold()


# --- names and options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEATURE_MAPS.names())
def test_a_misspelt_map_name_suggests_the_nearest(name):
    misspelt = name[:-1] if len(name) > 4 else name + "x"
    with pytest.raises(ValueError, match=f"unknown feature map '{misspelt}'; did you mean .*'{name}'"):
        nalaformer.feature_map(misspelt, num_heads=2, head_dim=8)


def test_a_map_name_like_no_other_lists_them_all():
    with pytest.raises(ValueError, match="unknown feature map 'qqq'; known: elu, focused, hedgehog, norm_aware"):
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
