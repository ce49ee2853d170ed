"""Reflections: they keep dot products, fold into projections, and follow the variance."""

import math

import pytest
import torch
from torch import Tensor, nn

import nalaformer
from nalaformer import linear_attention
from nalaformer.attention import build

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")


def reflection(head_dim: int = 8, num_heads: int = 2, **options) -> nn.Module:
    """With its parameters anywhere, not only where training starts."""
    made = nalaformer.feature_map("reflection", num_heads=num_heads, head_dim=head_dim, **options).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return made


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


def test_a_learned_contrast_of_queries_before_their_reflection_is_kept_or_refused():
    tokens = torch.randn(2, 15, 16, dtype=torch.float64)
    for across in (True, False):
        layer = build("mirrorla", dim=16, num_heads=2, variance=False, cross_head=across, contrast="learned").double().eval()
        before = layer(tokens, (3, 5))
        assert (nalaformer.fold(layer)(tokens, (3, 5)) - before).abs().max() < 1e-12
    # within heads a reflection keeps the norms of queries
    assert (layer.fold()(tokens, (3, 5)) - before).abs().max() < 1e-12
    with pytest.raises(ValueError, match="cross_head=False or another contrast"):
        build("mirrorla", dim=16, num_heads=2, variance=False, contrast="learned").fold()
    with pytest.raises(ValueError, match="train with variance=False"):
        build("mirrorla", dim=16, num_heads=2, variance=True, contrast="learned").fold()


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
    monkeypatch.setattr("nalaformer.feature_maps.reflection.CHUNK", 4)
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


def share_lost(made: nn.Module, x: Tensor) -> Tensor:
    """Of the squares of reflected inputs, the share that ReLU throws away."""
    return (-made.reflect(x, made.angles(x))).relu().square().mean() / x.square().mean()


@pytest.mark.parametrize("options", [{}, {"cross_head": False}, {"blockwise": False}], ids=["both", "blocks", "across"])
def test_reflections_learn_to_lose_less_of_inputs_that_nothing_else_can_turn(options):
    torch.manual_seed(0)
    made = nalaformer.feature_map("reflection", num_heads=2, head_dim=8, **options)
    # most of what they hold is negative, in the mean
    x = torch.randn(4, 50, 2, 8) - 1.5
    optimizer = torch.optim.Adam(made.parameters(), lr=0.05)
    first = share_lost(made, x).item()
    for _ in range(150):
        optimizer.zero_grad()
        share_lost(made, x).backward()
        optimizer.step()
    # the blocks alone turn pairs of channels: a pair of negative ones becomes positive and loses next to nothing
    assert share_lost(made, x).item() < first / 3
