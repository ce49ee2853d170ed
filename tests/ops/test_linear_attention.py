"""The op against the formula, over maps, sizes, backends and positions."""

import math

import pytest
import torch
from torch import Tensor

import nalaformer
from helpers.attention_formula import EXACT, Turning, distance, formula, grid_positions, row_positions
from helpers.maps import MAP_NAMES, VARIANCE_AWARE
from nalaformer import FeatureMap, Rotary, attention_weights, linear_attention

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "one_thread"), pytest.mark.pairwise]


# --- the formula, over maps, sizes and backends -------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 64), (2, 20), (7, 8), (49, 64), (197, 20), (1000, 8)])
def test_output_is_the_formula(map_name, causal, backend, tokens, head_dim, make_map, make_qkv):
    q, k, v = make_qkv(2, tokens, 2, head_dim)
    feature_map = make_map(map_name, head_dim=head_dim, dtype=torch.float64)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    assert distance(out, formula(feature_map, q, k, v, causal=causal)) < EXACT


@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (9, 1), (7, 150), (150, 7)])
def test_cross_attention_is_the_formula(map_name, backend, queries, keys, make_map, make_qkv):
    q, k, v = make_qkv(2, queries, keys=keys)
    feature_map = make_map(map_name, dtype=torch.float64)
    out = linear_attention(q, k, v, feature_map=feature_map)
    assert distance(out, formula(feature_map, q, k, v)) < EXACT


def test_values_may_be_wider_than_heads(map_name, causal, backend, make_map, make_qkv):
    q, k, v = make_qkv(values=22)
    feature_map = make_map(map_name, dtype=torch.float64)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    assert distance(out, formula(feature_map, q, k, v, causal=causal)) < EXACT


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
def test_eps_counts_once_per_visible_key(map_name, causal, backend, eps, make_map, make_qkv):
    q, k, v = make_qkv()
    feature_map = make_map(map_name, dtype=torch.float64)
    key_mask = torch.rand(2, 7) < 0.6
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, key_mask=key_mask, eps=eps)
    assert distance(out, formula(feature_map, q, k, v, causal=causal, key_mask=key_mask, eps=eps)) < EXACT


@pytest.mark.parametrize("name", ["relu", "split", "norm_aware", "polarity"])
def test_without_eps_tiny_keys_lose_nothing(name, causal, backend, make_map, make_qkv):
    # maps that are homogeneous in the key: its size cancels, unless eps outweighs it
    q, k, v = make_qkv(head_dim=20)
    feature_map = make_map(name, head_dim=20, dtype=torch.float64)
    if name == "polarity":
        torch.nn.init.zeros_(feature_map.power)
    ordinary, tiny, with_eps = (
        linear_attention(q, k * size, v, feature_map=feature_map, causal=causal, eps=eps)
        for size, eps in ((1.0, 0.0), (1e-9, 0.0), (1e-9, 1e-6))
    )
    assert distance(tiny, ordinary) < EXACT
    assert with_eps.norm() < 0.5 * ordinary.norm()


@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_heads_with_a_map_for_the_query_heads(map_name, causal, backend, key_heads, make_map, make_qkv):
    q, k, v = make_qkv(2, 7, 4, key_heads=key_heads)
    feature_map = make_map(map_name, num_heads=4, dtype=torch.float64)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    assert distance(out, formula(feature_map, q, k, v, causal=causal)) < EXACT


# a reflection across heads mixes exactly the heads that it was made for; test_errors has its refusal
@pytest.mark.parametrize("name", [name for name in MAP_NAMES if name != "reflection"])
def test_grouped_heads_with_a_map_for_the_key_heads(name, causal, backend, make_map, make_qkv):
    q, k, v = make_qkv(2, 7, 6, key_heads=2)
    feature_map = make_map(name, num_heads=2, dtype=torch.float64)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    assert distance(out, formula(feature_map, q, k, v, causal=causal)) < EXACT


@pytest.mark.parametrize("tokens", [7, 197])
def test_hidden_keys_do_not_take_part(map_name, causal, backend, tokens, make_map, make_qkv):
    q, k, v = make_qkv(3, tokens)
    key_mask = torch.rand(3, tokens) < 0.5
    feature_map = make_map(map_name, dtype=torch.float64)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, key_mask=key_mask)
    assert distance(out, formula(feature_map, q, k, v, causal=causal, key_mask=key_mask)) < EXACT


