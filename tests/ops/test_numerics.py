"""Gradients against finite differences, precision against float64, and inputs at which published code gives NaN."""

import copy

import pytest
import torch
from torch import Tensor

import nalaformer
from helpers.attention_formula import distance, formula
from helpers.maps import MAP_NAMES, VARIANCE_AWARE
from nalaformer import FeatureMap, Rotary, linear_attention, recurrent_linear_attention

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "one_thread"), pytest.mark.pairwise]

# error against float64, normwise with a floor of 1e-6: float32 inside, so what is left is the rounding of the output
BARS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# features, products, sums and the quotient are rounded one after the other, each of which is as a rounding of the inputs
ROUNDINGS = 4
DTYPES = list(BARS)
SIZES = (1e-20, 1e-3, 1e3, 1e4, 1e5, 1e9)


def size_in(dtype: torch.dtype, size: float) -> float:
    """Return the size, or 1e4 in float16, which ends at 65504."""
    return min(size, 1e4) if dtype == torch.float16 else size


def assert_precise(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    upstream: Tensor,
    *,
    dtype: torch.dtype,
    part: slice = slice(4),
    **arguments,
) -> None:
    """Output and gradients, or another part of what `run` gives, are within the bar of the type.

    float32: beside what roundings of the inputs alone change: much, where nearly equal numbers are subtracted (v_j - out
    in gradients of rows with few keys) and where a rounding of x becomes |w x| roundings of exp(w x).
    """
    actual = run(feature_map, q, k, v, upstream, **arguments)[part]
    expected = in_float64(feature_map, q, k, v, upstream, **arguments)[part]
    error = largest_distance(actual, expected)
    if dtype == torch.float32:
        moved = in_float64(moved_by_a_rounding(feature_map), *map(moved_by_a_rounding, (q, k, v)), upstream, **arguments)[part]
        assert error <= BARS[dtype] + ROUNDINGS * largest_distance(moved, expected)
    else:
        # room: rounding the result to 16 bits may cost all of the bar, which is half a unit, and float32 adds a hundredth to it
        assert error <= BARS[dtype]


def largest_distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max((distance(a, b) for a, b in zip(actual, expected, strict=True)), default=0.0)


