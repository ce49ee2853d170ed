"""The op against the formula, written out as a matrix of weights over tokens, and against itself in every other form."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nalaformer
from conftest import MAP_NAMES, VARIANCE_AWARE
from nalaformer import FeatureMap, LinearState, Rotary, attention_weights, linear_attention, recurrent_linear_attention
from nalaformer.ops import chunked

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")

# float64 inputs: what is left is rounding, and every mistake in the mathematics is far above it
EXACT = 1e-12
# float32: masks, mates, threads and cuts may change the order of sums and nothing else
ROUNDING = 1e-6


@dataclass(frozen=True)
class Turning:
    """Rotary positions for the formula: positions [N, A] or [B, N, A] of q and of k, `dim` channels, frequencies 10000^-t."""

    of_q: Tensor
    of_k: Tensor
    dim: int
    inclusive: bool
    normalised: bool = False

    def features(self, features: Tensor, positions: Tensor) -> Tensor:
        """Each channel pair as a complex number, turned by multiplication."""
        axes = positions.shape[-1]
        num_speeds = self.dim // (2 * axes)
        last = max(1, num_speeds - 1) if self.inclusive else num_speeds
        turned = torch.empty(*features.shape[:-1], features.shape[-1] // 2, dtype=torch.complex128)
        for pair in range(features.shape[-1] // 2):
            axis, speed = divmod(pair % (self.dim // 2), num_speeds)
            angle = positions[..., axis].double() * 10000.0 ** (-speed / last)
            number = torch.complex(features[..., 2 * pair], features[..., 2 * pair + 1])  # [B, N, H]
            turned[..., pair] = number * torch.exp(1j * angle)[..., None]
        result = torch.view_as_real(turned).flatten(-2)
        return torch.cat((result, turned.abs()), -1) if self.normalised else result


def formula(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    turning: Turning | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """out_i = sum_j rot(phi_q(q_i)).rot(phi_k(k_j)) v_j / (sum_j phi_q(q_i).phi_k(k_j) + eps n), j over what i sees."""
    exact = copy.deepcopy(feature_map).double()
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    if exact.num_heads == k.shape[2]:
        phi_k = exact.key(k).repeat_interleave(group, 2)
    else:
        phi_k = exact.key(k.repeat_interleave(group, 2))
    values = v.repeat_interleave(group, 2)

    batch, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    visible = torch.ones(batch, num_queries, num_keys, dtype=torch.bool)
    for i in range(num_queries):
        if causal:
            visible[:, i, i + 1 :] = False
        if key_mask is not None:
            visible[:, i] &= key_mask
    seen = visible.sum(-1).double()[:, None]  # [B, 1, N]

    outputs = []
    for phi_q, part in zip(exact.streams_as_numbers(q), values.chunk(exact.streams, -1), strict=True):
        above = below = weights_of(phi_q, phi_k, visible)
        if turning is not None:
            above = weights_of(turning.features(phi_q, turning.of_q), turning.features(phi_k, turning.of_k), visible)
            below = above if turning.normalised else below
        total = below.sum(-1) + eps * seen
        out = above @ part.transpose(1, 2) / torch.where(total == 0, 1.0, total)[..., None]
        outputs.append(out.transpose(1, 2))
    return torch.cat(outputs, -1)


def weights_of(phi_q: Tensor, phi_k: Tensor, visible: Tensor) -> Tensor:
    """[B, H, N, M]: the product of every query with every key that it sees."""
    return (phi_q.transpose(1, 2) @ phi_k.permute(0, 2, 3, 1)) * visible[:, None]


def distance(actual: Tensor, expected: Tensor) -> float:
    """Normwise; NaN anywhere makes it NaN, which passes no comparison."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / max(float(expected.norm()), 1e-6))


def row_positions(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens)[:, None]


