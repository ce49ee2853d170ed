"""What the attention layer refuses: the rule, the value, the remedy."""

import pytest
import torch

from helpers.attention_layers import LINEAR_METHODS, make
from nalaformer.attention import METHODS, AttentionConfig, build

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(("dim", "heads"), [(18, 4), (0, 1), (16, 0), (16, -2)])
def test_dim_must_be_a_multiple_of_the_heads(method, dim, heads):
    with pytest.raises(ValueError, match=f"dim must be a positive multiple of num_heads, got dim {dim} and {heads} heads"):
        build(method, dim=dim, num_heads=heads)


@pytest.mark.parametrize("name", ["polaformerpp", "nalaformer", "mirrorla"])
def test_rotary_wants_head_sizes_in_fours(name):
    with pytest.raises(ValueError, match=r'multiples of 4, got 6 \(dim 12 / 2 heads\); choose other heads or position="none"'):
        build(name, dim=12, num_heads=2)


def test_two_streams_want_even_head_sizes():
    with pytest.raises(ValueError, match=r"polarity reads the values in 2 equal parts .*, got 5 \(dim 10 / 2 heads\)"):
        build("polaformer", dim=10, num_heads=2)


def test_an_unknown_method_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"unknown attention 'nalaformr'; did you mean 'nalaformer'.* known: flatten"):
        build("nalaformr", dim=16, num_heads=2)


def test_a_misspelt_part_suggests_the_nearest(method):
    with pytest.raises(ValueError, match="'kernel_siz'; did you mean 'kernel_size'"):
        build(method, dim=16, num_heads=2, kernel_siz=3)


def test_a_misspelt_map_option_suggests_the_nearest():
    with pytest.raises(ValueError, match="'directon'; did you mean 'direction'"):
        build("nalaformer", dim=16, num_heads=2, directon="cosine")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "silly"}, "unknown gate 'silly'; did you mean 'silu'. known: linear, none, silu"),
        ({"position": "rotery"}, "unknown position 'rotery'; did you mean 'rotary'"),
        ({"local_mix": "channel"}, "unknown local_mix 'channel'; did you mean 'channels'"),
        ({"rotary_over": "heads"}, "unknown rotary_over 'heads'; did you mean 'head'"),
        ({"value_upsampling": "grids"}, "unknown value_upsampling 'grids'; did you mean 'grid'"),
        ({"feature_map": "norm_awar"}, "unknown feature map 'norm_awar'; did you mean 'norm_aware'"),
        ({"kernel_size": 4}, "kernel_size must be positive and odd, .*, got 4"),
        ({"kernel_size": -1}, "kernel_size must be .*, got -1"),
        ({"key_reduction": 0}, "key_reduction must be at least 1, got 0"),
        ({"causal": True}, 'a causal layer must not see later tokens: use local_mix="none" and key_reduction=1'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_part_is_refused_with_rule_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        build("nalaformer", dim=16, num_heads=2, **options)


@pytest.mark.parametrize("shape", [(12, 16), (2, 12, 15), (2, 16, 3, 4)], ids=str)
def test_tokens_of_another_shape_are_refused(method, shape):
    with pytest.raises(ValueError, match=r"x must be tokens \[batch, tokens, 16\], got shape .*; flatten an image with"):
        make(method)(torch.randn(shape))


@pytest.mark.parametrize("grid", [(3, 5), (0, 12), (-3, -4)], ids=str)
def test_a_grid_that_does_not_cover_the_tokens_is_refused(method, grid):
    with pytest.raises(ValueError, match="grid must "):
        make(method)(torch.randn(2, 12, 16), grid)


def test_a_grid_of_three_sizes_is_refused_by_name(method):
    with pytest.raises(ValueError, match="grid"):
        make(method)(torch.randn(2, 12, 16), (3, 4, 1))


def test_no_tokens_at_all_are_refused(method):
    with pytest.raises(ValueError, match="at least one token"):
        make(method)(torch.randn(2, 0, 16))


@pytest.mark.parametrize(
    "key_mask",
    [torch.ones(2, 12), torch.ones(2, 11, dtype=torch.bool), torch.ones(1, 12, dtype=torch.bool)],
    ids=["float", "short", "batch"],
)
def test_a_wrong_mask_is_refused(method, key_mask):
    with pytest.raises(ValueError, match=r"key_mask must be bool \[batch, keys\] = \(2, 12\), .*, got "):
        make(method)(torch.randn(2, 12, 16), (3, 4), key_mask)


def test_a_mask_with_reduced_keys_is_refused(method):
    layer = make(method, key_reduction=2)
    with pytest.raises(ValueError, match=r"key_mask needs a key for each token, got key_reduction=2.*; use key_reduction=1"):
        layer(torch.randn(2, 12, 16), (3, 4), torch.ones(2, 12, dtype=torch.bool))


def test_a_config_cannot_be_changed_by_accident():
    config = AttentionConfig(feature_map="relu")
    with pytest.raises(AttributeError):
        config.gate = "silu"


@pytest.mark.parametrize("name", LINEAR_METHODS)
def test_another_map_comes_with_its_own_defaults(name):
    layer = build(name, dim=16, num_heads=2, feature_map="split")
    assert type(layer.map).__name__ == "Split"
    assert layer(torch.randn(2, 12, 16), (3, 4)).shape == (2, 12, 16)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("softmax", {"shifted": True}, r"shifted windows .* need window=1 or more, got window=0"),
        ("softmax", {"position": "relative"}, r"need window=1 or more, got window=0"),
        ("softmax", {"window": -1}, r"or 0 for none, got -1"),
        ("softmax", {"window": 4, "causal": True}, r"windows .* look around: use causal=False"),
        ("softmax", {"window": 4, "key_reduction": 2}, r"as many keys as queries.*key_reduction=1"),
        ("linear", {"window": 4, "position": "relative"}, r"needs the weight of each pair, got the linear relu map"),
    ],
)
def test_windows_that_cannot_be_say_why(method, options, message):
    with pytest.raises(ValueError, match=message):
        build(method, dim=16, num_heads=2, **options)