def run(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    upstream: Tensor | None = None,
    *,
    autocast: torch.dtype | None = None,
    **arguments,
) -> list[Tensor]:
    """Output, then the gradients of q, k, v and of the map's parameters."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    # as torch advises, the backward pass runs outside
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        out = linear_attention(*inputs, feature_map=feature_map, **arguments)
    upstream = torch.ones_like(out) if upstream is None else upstream.to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [*inputs, *feature_map.parameters()], upstream)]


def in_float64(feature_map: FeatureMap, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, **arguments) -> list[Tensor]:
    """The same on the plain formula in float64, from the very same (rounded) inputs."""
    exact = copy.deepcopy(feature_map).double()
    with nalaformer.use_backend("reference"):
        return run(exact, q.double(), k.double(), v.double(), upstream.double(), **arguments)


@torch.no_grad()
def moved_by_a_rounding(x):
    """A tensor, or the parameters of a map, in float64 and off by about half a unit of float32."""
    if isinstance(x, FeatureMap):
        x = copy.deepcopy(x).double()
        for parameter in x.parameters():
            parameter.copy_(moved_by_a_rounding(parameter))
        return x
    return x.double() * (1 + 2**-24 * torch.randn(x.shape, dtype=torch.float64))


def all_finite(tensors: list[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


# --- gradients against finite differences -------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary", [None, "numerator", "normalised"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_gradients_are_those_of_finite_differences(map_name, causal, backend, rotary, masked, make_map, make_qkv):
    q, k, v = make_qkv(2, 3, head_dim=4)
    feature_map = make_map(map_name, head_dim=4, dtype=torch.float64)
    turn = None if rotary is None else Rotary.sequence(3, 4, normalised=rotary == "normalised")
    key_mask = torch.tensor([[True, False, True], [True, True, True]]) if masked else None

    def attend(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        # gradcheck moves the parameters in place
        return linear_attention(q, k, v, feature_map=feature_map, causal=causal, rotary=turn, key_mask=key_mask)

    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(attend, (*inputs, *feature_map.parameters()), fast_mode=True)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_variance_aware_gradients_are_those_of_finite_differences(backend, masked, make_map, make_qkv):
    q, k, v = make_qkv(2, 3, head_dim=4)
    feature_map = make_map(VARIANCE_AWARE, head_dim=4, dtype=torch.float64)
    key_mask = torch.tensor([[True, False, True], [True, True, True]]) if masked else None

    def attend(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        return linear_attention(q, k, v, feature_map=feature_map, key_mask=key_mask, query_mask=key_mask)

    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(attend, (*inputs, *feature_map.parameters()), fast_mode=True)


def test_gradients_through_the_recurrent_state_are_those_of_finite_differences(kind, make_map, make_qkv):
    q, k, v = make_qkv(1, 4, head_dim=4)
    feature_map = make_map(kind, head_dim=4, dtype=torch.float64)

    def attend(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        state, outputs = None, []
        for part in zip(q.split(2, 1), k.split(2, 1), v.split(2, 1), strict=True):
            out, state = recurrent_linear_attention(*part, feature_map=feature_map, state=state)
            outputs.append(out)
        # the normaliser of later tokens too
        return (*outputs, state.state, state.key_sum)

    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(attend, (*inputs, *feature_map.parameters()), fast_mode=True)


def test_gradients_of_grouped_heads_are_those_of_finite_differences(map_name, causal, make_map, make_qkv):
    q, k, v = make_qkv(1, 3, 4, 4, key_heads=2)
    feature_map = make_map(map_name, num_heads=4, head_dim=4, dtype=torch.float64)

    def attend(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        return linear_attention(q, k, v, feature_map=feature_map, causal=causal)

    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(attend, (*inputs, *feature_map.parameters()), fast_mode=True)


# --- precision ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "head_dim"), [(49, 20), (300, 64)])
def test_outputs_and_gradients_are_as_precise_as_their_dtype(map_name, causal, dtype, tokens, head_dim, make_map, make_qkv):
    q, k, v = make_qkv(1, tokens, 2, head_dim, dtype=dtype)
    feature_map = make_map(map_name, head_dim=head_dim)
    upstream = torch.randn(1, tokens, 2, head_dim, dtype=dtype)
    assert_precise(feature_map, q, k, v, upstream, dtype=dtype, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", nalaformer.FEATURE_MAPS.names())
def test_parameter_gradients_are_as_precise_as_their_dtype(name, causal, dtype, make_map, make_qkv):
    q, k, v = make_qkv(2, 49, 2, 20, dtype=dtype)
    feature_map = make_map(name, head_dim=20)
    upstream = torch.randn(2, 49, 2, 20, dtype=dtype)
    # parameters are float32 whatever the inputs are, and so are their gradients
    assert_precise(feature_map, q, k, v, upstream, dtype=torch.float32, part=slice(4, None), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalised", [False, True], ids=["numerator", "normalised"])
def test_rotary_is_as_precise_as_its_dtype(map_name, dtype, normalised, make_map, make_qkv):
    q, k, v = make_qkv(1, 63, 2, 20, dtype=dtype)
    feature_map = make_map(map_name, head_dim=20)
    upstream = torch.randn(1, 63, 2, 20, dtype=dtype)
    rotary = Rotary.grid(9, 7, 20, normalised=normalised)
    assert_precise(feature_map, q, k, v, upstream, dtype=dtype, rotary=rotary)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "head_dim"), [(49, 20), (300, 64)])
def test_variance_aware_reflections_are_as_precise_as_their_dtype(dtype, tokens, head_dim, make_map, make_qkv):
    q, k, v = make_qkv(1, tokens, 2, head_dim, dtype=dtype)
    feature_map = make_map(VARIANCE_AWARE, head_dim=head_dim)
    upstream = torch.randn(1, tokens, 2, head_dim, dtype=dtype)
    assert_precise(feature_map, q, k, v, upstream, dtype=dtype)


@pytest.mark.parametrize("scale", [3.0, 10.0])
def test_larger_inputs_are_as_precise(map_name, causal, scale, make_map, make_qkv):
    # the largest keys now need a scale, which must not cost the small ones their digits
    q, k, v = (scale * x for x in make_qkv(1, 49, 2, 20, dtype=torch.float32))
    feature_map = make_map(map_name, head_dim=20)
    upstream = torch.randn(1, 49, 2, 20)
    assert_precise(feature_map, q, k, v, upstream, dtype=torch.float32, causal=causal)


def test_chunks_are_as_precise_as_the_plain_formula_in_the_same_dtype(map_name, causal, make_map, make_qkv):
    # for every map and input, however badly conditioned; gradients may have twice the error
    q, k, v = make_qkv(1, 300, 2, 20, dtype=torch.float32)
    feature_map = make_map(map_name, head_dim=20)
    upstream = torch.randn(1, 300, 2, 20)
    expected = in_float64(feature_map, q, k, v, upstream, causal=causal)
    errors = {}
    for backend in ("reference", "chunked"):
        with nalaformer.use_backend(backend):
            actual = run(feature_map, q, k, v, upstream, causal=causal)
        errors[backend] = [distance(a, b) for a, b in zip(actual[:4], expected[:4], strict=True)]
    half_a_unit = 2**-24
    factors = (1, 2, 2, 2)
    for mine, plain, factor in zip(errors["chunked"], errors["reference"], factors, strict=True):
        # room: both sides have the same features and their rounding, so the ratio hardly moves: 0.6 to 0.84 over 20 seeds
        assert mine <= factor * plain + half_a_unit


# --- inputs at which published code fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids="{:g}".format)
def test_outputs_and_gradients_are_finite_at_every_size(map_name, causal, dtype, size, make_map, make_qkv):
    inputs = [(size_in(dtype, size) * x).to(dtype) for x in make_qkv(2, 9)]
    results = run(make_map(map_name), *inputs, causal=causal)
    assert all_finite(results)
    assert results[0].dtype == dtype


# not the polarity maps: their features of one key differ by more than float32 holds
@pytest.mark.parametrize("size", [1e20, 1e28], ids="{:g}".format)
@pytest.mark.parametrize("name", [name for name in MAP_NAMES if not name.startswith("polarity")])
def test_products_beyond_float32_are_as_in_float64(name, causal, backend, size, make_map, make_qkv):
    q, k, v = make_qkv(2, 9, dtype=torch.float32)
    feature_map = make_map(name)
    q, k = size * q, size * k
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal).detach()
    expected = formula(feature_map, q, k, v, causal=causal)
    moved = formula(moved_by_a_rounding(feature_map), *map(moved_by_a_rounding, (q, k, v)), causal=causal)
    assert distance(out, expected) <= BARS[torch.float32] + ROUNDINGS * distance(moved, expected)


@pytest.mark.parametrize("name", ["norm_aware", "norm_aware+cosine", "norm_preserving"])
def test_a_query_too_long_to_square_keeps_its_direction(name, backend, make_map, make_qkv):
    q, k, v = make_qkv(2, 9, dtype=torch.float32)
    feature_map = make_map(name)
    # a power of two: nothing but the length changes, and both are far beyond where it still counts
    long, longer = (linear_attention(2.0**power * q, k, v, feature_map=feature_map) for power in (20, 80))
    assert distance(longer.detach(), long.detach()) <= BARS[torch.float32]


@pytest.mark.parametrize("size", [1e3, 1e5, 1e9], ids="{:g}".format)
@pytest.mark.parametrize("alpha", [4.0, 7.0])
def test_the_largest_polarity_powers_stay_finite(causal, alpha, size, make_qkv):
    # powers of 5 and 8: 1e9 to that power is beyond float32, so the scale must come off before the power
    feature_map = nalaformer.feature_map("polarity", num_heads=2, head_dim=8, alpha=alpha)
    torch.nn.init.constant_(feature_map.power, 10.0)
    assert all_finite(run(feature_map, *((size * x).float() for x in make_qkv(2, 9)), causal=causal))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["q", "k"])
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e4], ids="{:g}".format)
def test_one_odd_token_leaves_everything_finite(map_name, causal, dtype, which, size, make_map, make_qkv):
    inputs = list(make_qkv(2, 9, dtype=dtype))
    inputs[which][:, 4] *= size
    assert all_finite(run(make_map(map_name), *inputs, causal=causal))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1), (0, 1, 2)], ids=["q", "k", "qk", "qkv"])
def test_zero_inputs_leave_everything_finite(map_name, causal, dtype, which, make_map, make_qkv):
    inputs = [x * (i not in which) for i, x in enumerate(make_qkv(2, 9, dtype=dtype))]
    assert all_finite(run(make_map(map_name), *inputs, causal=causal))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalised", [False, True], ids=["numerator", "normalised"])
@pytest.mark.parametrize("size", [0.0, 1e-20, 30.0, 1e3, 1e9], ids="{:g}".format)
def test_rotary_leaves_odd_sizes_finite(map_name, causal, dtype, normalised, size, make_map, make_qkv):
    inputs = [(size * x).to(dtype) for x in make_qkv(2, 9)]
    rotary = Rotary.sequence(9, 8, normalised=normalised)
    assert all_finite(run(make_map(map_name), *inputs, causal=causal, rotary=rotary))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids="{:g}".format)
def test_the_variance_aware_reflection_is_finite_at_every_size(dtype, size, make_map, make_qkv):
    inputs = [(size_in(dtype, size) * x).to(dtype) for x in make_qkv(2, 9)]
    assert all_finite(run(make_map(VARIANCE_AWARE), *inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_row_that_sees_nothing_gives_zeros(map_name, causal, backend, dtype, eps, make_map, make_qkv):
    q, k, v = make_qkv(2, 9, dtype=dtype)
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[1] = False
    results = run(make_map(map_name), q, k, v, causal=causal, key_mask=key_mask, eps=eps)
    assert all_finite(results)
    assert all((result[1] == 0).all() for result in results[:4])
    assert (results[0][0] != 0).any()


def test_causal_rows_before_the_first_visible_key_give_zeros(map_name, backend, make_map, make_qkv):
    # left padding
    q, k, v = make_qkv(1, 9, dtype=torch.float32)
    key_mask = torch.arange(9)[None] >= 4
    results = run(make_map(map_name), q, k, v, causal=True, key_mask=key_mask)
    assert all_finite(results)
    assert (results[0][:, :4] == 0).all()


def test_other_tokens_are_as_in_float64_when_one_query_is_zero(map_name, causal, make_map, make_qkv):
    q, k, v = make_qkv(1, 49, 2, 20, dtype=torch.float32)
    q[:, 17] = 0
    feature_map = make_map(map_name, head_dim=20)
    upstream = torch.randn(1, 49, 2, 20)
    actual = run(feature_map, q, k, v, upstream, causal=causal)
    expected = in_float64(feature_map, q, k, v, upstream, causal=causal)
    others = [i for i in range(49) if i != 17]
    assert all_finite(actual)
    assert distance(actual[0][:, others], expected[0][:, others]) <= BARS[torch.float32]
    assert distance(actual[1][:, others], expected[1][:, others]) <= BARS[torch.float32]
    assert largest_distance(actual[2:4], expected[2:4]) <= BARS[torch.float32]


@pytest.mark.parametrize("norm", [0.0, 1e-20, 1e-10, 1e-6, 1e-5, 1.01e-5, 1e-4, 1e-2], ids="{:g}".format)
def test_the_gradient_of_a_tiny_query_is_bounded(map_name, causal, norm, make_map, make_qkv):
    # of one output at a time, each in samples of its own, with keys of unit norm: 1/eps times a key is what a plain map gives
    # at most
    q, k, v = make_qkv(2, 9, dtype=torch.float32)
    q, k = norm * q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    upstream = torch.eye(8).repeat_interleave(2, 0)[:, None, None].expand(16, 9, 2, 8)
    gradient = run(make_map(map_name), *(x.repeat(8, 1, 1, 1) for x in (q, k, v)), upstream, causal=causal)[1]
    assert gradient.abs().max() <= 1e6 * v.abs().max()


# float16 gradients end at 65504, while near the norm 1e-5, where a query loses its direction, they reach 1.3e5
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["split", "cosine"])
@pytest.mark.parametrize("along_an_axis", [False, True])
def test_norm_aware_gradients_are_bounded_over_all_tiny_norms(dtype, direction, along_an_axis, causal, make_qkv):
    _, k, v = make_qkv(1, 91, dtype=dtype)
    direction_of_q = torch.eye(8)[:2] if along_an_axis else torch.randn(91, 2, 8)
    norms = torch.logspace(-20, -2, 91)[None, :, None, None]
    q = (norms * direction_of_q / direction_of_q.norm(dim=-1, keepdim=True)).to(dtype)
    feature_map = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8, direction=direction)
    results = run(feature_map, q, k, v, causal=causal)
    assert all_finite(results)
    assert results[1].abs().max() <= 1e6 * v.abs().max()


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 32.0, 1e3])
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16], ids=str)
def test_float16_inputs_stay_finite(map_name, causal, scale, autocast, make_map, make_qkv):
    inputs = [(scale * x).half() for x in make_qkv(2, 49)]
    assert all_finite(run(make_map(map_name), *inputs, causal=causal, autocast=autocast))


# --- dtypes and autocast ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_the_output_has_the_dtype_of_q(kind, causal, backend, dtype, make_map, make_qkv):
    q, k, v = make_qkv(dtype=dtype)
    out = linear_attention(q, k, v, feature_map=make_map(kind), causal=causal)
    assert out.dtype == dtype


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16", "float16"), ("bfloat16", "float32", "float64")], ids=str)
def test_mixed_dtypes_are_computed_in_the_widest(kind, causal, backend, dtypes, make_map, make_qkv):
    q, k, v = (x.to(getattr(torch, name)) for x, name in zip(make_qkv(2, 19), dtypes, strict=True))
    feature_map = make_map(kind)
    actual = run(feature_map, q, k, v, causal=causal)
    assert [x.dtype for x in actual[:4]] == [q.dtype, q.dtype, k.dtype, v.dtype]
    expected = in_float64(feature_map, q, k, v, torch.ones(()).expand(2, 19, 2, 8), causal=causal)
    # room: rounding the result to 16 bits may cost all of the bar, which is half a unit
    assert distance(actual[0], expected[0]) <= BARS[q.dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(kind, causal, backend, dtype, make_map, make_qkv):
    inputs = make_qkv(2, 49, dtype=torch.float32)
    feature_map = make_map(kind)
    without, within = (run(feature_map, *inputs, causal=causal, autocast=autocast) for autocast in (None, dtype))
    assert all(torch.equal(a, b) for a, b in zip(within, without, strict=True))


def test_autocast_changes_nothing_in_the_variance_aware_reflection(backend, make_map, make_qkv):
    inputs = make_qkv(2, 49, dtype=torch.float32)
    feature_map = make_map(VARIANCE_AWARE)
    without, within = (run(feature_map, *inputs, autocast=autocast) for autocast in (None, torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(within, without, strict=True))


def test_autocast_changes_nothing_in_recurrent_steps(kind, make_map, make_qkv):
    q, k, v = make_qkv(2, 9, dtype=torch.float32)
    feature_map = make_map(kind)
    without = recurrent_linear_attention(q, k, v, feature_map=feature_map)
    with torch.autocast("cpu", torch.bfloat16):
        within = recurrent_linear_attention(q, k, v, feature_map=feature_map)
    assert torch.equal(within[0], without[0])
    assert torch.equal(within[1].state, without[1].state)


def test_autocast_changes_nothing_in_attention_weights(kind, causal, make_map, make_qkv):
    q, k, _ = make_qkv(2, 9, dtype=torch.float32)
    feature_map = make_map(kind)
    without = nalaformer.attention_weights(q, k, feature_map=feature_map, causal=causal)
    with torch.autocast("cpu", torch.bfloat16):
        within = nalaformer.attention_weights(q, k, feature_map=feature_map, causal=causal)
    assert torch.equal(within, without)


def test_a_map_in_low_precision_takes_float32_inputs(map_name, causal, make_map, make_qkv):
    # the parameters of a bfloat16 model; they are brought to the compute dtype, not the inputs to theirs
    q, k, v = make_qkv(2, 19, dtype=torch.float32)
    rounded = make_map(map_name, dtype=torch.bfloat16)
    out = linear_attention(q, k, v, feature_map=rounded, causal=causal)
    expected = linear_attention(q, k, v, feature_map=copy.deepcopy(rounded).float(), causal=causal)
    assert distance(out.detach(), expected.detach()) <= BARS[torch.float32]


@pytest.mark.parametrize("name", MAP_NAMES)
def test_a_constant_value_comes_out_as_it_is(name, causal, make_map, make_qkv):
    # weights sum to one but for eps: no map and no dtype may drift
    q, k, _ = make_qkv(1, 49, 2, 20, dtype=torch.bfloat16)
    out = linear_attention(q, k, torch.ones_like(k), feature_map=make_map(name, head_dim=20), causal=causal, eps=0.0)
    assert (out - 1).abs().max() <= 2**-8
    assert abs(out.float().mean().item() - 1) <= 1e-4