def grid_positions(height: int, width: int) -> Tensor:
    return torch.tensor([(row, column) for row in range(height) for column in range(width)])


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
        weights = attention_weights(q, k, feature_map, stream=stream, rotary=rotary, eps=0.0)
        # two opposite pairs cancel to a rounding error of the sum's terms
        assert weights.min() >= -1e-15
        assert (weights.sum(-1) - 1).abs().max() < EXACT


def test_numerator_only_rotary_weights_are_not_a_distribution(make_map, make_qkv):
    # the published form: a test that it is never called convex by mistake
    q, k, _ = make_qkv(2, 21)
    weights = attention_weights(q, k, make_map("norm_aware", dtype=torch.float64), rotary=Rotary.sequence(21, 8))
    assert weights.min() < 0
    assert (weights.sum(-1) - 1).abs().max() > 0.01


# --- the variance-aware reflection: bidirectional only, so it has its own tests -----------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_variance_aware_reflection_is_the_formula_at_its_angles(backend, masked, make_map, make_qkv):
    q, k, v = make_qkv(3, 31)
    feature_map = make_map(VARIANCE_AWARE, dtype=torch.float64)
    key_mask = torch.rand(3, 31) < 0.6 if masked else None
    outputs = linear_attention(q, k, v, feature_map=feature_map, key_mask=key_mask)
    for sample in range(3):
        shown = key_mask[sample] if masked else torch.ones(31, dtype=torch.bool)
        at_rest = reflection_at_its_angles(feature_map, q[sample, shown], k[sample, shown])
        mine = slice(sample, sample + 1)
        expected = formula(at_rest, q[mine], k[mine][:, shown], v[mine][:, shown])
        assert distance(outputs[mine], expected) < EXACT


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


# --- the same function in other forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MAP_NAMES, VARIANCE_AWARE])
def test_padded_and_packed_and_single_samples_agree(name, backend, make_map):
    lengths = [3, 0, 17, 1]
    feature_map = make_map(name)
    samples = [[torch.randn(length, 2, 8) for _ in range(3)] for length in lengths]
    packed = [torch.cat([sample[i] for sample in samples]) for i in range(3)]
    cu_seqlens = torch.tensor([0, 3, 3, 20, 21])
    out = linear_attention(*packed, feature_map=feature_map, cu_seqlens=cu_seqlens)

    padded = [torch.zeros(len(lengths), 17, 2, 8) for _ in range(3)]
    for row, sample in enumerate(samples):
        for destination, tensor in zip(padded, sample, strict=True):
            destination[row, : lengths[row]] = tensor
    key_mask = torch.arange(17) < torch.tensor(lengths)[:, None]
    from_padded = linear_attention(*padded, feature_map=feature_map, key_mask=key_mask)
    assert distance(from_padded[key_mask], out) < ROUNDING

    alone = [linear_attention(*(x[None] for x in sample), feature_map=feature_map)[0] for sample in samples if len(sample[0])]
    assert distance(torch.cat(alone), out) < ROUNDING


def test_packed_causal_sequences_with_rotary_start_anew(map_name, backend, make_map):
    feature_map = make_map(map_name, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 5, 5, 12])
    q, k, v = (torch.randn(12, 2, 8, dtype=torch.float64) for _ in range(3))
    rotary = Rotary.packed(cu_seqlens, 8)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=True, rotary=rotary, cu_seqlens=cu_seqlens)
    for start, stop in ((0, 5), (5, 12)):
        mine = [x[None, start:stop] for x in (q, k, v)]
        positions = row_positions(stop - start)
        turning = Turning(positions, positions, 8, inclusive=False)
        assert distance(out[None, start:stop], formula(feature_map, *mine, causal=True, turning=turning)) < EXACT


def test_packed_positions_start_at_zero_in_each_sequence():
    # attention sees differences of positions only, so its outputs would not show a wrong start
    positions = Rotary.packed(torch.tensor([0, 3, 3, 5]), 8).positions
    assert positions.flatten().tolist() == [0, 1, 2, 0, 1]


