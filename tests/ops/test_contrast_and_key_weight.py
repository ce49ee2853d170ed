"""The contrast of MALA and the weights of RALA, as parts that any feature map takes."""

import pytest
import torch

import nalaformer
from helpers.attention_formula import EXACT, ROUNDING, Turning, distance, row_positions
from helpers.contrast_formula import rala_weight, weighted_and_contrasted
from nalaformer import Rotary, attention_weights, feature_map, global_query_weight, linear_attention
from nalaformer.ops import chunked, key_weight
from nalaformer.ops.features import repeat_heads

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")

# one stream, both signs, two streams with scaled features
MAPS = ("elu", "norm_aware", "polarity")


@pytest.fixture(params=["reference", "chunked"], autouse=True)
def backend(request, monkeypatch):
    # several pieces even of few tokens
    for module in (chunked, key_weight):
        monkeypatch.setattr(module, "chunk_size", lambda *_: 5)
    monkeypatch.setattr(chunked, "CAUSAL_CHUNK", 5)
    with nalaformer.use_backend(request.param):
        yield request.param


def inputs(queries=13, keys=13, heads=2, kv_heads=2, dtype=torch.float64):
    q = torch.randn(2, queries, heads, 8, dtype=dtype)
    k, v = (torch.randn(2, keys, kv_heads, 8, dtype=dtype) for _ in range(2))
    return q, k, v


def padding(tokens=13):
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[0, -4:] = False
    mask[1, 2] = False
    return mask


def the_map(name, heads=2):
    return feature_map(name, num_heads=heads, head_dim=8).double()


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strength", ["mean_score", "given"])
def test_contrast_and_weight_are_the_formula_over_visible_tokens(name, causal, strength):
    q, k, v = inputs()
    weight = torch.rand(2, 13, 2, dtype=torch.float64)
    contrast = strength if strength == "mean_score" else torch.rand(2, 13, 2, dtype=torch.float64)
    options = {"causal": causal, "key_mask": padding(), "contrast": contrast, "key_weight": weight}
    rotary = Rotary.sequence(13, 8)
    turning = Turning(row_positions(13), row_positions(13), dim=8, inclusive=False)
    found = linear_attention(q, k, v, feature_map=the_map(name), rotary=rotary, **options)
    expected = weighted_and_contrasted(the_map(name), q, k, v, turning=turning, eps=1e-6, **options)
    assert distance(found, expected) < EXACT


def test_the_published_formula_of_mala_is_attention_plus_its_distance_from_the_mean():
    # A (1 + 1/z) - z mean v, with A the un-normalised attention
    q, k, v = inputs()
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    z = torch.einsum("bihd,bhd->bih", phi_q, phi_k.mean(1))[..., None] * 8**-0.5
    above = torch.einsum("bihd,bjhd,bjhv->bihv", phi_q, phi_k, v) * 8**-0.5 / 13
    expected = above * (1 + 1 / z) - z * v.mean(1, keepdim=True)
    found = linear_attention(q, k, v, feature_map=the_map("elu"), contrast="mean_score", eps=0)
    assert distance(found, expected) < EXACT


@pytest.mark.parametrize("name", MAPS)
def test_gradients_are_those_of_the_formula(name):
    tensors = [x.requires_grad_() for x in inputs(queries=6, keys=7)]
    weight = torch.rand(2, 7, 2, dtype=torch.float64).requires_grad_()
    strength = torch.rand(2, 6, 2, dtype=torch.float64).requires_grad_()
    cotangent = torch.randn(2, 6, 2, 8, dtype=torch.float64)
    for contrast in ("mean_score", strength):
        wanted = [*tensors, weight] + ([strength] if contrast is strength else [])
        options = {"contrast": contrast, "key_weight": weight}
        found = linear_attention(*tensors, feature_map=the_map(name), **options)
        expected = weighted_and_contrasted(the_map(name), *tensors, eps=1e-6, **options)
        pairs = zip(
            torch.autograd.grad(found, wanted, cotangent), torch.autograd.grad(expected, wanted, cotangent), strict=True
        )
        assert max(distance(*pair) for pair in pairs) < EXACT


