"""Causal attention in blocks: a token sees its own block and all earlier ones, against a formula with an explicit mask."""

import copy

import pytest
import torch

import nalaformer
from helpers.attention_formula import EXACT, Turning, distance, row_positions, weights_of
from nalaformer import FEATURE_MAPS, Rotary, feature_map, linear_attention, use_backend

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
TOKENS = 11


def inputs(dtype=torch.float64, heads=2, tokens=TOKENS):
    torch.manual_seed(3)
    return [torch.randn(2, tokens, heads, 8, dtype=dtype) for _ in range(3)]


def seen(block, tokens=TOKENS, key_mask=None):
    """[B, N, N]: whether the block of j is that of i, or an earlier one."""
    number = torch.tensor([token // block for token in range(tokens)])
    visible = (number[None, :] <= number[:, None]).expand(2, -1, -1)
    return visible if key_mask is None else visible & key_mask[:, None]


def by_mask(phi, q, k, v, visible, *, turning=None, contrast=None, weight=None, eps=1e-6):
    """sum_j w_ij v_j over what i sees, moved away from the mean of that where a contrast asks for it; float64."""
    exact = copy.deepcopy(phi).double()
    q, k, v = q.double(), k.double(), v.double()
    phi_k = exact.key(k) if weight is None else exact.key(k) * weight[..., None]
    count = visible.sum(-1).double()[:, None]
    streams = list(exact.streams_as_numbers(q))
    outputs = []
    for phi_q, values in zip(streams, v.chunk(len(streams), -1), strict=True):
        above = below = weights_of(phi_q, phi_k, visible)
        if turning is not None:
            above = weights_of(turning.features(phi_q, turning.of_q), turning.features(phi_k, turning.of_k), visible)
        total = below.sum(-1) + eps * count
        out = ((above / torch.where(total == 0, 1.0, total)[..., None]) @ values.transpose(1, 2)).transpose(1, 2)
        if contrast is not None:
            mean = torch.einsum("bij,bjhv->bihv", visible.double(), values) / count.transpose(1, 2)[..., None].clamp(min=1)
            out = out + contrast[..., None] * (out - mean)
        outputs.append(out)
    return torch.cat(outputs, -1)


@pytest.mark.parametrize("block", [2, 4, 11, 30])
@pytest.mark.parametrize("name", FEATURE_MAPS.names())
def test_a_token_sees_its_own_block_and_earlier_ones(name, block):
    options = {"variance": False} if name == "reflection" else {}
    phi, (q, k, v) = feature_map(name, num_heads=2, head_dim=8, **options).double(), inputs()
    out = linear_attention(q, k, v, feature_map=phi, causal=True, block=block)
    assert distance(out, by_mask(phi, q, k, v, seen(block))) < EXACT


def test_blocks_of_one_token_are_causal_and_one_block_is_everything():
    phi, (q, k, v) = feature_map("split", num_heads=2, head_dim=8).double(), inputs()
    causal = linear_attention(q, k, v, feature_map=phi, causal=True)
    assert torch.equal(linear_attention(q, k, v, feature_map=phi, causal=True, block=1), causal)
    everything = linear_attention(q, k, v, feature_map=phi)
    assert distance(linear_attention(q, k, v, feature_map=phi, causal=True, block=TOKENS), everything) < EXACT


def test_nothing_of_a_later_block_reaches_a_token():
    phi, (q, k, v) = feature_map("polarity", num_heads=2, head_dim=8).double(), inputs()
    out = linear_attention(q, k, v, feature_map=phi, causal=True, block=4)
    k[:, 8:], v[:, 8:] = 1e3, torch.nan
    assert torch.equal(linear_attention(q, k, v, feature_map=phi, causal=True, block=4)[:, :8], out[:, :8])


@pytest.mark.parametrize("kind", ["mask", "rotary", "contrast", "weight"])
def test_masks_positions_contrasts_and_weights_of_keys_work_in_blocks(kind):
    phi, (q, k, v) = feature_map("norm_aware", num_heads=2, head_dim=8).double(), inputs()
    key_mask = torch.rand(2, TOKENS) > 0.4 if kind == "mask" else None
    given, expected = {"key_mask": key_mask}, {}
    if kind == "rotary":
        positions = row_positions(TOKENS)
        given["rotary"] = Rotary.sequence(TOKENS, 8)
        expected["turning"] = Turning(positions, positions, dim=8, inclusive=False)
    if kind == "contrast":
        given["contrast"] = expected["contrast"] = torch.rand(2, TOKENS, 2, dtype=torch.float64)
    if kind == "weight":
        given["key_weight"] = expected["weight"] = torch.rand(2, TOKENS, 2, dtype=torch.float64)
    out = linear_attention(q, k, v, feature_map=phi, causal=True, block=3, **given)
    assert distance(out, by_mask(phi, q, k, v, seen(3, key_mask=key_mask), **expected)) < EXACT


@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("name", FEATURE_MAPS.names())
def test_weights_of_some_rows_are_those_of_their_blocks(name, size):
    options = {"variance": False} if name == "reflection" else {}
    phi, (q, k, v) = feature_map(name, num_heads=2, head_dim=8, **options).double(), inputs()
    # a large key sets the scale of its whole block, of tokens in front of it too
    k[:, 6] *= size
    key_mask = torch.ones(2, TOKENS, dtype=torch.bool)
    key_mask[0, 5] = False
    places = [9, 4, 0, 10]
    found = [
        nalaformer.attention_weights(
            *(q, k), feature_map=phi, causal=True, block=4, key_mask=key_mask, rows=places, stream=stream
        )
        for stream in range(phi.streams)
    ]
    # each stream meets its part of the values
    parts = [torch.einsum("bhij,bjhv->bihv", w, part) for w, part in zip(found, v.chunk(phi.streams, -1), strict=True)]
    expected = by_mask(phi, q, k, v, seen(4, key_mask=key_mask))[:, places]
    assert distance(torch.cat(parts, -1), expected) < EXACT
    assert all(not w[:, :, 1:3, 8:].any() for w in found)


def test_gradients_are_those_of_the_formula():
    phi, tensors = feature_map("polarity_exp", num_heads=2, head_dim=8).double(), inputs()
    for x in tensors:
        x.requires_grad_()
    wanted = torch.randn(2, TOKENS, 2, 8, dtype=torch.float64)
    found = torch.autograd.grad((linear_attention(*tensors, feature_map=phi, causal=True, block=4) * wanted).sum(), tensors)
    expected = torch.autograd.grad((by_mask(phi, *tensors, seen(4)) * wanted).sum(), tensors)
    assert max(distance(x, y) for x, y in zip(found, expected, strict=True)) < EXACT


def test_float32_is_as_exact_as_its_numbers_over_many_blocks():
    phi, (q, k, v) = feature_map("norm_aware", num_heads=2, head_dim=8), inputs(torch.float32, tokens=130)
    out = linear_attention(q, k, v, feature_map=phi, causal=True, block=7)
    assert out.dtype == torch.float32
    assert distance(out, by_mask(phi, q, k, v, seen(7, tokens=130))) < 2e-6


def test_blocks_that_have_no_meaning_or_no_kernel_are_refused():
    phi, (q, k, v) = feature_map("relu", num_heads=2, head_dim=8), inputs(torch.float32)
    for wrong in (0, -2, 2.0, True):
        with pytest.raises(ValueError, match="block must be the number of tokens that see each other"):
            linear_attention(q, k, v, feature_map=phi, causal=True, block=wrong)
    with pytest.raises(ValueError, match="got block=2 with causal=False"):
        linear_attention(q, k, v, feature_map=phi, block=2)
    with pytest.raises(ValueError, match="got block=2 with causal=False"):
        nalaformer.attention_weights(q, k, feature_map=phi, block=2)
    ends = torch.tensor([0, 4, TOKENS])
    with pytest.raises(ValueError, match="packed sequences have no blocks"):
        linear_attention(q[0], k[0], v[0], feature_map=phi, causal=True, block=2, cu_seqlens=ends)
    with use_backend("triton"), pytest.raises(ValueError, match="see all of their block have no kernel"):
        linear_attention(q, k, v, feature_map=phi, causal=True, block=2)


def test_a_program_that_is_exported_does_not_lose_its_blocks():
    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.map = feature_map("relu", num_heads=2, head_dim=8)

        def forward(self, q, k, v):
            return nalaformer.linear_attention(q, k, v, feature_map=self.map, causal=True, block=2)

    with pytest.raises(Exception, match="cannot count blocks of tokens"):
        torch.export.export(Blocks(), tuple(inputs(torch.float32)))