def test_packed_sequences_of_no_tokens_at_all_give_no_output(make_map):
    empty = torch.randn(0, 2, 8)
    out = linear_attention(empty, empty, empty, feature_map=make_map("norm_aware"), cu_seqlens=torch.tensor([0, 0]))
    assert out.shape == (0, 2, 8)


@pytest.mark.parametrize("piece", [1, 3, 64, 150, 1000])
@torch.no_grad()
def test_bidirectional_result_does_not_depend_on_the_piece_size(map_name, piece, make_map, make_qkv):
    q, k, v = make_qkv(2, 11 if piece == 1 else 150)
    feature_map = make_map(map_name, dtype=torch.float64)
    key_mask = torch.rand(k.shape[:2]) < 0.7
    turn = Rotary.sequence(q.shape[1], 8)
    out = chunked.linear_attention(
        q, k, v, feature_map=feature_map, rotary=(turn, turn), key_mask=key_mask, eps=1e-6, recompute=False, piece=piece
    )
    turning = Turning(row_positions(q.shape[1]), row_positions(q.shape[1]), 8, inclusive=False)
    assert distance(out, formula(feature_map, q, k, v, key_mask=key_mask, turning=turning)) < EXACT


@pytest.mark.parametrize("piece", [1, 3, 64, 150, 1000])
def test_causal_result_does_not_depend_on_the_piece_size(map_name, piece, make_map, make_qkv):
    q, k, v = make_qkv(2, 11 if piece == 1 else 150)
    feature_map = make_map(map_name, dtype=torch.float64)
    key_mask = torch.rand(k.shape[:2]) < 0.7
    turn = Rotary.sequence(q.shape[1], 8)
    out, _ = chunked.causal_linear_attention(
        q,
        k,
        v,
        feature_map=feature_map,
        state=None,
        rotary=(turn, turn),
        key_mask=key_mask,
        eps=1e-6,
        recompute=False,
        piece=piece,
    )
    turning = Turning(row_positions(q.shape[1]), row_positions(q.shape[1]), 8, inclusive=False)
    assert distance(out, formula(feature_map, q, k, v, causal=True, key_mask=key_mask, turning=turning)) < EXACT


@pytest.mark.parametrize("piece", [3, 64])
def test_gradients_do_not_depend_on_the_piece_size_or_on_recomputing(map_name, causal, piece, make_map, make_qkv):
    inputs = [x.requires_grad_() for x in make_qkv(1, 70)]
    feature_map = make_map(map_name, dtype=torch.float64)
    upstream = torch.randn_like(inputs[0])
    wanted = [*inputs, *feature_map.parameters()]
    results = []
    for size, recompute in ((piece, True), (70, False)):
        arguments = {"rotary": (None, None), "key_mask": None, "eps": 1e-6, "recompute": recompute, "piece": size}
        if causal:
            out, _ = chunked.causal_linear_attention(*inputs, feature_map=feature_map, state=None, **arguments)
        else:
            out = chunked.linear_attention(*inputs, feature_map=feature_map, **arguments)
        results.append(torch.autograd.grad(out, wanted, upstream))
    assert max(distance(a, b) for a, b in zip(*results, strict=True)) < 1e-11


@pytest.mark.parametrize("cuts", [[1] * 23, [1, 9, 13], [22, 1], [23]], ids=["tokens", "uneven", "last", "once"])
def test_recurrent_pieces_equal_one_causal_call(map_name, cuts, make_map, make_qkv):
    q, k, v = make_qkv(2, 23)
    feature_map = make_map(map_name, dtype=torch.float64)
    key_mask = torch.rand(2, 23) < 0.8
    state, outputs, start = None, [], 0
    for q_piece, k_piece, v_piece, mask in zip(*(x.split(cuts, 1) for x in (q, k, v, key_mask)), strict=True):
        rotary = Rotary.sequence(q_piece.shape[1], 8, start=start)
        out, state = recurrent_linear_attention(
            q_piece, k_piece, v_piece, feature_map=feature_map, state=state, rotary=rotary, key_mask=mask
        )
        outputs.append(out)
        start += q_piece.shape[1]
    turning = Turning(row_positions(23), row_positions(23), 8, inclusive=False)
    expected = formula(feature_map, q, k, v, causal=True, key_mask=key_mask, turning=turning)
    assert distance(torch.cat(outputs, 1), expected) < EXACT
    assert state.count.tolist() == key_mask.sum(1).tolist()


