"""Every option of an attention layer and of a feature map has the effect that its documentation says."""

from dataclasses import fields
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.attention_formula import EXACT, Turning, distance, formula, grid_positions
from helpers.contrast_formula import rala_weight, weighted_and_contrasted
from helpers.option_effects import Effects
from nalaformer import FEATURE_MAPS, Rotary, feature_map, linear_attention
from nalaformer.attention import METHODS, Attention, AttentionConfig, build
from nalaformer.attention.local_mix import resize_values
from nalaformer.feature_maps import map_option_names

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")

PARTS = Effects(field.name for field in fields(AttentionConfig))
MAPS = {name: Effects(map_option_names(name)) for name in FEATURE_MAPS.names() if map_option_names(name)}
GRID = (3, 5)


def make(method: str = "linear", **options) -> Attention:
    """16 channels in 2 heads, float64, parameters away from their start."""
    layer = build(method, dim=16, num_heads=2, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.double()


def tokens(grid: tuple[int, int] = GRID) -> Tensor:
    return torch.randn(2, grid[0] * grid[1], 16, dtype=torch.float64)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 8))


def turning(dim: int, grid: tuple[int, int] = GRID, key_grid: tuple[int, int] = GRID, **options) -> Turning:
    return Turning(grid_positions(*grid), grid_positions(*key_grid), dim=dim, inclusive=True, **options)


# --- parts of a layer ---------------------------------------------------------------------------------------------------


def test_every_part_of_a_layer_is_seen_to():
    assert PARTS.missing() == []


@PARTS.of("feature_map", "map_options")
@pytest.mark.parametrize(("name", "options"), [("relu", {}), ("focused", {"power": 5.0}), ("norm_aware", {"key_power": 2.0})])
def test_a_layer_attends_with_the_map_that_it_names(name, options):
    layer, x = make(feature_map=name, map_options=options), tokens()
    q, k, v = map(heads, layer.qkvg(x).chunk(3, -1))
    chosen = feature_map(name, num_heads=2, head_dim=8, **options).double()
    chosen.load_state_dict(layer.map.state_dict())
    assert distance(layer(x), layer.projection(formula(chosen, q, k, v).flatten(2))) < EXACT


@PARTS.of("feature_map")
def test_no_map_is_softmax():
    layer, x = make("softmax"), tokens()
    q, k, v = map(heads, layer.qkvg(x).chunk(3, -1))
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5).softmax(-1)
    expected = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
    assert distance(layer(x), layer.projection(expected)) < EXACT


@PARTS.of("contrast")
@pytest.mark.parametrize("contrast", ["mean_score", "learned"])
def test_a_contrast_moves_outputs_away_from_the_mean_value(contrast):
    layer, x = make(feature_map="elu", contrast=contrast), tokens()
    q, k, v = map(heads, layer.qkvg(x).chunk(3, -1))
    plain = formula(layer.map, q, k, v)
    phi_q, phi_k = layer.map.query(q), layer.map.key(k)
    strength = torch.einsum("bihf,bhf->bih", phi_q, phi_k.mean(1)) / 8**0.5
    if contrast == "learned":
        strength = F.softplus(layer.contrast.offset + layer.contrast.slope * q.square().mean(-1).sqrt())
    expected = plain + strength[..., None] * (plain - v.mean(1, keepdim=True))
    assert distance(layer(x), layer.projection(expected.flatten(2))) < EXACT


@PARTS.of("contrast_offset")
def test_a_learned_contrast_may_start_at_almost_nothing():
    x = tokens()
    plain = make(feature_map="elu")
    gentle, usual = (
        build("linear", dim=16, num_heads=2, feature_map="elu", contrast="learned", **options).double()
        for options in ({"contrast_offset": -9}, {})
    )
    assert gentle.contrast.offset.tolist() == [-9.0, -9.0]
    for layer in (gentle, usual):
        layer.load_state_dict(plain.state_dict(), strict=False)
    assert distance(gentle(x), plain(x)) < 0.01 < distance(usual(x), plain(x))
    with pytest.raises(ValueError, match="where a learned contrast starts, got -3"):
        make(feature_map="elu", contrast="mean_score", contrast_offset=-3.0)
    with pytest.raises(ValueError, match="finite number, got inf"):
        make(feature_map="elu", contrast="learned", contrast_offset=float("inf"))


