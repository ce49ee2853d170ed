"""LinearState: what is remembered of the past is a sum, so it can be cut, joined, moved, saved and added up."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

import nalaformer
from helpers.maps import MAP_NAMES
from nalaformer import FeatureMap, LinearState, Rotary, linear_attention, recurrent_linear_attention
from nalaformer.ops.backend import TRITON_FOUND

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "one_thread"), pytest.mark.pairwise]


def state_after(feature_map: FeatureMap, k: Tensor, v: Tensor, **arguments) -> LinearState:
    """The queries do not enter the state."""
    group = feature_map.num_heads // k.shape[2]
    return recurrent_linear_attention(k.repeat_interleave(group, 2), k, v, feature_map=feature_map, **arguments)[1]


def assert_same(actual: LinearState, expected: LinearState, tolerance: float = 0.0) -> None:
    for name, tensor in expected.tensors().items():
        mine = actual.tensors()[name]
        assert (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype), name
        assert (mine - tensor).double().norm() <= tolerance * tensor.double().norm(), name


def random_state(batch: int = 4, heads: int = 6) -> LinearState:
    return LinearState(
        torch.randn(batch, heads, 5, 3),
        torch.rand(batch, heads, 5),
        torch.randint(0, 100, (batch,)),
        torch.rand(batch, heads),
    )


# --- sums ---------------------------------------------------------------------------------------------------------------


# at 1e5 the features of some maps exceed float32, and states carry a scale
@pytest.mark.parametrize("size", [1.0, 1e5])
@pytest.mark.parametrize("cut", [1, 8, 16])
def test_merged_states_are_the_state_of_all_tokens(map_name, size, cut, make_map, make_qkv):
    _, k, v = make_qkv(2, 17)
    k[:, 9:] *= size
    feature_map = make_map(map_name, dtype=torch.float64)
    parts = [state_after(feature_map, k[:, tokens], v[:, tokens]) for tokens in (slice(cut), slice(cut, None))]
    assert_same(LinearState.merge(*parts), state_after(feature_map, k, v), 1e-12)


@pytest.mark.parametrize("name", ["norm_aware", "norm_aware+mild", "polarity", "polarity_exp"])
def test_huge_keys_give_the_state_a_scale(name, make_map, make_qkv):
    # the tests with huge keys must not pass because nothing was scaled
    _, k, v = make_qkv(dtype=torch.float32)
    feature_map = make_map(name)
    assert (state_after(feature_map, k, v).log_scale == 0).all()
    huge = state_after(feature_map, k * 1e8, v)
    assert (huge.log_scale > 1).all()
    assert huge.state.isfinite().all()


def test_the_order_of_merging_does_not_matter(map_name, make_map, make_qkv):
    _, k, v = make_qkv(2, 12)
    k[:, 5:] *= 1e4
    feature_map = make_map(map_name, dtype=torch.float64)
    a, b, c = (state_after(feature_map, *tokens) for tokens in zip(k.split(4, 1), v.split(4, 1), strict=True))
    left = LinearState.merge(LinearState.merge(a, b), c)
    right = LinearState.merge(LinearState.merge(c, b), a)
    assert_same(left, right, 1e-12)


@pytest.mark.parametrize("size", [1.0, 1e5])
def test_the_empty_state_changes_nothing(map_name, size, make_map, make_qkv):
    _, k, v = make_qkv(dtype=torch.float32)
    full = state_after(make_map(map_name), k * size, v)
    empty = LinearState.empty(*full.state.shape)
    assert_same(LinearState.merge(empty, full), full)
    assert_same(LinearState.merge(full, empty), full)


def test_states_of_different_layers_do_not_merge():
    with pytest.raises(ValueError, match=r"states merge only if .* agree, got \(4, 6, 5, 3\) and \(4, 2, 5, 3\)"):
        LinearState.merge(random_state(), random_state(heads=2))


def test_hidden_tokens_do_not_enter_the_state(map_name, make_map, make_qkv):
    _, k, v = make_qkv(1, 9)
    key_mask = torch.tensor([[True, False, True, True, False, False, True, True, False]])
    feature_map = make_map(map_name, dtype=torch.float64)
    masked = state_after(feature_map, torch.where(key_mask[..., None, None], k, torch.nan), v, key_mask=key_mask)
    assert_same(masked, state_after(feature_map, k[:, key_mask[0]], v[:, key_mask[0]]), 1e-12)


@pytest.mark.parametrize("name", MAP_NAMES)
def test_tokens_in_parallel_parts_give_the_sequential_result(name, make_map, make_qkv):
    # sequence parallelism: each part sums its own tokens, then starts from the merged states of the parts before it
    q, k, v = make_qkv(2, 30)
    k[:, 20] *= 1e4
    feature_map = make_map(name, dtype=torch.float64)
    sizes = [7, 1, 13, 9]
    tokens = list(zip(*(x.split(sizes, 1) for x in (q, k, v)), strict=True))
    alone = [state_after(feature_map, k_part, v_part) for _, k_part, v_part in tokens]
    before = [None, *itertools.accumulate(alone[:-1], LinearState.merge)]
    parts = [
        recurrent_linear_attention(*part, feature_map=feature_map, state=state)[0]
        for part, state in zip(tokens, before, strict=True)
    ]
    whole = linear_attention(q, k, v, feature_map=feature_map, causal=True)
    assert (torch.cat(parts, 1) - whole).norm() / whole.norm() < 1e-12


# --- precision and size -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_state_of_low_precision_inputs_is_float32(map_name, dtype, make_map, make_qkv):
    state = state_after(make_map(map_name), *make_qkv(dtype=dtype)[1:])
    assert {tensor.dtype for tensor in (state.state, state.key_sum, state.log_scale)} == {torch.float32}


def test_the_state_of_float64_inputs_is_float64(map_name, make_map, make_qkv):
    state = state_after(make_map(map_name, dtype=torch.float64), *make_qkv()[1:])
    assert {tensor.dtype for tensor in (state.state, state.key_sum, state.log_scale)} == {torch.float64}


def test_a_map_of_users_meets_a_state_in_the_type_of_its_tokens(make_qkv):
    class Projected(nalaformer.FeatureMap):
        def __init__(self) -> None:
            super().__init__(num_heads=2, head_dim=8)
            self.projection = torch.nn.Linear(8, 5)

        def query(self, q):
            return self.projection(q).exp()

        def key(self, k):
            return self.projection(k).exp()

    mapped, tensors = Projected().double(), [x.double() for x in make_qkv(tokens=6)]
    whole = nalaformer.linear_attention(*tensors, feature_map=mapped, causal=True)
    _, state = nalaformer.recurrent_linear_attention(*(x[:, :5] for x in tensors), feature_map=mapped)
    last, _ = nalaformer.recurrent_linear_attention(*(x[:, 5:] for x in tensors), feature_map=mapped, state=state)
    torch.testing.assert_close(last, whole[:, 5:])


def test_65536_bfloat16_tokens_lose_nothing_in_the_state(make_map, make_qkv):
    # values of one sign, so that the sum grows: a bfloat16 sum stops growing early and ends 60% off
    _, k, v = make_qkv(1, 65_536, heads=1, dtype=torch.bfloat16)
    v = v.abs()
    state = state_after(make_map("norm_aware", num_heads=1), k, v)
    exact = make_map("norm_aware", num_heads=1, dtype=torch.float64)
    phi_k = exact.key(k.double())
    key_sum, products = phi_k.sum(1), torch.einsum("bjhf,bjhv->bhfv", phi_k, v.double())
    assert (state.key_sum - key_sum).norm() / key_sum.norm() < 2e-6
    assert (state.state - products).norm() / products.norm() < 2e-6


def test_65536_bfloat16_tokens_keep_outputs_to_bfloat16_rounding(causal, make_map, make_qkv):
    q, k, v = make_qkv(1, 65_536, heads=1, dtype=torch.bfloat16)
    v = v.abs()
    feature_map, exact = (make_map("norm_aware", num_heads=1, dtype=dtype) for dtype in (torch.float32, torch.float64))
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    expected = linear_attention(q.double(), k.double(), v.double(), feature_map=exact, causal=causal)
    # room: half a unit of bfloat16 is the most that rounding the output costs; the sums are in float32
    assert (out - expected).norm() / expected.norm() < 4e-3


def test_the_state_does_not_grow_with_tokens(map_name, make_map, make_qkv):
    feature_map = make_map(map_name)
    few, many = (state_after(feature_map, *make_qkv(2, tokens, dtype=torch.float32)[1:]) for tokens in (1, 500))
    assert few.nbytes == many.nbytes
    assert few.count.tolist() == [1, 1]
    assert many.count.tolist() == [500, 500]


def test_nbytes_counts_every_tensor():
    state = random_state()
    assert state.nbytes == 4 * (4 * 6 * 5 * 3 + 4 * 6 * 5 + 4 * 6) + 8 * 4


# --- cutting, joining, moving, saving -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [1, 3, [1, 3], [4]])
def test_cat_puts_split_states_together_again(sizes):
    state = random_state()
    assert_same(LinearState.cat(state.split(sizes)), state)


def test_split_states_continue_like_the_whole(map_name, make_map, make_qkv):
    q, k, v = make_qkv(3, 5)
    feature_map = make_map(map_name, dtype=torch.float64)
    state = state_after(feature_map, k, v)
    whole, _ = recurrent_linear_attention(q, k, v, feature_map=feature_map, state=state)
    parts = [
        recurrent_linear_attention(*tokens, feature_map=feature_map, state=part)[0]
        for *tokens, part in zip(q.split([1, 2]), k.split([1, 2]), v.split([1, 2]), state.split([1, 2]), strict=True)
    ]
    assert (torch.cat(parts) - whole).abs().max() < 1e-12


@pytest.mark.parametrize("samples", [[2, 0, 0], torch.tensor([3])], ids=["list", "tensor"])
def test_select_reorders_and_repeats_samples(samples):
    state = random_state()
    chosen = state.select(samples)
    for row, sample in enumerate(torch.as_tensor(samples).tolist()):
        assert_same(chosen.split(1)[row], state.split(1)[sample])


def test_select_of_no_sample_is_an_empty_state():
    # every beam has ended: an empty batch is fine everywhere else too
    assert random_state().select([]).state.shape == (0, 6, 5, 3)


def test_split_heads_cuts_heads_and_keeps_the_count():
    state = random_state()
    first, second = state.split_heads([2, 4])
    assert torch.equal(first.state, state.state[:, :2])
    assert torch.equal(second.key_sum, state.key_sum[:, 2:])
    assert torch.equal(second.log_scale, state.log_scale[:, 2:])
    assert torch.equal(first.count, state.count)


def test_heads_in_parallel_continue_like_the_whole(make_qkv):
    q, k, v = make_qkv(2, 5, 6)
    whole_map, part_map = (nalaformer.feature_map("norm_aware", num_heads=heads, head_dim=8) for heads in (6, 2))
    state = state_after(whole_map, k, v)
    whole, _ = recurrent_linear_attention(q, k, v, feature_map=whole_map, state=state)
    parts = [
        recurrent_linear_attention(*tokens, feature_map=part_map, state=part)[0]
        for *tokens, part in zip(q.split(2, 2), k.split(2, 2), v.split(2, 2), state.split_heads(2), strict=True)
    ]
    assert (torch.cat(parts, 2) - whole).abs().max() < 1e-12


def test_detach_cuts_the_gradient_of_the_past(make_map, make_qkv):
    q, k, v = make_qkv()
    past = k.clone().requires_grad_()
    feature_map = make_map("norm_aware")
    state = state_after(feature_map, past, v)
    connected, _ = recurrent_linear_attention(q, k, v, feature_map=feature_map, state=state)
    cut, _ = recurrent_linear_attention(q, k, v, feature_map=feature_map, state=state.detach())
    assert connected.requires_grad
    assert not cut.requires_grad


@pytest.mark.parametrize("backend", ["chunked", "triton"])
@pytest.mark.parametrize("learned", ["state", "key_sum"])
def test_the_past_learns_where_nothing_of_the_present_does(learned, backend, make_map, make_qkv):
    if backend == "triton" and not TRITON_FOUND:
        pytest.skip("the kernels need Triton, which this platform has no build of")
    # more than one piece of the chunked form
    q, k, v = make_qkv(batch=1, tokens=130 if backend == "chunked" else 5, dtype=torch.float32)
    feature_map = make_map("elu")
    before = state_after(feature_map, k, v)

    def outputs(past: Tensor) -> Tensor:
        return recurrent_linear_attention(
            q, k, v, feature_map=feature_map, state=dataclasses.replace(before, **{learned: past})
        )[0]

    past = before.tensors()[learned].requires_grad_()
    direction = torch.randn_like(past)
    with nalaformer.use_backend(backend):
        (found,) = torch.autograd.grad(outputs(past).sum(), past)
    with torch.no_grad():
        slope = (outputs(past + 0.1 * direction).double() - outputs(past - 0.1 * direction).double()).sum() / 0.2
    assert (found * direction).sum().item() == pytest.approx(slope.item(), rel=1e-3)


def test_to_moves_every_tensor():
    assert {tensor.device.type for tensor in random_state().to("meta").tensors().values()} == {"meta"}


def test_a_saved_state_loads_bit_equal(tmp_path, map_name, make_map, make_qkv):
    _, k, v = make_qkv(dtype=torch.float32)
    state = state_after(make_map(map_name), k * 1e3, v).detach()
    state.save(tmp_path / "state.safetensors")
    assert_same(LinearState.load(tmp_path / "state.safetensors"), state)


def test_a_part_of_a_state_can_be_saved(tmp_path):
    # heads cut out of a state are not contiguous in memory
    part = random_state().split_heads(2)[1]
    part.save(str(tmp_path / "part.safetensors"))
    assert_same(LinearState.load(str(tmp_path / "part.safetensors")), part)


def test_a_loaded_state_continues_like_the_saved_one(tmp_path, map_name, make_map, make_qkv):
    q, k, v = make_qkv(dtype=torch.float32)
    feature_map = make_map(map_name)
    rotary = Rotary.sequence(7, 8, start=7)
    state = state_after(feature_map, k, v, rotary=Rotary.sequence(7, 8)).detach()
    state.save(tmp_path / "state.safetensors")
    loaded = LinearState.load(tmp_path / "state.safetensors")
    results = [
        recurrent_linear_attention(q, k, v, feature_map=feature_map, state=past, rotary=rotary)[0] for past in (state, loaded)
    ]
    assert torch.equal(*results)


def test_a_state_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        random_state().count = torch.zeros(4)
