"""Causal layers in blocks: a token gathers what its own block and earlier ones hold, against one token at a time in float64."""

import pytest
import torch
from torch import Tensor

from helpers.attention_formula import EXACT, distance
from nalaformer.analysis import record
from nalaformer.analysis.layers import Recorder
from nalaformer.analysis.records import LinearRecord
from nalaformer.attention import Attention, build

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
TOKENS, BLOCK = 11, 4
KINDS = {
    "softmax": {},
    "linear": {},
    "contrasted": {"feature_map": "channel_softmax", "contrast": "learned"},
    "mean score": {"feature_map": "elu", "contrast": "mean_score"},
}


def make(kind: str, **options) -> Attention:
    torch.manual_seed(7)
    method = "softmax" if kind == "softmax" else "linear"
    layer = build(method, dim=16, num_heads=2, **({"causal": True, "block": BLOCK} | KINDS[kind] | options))
    return layer.double()


def tokens() -> Tensor:
    return torch.randn(2, TOKENS, 16, dtype=torch.float64)


def some_hidden() -> Tensor:
    """Padding in front, which leaves the first block without a key, and one more hidden token."""
    visible = torch.ones(2, TOKENS, dtype=torch.bool)
    visible[0, :5] = False
    visible[1, 6] = False
    return visible


def seen_by(token: int, sample: int, key_mask: Tensor | None) -> list[int]:
    """Numbers of the tokens that it sees."""
    last = (token // BLOCK + 1) * BLOCK
    return [j for j in range(min(last, TOKENS)) if key_mask is None or key_mask[sample, j]]


def weights_by_token(layer: Attention, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """[B, H, N, N], a row at a time from the keys that its token sees and no others."""
    q, k, _ = layer.qkvg(x).unflatten(-1, (3, 2, 8)).unbind(2)
    strength = layer.contrast(q) if layer.contrast is not None else None
    weights = torch.zeros(2, 2, TOKENS, TOKENS, dtype=torch.float64)
    for sample in range(2):
        for token in range(TOKENS):
            seen = seen_by(token, sample, key_mask)
            if not seen:
                continue
            for head in range(2):
                query, keys = q[sample, token, head], k[sample, seen, head]
                if layer.map is None:
                    row = (keys @ query / 8**0.5).softmax(0)
                else:
                    phi_q = layer.map.query(query.expand(1, 1, 2, 8))[0, 0, head]
                    phi_k = layer.map.key(keys[None, :, None].expand(-1, -1, 2, -1))[0, :, head]
                    scores = phi_k @ phi_q
                    row = scores / (scores.sum() + 1e-6 * len(seen))
                    if strength is not None:
                        row = row + strength[sample, token, head] * (row - 1 / len(seen))
                    if layer.config.contrast == "mean_score":
                        row = row + scores.mean() / 8**0.5 * (row - 1 / len(seen))
                weights[sample, head, token, seen] = row
    return weights


def gathered(layer: Attention, x: Tensor, weights: Tensor) -> Tensor:
    v = layer.qkvg(x).unflatten(-1, (3, 2, 8))[:, :, 2]
    return layer.projection(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_gathers_from_its_own_block_and_earlier_ones(kind, is_masked):
    layer, x = make(kind), tokens()
    key_mask = some_hidden() if is_masked else None
    expected = gathered(layer, x, weights_by_token(layer, x, key_mask))
    if is_masked:
        # what padding holds reaches nobody
        x[~key_mask] = torch.nan
    shown = torch.ones(2, TOKENS, dtype=torch.bool) if key_mask is None else key_mask
    assert distance(layer(x, key_mask=key_mask)[shown], expected[shown]) < EXACT


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_groups_keep_their_blocks(kind):
    layer, x = make(kind), tokens()
    groups = torch.arange(TOKENS).remainder(3).expand(2, -1)
    found = layer(x, groups=groups)
    for number in range(3):
        inside = groups == number
        expected = gathered(layer, x, weights_by_token(layer, x, inside))
        assert distance(found[inside], expected[inside]) < EXACT


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_a_block_of_all_tokens_is_no_causal_layer(kind):
    x = tokens()
    assert distance(make(kind, block=TOKENS)(x), make(kind, block=1, causal=False)(x)) < EXACT


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_rows_are_those_of_the_blocks(kind, is_masked):
    layer, x = make(kind), tokens()
    key_mask = some_hidden() if is_masked else None
    with torch.no_grad():
        found = record(layer, {"x": x, "key_mask": key_mask})[0]
        expected = weights_by_token(layer, x, key_mask)
    places = torch.tensor([10, 0, 5, 7])
    assert distance(found.rows(places), expected[:, :, places]) < EXACT
    assert distance(torch.cat([rows for _, rows in found.chunks()], 2), expected) < EXACT


@pytest.mark.parametrize("is_masked", [False, True])
def test_recorded_denominators_sum_over_the_keys_of_the_blocks(is_masked):
    layer, x = make("linear"), tokens()
    key_mask = some_hidden() if is_masked else None
    with torch.no_grad(), Recorder(layer) as recorder:
        layer(x, key_mask=key_mask)
    found = recorder.records[0]
    assert isinstance(found, LinearRecord)
    q, k, _ = layer.qkvg(x).unflatten(-1, (3, 2, 8)).unbind(2)
    for sample, token in ((0, 6), (1, 0), (1, 7), (1, 10)):
        seen = seen_by(token, sample, key_mask)
        scores = (q[sample, token].relu() * k[sample, seen].relu()).sum((0, 2))
        expected = (scores + 1e-6 * len(seen)).log()
        assert distance(found.log_denominators()[sample, :, token], expected) < EXACT


def test_blocks_without_causal_attention_are_refused():
    for method in ("linear", "softmax"):
        with pytest.raises(ValueError, match=r"got block=4 with causal=False; use causal=True, or block=1"):
            build(method, dim=16, num_heads=2, block=4)
        with pytest.raises(ValueError, match=r"block must be the number of tokens .* at least 1, got 0; 1 is plain causal"):
            build(method, dim=16, num_heads=2, causal=True, block=0)
    with pytest.raises(ValueError, match=r"block must be a whole number, got 2\.5"):
        build("linear", dim=16, num_heads=2, causal=True, block=2.5)


def test_attention_received_from_all_tokens_is_refused_where_they_do_not_see_each_other():
    with pytest.raises(ValueError, match=r"needs tokens that all see each other alike: use .* causal=False"):
        make("linear").received_attention(tokens())
