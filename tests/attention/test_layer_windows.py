"""Attention inside windows and groups of tokens."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from helpers.attention_layers import LINEAR_METHODS, make
from nalaformer.attention import METHODS, Attention

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("shifted", [False, True], ids=["plain", "shifted"])
@pytest.mark.parametrize("grid", [(1, 1), (3, 3), (6, 9), (7, 8), (2, 11), (4, 3)], ids=str)
def test_windows_are_attention_among_the_tokens_of_a_tile(grid, shifted):
    layer = make("softmax", window=3, shifted=shifted, position="relative", dtype=torch.float64)
    x = torch.randn(2, grid[0] * grid[1], 16, dtype=torch.float64)
    key_mask = torch.rand(2, x.shape[1]) < 0.8

    # by definition: tiles of 3, of which a shift moves the first border to 1 along sides that have more than one tile
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    offsets = [1 if shifted and side > 3 else 0 for side in grid]
    tiles = [
        (place.flatten() - offset).div(3, rounding_mode="floor") for place, offset in zip((rows, columns), offsets, strict=True)
    ]
    together = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    for tile in tiles:
        together &= tile[:, None] == tile
    apart = [place.flatten()[:, None] - place.flatten() for place in (rows, columns)]
    bias = layer.relative_bias.bias[((apart[0] + 2) * 5 + apart[1] + 2).clamp(0, 24)].permute(2, 0, 1)
    visible = together & key_mask[:, None, None, :]
    q, k, v = layer.qkvg(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-2, -1) / 8**0.5 + bias).masked_fill(~visible, -math.inf)
    expected = layer.projection((scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2).flatten(2))

    assert (layer(x, grid, key_mask) - expected)[key_mask].abs().max() < 1e-12


@pytest.mark.parametrize(("shifted", "edges"), [(False, (0, 4, 8)), (True, (0, 2, 6, 8))], ids=["plain", "shifted"])
@pytest.mark.parametrize("name", LINEAR_METHODS)
def test_linear_windows_are_the_layer_on_each_tile(name, shifted, edges):
    # without positions, which begin anew at the corner of a window: a tile by itself may be a part of one
    layer = make(name, position="none", local_mix="none", window=4, shifted=shifted)
    alone = Attention(replace(layer.config, window=0, shifted=False), dim=16, num_heads=2)
    alone.load_state_dict(layer.state_dict())
    x = torch.randn(2, 7, 8, 16)
    out = layer(x.flatten(1, 2), (7, 8)).unflatten(1, (7, 8))
    for top, bottom in pairwise(edges):
        for left, right in pairwise(edges):
            # the lower tiles end at row 7: a window's eighth row is padding that must not count
            tile = x[:, top:bottom, left:right]
            expected = alone(tile.flatten(1, 2), tuple(tile.shape[1:3])).unflatten(1, tile.shape[1:3])
            assert (out[:, top:bottom, left:right] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("key_mask", [None, torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.7])
def test_a_token_sees_its_group_alone(method, key_mask):
    layer = make(method, position="none", local_mix="none")
    # more groups than the parts of a shifted window, and numbers that nobody uses
    groups = 7 * (torch.arange(24) % 6).view(2, 12)
    x = torch.randn(2, 12, 16)
    out = layer(x, groups=groups, key_mask=key_mask)
    for group in range(0, 42, 7):
        visible = groups == group if key_mask is None else (groups == group) & key_mask
        expected = layer(x, key_mask=visible)
        assert (out - expected)[visible].abs().max() < 1e-6


def test_other_groups_do_not_reach_a_token_through_any_part_of_the_layer(method):
    """The local mix included: the neighbours of a token may be of another group."""
    layer = make(method)
    groups = (torch.arange(24) % 6).view(2, 12)
    x = torch.randn(2, 12, 16)
    out = layer(x, (3, 4), groups=groups)
    for group in groups.unique():
        inside = groups == group
        moved = torch.where(inside[..., None], x, 5 * torch.randn_like(x))
        assert torch.equal(layer(moved, (3, 4), groups=groups)[inside], out[inside])
        # and the neighbours of the same group do
        alone = layer(torch.where(inside[..., None], x + 1, x), (3, 4), groups=groups)
        assert (alone - out)[inside].abs().amax(-1).min() > 0


@pytest.mark.parametrize("method", [name for name, config in METHODS.items() if config.local_mix != "none"])
def test_the_local_mix_of_a_group_is_that_of_an_image_without_the_others(method):
    layer = make(method, position="none")
    groups = torch.tensor([0, 1, 0, 0, 2, 1, 1, 0, 2, 0, 1, 0]).expand(2, -1)
    x = torch.randn(2, 12, 16)
    out = layer(x, (3, 4), groups=groups)
    for group in range(3):
        inside = groups == group
        assert (out - layer(x, (3, 4), key_mask=inside))[inside].abs().max() < 1e-6


def test_a_number_of_groups_that_is_told_changes_nothing(method):
    layer = make(method)
    groups, x = torch.randint(3, (2, 12)), torch.randn(2, 12, 16)
    assert torch.equal(layer(x, (3, 4), groups=groups), layer(x, (3, 4), groups=groups, num_groups=5))


@pytest.mark.parametrize("name", LINEAR_METHODS)
def test_a_token_beyond_the_number_of_groups_that_was_told_is_no_result(name):
    out = make(name)(torch.randn(1, 4, 16), (2, 2), groups=torch.tensor([[0, 1, 2, 1]]), num_groups=2)
    assert out.isnan().all(-1).tolist() == [[False, False, True, False]]


def test_wrong_groups_say_the_rule():
    x = torch.randn(2, 12, 16)
    with pytest.raises(ValueError, match="groups must be integers of at least 0, got -1; hide"):
        make("linear")(x, groups=torch.arange(12).expand(2, -1) - 1)
    with pytest.raises(ValueError, match="num_groups must be at least 1, got 0"):
        make("linear")(x, groups=torch.zeros(2, 12, dtype=torch.long), num_groups=0)
    with pytest.raises(ValueError, match=r"groups must be integers for each token, \(2, 12\), got \(2, 11\)"):
        make("linear")(x, groups=torch.zeros(2, 11, dtype=torch.long))
    with pytest.raises(ValueError, match="use window=0"):
        make("linear", window=2)(x, (3, 4), groups=torch.zeros(2, 12, dtype=torch.long))


def test_gradients_flow_through_shifted_windows_to_every_parameter():
    layer = make("softmax", window=3, shifted=True, position="relative")
    layer(torch.randn(2, 63, 16), (7, 9)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in layer.parameters())