@PARTS.of("mixed_blocks")
def test_blocks_have_states_of_their_own_and_queries_mix_them():
    layer, x = make(feature_map="elu", mixed_blocks=(2, 2)), tokens()
    q, k, v = map(heads, layer.qkvg(x).chunk(3, -1))
    height, width = GRID
    number = torch.tensor([(2 * y // height) * 2 + 2 * x // width for y in range(height) for x in range(width)])
    pairs = layer.block_mix.log_mixing.exp()[number][:, number]
    weights = torch.einsum("bihf,bjhf->bhij", layer.map.query(q), layer.map.key(k)) * pairs
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-6 * height * width)
    expected = torch.einsum("bhij,bjhv->bihv", weights, v)
    assert distance(layer(x, GRID), layer.projection(expected.flatten(2))) < EXACT


@PARTS.of("key_weight")
def test_the_weight_of_a_key_is_what_all_queries_give_it():
    layer, x = make(feature_map="elu", key_weight="global_query"), tokens()
    q, k, v = map(heads, layer.qkvg(x).chunk(3, -1))
    weight = rala_weight(layer.map, q, k)
    expected = weighted_and_contrasted(layer.map, q, k, v, key_weight=weight, eps=1e-6)
    assert distance(layer(x), layer.projection(expected.flatten(2))) < EXACT


@PARTS.of("contrast", "key_weight")
@pytest.mark.parametrize("method", ["rala", "mala"])
def test_groups_and_padding_have_means_and_weights_of_their_own(method):
    layer = make(method, position="none", local_mix="none")
    x = tokens()
    groups = torch.tensor([0] * 6 + [1] * 9).expand(2, -1)
    visible = torch.ones(2, 15, dtype=torch.bool)
    visible[:, 4] = False
    found = layer(x, key_mask=visible, groups=groups)
    for part in (slice(0, 6), slice(6, 15)):
        for sample in range(2):
            shown = visible[sample, part]
            alone = layer(x[sample, part][shown][None])[0]
            assert distance(found[sample, part][shown], alone) < EXACT


@PARTS.of("contrast", "key_weight")
def test_softmax_has_neither_contrast_nor_weights_and_rala_is_never_causal():
    for option in ({"contrast": "mean_score"}, {"key_weight": "global_query"}):
        with pytest.raises(ValueError, match="parts of linear attention"):
            make("softmax", **option)
    with pytest.raises(ValueError, match=r"looks at all queries, later ones too, and cannot be causal \(RALA\)"):
        make(feature_map="elu", key_weight="global_query", causal=True)
    layer, x = make(feature_map="elu", contrast="mean_score", causal=True), tokens()
    later = x.clone()
    later[:, 9:] += 1
    assert torch.equal(layer(x)[:, :9], layer(later)[:, :9])


@PARTS.of("weight_dropout")
def test_softmax_weights_are_dropped_as_often_as_told_in_training_alone():
    torch.manual_seed(0)
    layer = Attention(AttentionConfig(feature_map=None, weight_dropout=0.75), dim=16, num_heads=2).double()
    with torch.no_grad():
        # every token sees only itself, and its value comes out as it is
        layer.qkvg.weight.zero_()
        layer.qkvg.bias.zero_()
        layer.qkvg.bias[32:] = 1.0
        layer.projection.weight.copy_(torch.eye(16))
        layer.projection.bias.zero_()
    single = torch.randn(3000, 1, 16, dtype=torch.float64)
    dropped = (layer.train()(single)[:, 0, ::8] == 0).double().mean().item()
    assert dropped == pytest.approx(0.75, abs=0.05)
    assert (layer.eval()(single) == 1).all()
    with pytest.raises(ValueError, match=r"weight_dropout needs the weight of each pair"):
        build("linear", dim=16, num_heads=2, weight_dropout=0.1)


@PARTS.of("position", "rotary_over", "normalised_rotary")
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("over", "dim"), [("head", 8), ("features", 16)])
def test_rotary_turns_heads_or_whole_features(over, dim, normalised):
    options = {"position": "rotary", "rotary_over": over, "normalised_rotary": normalised}
    layer, x = make(feature_map="split", **options), tokens()
    q, k, v = map(heads, layer.qkvg(x).chunk(3, -1))
    expected = formula(layer.map, q, k, v, turning=turning(dim, normalised=normalised)).flatten(2)
    assert distance(layer(x, GRID), layer.projection(expected)) < EXACT


@PARTS.of("position", "normalised_rotary")
def test_softmax_turns_its_queries_and_keys_and_nothing_else():
    layer, x = make("softmax", position="rotary", normalised_rotary=True), tokens()
    same = make("softmax", position="rotary")
    same.load_state_dict(layer.state_dict())
    # weights that sum to one need no other denominator
    assert torch.equal(layer(x, GRID), same(x, GRID))
    places = torch.arange(15).expand(len(x), -1)
    assert distance(layer.forward_at(x, GRID, places), same(x, GRID)) < EXACT


@PARTS.of("position", "table_grid")
def test_a_table_is_added_to_the_keys_cell_by_cell_on_its_own_grid():
    layer, x = make(position="table", table_grid=GRID), tokens()
    q, k, v = map(heads, layer.qkvg(x).chunk(3, -1))
    assert layer.table.table.shape == (1, 15, 16)
    expected = formula(layer.map, q, k + heads(layer.table.table), v).flatten(2)
    assert distance(layer(x, GRID), layer.projection(expected)) < EXACT


@PARTS.of("position", "window")
def test_a_relative_bias_is_added_to_the_scores_by_offset():
    layer, x = make("softmax", position="relative", window=3), tokens((3, 3))
    q, k, v = map(heads, layer.qkvg(x).chunk(3, -1))
    places = grid_positions(3, 3)
    offset = places[:, None] - places + 2
    bias = layer.relative_bias.bias[offset[..., 0] * 5 + offset[..., 1]].permute(2, 0, 1)
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5 + bias).softmax(-1)
    expected = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
    assert distance(layer(x, (3, 3)), layer.projection(expected)) < EXACT


