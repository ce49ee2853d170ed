"""The norm-aware map without its bound: powers that grow with the norm, keys that are treated as queries."""

import pytest
import torch
import torch.nn.functional as F

import nalaformer
from nalaformer.ops import attention_weights

pytestmark = pytest.mark.usefixtures("one_thread")


def norm_aware(**options):
    return nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8, **options).double()


def normalised(features):
    return features / features.sum(-1, keepdim=True)


def entropy(weights):
    return -(weights * weights.clamp(min=1e-300).log()).sum(-1)


def test_without_saturation_the_power_grows_in_proportion_to_the_norm():
    q = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    norm = q.norm(dim=-1, keepdim=True)
    phi = norm_aware(saturation="none", norm_scale=0.3)
    power = 3 * (0.5 + 0.3 * norm)
    expected = torch.cat((q.relu() ** power, (-q).relu() ** power), -1)
    # what multiplies all features of a query cancels
    torch.testing.assert_close(normalised(phi.query(q)), normalised(expected), rtol=1e-10, atol=1e-12)


def test_a_large_query_that_doubles_attends_more_sharply_without_saturation_alone():
    q, k = (torch.randn(1, 40, 2, 8, dtype=torch.float64) for _ in range(2))
    q = 6 * q / q.norm(dim=-1, keepdim=True)
    drops = {}
    for saturation in ("tanh", "none"):
        phi = norm_aware(saturation=saturation)
        once, twice = (entropy(attention_weights(size * q, k, feature_map=phi, eps=0.0)).mean() for size in (1, 2))
        drops[saturation] = float(once - twice)
    assert abs(drops["tanh"]) < 1e-3
    assert drops["none"] > 0.03


@pytest.mark.parametrize("powers", ["published", "mild"])
def test_keys_like_queries_keep_their_length_and_are_sharpened_by_it(powers):
    k = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    phi = norm_aware(keys="like_queries", powers=powers, saturation="none", norm_scale="head", start_gain=0.7)
    size = k.norm(dim=-1, keepdim=True)
    turn = size / 8**0.5
    power = 1 + 0.7 * turn if powers == "mild" else 3 * (0.5 + turn)
    halves = torch.cat((k.relu() ** power, (-k).relu() ** power), -1)
    expected = size * halves / halves.norm(dim=-1, keepdim=True)
    # the parameters are kept in float32
    torch.testing.assert_close(phi.key(k), expected, rtol=1e-6, atol=1e-9)


OPEN = {"powers": "mild", "norm_scale": "head", "saturation": "none", "keys": "like_queries", "start_gain": 0.7}


def test_exponential_growth_is_expm1_of_the_channels_times_the_gain():
    x = 3 * torch.randn(1, 5, 2, 8, dtype=torch.float64)
    phi = norm_aware(**OPEN, growth="exponential")
    halves = torch.cat((torch.expm1(0.7 * x.relu()), torch.expm1(0.7 * (-x).relu())), -1)
    torch.testing.assert_close(normalised(phi.query(x)), normalised(halves), rtol=1e-5, atol=1e-9)
    size = x.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(phi.key(x), size * halves / halves.norm(dim=-1, keepdim=True), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("growth", ["power", "exponential"])
def test_short_vectors_have_the_features_of_the_sign_split(growth):
    x = 1e-3 * torch.randn(1, 5, 2, 8, dtype=torch.float64)
    phi, split = norm_aware(**OPEN, growth=growth), torch.cat((x.relu(), (-x).relu()), -1)
    torch.testing.assert_close(normalised(phi.query(x)), normalised(split), rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(phi.key(x), split, rtol=1e-2, atol=1e-6)


def test_a_large_query_that_doubles_attends_more_sharply_with_exponential_growth():
    q, k = (torch.randn(1, 40, 2, 8, dtype=torch.float64) for _ in range(2))
    q = 6 * q / q.norm(dim=-1, keepdim=True)
    phi = norm_aware(**OPEN, growth="exponential")
    once, twice = (entropy(attention_weights(size * q, k, feature_map=phi, eps=0.0)).mean() for size in (1, 2))
    assert once - twice > 0.03


@pytest.mark.parametrize("gain", [0.126928, 2.0])
def test_the_gains_of_mild_powers_start_where_they_are_told(gain):
    phi = norm_aware(powers="mild", start_gain=gain)
    for parameter in (phi.query_gain, phi.key_gain):
        torch.testing.assert_close(F.softplus(parameter), torch.full_like(parameter, gain), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"saturation": "relu"}, 'saturation must be "tanh" .* or "none", got \'relu\''),
        ({"keys": "queries"}, 'keys must be "powers" .* or "like_queries", got \'queries\''),
        ({"growth": "cubic"}, 'growth must be "power" .* or "exponential", got \'cubic\''),
        ({"growth": "exponential"}, 'needs direction="split", powers="mild", .* got .*published.*pass all four'),
        (OPEN | {"growth": "exponential", "direction": "cosine"}, "needs direction=.*got 'cosine'"),
        ({"start_gain": 0.0}, "start_gain must be a finite number above 0"),
    ],
)
def test_unknown_forms_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        norm_aware(**options)