def test_recurrent_pieces_equal_one_causal_call_across_pieces_of_the_walk(map_name, make_map, make_qkv):
    # longer than the walk's own piece, cut elsewhere
    q, k, v = make_qkv(1, 300, dtype=torch.float32)
    feature_map = make_map(map_name)
    whole = linear_attention(q, k, v, feature_map=feature_map, causal=True)
    state, outputs = None, []
    for parts in zip(*(x.split([1, 131, 168], 1) for x in (q, k, v)), strict=True):
        out, state = recurrent_linear_attention(*parts, feature_map=feature_map, state=state)
        outputs.append(out)
    assert distance(torch.cat(outputs, 1), whole) < ROUNDING


@pytest.mark.parametrize("made_for", [2, 4])
def test_recurrent_steps_take_grouped_heads(made_for, make_map, make_qkv):
    q, k, v = make_qkv(2, 9, 4, key_heads=2)
    for name in ("norm_aware", "polarity", "hedgehog"):
        feature_map = make_map(name, num_heads=made_for, dtype=torch.float64)
        state, outputs = None, []
        for parts in zip(*(x.split(4, 1) for x in (q, k, v)), strict=True):
            out, state = recurrent_linear_attention(*parts, feature_map=feature_map, state=state)
            outputs.append(out)
        assert distance(torch.cat(outputs, 1), formula(feature_map, q, k, v, causal=True)) < EXACT


def test_a_recurrent_step_leaves_its_state_argument_alone(map_name, make_map, make_qkv):
    q, k, v = make_qkv()
    feature_map = make_map(map_name, dtype=torch.float64)
    _, state = recurrent_linear_attention(q, k, v, feature_map=feature_map)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    recurrent_linear_attention(q, k, v, feature_map=feature_map, state=state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())


def test_gradients_flow_through_the_recurrent_state(map_name, make_map, make_qkv):
    inputs = [x.requires_grad_() for x in make_qkv(1, 9)]
    feature_map = make_map(map_name, dtype=torch.float64)
    upstream = torch.randn(1, 9, 2, 8, dtype=torch.float64)
    state, outputs = None, []
    for parts in zip(*(x.split([4, 5], 1) for x in inputs), strict=True):
        out, state = recurrent_linear_attention(*parts, feature_map=feature_map, state=state)
        outputs.append(out)
    cut = torch.autograd.grad(torch.cat(outputs, 1), inputs, upstream)
    whole = torch.autograd.grad(formula(feature_map, *inputs, causal=True), inputs, upstream)
    assert max(distance(a, b) for a, b in zip(cut, whole, strict=True)) < 1e-11


def test_attention_weights_times_values_is_the_output(map_name, causal, make_map, make_qkv):
    q, k, v = make_qkv(2, 9, 4, key_heads=2)
    feature_map = make_map(map_name, num_heads=4, dtype=torch.float64)
    arguments = {"causal": causal, "rotary": Rotary.sequence(9, 8), "key_mask": torch.rand(2, 9) < 0.8}
    out = linear_attention(q, k, v, feature_map=feature_map, **arguments)
    values = v.repeat_interleave(2, 2).chunk(feature_map.streams, -1)
    parts = [
        torch.einsum("bhij,bjhv->bihv", attention_weights(q, k, feature_map, stream=stream, **arguments), part)
        for stream, part in enumerate(values)
    ]
    assert distance(torch.cat(parts, -1), out) < EXACT