@pytest.mark.parametrize("size", [1e3, 1e5])
def test_huge_keys_and_queries_still_follow_the_formula(map_name, causal, backend, size, make_map, make_qkv):
    # float64 holds the features of 1e5 as they are; the library divides them by a scale, which must cancel everywhere
    if map_name == "polarity_exp":
        size = 20 * math.log10(size)
    q, k, v = make_qkv(tokens=150)
    k = k * torch.where(torch.rand(2, 150, 1, 1) < 0.1, size, 1.0)
    q = q * torch.where(torch.rand(2, 150, 1, 1) < 0.1, size, 1.0)
    feature_map = make_map(map_name, dtype=torch.float64)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, eps=0.0)
    assert distance(out, formula(feature_map, q, k, v, causal=causal, eps=0.0)) < EXACT


def test_eps_is_scaled_along_with_huge_keys(map_name, causal, backend, make_map, make_qkv):
    # sizes whose scale stays within what may be taken off eps; an eps so large that a wrong unit would show
    q, k, v = make_qkv(tokens=150)
    k = k * torch.where(torch.rand(2, 150, 1, 1) < 0.02, 4.0 if map_name == "polarity_exp" else 12.0, 1.0)
    feature_map = make_map(map_name, dtype=torch.float64)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, eps=1e3)
    assert distance(out, formula(feature_map, q, k, v, causal=causal, eps=1e3)) < EXACT


def test_eps_is_scaled_along_with_huge_queries(map_name, causal, backend, make_map, make_qkv):
    q, k, v = make_qkv(tokens=150)
    # far enough that both streams of every polarity map divide the features of a query
    q = q * torch.where(torch.rand(2, 150, 1, 1) < 0.2, 8.0 if map_name == "polarity_exp" else 12.0, 1.0)
    feature_map = make_map(map_name, dtype=torch.float64)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, eps=1e3)
    assert distance(out, formula(feature_map, q, k, v, causal=causal, eps=1e3)) < EXACT


def test_gradients_with_huge_keys_are_those_of_the_formula(map_name, causal, backend, make_map, make_qkv):
    size = 20.0 if map_name == "polarity_exp" else 1e4
    q, k, v = make_qkv(1, 9)
    inputs = [x.requires_grad_() for x in (q, k * size, v)]
    feature_map = make_map(map_name, dtype=torch.float64)
    upstream = torch.randn(1, 9, 2, 8, dtype=torch.float64)
    out = linear_attention(*inputs, feature_map=feature_map, causal=causal, eps=0.0)
    actual = torch.autograd.grad(out, inputs, upstream)
    expected = torch.autograd.grad(formula(feature_map, *inputs, causal=causal, eps=0.0), inputs, upstream)
    for x, y, unit in zip(actual, expected, (1.0, size, 1.0), strict=True):
        # the gradient of a huge key is small by its size; measured in its own unit the floor of `distance` is harmless
        assert distance(x * unit, y * unit) < 1e-11


# --- rotary -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalised", [False, True], ids=["numerator", "normalised"])
def test_rotary_along_a_sequence_is_the_formula(map_name, causal, backend, normalised, make_map, make_qkv):
    q, k, v = make_qkv(2, 19)
    feature_map = make_map(map_name, dtype=torch.float64)
    rotary = Rotary.sequence(19, 8, normalised=normalised)
    turning = Turning(row_positions(19), row_positions(19), 8, inclusive=False, normalised=normalised)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, rotary=rotary)
    assert distance(out, formula(feature_map, q, k, v, causal=causal, turning=turning)) < EXACT


@pytest.mark.parametrize("normalised", [False, True], ids=["numerator", "normalised"])
def test_rotary_over_a_grid_is_the_formula(map_name, causal, backend, normalised, make_map, make_qkv):
    q, k, v = make_qkv(2, 15, head_dim=20)
    feature_map = make_map(map_name, head_dim=20, dtype=torch.float64)
    rotary = Rotary.grid(5, 3, 20, normalised=normalised)
    turning = Turning(grid_positions(5, 3), grid_positions(5, 3), 20, inclusive=True, normalised=normalised)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, rotary=rotary)
    assert distance(out, formula(feature_map, q, k, v, causal=causal, turning=turning)) < EXACT


@pytest.mark.parametrize("normalised", [False, True], ids=["numerator", "normalised"])
def test_rotary_positions_may_differ_by_sample(map_name, causal, backend, normalised, make_map, make_qkv):
    q, k, v = make_qkv(3, 11)
    feature_map = make_map(map_name, dtype=torch.float64)
    positions = torch.randint(0, 40, (3, 11, 1))
    rotary = Rotary(positions, Rotary.sequence(1, 8).frequencies, normalised)
    turning = Turning(positions, positions, 8, inclusive=False, normalised=normalised)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, rotary=rotary)
    assert distance(out, formula(feature_map, q, k, v, causal=causal, turning=turning)) < EXACT


