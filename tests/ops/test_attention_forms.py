"""The op against itself: packed, in pieces and steps, in other layouts, beside other tokens and samples, run again."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nalaformer
from helpers.attention_formula import EXACT, ROUNDING, Turning, distance, formula, row_positions
from helpers.maps import MAP_NAMES, VARIANCE_AWARE
from nalaformer import FeatureMap, LinearState, Rotary, attention_weights, linear_attention, recurrent_linear_attention
from nalaformer.ops import chunked

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "one_thread"), pytest.mark.pairwise]


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
    from_padded = linear_attention(*padded, feature_map=feature_map, key_mask=key_mask, query_mask=key_mask)
    assert distance(from_padded[key_mask], out) < ROUNDING

    alone = [linear_attention(*(x[None] for x in sample), feature_map=feature_map)[0] for sample in samples if len(sample[0])]
    assert distance(torch.cat(alone), out) < ROUNDING


def test_packed_causal_sequences_with_rotary_start_anew(kind, backend, make_map):
    feature_map = make_map(kind, dtype=torch.float64)
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


@pytest.mark.parametrize("chunk", [1, 3, 64, 150, 1000])
@torch.no_grad()
def test_bidirectional_result_does_not_depend_on_the_chunk_size(kind, chunk, make_map, make_qkv):
    q, k, v = make_qkv(2, 11 if chunk == 1 else 150)
    feature_map = make_map(kind, dtype=torch.float64)
    key_mask = torch.rand(k.shape[:2]) < 0.7
    turn = Rotary.sequence(q.shape[1], 8)
    out = chunked.linear_attention(
        q, k, v, feature_map=feature_map, rotary=(turn, turn), key_mask=key_mask, eps=1e-6, recompute=False, chunk=chunk
    )
    turning = Turning(row_positions(q.shape[1]), row_positions(q.shape[1]), 8, inclusive=False)
    assert distance(out, formula(feature_map, q, k, v, key_mask=key_mask, turning=turning)) < EXACT


@pytest.mark.parametrize("chunk", [1, 3, 64, 150, 1000])
def test_causal_result_does_not_depend_on_the_chunk_size(kind, chunk, make_map, make_qkv):
    q, k, v = make_qkv(2, 11 if chunk == 1 else 150)
    feature_map = make_map(kind, dtype=torch.float64)
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
        chunk=chunk,
    )
    turning = Turning(row_positions(q.shape[1]), row_positions(q.shape[1]), 8, inclusive=False)
    assert distance(out, formula(feature_map, q, k, v, causal=True, key_mask=key_mask, turning=turning)) < EXACT


@pytest.mark.parametrize("chunk", [3, 64])
def test_gradients_do_not_depend_on_the_chunk_size_or_on_recomputing(kind, causal, chunk, make_map, make_qkv):
    inputs = [x.requires_grad_() for x in make_qkv(1, 70)]
    feature_map = make_map(kind, dtype=torch.float64)
    upstream = torch.randn_like(inputs[0])
    wanted = [*inputs, *feature_map.parameters()]
    results = []
    for size, recompute in ((chunk, True), (70, False)):
        arguments = {"rotary": (None, None), "key_mask": None, "eps": 1e-6, "recompute": recompute, "chunk": size}
        if causal:
            out, _ = chunked.causal_linear_attention(*inputs, feature_map=feature_map, state=None, **arguments)
        else:
            out = chunked.linear_attention(*inputs, feature_map=feature_map, **arguments)
        results.append(torch.autograd.grad(out, wanted, upstream))
    assert max(distance(a, b) for a, b in zip(*results, strict=True)) < 1e-11


@pytest.mark.parametrize("cuts", [[1] * 23, [1, 9, 13], [22, 1], [23]], ids=["tokens", "uneven", "last", "once"])
def test_recurrent_pieces_equal_one_causal_call(kind, cuts, make_map, make_qkv, backend):
    q, k, v = make_qkv(2, 23)
    feature_map = make_map(kind, dtype=torch.float64)
    key_mask = torch.rand(2, 23) < 0.8
    state, outputs, start = None, [], 0
    for q_chunk, k_chunk, v_chunk, mask in zip(*(x.split(cuts, 1) for x in (q, k, v, key_mask)), strict=True):
        rotary = Rotary.sequence(q_chunk.shape[1], 8, start=start)
        out, state = recurrent_linear_attention(
            q_chunk, k_chunk, v_chunk, feature_map=feature_map, state=state, rotary=rotary, key_mask=mask
        )
        outputs.append(out)
        start += q_chunk.shape[1]
    turning = Turning(row_positions(23), row_positions(23), 8, inclusive=False)
    expected = formula(feature_map, q, k, v, causal=True, key_mask=key_mask, turning=turning)
    assert distance(torch.cat(outputs, 1), expected) < EXACT
    assert state.count.tolist() == key_mask.sum(1).tolist()


def test_recurrent_pieces_equal_one_causal_call_across_pieces_of_the_walk(kind, make_map, make_qkv):
    # longer than the walk's own piece, cut elsewhere
    q, k, v = make_qkv(1, 300, dtype=torch.float32)
    feature_map = make_map(kind)
    whole = linear_attention(q, k, v, feature_map=feature_map, causal=True)
    state, outputs = None, []
    for parts in zip(*(x.split([1, 131, 168], 1) for x in (q, k, v)), strict=True):
        out, state = recurrent_linear_attention(*parts, feature_map=feature_map, state=state)
        outputs.append(out)
    assert distance(torch.cat(outputs, 1), whole) < ROUNDING


def test_the_reference_backend_runs_nothing_else_in_the_recurrent_functions(monkeypatch, make_map, make_qkv):
    q, k, v = make_qkv(1, 3, dtype=torch.float32)
    monkeypatch.setattr(chunked, "causal_linear_attention", None)
    feature_map = make_map("norm_aware")
    with nalaformer.use_backend("reference"):
        _, state = recurrent_linear_attention(*(x[:, :2] for x in (q, k, v)), feature_map=feature_map)
        out = nalaformer.recurrent_step_(state, *(x[:, 2:] for x in (q, k, v)), feature_map=feature_map)
    assert distance(out, formula(feature_map, q, k, v, causal=True)[:, 2:]) < ROUNDING
    assert state.count.tolist() == [3]


@pytest.mark.parametrize("made_for", [2, 4])
def test_recurrent_steps_take_grouped_heads(made_for, make_map, make_qkv, backend):
    q, k, v = make_qkv(2, 9, 4, key_heads=2)
    for name in ("norm_aware", "polarity", "hedgehog"):
        feature_map = make_map(name, num_heads=made_for, dtype=torch.float64)
        state, outputs = None, []
        for parts in zip(*(x.split(4, 1) for x in (q, k, v)), strict=True):
            out, state = recurrent_linear_attention(*parts, feature_map=feature_map, state=state)
            outputs.append(out)
        assert distance(torch.cat(outputs, 1), formula(feature_map, q, k, v, causal=True)) < EXACT


def test_a_recurrent_step_leaves_its_state_argument_alone(kind, make_map, make_qkv):
    q, k, v = make_qkv()
    feature_map = make_map(kind, dtype=torch.float64)
    _, state = recurrent_linear_attention(q, k, v, feature_map=feature_map)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    recurrent_linear_attention(q, k, v, feature_map=feature_map, state=state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())


def test_gradients_flow_through_the_recurrent_state(kind, make_map, make_qkv, backend):
    inputs = [x.requires_grad_() for x in make_qkv(1, 9)]
    feature_map = make_map(kind, dtype=torch.float64)
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
        torch.einsum("bhij,bjhv->bihv", attention_weights(q, k, feature_map=feature_map, stream=stream, **arguments), part)
        for stream, part in enumerate(values)
    ]
    assert distance(torch.cat(parts, -1), out) < EXACT


def test_attention_weights_of_some_rows_are_those_rows(kind, causal, make_map, make_qkv):
    q, k, _ = make_qkv(2, 9)
    feature_map = make_map(kind, dtype=torch.float64)
    arguments = {"causal": causal, "rotary": Rotary.sequence(9, 8)}
    every = attention_weights(q, k, feature_map=feature_map, **arguments)
    some = attention_weights(q, k, feature_map=feature_map, rows=[7, 0, 3], **arguments)
    assert distance(some, every[:, :, [7, 0, 3]]) < EXACT


# --- layout -------------------------------------------------------------------------------------------------------------


def test_views_into_one_projection_give_the_same_as_copies(kind, causal, backend, make_map):
    projected = torch.randn(2, 49, 3 * 2 * 8)
    views = [part.unflatten(-1, (2, 8)) for part in projected.split(16, dim=-1)]
    feature_map = make_map(kind)
    out = linear_attention(*views, feature_map=feature_map, causal=causal)
    copied = linear_attention(*(view.contiguous() for view in views), feature_map=feature_map, causal=causal)
    assert not views[0].is_contiguous()
    assert distance(out, copied) < ROUNDING


def test_head_major_and_expanded_and_backward_strides_are_read_right(kind, causal, backend, make_map):
    q = torch.randn(2, 2, 21, 8).transpose(1, 2)
    k = torch.randn(1, 21, 2, 8).expand(2, -1, -1, -1)
    v = torch.randn(2, 42, 2, 16)[:, ::2, :, ::2]
    feature_map = make_map(kind)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    copied = linear_attention(*copies, feature_map=feature_map, causal=causal)
    assert distance(out, copied) < ROUNDING


def test_inputs_are_not_changed(kind, causal, backend, make_map, make_qkv):
    inputs = make_qkv(dtype=torch.float32)
    before = [x.clone() for x in inputs]
    key_mask = torch.rand(2, 7) < 0.5
    linear_attention(*inputs, feature_map=make_map(kind), causal=causal, key_mask=key_mask)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_an_empty_batch_gives_an_empty_output(kind, causal, backend, make_map, make_qkv):
    q, k, v = make_qkv(0, 7, values=6, dtype=torch.bfloat16)
    out = linear_attention(q, k, v, feature_map=make_map(kind), causal=causal)
    assert (out.shape, out.dtype) == ((0, 7, 2, 6), torch.bfloat16)


def test_an_empty_batch_can_be_trained_through(causal, backend, make_map, make_qkv):
    # the last, short batch of one rank of several: its backward pass must run like that of the others
    inputs = [x.requires_grad_() for x in make_qkv(0, 7, dtype=torch.float32)]
    linear_attention(*inputs, feature_map=make_map("norm_aware"), causal=causal).sum().backward()
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]


def test_an_empty_batch_has_an_empty_state(kind, make_map, make_qkv):
    out, state = recurrent_linear_attention(*make_qkv(0, 7, dtype=torch.float32), feature_map=make_map(kind))
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
        masks = {"key_mask": key_mask, "query_mask": key_mask}
        together = linear_attention(q, k, v, feature_map=feature_map, **masks, **arguments)
        precise = copy.deepcopy(feature_map).double()
        exact = linear_attention(q.double(), k.double(), v.double(), feature_map=precise, **masks, **arguments)
        # a row of few keys whose reflected features nearly vanish is as uncertain as float32 leaves it (4e-5 in 12 seeds)
        rounding = ROUNDING + 2 * (together - exact).abs().max()
        for i in range(5):
            mine = slice(i, i + 1)
            parts = [x[mine] for x in (q, k, v)]
            mask = {name: x[mine] for name, x in masks.items()}
            alone = linear_attention(*parts, feature_map=feature_map, **mask, **arguments)
            assert (alone - together[mine]).abs().max() <= rounding


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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_a_value_that_is_no_number_makes_its_channel_nan_in_the_rows_that_see_it(
    map_name, causal, backend, bad, make_map, make_qkv
):
    q, k, v = make_qkv(1, 9, dtype=torch.float32)
    v[0, 3, 1, 2] = bad
    expected = torch.zeros(1, 9, 2, 8, dtype=torch.bool)
    expected[0, 3 if causal else 0 :, 1, 2] = True
    assert torch.equal(linear_attention(q, k, v, feature_map=make_map(map_name), causal=causal).isnan(), expected)


def test_a_value_that_is_no_number_makes_its_channel_nan_in_later_pieces(map_name, make_map, make_qkv):
    q, k, v = make_qkv(1, 9, dtype=torch.float32)
    v[0, 3, 1, 2] = math.inf
    feature_map = make_map(map_name)
    _, state = recurrent_linear_attention(q[:, :5], k[:, :5], v[:, :5], feature_map=feature_map)
    out, _ = recurrent_linear_attention(q[:, 5:], k[:, 5:], v[:, 5:], feature_map=feature_map, state=state)
    expected = torch.zeros(1, 4, 2, 8, dtype=torch.bool)
    expected[0, :, 1, 2] = True
    assert torch.equal(out.isnan(), expected)


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
        out = linear_attention(*inputs, feature_map=feature_map, key_mask=key_mask, query_mask=key_mask)[key_mask]
        results.append([out.detach(), *torch.autograd.grad(out.sum(), inputs[1:])])
    for clean, spoilt in zip(*results, strict=True):
        assert torch.equal(clean, spoilt)


# --- repeatability ------------------------------------------------------------------------------------------------------


def test_a_second_run_is_bit_equal(kind, causal, backend, make_map, make_qkv):
    inputs = dict(zip("qkv", make_qkv(2, 197, dtype=torch.float32), strict=True))
    feature_map = make_map(kind)
    first, second = (outputs_and_gradients(inputs, feature_map, causal) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["norm_aware", "reflection"])
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


@pytest.mark.parametrize(
    ("name", "causal"), [("norm_aware", False), ("polarity", False), ("hedgehog", False), ("norm_aware", True)]
)
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


def test_an_empty_state_is_the_same_as_none(kind, make_map, make_qkv):
    q, k, v = make_qkv()
    feature_map = make_map(kind, dtype=torch.float64)
    features = feature_map.key(k).shape[-1]
    fresh = LinearState.empty(2, 2, features, 8, dtype=torch.float64)
    out, _ = recurrent_linear_attention(q, k, v, feature_map=feature_map, state=fresh)
    assert torch.equal(out, recurrent_linear_attention(q, k, v, feature_map=feature_map)[0])