def test_attention_weights_of_some_rows_are_those_rows(map_name, causal, make_map, make_qkv):
    q, k, _ = make_qkv(2, 9)
    feature_map = make_map(map_name, dtype=torch.float64)
    arguments = {"causal": causal, "rotary": Rotary.sequence(9, 8)}
    every = attention_weights(q, k, feature_map, **arguments)
    some = attention_weights(q, k, feature_map, rows=[7, 0, 3], **arguments)
    assert distance(some, every[:, :, [7, 0, 3]]) < EXACT


# --- layout -------------------------------------------------------------------------------------------------------------


def test_views_into_one_projection_give_the_same_as_copies(map_name, causal, backend, make_map):
    projected = torch.randn(2, 49, 3 * 2 * 8)
    views = [part.unflatten(-1, (2, 8)) for part in projected.split(16, dim=-1)]
    feature_map = make_map(map_name)
    out = linear_attention(*views, feature_map=feature_map, causal=causal)
    copied = linear_attention(*(view.contiguous() for view in views), feature_map=feature_map, causal=causal)
    assert not views[0].is_contiguous()
    assert distance(out, copied) < ROUNDING


def test_head_major_and_expanded_and_backward_strides_are_read_right(map_name, causal, backend, make_map):
    q = torch.randn(2, 2, 21, 8).transpose(1, 2)
    k = torch.randn(1, 21, 2, 8).expand(2, -1, -1, -1)
    v = torch.randn(2, 42, 2, 16)[:, ::2, :, ::2]
    feature_map = make_map(map_name)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    copied = linear_attention(*copies, feature_map=feature_map, causal=causal)
    assert distance(out, copied) < ROUNDING


def test_inputs_are_not_changed(map_name, causal, backend, make_map, make_qkv):
    inputs = make_qkv(dtype=torch.float32)
    before = [x.clone() for x in inputs]
    key_mask = torch.rand(2, 7) < 0.5
    linear_attention(*inputs, feature_map=make_map(map_name), causal=causal, key_mask=key_mask)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_an_empty_batch_gives_an_empty_output(map_name, causal, backend, make_map, make_qkv):
    q, k, v = make_qkv(0, 7, values=6, dtype=torch.bfloat16)
    out = linear_attention(q, k, v, feature_map=make_map(map_name), causal=causal)
    assert (out.shape, out.dtype) == ((0, 7, 2, 6), torch.bfloat16)


def test_an_empty_batch_can_be_trained_through(causal, backend, make_map, make_qkv):
    # the last, short batch of one rank of several: its backward pass must run like that of the others
    inputs = [x.requires_grad_() for x in make_qkv(0, 7, dtype=torch.float32)]
    linear_attention(*inputs, feature_map=make_map("norm_aware"), causal=causal).sum().backward()
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]


def test_an_empty_batch_has_an_empty_state(map_name, make_map, make_qkv):
    out, state = recurrent_linear_attention(*make_qkv(0, 7, dtype=torch.float32), feature_map=make_map(map_name))
    assert out.shape == (0, 7, 2, 8)
    assert state.state.shape[0] == 0


# --- isolation ----------------------------------------------------------------------------------------------------------


def changed(x: Tensor, token: int, to: float) -> Tensor:
    x = x.clone()
    x[:, token:] = to
    return x