def test_cross_attention_takes_a_rotary_for_each_side(map_name, backend, make_map, make_qkv):
    q, k, v = make_qkv(2, 5, keys=12)
    feature_map = make_map(map_name, dtype=torch.float64)
    rotary = (Rotary.sequence(5, 8, start=30), Rotary.sequence(12, 8))
    turning = Turning(row_positions(5) + 30, row_positions(12), 8, inclusive=False)
    out = linear_attention(q, k, v, feature_map=feature_map, rotary=rotary)
    assert distance(out, formula(feature_map, q, k, v, turning=turning)) < EXACT


def test_rotary_and_mask_and_grouped_heads_go_together(map_name, causal, backend, make_map, make_qkv):
    q, k, v = make_qkv(2, 13, 4, key_heads=2)
    feature_map = make_map(map_name, num_heads=4, dtype=torch.float64)
    key_mask = torch.rand(2, 13) < 0.6
    turning = Turning(row_positions(13), row_positions(13), 8, inclusive=False)
    arguments = {"causal": causal, "key_mask": key_mask}
    out = linear_attention(q, k, v, feature_map=feature_map, rotary=Rotary.sequence(13, 8), **arguments)
    assert distance(out, formula(feature_map, q, k, v, turning=turning, **arguments)) < EXACT


def test_rotary_may_span_both_halves_of_the_features(causal, backend, make_map, make_qkv):
    q, k, v = make_qkv(2, 15)
    feature_map = make_map("polarity_exp", dtype=torch.float64)
    turning = Turning(grid_positions(3, 5), grid_positions(3, 5), 16, inclusive=True)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, rotary=Rotary.grid(3, 5, 16))
    assert distance(out, formula(feature_map, q, k, v, causal=causal, turning=turning)) < EXACT


def test_rotary_depends_on_relative_positions_only(map_name, causal, make_map, make_qkv):
    q, k, v = make_qkv(1, 9)
    feature_map = make_map(map_name, dtype=torch.float64)
    near, far = (
        linear_attention(q, k, v, feature_map=feature_map, causal=causal, rotary=Rotary.sequence(9, 8, start=start))
        for start in (0, 100_000)
    )
    assert distance(far, near) < 1e-9


def test_rotary_keeps_its_digits_far_from_the_start(make_map, make_qkv):
    # a float32 angle at position 262,144 is off by 0.02
    q, k, v = make_qkv(1, 9, dtype=torch.float32)
    feature_map = make_map("norm_aware")
    rotary = Rotary.sequence(9, 8, start=262_144)
    turning = Turning(row_positions(9) + 262_144, row_positions(9) + 262_144, 8, inclusive=False)
    out = linear_attention(q, k, v, feature_map=feature_map, rotary=rotary)
    assert distance(out, formula(feature_map, q, k, v, turning=turning)) < 2e-6


@pytest.mark.parametrize("name", [*MAP_NAMES, VARIANCE_AWARE])
@pytest.mark.parametrize("grid", [False, True], ids=["sequence", "grid"])
def test_normalised_rotary_weights_are_a_distribution(name, grid, make_map, make_qkv):
    q, k, _ = make_qkv(2, 21, head_dim=20)
    feature_map = make_map(name, head_dim=20, dtype=torch.float64)
    rotary = Rotary.grid(3, 7, 20, normalised=True) if grid else Rotary.sequence(21, 20, normalised=True)
    for stream in range(feature_map.streams):
        weights = attention_weights(q, k, feature_map=feature_map, stream=stream, rotary=rotary, eps=0.0)
        # two opposite pairs cancel to a rounding error of the sum's terms
        assert weights.min() >= -1e-15
        assert (weights.sum(-1) - 1).abs().max() < EXACT


def test_numerator_only_rotary_weights_are_not_a_distribution(make_map, make_qkv):
    # the published form: a test that it is never called convex by mistake
    q, k, _ = make_qkv(2, 21)
    weights = attention_weights(q, k, feature_map=make_map("norm_aware", dtype=torch.float64), rotary=Rotary.sequence(21, 8))
    assert weights.min() < 0
    assert (weights.sum(-1) - 1).abs().max() > 0.01