@pytest.mark.parametrize("name", MAPS)
def test_equal_weights_and_no_strength_are_plain_attention(name):
    q, k, v = inputs()
    plain = linear_attention(q, k, v, feature_map=the_map(name))
    ones, none = torch.ones(2, 13, 2), torch.zeros(2, 13, 2)
    assert distance(linear_attention(q, k, v, feature_map=the_map(name), key_weight=ones, contrast=none), plain) < EXACT
    # equal keys look alike to every query
    alike = k[:, :1].expand_as(k)
    weight = global_query_weight(q, alike, feature_map=the_map(name))
    assert distance(weight, torch.ones_like(weight)) < EXACT


@pytest.mark.parametrize("name", MAPS)
def test_weights_of_the_global_query_are_the_formula_over_visible_tokens(name):
    q, k, _ = inputs(queries=11)
    masks = {"key_mask": padding(), "query_mask": padding(11)}
    for options in ({}, masks):
        found = global_query_weight(q, k, feature_map=the_map(name), **options)
        assert distance(found, rala_weight(the_map(name), q, k, **options)) < EXACT


def test_gradients_of_the_weights_are_those_of_the_formula():
    q, k, _ = (x.requires_grad_() for x in inputs(queries=11))
    cotangent = torch.randn(2, 13, 2, dtype=torch.float64)
    options = {"key_mask": padding(), "query_mask": padding(11)}
    found = torch.autograd.grad(global_query_weight(q, k, feature_map=the_map("elu"), **options), (q, k), cotangent)
    expected = torch.autograd.grad(rala_weight(the_map("elu"), q, k, **options), (q, k), cotangent)
    assert max(distance(*pair) for pair in zip(found, expected, strict=True)) < EXACT


@pytest.mark.parametrize("weight_heads", [2, 4])
def test_query_heads_that_share_keys_have_strengths_and_weights_of_their_own(weight_heads):
    q, k, v = inputs(heads=4)
    shared = the_map("elu", heads=4)
    weight = torch.rand(2, 13, weight_heads, dtype=torch.float64)
    found = linear_attention(q, k, v, feature_map=shared, contrast="mean_score", key_weight=weight)
    repeated = weight.repeat_interleave(4 // weight_heads, 2)
    expected = weighted_and_contrasted(shared, q, k, v, contrast="mean_score", key_weight=repeated, eps=1e-6)
    assert distance(found, expected) < EXACT
    assert distance(global_query_weight(q, k, feature_map=shared), rala_weight(shared, q, k)) < EXACT


@pytest.mark.parametrize("name", MAPS)
def test_the_global_query_takes_a_map_made_for_the_heads_of_the_keys(name):
    q, k, v = inputs(heads=4)
    mapped = the_map(name, heads=2)
    weight = global_query_weight(q, k, feature_map=mapped)
    given = {"feature_map": mapped, "contrast": "mean_score"}
    expected = linear_attention(q, k, v, key_weight=weight, **given)
    assert distance(linear_attention(q, k, v, key_weight="global_query", **given), expected) < EXACT
    rows = (attention_weights(q, k, key_weight=chosen, **given) for chosen in (weight, "global_query"))
    assert distance(*rows) < EXACT


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_know_nothing_of_each_other(causal):
    q, k, v = (torch.randn(13, 2, 8, dtype=torch.float64) for _ in range(3))
    bounds = torch.tensor([0, 4, 4, 13])
    options = {"feature_map": the_map("elu"), "causal": causal}
    weight = global_query_weight(q, k, feature_map=the_map("elu"), cu_seqlens=bounds)
    strength = torch.rand(13, 2, dtype=torch.float64)
    for contrast in ("mean_score", strength):
        packed = linear_attention(q, k, v, contrast=contrast, key_weight=weight, cu_seqlens=bounds, **options)
        for part in (slice(0, 4), slice(4, 13)):
            alone = [x[None, part] for x in (q, k, v)]
            own = global_query_weight(*alone[:2], feature_map=the_map("elu"))
            z = contrast if isinstance(contrast, str) else contrast[None, part]
            expected = linear_attention(*alone, contrast=z, key_weight=own, **options)
            assert distance(packed[part], expected[0]) < EXACT


def test_a_causal_contrast_ignores_future_tokens():
    q, k, v = inputs()
    options = {"feature_map": the_map("elu"), "causal": True, "contrast": "mean_score"}
    before = linear_attention(q, k, v, **options)
    k[:, 9:], v[:, 9:] = torch.nan, torch.inf
    assert torch.equal(linear_attention(q, k, v, **options)[:, :9], before[:, :9])


def test_what_padding_holds_reaches_nobody():
    q, k, v = inputs(dtype=torch.float32)
    mask = padding()
    single = feature_map("elu", num_heads=2, head_dim=8)

    def attend(tensors):
        of_weights, k, v = tensors = [x.clone().requires_grad_() for x in tensors]
        weight = global_query_weight(of_weights, k, feature_map=single, key_mask=mask, query_mask=mask)
        out = linear_attention(q, k, v, feature_map=single, contrast="mean_score", key_weight=weight, key_mask=mask)
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    expected = attend((q, k, v))
    hidden = ~mask[:, :, None, None]
    found = attend([x.masked_fill(hidden, torch.nan) for x in (q, k, v)])
    assert distance(found[0], expected[0]) < ROUNDING
    for actual, known in zip(found[1:], expected[1:], strict=True):
        assert distance(actual[mask], known[mask]) < ROUNDING
        assert not actual[~mask].isnan().any()


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e4, 1e10])
@pytest.mark.parametrize("causal", [False, True])
def test_zero_tiny_and_huge_inputs_stay_finite(name, size, causal):
    q, k, v = (x * size for x in inputs(dtype=torch.float32))
    v = v / max(size, 1.0)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    single = the_map(name).float()
    weight = None if causal else global_query_weight(q, k, feature_map=single)
    out = linear_attention(*tensors, feature_map=single, contrast="mean_score", key_weight=weight, causal=causal)
    assert out.isfinite().all()
    # huge strengths have huge gradients: of a loss of their size
    loss = (out / out.detach().abs().amax().clamp(min=1)).sum()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, tensors))