@pytest.mark.parametrize("to", [0.5, 1e9, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_causal_output_ignores_future_tokens(map_name, backend, which, to, make_map, make_qkv):
    inputs = dict(zip("qkv", make_qkv(2, 11, dtype=torch.float32), strict=True))
    feature_map = make_map(map_name)
    before = linear_attention(**inputs, feature_map=feature_map, causal=True)
    inputs[which] = changed(inputs[which], 6, to)
    after = linear_attention(**inputs, feature_map=feature_map, causal=True)
    assert (after - before)[:, :6].abs().max() == 0.0


@pytest.mark.parametrize("to", [1e9, math.nan], ids=str)
@pytest.mark.parametrize("token", [128, 140])
def test_causal_output_ignores_later_pieces(map_name, token, to, make_map, make_qkv):
    # 128 tokens make a piece: a change at its border, and one behind it
    q, k, v = make_qkv(1, 150, dtype=torch.float32)
    feature_map = make_map(map_name)
    before = linear_attention(q, k, v, feature_map=feature_map, causal=True)
    after = linear_attention(changed(q, token, to), changed(k, token, to), v, feature_map=feature_map, causal=True)
    assert (after - before)[:, :token].abs().max() == 0.0


def test_causal_output_sees_its_own_token(map_name, backend, make_map, make_qkv):
    # the opposite mistake: a mask that hides the diagonal leaks nothing either
    q, k, v = make_qkv(2, 11, dtype=torch.float32)
    feature_map = make_map(map_name)
    before = linear_attention(q, k, v, feature_map=feature_map, causal=True)
    after = linear_attention(q, k, changed(v, 6, 3.0), feature_map=feature_map, causal=True)
    assert (after - before)[:, 6].abs().max() > 0


@pytest.mark.parametrize("name", [*MAP_NAMES, VARIANCE_AWARE])
def test_batch_mates_do_not_matter(name, backend, make_map, make_qkv):
    q, k, v = make_qkv(5, 197, dtype=torch.float32)
    key_mask = torch.rand(5, 197) < 0.7
    feature_map = make_map(name)
    for arguments in ({}, {"causal": True})[: 1 if name == VARIANCE_AWARE else 2]:
        together = linear_attention(q, k, v, feature_map=feature_map, key_mask=key_mask, **arguments)
        for i in range(5):
            mine = slice(i, i + 1)
            parts = [x[mine] for x in (q, k, v)]
            alone = linear_attention(*parts, feature_map=feature_map, key_mask=key_mask[mine], **arguments)
            assert (alone - together[mine]).abs().max() <= ROUNDING


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_bad_sample_spoils_no_other(map_name, causal, backend, which, bad, make_map, make_qkv):
    inputs = dict(zip("qkv", make_qkv(3, 9, dtype=torch.float32), strict=True))
    feature_map = make_map(map_name)
    clean = outputs_and_gradients(inputs, feature_map, causal)
    inputs[which] = inputs[which].clone()
    inputs[which][1, 4] = bad
    spoilt = outputs_and_gradients(inputs, feature_map, causal)
    for before, after in zip(clean, spoilt, strict=True):
        assert (before - after)[[0, 2]].abs().max() <= ROUNDING


def outputs_and_gradients(inputs: dict[str, Tensor], feature_map: FeatureMap, causal: bool, **arguments) -> list[Tensor]:
    inputs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out = linear_attention(**inputs, feature_map=feature_map, causal=causal, **arguments)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, list(inputs.values()), upstream)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30], ids=str)
def test_hidden_tokens_reach_neither_outputs_nor_gradients(map_name, causal, backend, bad, make_map, make_qkv):
    q, k, v = make_qkv(2, 9, dtype=torch.float32)
    key_mask = torch.rand(2, 9) < 0.6
    feature_map = make_map(map_name)
    results = []
    for hidden in (0.0, bad):
        keys, values = (torch.where(key_mask[:, :, None, None], x, hidden) for x in (k, v))
        inputs = [x.requires_grad_() for x in (q.clone(), keys, values)]
        out = linear_attention(*inputs, feature_map=feature_map, causal=causal, key_mask=key_mask)
        wanted = [*inputs, *feature_map.parameters()]
        upstream = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append([out.detach(), *torch.autograd.grad(out, wanted, upstream, allow_unused=True)])
    for clean, spoilt in zip(*results, strict=True):
        assert torch.equal(clean, spoilt)
    assert results[1][2][~key_mask].abs().max() == 0
    assert results[1][3][~key_mask].abs().max() == 0


