"""The norm-aware map: attention sharpens with the query norm, and the features are those of the paper."""

import math

import pytest
import torch
from torch import Tensor, nn

import nalaformer
from helpers.maps import entropy
from nalaformer import attention_weights, linear_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


def norm_aware(head_dim: int = 8, num_heads: int = 2, **options) -> nn.Module:
    return nalaformer.feature_map("norm_aware", num_heads=num_heads, head_dim=head_dim, **options).double()


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