def test_a_row_that_sees_nothing_gives_zeros():
    q, k, v = inputs()
    mask = padding()
    mask[1] = False
    weight = global_query_weight(q, k, feature_map=the_map("elu"), key_mask=mask, query_mask=mask)
    assert not weight[1].any()
    out = linear_attention(q, k, v, feature_map=the_map("elu"), contrast="mean_score", key_weight=weight, key_mask=mask)
    assert not out[1].any()
    assert out[0].any()


@pytest.mark.parametrize("causal", [False, True])
def test_exact_weights_times_values_are_the_output(causal):
    q, k, v = inputs()
    strength = torch.rand(2, 13, 2, dtype=torch.float64)
    for contrast in ("mean_score", strength):
        options = {
            "feature_map": the_map("elu"),
            "causal": causal,
            "contrast": contrast,
            "key_weight": torch.rand(2, 13, 2),
            "eps": 0.0,
        }
        rows = attention_weights(q, k, rows=[3, 12], **options)
        expected = linear_attention(q, k, v, **options)[:, [3, 12]]
        assert distance(torch.einsum("bhij,bjhv->bihv", rows, v), expected) < EXACT
        # a contrast only moves weight from key to key
        assert distance(rows.sum(-1), torch.ones_like(rows.sum(-1))) < EXACT


def test_what_is_wrong_with_contrast_and_weights_is_said():
    q, k, v = inputs()
    options = {"feature_map": the_map("elu")}
    with pytest.raises(ValueError, match=r'contrast must be None, "mean_score" or a tensor.*got \'mean\''):
        linear_attention(q, k, v, contrast="mean", **options)
    with pytest.raises(ValueError, match=r"contrast must hold a float for each token and head of q, \(2, 13, 2\)"):
        linear_attention(q, k, v, contrast=torch.ones(2, 13), **options)
    with pytest.raises(ValueError, match=r"key_weight must hold a number for each key.*got \(2, 13\)"):
        linear_attention(q, k, v, key_weight=torch.ones(2, 13), **options)
    with pytest.raises(ValueError, match=r"key_weight must be a float tensor, got 'rala'; nalaformer.global_query_weight"):
        linear_attention(q, k, v, key_weight="rala", **options)
    with pytest.raises(ValueError, match=r"no query_mask; pass query_mask=key_mask in self-attention"):
        global_query_weight(q, k, key_mask=padding(), **options)


def test_keys_of_as_many_heads_as_queries_are_not_copied():
    q, k = torch.zeros(1, 5, 4, 8), torch.zeros(1, 7, 4, 8)
    assert repeat_heads(q, k) is k
    assert repeat_heads(q, k[:, :, :2]).shape == k.shape