def test_hidden_tokens_do_not_move_the_variance_aware_angles(backend, make_map, make_qkv):
    q, k, v = make_qkv(2, 9, dtype=torch.float32)
    key_mask = torch.rand(2, 9) < 0.6
    feature_map = make_map(VARIANCE_AWARE)
    results = []
    # a hidden token still asks, so its query is a number; its key and value may be anything
    for hidden in ((0.0, 0.0, 0.0), (1e3, math.nan, math.nan)):
        inputs = [torch.where(key_mask[:, :, None, None], x, to) for x, to in zip((q, k, v), hidden, strict=True)]
        inputs = [x.requires_grad_() for x in inputs]
        out = linear_attention(*inputs, feature_map=feature_map, key_mask=key_mask)[key_mask]
        results.append([out.detach(), *torch.autograd.grad(out.sum(), inputs[1:])])
    for clean, spoilt in zip(*results, strict=True):
        assert torch.equal(clean, spoilt)


# --- repeatability ------------------------------------------------------------------------------------------------------


def test_a_second_run_is_bit_equal(map_name, causal, backend, make_map, make_qkv):
    inputs = dict(zip("qkv", make_qkv(2, 197, dtype=torch.float32), strict=True))
    feature_map = make_map(map_name)
    first, second = (outputs_and_gradients(inputs, feature_map, causal) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["norm_aware", "polarity", "hedgehog", "reflection"])
def test_the_number_of_threads_changes_rounding_only(name, causal, backend, make_map, make_qkv):
    inputs = dict(zip("qkv", make_qkv(2, 300, dtype=torch.float32), strict=True))
    feature_map = make_map(name)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)  # the fixture of this file puts it back
        results.append(outputs_and_gradients(inputs, feature_map, causal))
    assert max(distance(a, b) for a, b in zip(*results, strict=True)) < 2e-6


class LargestTensor(TorchDispatchMode):
    """Watches every operation, those of the backward pass too, for the largest tensor that it makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self.elements = max(self.elements, made.numel())
        return result


@pytest.mark.parametrize("name", ["norm_aware", "polarity", "hedgehog"])
def test_nothing_larger_than_an_input_is_ever_made(name, causal, make_map, make_qkv):
    # features are twice as wide as the heads, and a matrix of weights far larger
    inputs = [x.requires_grad_() for x in make_qkv(1, 8192, 1, 64, dtype=torch.float32)]
    feature_map = make_map(name, num_heads=1, head_dim=64)
    with LargestTensor() as largest:
        linear_attention(*inputs, feature_map=feature_map, causal=causal).sum().backward()
    assert largest.elements == inputs[0].numel()


def test_the_backend_setting_ends_with_its_block():
    before = nalaformer.get_backend()
    with nalaformer.use_backend("reference"):
        assert nalaformer.get_backend() == "reference"
    assert nalaformer.get_backend() == before


def test_the_backend_setting_ends_when_its_block_fails(make_map, make_qkv):
    before = nalaformer.get_backend()
    q, k, v = make_qkv()
    with pytest.raises(ValueError, match="head_dim"), nalaformer.use_backend("reference"):
        linear_attention(q, k, v, feature_map=make_map("relu", head_dim=4))
    assert nalaformer.get_backend() == before


def test_a_map_that_defines_only_query_and_key_runs_everywhere(causal, backend, make_qkv):
    class Squares(FeatureMap):
        def query(self, q: Tensor) -> Tensor:
            return q.square()

        def key(self, k: Tensor, log_scale: Tensor | float = 0.0) -> Tensor:
            return k.square()

    q, k, v = make_qkv(2, 150)
    feature_map = Squares(num_heads=2, head_dim=8)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    assert distance(out, formula(feature_map, q, k, v, causal=causal)) < EXACT


def test_an_empty_state_is_the_same_as_none(map_name, make_map, make_qkv):
    q, k, v = make_qkv()
    feature_map = make_map(map_name, dtype=torch.float64)
    features = feature_map.key(k).shape[-1]
    fresh = LinearState.empty(2, 2, features, 8, dtype=torch.float64)
    out, _ = recurrent_linear_attention(q, k, v, feature_map=feature_map, state=fresh)
    assert torch.equal(out, recurrent_linear_attention(q, k, v, feature_map=feature_map)[0])