@PARTS.of("local_mix", "kernel_size")
@pytest.mark.parametrize(("mix", "kernels"), [("channels", 16), ("heads", 8)])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_local_mix_adds_a_convolution_of_the_values(mix, kernels, size):
    layer, x = make(local_mix=mix, kernel_size=size), tokens()
    weight, bias = layer.local_mix.conv.weight, layer.local_mix.conv.bias
    assert weight.shape == (kernels, 1, size, size)
    q, k, v = map(heads, layer.qkvg(x).chunk(3, -1))
    image = v.flatten(2).transpose(1, 2).unflatten(2, GRID)
    weight, bias = weight.repeat(16 // kernels, 1, 1, 1), bias.repeat(16 // kernels)
    near = F.conv2d(image, weight, bias, padding=size // 2, groups=16).flatten(2).transpose(1, 2)
    assert distance(layer(x, GRID), layer.projection(formula(layer.map, q, k, v).flatten(2) + near)) < EXACT


@PARTS.of("norm", "gate")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gate", ["none", "linear", "silu"])
def test_norm_comes_before_the_gate_and_both_before_the_projection(norm, gate):
    layer, x = make(norm=norm, gate=gate), tokens()
    q, k, v, *gates = layer.qkvg(x).split(16, -1)
    out = formula(layer.map, *map(heads, (q, k, v))).flatten(2)
    if norm:
        out = F.layer_norm(out, (16,), layer.norm.weight, layer.norm.bias, eps=1e-5)
    assert len(gates) == (gate != "none")
    if gates:
        out = out * (F.silu(gates[0]) if gate == "silu" else gates[0])
    assert distance(layer(x), layer.projection(out)) < EXACT


@PARTS.of("qkv_bias")
def test_without_bias_the_input_projection_keeps_zero_at_zero():
    options = {"gate": "linear", "key_reduction": 2}
    for reduced in ({}, options):
        for bias in (False, True):
            layer = make(qkv_bias=bias, **reduced)
            linears = [layer.qg, layer.kv] if reduced else [layer.qkvg]
            assert all(bool(linear(torch.zeros(1, 16, dtype=torch.float64)).any()) == bias for linear in linears)
            assert layer.projection.bias is not None


@PARTS.of("key_reduction")
def test_reduced_keys_are_those_of_the_smaller_image():
    layer, x = make(key_reduction=2, position="rotary", feature_map="split"), tokens()
    image = F.pad(x.transpose(1, 2).unflatten(2, GRID), (0, 1, 0, 1))
    small = F.conv2d(image, layer.reduce.weight, layer.reduce.bias, stride=2).flatten(2).transpose(1, 2)
    assert small.shape[1] == 2 * 3
    small = F.layer_norm(small, (16,), layer.reduce_norm.weight, layer.reduce_norm.bias, eps=1e-5)
    k, v = map(heads, layer.kv(small).chunk(2, -1))
    expected = formula(layer.map, heads(layer.qg(x)), k, v, turning=turning(8, key_grid=(2, 3))).flatten(2)
    assert distance(layer(x, GRID), layer.projection(expected)) < EXACT


def between(values: list[float], place: float) -> float:
    """The value at a place between two of the list; beyond its ends the last one."""
    place = min(max(place, 0.0), len(values) - 1.0)
    left = min(int(place), len(values) - 2) if len(values) > 1 else 0
    right = min(left + 1, len(values) - 1)
    return values[left] + (place - left) * (values[right] - values[left])


@PARTS.of("value_upsampling")
def test_values_reach_the_full_grid_by_the_centres_of_their_pixels():
    # row 2r and 2r + 1 lie a quarter of a pixel above and below the centre of row r; so do columns
    v = torch.randn(1, 6, 2, 8, dtype=torch.float64)
    rows = v[0, :, 1, 3].unflatten(0, (2, 3)).tolist()
    found = resize_values(v, (2, 3), (4, 6), "grid")[0, :, 1, 3].unflatten(0, (4, 6))
    for row in range(4):
        for column in range(6):
            across = [between(line, column / 2 - 0.25) for line in rows]
            assert found[row, column].item() == pytest.approx(between(across, row / 2 - 0.25), abs=1e-12)


@PARTS.of("value_upsampling")
def test_flat_values_are_interpolated_along_the_row_of_all_tokens():
    v = torch.randn(1, 6, 2, 8, dtype=torch.float64)
    found = resize_values(v, (2, 3), (3, 4), "flat")[0, :, 0, 5]
    line = v[0, :, 0, 5].tolist()
    expected = [between(line, (place + 0.5) / 2 - 0.5) for place in range(12)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


@PARTS.of("value_upsampling")
@pytest.mark.parametrize("how", ["grid", "flat"])
def test_the_local_mix_of_reduced_keys_sees_values_resized_as_asked(how):
    layer, x = make(key_reduction=2, local_mix="channels", kernel_size=3, value_upsampling=how), tokens()
    plain = Attention(AttentionConfig(feature_map="relu", key_reduction=2), dim=16, num_heads=2).double()
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "local_mix" not in name})
    _, _, v, _, key_grid = layer.project(x, GRID, None)
    near = layer.local_mix(resize_values(v, key_grid, GRID, how), GRID)
    unprojected = torch.linalg.solve(layer.projection.weight, (layer(x, GRID) - plain(x, GRID)).mT).mT
    assert distance(unprojected, near) < 1e-9


@PARTS.of("window", "shifted")
@pytest.mark.parametrize(("shifted", "edges"), [(False, (0, 4, 8)), (True, (0, 2, 6, 8))])
def test_a_token_reaches_its_window_and_no_further(shifted, edges):
    layer, x = make(window=4, shifted=shifted), tokens((8, 8))
    before = layer(x, (8, 8))
    x[:, 3 * 8 + 1] += 1
    reached = ((layer(x, (8, 8)) - before).abs().amax((0, 2)) > 1e-9).unflatten(0, (8, 8))
    expected = torch.zeros(8, 8, dtype=torch.bool)
    top, bottom = next((a, b) for a, b in pairwise(edges) if a <= 3 < b)
    expected[top:bottom, edges[0] : edges[1]] = True
    assert torch.equal(reached, expected)


@PARTS.of("causal")
@pytest.mark.parametrize("method", ["linear", "softmax"])
def test_a_causal_token_reaches_later_ones_alone(method):
    for causal in (False, True):
        layer, x = make(method, causal=causal), tokens()
        before = layer(x)
        x[:, 6] += 1
        reached = (layer(x) - before).abs().amax((0, 2)) > 1e-9
        assert torch.equal(reached, torch.arange(15) >= (6 if causal else 0))


@PARTS.of("block")
@pytest.mark.parametrize("method", ["linear", "softmax"])
def test_a_token_of_a_block_reaches_all_of_its_block_and_later_ones(method):
    for block, first in ((1, 6), (4, 4), (7, 0), (30, 0)):
        layer, x = make(method, causal=True, block=block), tokens()
        before = layer(x)
        x[:, 6] += 1
        reached = (layer(x) - before).abs().amax((0, 2)) > 1e-9
        assert torch.equal(reached, torch.arange(15) >= first)


@PARTS.of("forgets")
@pytest.mark.parametrize("contrast", ["none", "learned"])
def test_a_layer_that_forgets_counts_each_key_as_far_as_it_has_faded(contrast):
    layer, x = make(causal=True, forgets=True, contrast=contrast), tokens()
    q, k, v = map(heads, layer.qkvg(x).chunk(3, -1))
    decay = layer.fading
    log_decay = -decay.rate.exp() * F.softplus(decay.projection(x) + decay.step)
    assert (log_decay < 0).all()
    strength = layer.contrast(q) if contrast == "learned" else None
    expected = weighted_and_contrasted(layer.map, q, k, v, causal=True, log_decay=log_decay, contrast=strength, eps=1e-6)
    assert distance(layer(x), layer.projection(expected.flatten(2))) < EXACT


# --- whole methods ------------------------------------------------------------------------------------------------------


def by_hand(layer: Attention, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Any layer without windows: project, add the table, attend, mix nearby, normalise, gate, project."""
    config, size = layer.config, layer.config.key_reduction
    if size == 1:
        (q, k, v, *gate), key_grid = layer.qkvg(x).split(16, -1), grid
    else:
        q, *gate = layer.qg(x).split(16, -1)
        image = F.pad(x.transpose(1, 2).unflatten(2, grid), (0, -grid[1] % size, 0, -grid[0] % size))
        image = F.conv2d(image, layer.reduce.weight, layer.reduce.bias, stride=size)
        key_grid = (image.shape[2], image.shape[3])
        small = image.flatten(2).transpose(1, 2)
        k, v = layer.kv(F.layer_norm(small, (16,), layer.reduce_norm.weight, layer.reduce_norm.bias)).chunk(2, -1)
    k = k if layer.table is None else k + layer.table(key_grid)
    q, k, v = map(heads, (q, k, v))
    turns = None
    if config.position == "rotary":
        turns = turning(8 if config.rotary_over == "head" else 16, grid, key_grid)
    if layer.map is None:
        weights = (torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5).softmax(-1)
        out = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
    elif config.contrast == config.key_weight == "none":
        out = formula(layer.map, q, k, v, turning=turns).flatten(2)
    else:
        given = {"contrast": "mean_score"} if config.contrast != "none" else {"key_weight": rala_weight(layer.map, q, k)}
        out = weighted_and_contrasted(layer.map, q, k, v, turning=turns, eps=1e-6, **given).flatten(2)
    if layer.local_mix is not None:
        full = v if size == 1 else resize_values(v, key_grid, grid, config.value_upsampling)
        conv = layer.local_mix.conv
        share = 16 // len(conv.bias)
        weight, bias = conv.weight.repeat(share, 1, 1, 1), conv.bias.repeat(share)
        image = full.flatten(2).transpose(1, 2).unflatten(2, grid)
        out = out + F.conv2d(image, weight, bias, padding=config.kernel_size // 2, groups=16).flatten(2).transpose(1, 2)
    out = F.layer_norm(out, (16,), layer.norm.weight, layer.norm.bias) if config.norm else out
    if gate:
        out = out * (F.silu(gate[0]) if config.gate == "silu" else gate[0])
    return layer.projection(out)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (7, 1), (3, 5), (2, 13)], ids=str)
@pytest.mark.parametrize("reduction", [{}, {"key_reduction": 2}, {"key_reduction": 5, "value_upsampling": "flat"}], ids=str)
def test_every_method_is_its_formula_on_every_grid(method, grid, reduction):
    # the angles that follow the variance of the input have tests of their own
    still = {"variance": False} if method == "mirrorla" else {}
    layer, x = make(method, **still, **reduction), tokens(grid)
    assert distance(layer(x, grid), by_hand(layer, x, grid)) < EXACT


# --- options of feature maps --------------------------------------------------------------------------------------------


def test_every_option_of_a_feature_map_is_seen_to():
    assert [(name, effects.missing()) for name, effects in MAPS.items() if effects.missing()] == []


def norm_aware(**options):
    return feature_map("norm_aware", num_heads=2, head_dim=8, **options).double()


@MAPS["norm_aware"].of("lambda_", "tau", "norm_scale")
@pytest.mark.parametrize(("lambda_", "tau", "scale"), [(3.0, 0.5, 1.0), (2.0, 0.8, 0.3), (4.0, 0.25, "head")])
def test_the_power_of_queries_is_lambda_times_tau_plus_tanh_of_the_norm(lambda_, tau, scale):
    q = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    norm = q.norm(dim=-1, keepdim=True)
    number = 8**-0.5 if scale == "head" else scale
    power = lambda_ * (tau + (number * norm).tanh())
    unit = q / norm
    expected = torch.cat((unit.relu() ** power, (-unit).relu() ** power), -1)
    found = norm_aware(lambda_=lambda_, tau=tau, norm_scale=scale).query(q)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@MAPS["norm_aware"].of("key_power")
@pytest.mark.parametrize("power", [1.0, 2.5, 3.0])
def test_keys_are_raised_to_the_key_power(power):
    k = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    expected = torch.cat((k.relu() ** power, (-k).relu() ** power), -1)
    torch.testing.assert_close(norm_aware(key_power=power).key(k), expected, rtol=1e-12, atol=1e-12)


@MAPS["norm_aware"].of("direction", "alpha")
@pytest.mark.parametrize("alpha", [1.0, 20.0])
def test_the_cosine_direction_divides_a_feature_by_an_angle_that_alpha_sharpens(alpha):
    k = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    angle = torch.pi / 4 * (alpha * k / k.norm(dim=-1, keepdim=True)).tanh()
    # [cos ; sin] turned by 45 degrees, which leaves products as they are and features without a sign
    halves = angle.cos() + angle.sin(), angle.cos() - angle.sin()
    expected = torch.cat([k.abs() ** 3 * half / 2**0.5 for half in halves], -1)
    torch.testing.assert_close(norm_aware(direction="cosine", alpha=alpha).key(k), expected, rtol=1e-12, atol=1e-12)


@MAPS["norm_aware"].of("learnable")
def test_learnable_powers_follow_their_parameters():
    phi, q = norm_aware(learnable=True), torch.randn(1, 5, 2, 8, dtype=torch.float64)
    with torch.no_grad():
        phi.lambda_.fill_(2.0)
        phi.tau.fill_(0.9)
    torch.testing.assert_close(phi.query(q), norm_aware(lambda_=2.0, tau=0.9).query(q), rtol=1e-12, atol=1e-12)
    assert not list(norm_aware().parameters())


@MAPS["norm_aware"].of("start_gain")
@pytest.mark.parametrize("gain", [0.126928, 2.0])
def test_the_gains_of_mild_powers_start_where_they_are_told(gain):
    phi = norm_aware(powers="mild", start_gain=gain)
    for parameter in (phi.query_gain, phi.key_gain):
        torch.testing.assert_close(F.softplus(parameter).float(), torch.full((2,), gain), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="start_gain must be a finite number above 0"):
        norm_aware(powers="mild", start_gain=0.0)


@MAPS["norm_aware"].of("powers")
def test_mild_powers_are_one_plus_softplus_of_their_parameters():
    phi, x = norm_aware(powers="mild", norm_scale=0.5), torch.randn(1, 5, 2, 8, dtype=torch.float64)
    with torch.no_grad():
        phi.query_gain.copy_(torch.tensor([-1.0, 2.0]))
        phi.key_gain.copy_(torch.tensor([0.5, -3.0]))
    query_gain, key_gain = F.softplus(phi.query_gain)[:, None], F.softplus(phi.key_gain)[:, None]
    norm = x.norm(dim=-1, keepdim=True)
    for found, base, power in (
        (phi.query(x), x / norm, 1 + query_gain * (0.5 * norm).tanh()),
        (phi.key(x), x, 1 + key_gain),
    ):
        expected = torch.cat((base.relu() ** power, (-base).relu() ** power), -1)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@MAPS["channel_softmax"].of("gain")
def test_the_gain_of_a_channel_softmax_is_a_longer_vector():
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    maps = [feature_map("channel_softmax", num_heads=2, head_dim=8, gain=gain) for gain in (1.0, 3.0)]
    torch.testing.assert_close(maps[1].key(x), maps[0].key(3 * x), rtol=1e-12, atol=1e-15)
    # fewer and larger features: more than the share of the largest in a shorter vector
    assert (maps[1].query(x).amax(-1) > maps[0].query(x).amax(-1)).all()


@MAPS["focused"].of("power", "norm_over")
@pytest.mark.parametrize("power", [1.0, 4.0])
@pytest.mark.parametrize(("norm_over", "dims"), [("all", (-2, -1)), ("head", (-1,))])
def test_focusing_takes_the_power_and_keeps_the_norm_over_what_is_asked(power, norm_over, dims):
    phi = feature_map("focused", num_heads=2, head_dim=8, power=power, norm_over=norm_over).double()
    with torch.no_grad():
        phi.scale.normal_()
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    positive = (x.relu() + 1e-6) / F.softplus(phi.scale)
    powered = positive**power
    length, powered_length = (torch.linalg.vector_norm(y, dim=dims, keepdim=True) for y in (positive, powered))
    expected = powered * length / powered_length
    torch.testing.assert_close(phi.key(x), expected, rtol=1e-12, atol=1e-12)


@MAPS["polarity"].of("alpha")
@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_alpha_bounds_the_powers_of_polarity_from_one_upwards(alpha):
    phi = feature_map("polarity", num_heads=2, head_dim=8, alpha=alpha).double()
    with torch.no_grad():
        phi.power.normal_()
        phi.scale.normal_()
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    size = x.abs() / F.softplus(phi.scale)
    magnitude = size ** (1 + alpha * phi.power.sigmoid())
    expected = torch.cat((magnitude * (x > 0), magnitude * (x < 0)), -1)
    torch.testing.assert_close(phi.key(x), expected, rtol=1e-12, atol=1e-12)


@MAPS["reflection"].of("cross_head", "blockwise")
@pytest.mark.parametrize("cross_head", [False, True])
@pytest.mark.parametrize("blockwise", [False, True])
def test_a_reflection_has_the_parts_that_are_asked_for(cross_head, blockwise):
    phi = feature_map("reflection", num_heads=2, head_dim=8, cross_head=cross_head, blockwise=blockwise).double()
    with torch.no_grad():
        for parameter in phi.parameters():
            parameter.normal_()
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    reflected = x
    if cross_head:
        unit = phi.normal / phi.normal.norm()
        flat = x.flatten(2)
        reflected = (flat - 2 * (flat @ unit)[..., None] * unit).unflatten(2, (2, 8))
    if blockwise:
        axis = torch.stack((phi.theta.cos(), phi.theta.sin()), -1)  # [H, D/2, 2]
        pairs = reflected.unflatten(-1, (4, 2))
        reflected = (pairs - 2 * (pairs * axis).sum(-1, keepdim=True) * axis).flatten(-2)
    torch.testing.assert_close(phi.key(x), reflected.relu(), rtol=1e-12, atol=1e-12)


@MAPS["reflection"].of("variance")
def test_the_variance_of_the_input_turns_the_reflection():
    q, k, v = torch.randn(3, 1, 9, 2, 8, dtype=torch.float64).unbind()
    k[..., :2] *= 10
    phi = feature_map("reflection", num_heads=2, head_dim=8, variance=True).double()
    still = feature_map("reflection", num_heads=2, head_dim=8).double()
    still.load_state_dict({name: value for name, value in phi.state_dict().items() if name in ("normal", "theta")})
    with torch.no_grad():
        for strength, moves in ((0.0, False), (1.0, True)):
            phi.strength.fill_(strength)
            out, expected = (linear_attention(q, k, v, feature_map=each) for each in (phi, still))
            assert (distance(out, expected) > 1e-3) == moves


# --- the op and rotary positions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [100.0, 10000.0])
def test_the_base_sets_how_fast_the_slow_pairs_turn(base):
    rotary = Rotary.sequence(4, 8, base=base)
    assert rotary.frequencies.tolist() == pytest.approx([base ** (-pair / 4) for pair in range(4)])
    assert Rotary.grid(2, 3, 8, base=base).frequencies.tolist() == pytest.approx([1.0, 1 / base])
    assert Rotary.packed(torch.tensor([0, 2, 5]), 8, base=base).frequencies.tolist() == rotary.frequencies.tolist()


def test_positions_of_a_sequence_count_on_from_its_start():
    assert Rotary.sequence(3, 8, start=7).positions.flatten().tolist() == [7, 8, 9]