# --- the variance-aware reflection: bidirectional only, so it has its own tests -----------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_variance_aware_reflection_is_the_formula_at_its_angles(backend, masked, make_map, make_qkv):
    q, k, v = make_qkv(3, 31)
    feature_map = make_map(VARIANCE_AWARE, dtype=torch.float64)
    key_mask = torch.rand(3, 31) < 0.6 if masked else None
    outputs = linear_attention(q, k, v, feature_map=feature_map, key_mask=key_mask, query_mask=key_mask)
    for sample in range(3):
        shown = key_mask[sample] if masked else torch.ones(31, dtype=torch.bool)
        at_rest = reflection_at_its_angles(feature_map, q[sample, shown], k[sample, shown])
        mine = slice(sample, sample + 1)
        expected = formula(at_rest, q[mine], k[mine][:, shown], v[mine][:, shown])
        assert distance(outputs[mine], expected) < EXACT


def test_every_query_of_cross_attention_counts_in_the_variances_whatever_keys_are_hidden(backend, make_map, make_qkv):
    # as many queries as keys by chance: the mask of the keys says nothing about the queries
    q, k, v = make_qkv(1, 9)
    feature_map = make_map(VARIANCE_AWARE, dtype=torch.float64)
    key_mask = torch.arange(9)[None] < 5
    every = torch.ones(1, 9, dtype=torch.bool)
    out = linear_attention(q, k, v, feature_map=feature_map, key_mask=key_mask, query_mask=every)
    assert distance(out, linear_attention(q, k[:, :5], v[:, :5], feature_map=feature_map)) < EXACT
    # one query fewer and there is nothing to confuse
    fewer = linear_attention(q[:, :8], k, v, feature_map=feature_map, key_mask=key_mask)
    assert distance(fewer, linear_attention(q[:, :8], k[:, :5], v[:, :5], feature_map=feature_map)) < EXACT


def test_the_variance_aware_reflection_asks_which_queries_are_padding(make_map, make_qkv):
    q, k, v = make_qkv(1, 9)
    with pytest.raises(ValueError, match=r"as many keys as queries \(9\) and no query_mask; pass query_mask=key_mask in self"):
        linear_attention(q, k, v, feature_map=make_map(VARIANCE_AWARE), key_mask=torch.ones(1, 9, dtype=torch.bool))


def test_a_query_mask_of_another_shape_is_refused(make_map, make_qkv):
    q, k, v = make_qkv(1, 9)
    with pytest.raises(ValueError, match=r"query_mask must be bool \[batch, queries\] = \(1, 9\).*got torch.bool \(1, 8\)"):
        linear_attention(q, k, v, feature_map=make_map("relu"), query_mask=torch.ones(1, 8, dtype=torch.bool))


def reflection_at_its_angles(feature_map: FeatureMap, q: Tensor, k: Tensor) -> FeatureMap:
    """The static reflection that the variance of tokens q and k [N, H, D] leads to."""
    static = nalaformer.feature_map("reflection", num_heads=q.shape[1], head_dim=q.shape[2]).double()
    u = feature_map.normal.detach()
    tokens = torch.cat((q, k)).flatten(1)  # [2 N, C]
    tokens = tokens - 2 * (tokens @ u)[:, None] * u / u.square().sum()
    theta = feature_map.theta.detach().clone()
    for head in range(q.shape[1]):
        channels = tokens[:, head * q.shape[2] : (head + 1) * q.shape[2]]
        logs = [(channels[:, 2 * i : 2 * i + 2].var(correction=0) + 1e-6).log() for i in range(q.shape[2] // 2)]
        for i, log in enumerate(logs):
            away = feature_map.sensitivity[head].detach() * (log - sum(logs) / len(logs))
            theta[head, i] += math.pi / 4 * feature_map.strength[head].detach().tanh() * away.tanh()
    with torch.no_grad():
        static.normal.copy_(u)
        static.theta.copy_(theta)
    return static


def test_variance_aware_reflection_with_grouped_heads(backend, make_map, make_qkv):
    # each head by itself (no mixing across heads): a group of queries, and the keys repeated for it, is plain attention
    q, k, v = make_qkv(2, 9, 4, key_heads=2)
    options = {"cross_head": False, "variance": True}
    feature_map = nalaformer.feature_map("reflection", num_heads=4, head_dim=8, **options).double()
    out = linear_attention(q, k, v, feature_map=feature_map)
    expected = linear_attention(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), feature_map=feature_map)
    assert distance(out, expected) < EXACT
    for_keys = nalaformer.feature_map("reflection", num_heads=2, head_dim=8, **options).double()
    with pytest.raises(ValueError, match=r"keys for each, got 4 query and 2 key heads.*num_heads=4"):
        linear_attention(q, k, v, feature_map=for_keys)
