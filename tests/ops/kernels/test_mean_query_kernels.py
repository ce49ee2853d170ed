"""Keys that the mean query weighs inside the kernels (RALA), against the formula in float64, forward and backward."""

import pytest
import torch

import nalaformer
from helpers.attention_formula import Turning, row_positions
from helpers.contrast_formula import rala_weight, weighted_and_contrasted
from helpers.kernel_checks import DEVICE, HALF_ULP, make, relative_error
from nalaformer import Rotary, feature_map, global_query_weight, linear_attention
from nalaformer.ops.backend import INTERPRETING
from nalaformer.ops.kernels.linear import call

pytestmark = pytest.mark.kernels

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")

# float32 sums of a few hundred products miss float64 by less than 1e-6 here
BAR = 4e-6


@pytest.fixture(autouse=True)
def many_programs(poisoned_memory, monkeypatch):
    """Even few tokens are split over programs, and memory that nothing wrote is NaN."""
    monkeypatch.setattr(call, "SPREAD", dict.fromkeys(call.SPREAD, (2, 1)))
    monkeypatch.setattr(call, "CALLS", {})


def the_map(name, tensors):
    return feature_map(name, num_heads=tensors[0].shape[-2], head_dim=tensors[0].shape[-1]).to(DEVICE)


def found(name, tensors, upstream, *, dtype=torch.float32, backend="triton", **options):
    """Output and gradients of q, k and v."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
    with nalaformer.use_backend(backend):
        out = linear_attention(*inputs, feature_map=the_map(name, tensors), key_weight="global_query", **options)
    return [out, *torch.autograd.grad(out, inputs, upstream.to(dtype))]


def expected(name, tensors, upstream, *, query_mask=None, key_mask=None, turning=None, eps=1e-6):
    """The same by the formula over all pairs."""
    single = the_map(name, tensors)
    q, k, v = inputs = [x.detach().double().requires_grad_() for x in tensors]
    weight = rala_weight(single, q, k, key_mask=key_mask, query_mask=query_mask)
    out = weighted_and_contrasted(single, q, k, v, key_weight=weight, key_mask=key_mask, turning=turning, eps=eps)
    return [out, *torch.autograd.grad(out, inputs, upstream.double())]


def largest_error(ours, exact):
    return max(relative_error(x, y) for x, y in zip(ours, exact, strict=True))


@pytest.mark.parametrize("name", ["elu", "relu", "split"])
def test_output_and_gradients_are_the_formula(name):
    tensors = make((2, 70, 2, 12), (2, 91, 2, 12), (2, 91, 2, 20))
    upstream = torch.randn(2, 70, 2, 20, device=DEVICE)
    assert largest_error(found(name, tensors, upstream), expected(name, tensors, upstream)) < BAR


def test_eps_shrinks_outputs_as_if_weights_had_a_mean_of_one():
    # with a small eps a factor of all weights cancels, and with it what the softmax subtracts from their gradients
    tensors = make((1, 40, 2, 8), (1, 50, 2, 8), (1, 50, 2, 8))
    upstream = torch.randn(1, 40, 2, 8, device=DEVICE)
    ours = found("elu", tensors, upstream, eps=3.0)
    assert largest_error(ours, expected("elu", tensors, upstream, eps=3.0)) < BAR


def test_hidden_tokens_count_neither_in_the_mean_nor_among_the_keys():
    tensors = make((2, 70, 2, 12), (2, 91, 2, 12), (2, 91, 2, 12))
    masks = {"query_mask": torch.rand(2, 70, device=DEVICE) > 0.3, "key_mask": torch.rand(2, 91, device=DEVICE) > 0.3}
    upstream = torch.randn(2, 70, 2, 12, device=DEVICE)
    exact = expected("elu", tensors, upstream, **masks)
    # hidden keys may hold anything; a hidden query still gets an output
    tensors[1][~masks["key_mask"]], tensors[2][~masks["key_mask"]] = torch.nan, torch.nan
    assert largest_error(found("elu", tensors, upstream, **masks), exact) < BAR


def test_positions_turn_the_numerator_and_not_the_weights():
    tensors = make(*[(1, 75, 2, 8)] * 3)
    upstream = torch.randn(1, 75, 2, 8, device=DEVICE)
    turning = Turning(row_positions(75).to(DEVICE), row_positions(75).to(DEVICE), dim=8, inclusive=False)
    ours = found("elu", tensors, upstream, rotary=Rotary.sequence(75, 8, device=DEVICE))
    assert largest_error(ours, expected("elu", tensors, upstream, turning=turning)) < BAR


def test_query_heads_that_share_keys_weigh_them_each_for_itself():
    tensors = make((2, 33, 4, 8), (2, 33, 2, 8), (2, 33, 2, 8))
    upstream = torch.randn(2, 33, 4, 8, device=DEVICE)
    assert largest_error(found("elu", tensors, upstream), expected("elu", tensors, upstream)) < BAR


def test_packed_sequences_have_mean_queries_of_their_own():
    q, k, v = make(*[(40, 2, 8)] * 3)
    bounds = torch.tensor([0, 5, 5, 40], device=DEVICE)
    single = feature_map("elu", num_heads=2, head_dim=8).to(DEVICE)
    with nalaformer.use_backend("triton"):
        packed = linear_attention(q, k, v, feature_map=single, key_weight="global_query", cu_seqlens=bounds)
    for part in (slice(0, 5), slice(5, 40)):
        alone = [x[None, part] for x in (q, k, v)]
        exact = weighted_and_contrasted(single, *alone, key_weight=rala_weight(single, *alone[:2]), eps=1e-6)
        assert relative_error(packed[part], exact[0]) < BAR


def test_a_contrast_is_computed_beside_the_weights():
    q, k, v = make(*[(1, 40, 2, 8)] * 3)
    single = feature_map("elu", num_heads=2, head_dim=8).to(DEVICE)
    with nalaformer.use_backend("triton"):
        ours = linear_attention(q, k, v, feature_map=single, key_weight="global_query", contrast="mean_score")
    weight = rala_weight(single, q, k)
    exact = weighted_and_contrasted(single, q, k, v, key_weight=weight, contrast="mean_score", eps=1e-6)
    assert relative_error(ours, exact) < BAR


# where the products lie far from what the mean query promises: above and below it
@pytest.mark.parametrize("change", [lambda q, k: (q - 3.0, k + 100.0), lambda q, k: (q * 40.0, k * 0.1 - 6.0)])
def test_a_scale_that_was_guessed_wrong_is_mended(change):
    q, k, v = make(*[(1, 70, 2, 12)] * 3)
    tensors, upstream = (*change(q, k), v), torch.randn(1, 70, 2, 12, device=DEVICE)
    ours, exact = found("elu", tensors, upstream), expected("elu", tensors, upstream)
    # an exponent near 40 loses five bits, and gradients are differences of features near 100 that differ by one
    assert relative_error(ours[0], exact[0]) < 8 * BAR
    assert largest_error(ours, exact) < 100 * BAR


# sharp weights: one key in a hundred has most of the weight
@pytest.mark.parametrize("size", [1.0, 3.0])
def test_bfloat16_is_nearly_as_near_as_the_plain_reference(size, monkeypatch):
    if INTERPRETING:
        from helpers.bfloat16_in_the_interpreter import teach_bfloat16

        teach_bfloat16(monkeypatch)
    tensors = [x.bfloat16() for x in make(*[(1, 100, 1, 64)] * 3)]
    tensors[:2] = [x * size for x in tensors[:2]]
    upstream = torch.randn(1, 100, 1, 64, device=DEVICE).bfloat16()
    exact = expected("elu", tensors, upstream)
    plain = found("elu", tensors, upstream, dtype=torch.bfloat16, backend="reference")
    ours = found("elu", tensors, upstream, dtype=torch.bfloat16)
    for x, y, z in zip(ours, exact, plain, strict=True):
        # room: half a unit is the most that the rounding of an operand costs; the gradient of a query is a difference
        assert relative_error(x, y) < relative_error(z, y) + 2 * HALF_ULP[torch.bfloat16]


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e4, 1e10, 1e18])
def test_zero_tiny_and_huge_inputs_stay_finite(size):
    q, k, v = make(*[(2, 21, 2, 8)] * 3)
    visible = torch.ones(2, 21, dtype=torch.bool, device=DEVICE)
    visible[1] = False
    masks = {"key_mask": visible, "query_mask": visible}
    ours = found("elu", (q * size, k * size, v), torch.ones_like(v), **masks)
    assert all(x.isfinite().all() for x in ours)
    assert not ours[0][1].any()


def test_a_key_that_has_all_the_weight_gives_its_product_no_gradient():
    # what rounding leaves of the difference would be multiplied by the huge mean query
    q, k, v = make(*[(1, 40, 1, 8)] * 3)
    ours = found("elu", (q * 1e7, k * 1e7, v), torch.randn_like(v))
    assert ours[1].norm() < 1e-3
    assert ours[2].norm() < 1e-3


def test_the_numbers_of_the_weights_give_the_same_output():
    q, k, v = make(*[(2, 50, 2, 8)] * 3)
    single = feature_map("elu", num_heads=2, head_dim=8).to(DEVICE)
    with nalaformer.use_backend("triton"):
        weight = global_query_weight(q, k, feature_map=single)
        given = linear_attention(q, k, v, feature_map=single, key_weight=weight)
        made = linear_attention(q, k, v, feature_map=single, key_weight="global_query")
    assert relative_error(made, given) < BAR


def test_later_queries_and_unknown_padding_are_refused():
    q, k, v = make(*[(1, 5, 2, 8)] * 3)
    single = feature_map("elu", num_heads=2, head_dim=8).to(DEVICE)
    options = {"feature_map": single, "key_weight": "global_query"}
    with pytest.raises(ValueError, match=r"reads all queries, later ones too, but got causal=True"):
        linear_attention(q, k, v, causal=True, **options)
    with pytest.raises(ValueError, match=r"no query_mask; pass query_mask=key_mask in self-attention"):
        linear_attention(q, k, v, key_mask=torch.ones(1, 5, dtype=torch.bool, device=DEVICE), **options)
