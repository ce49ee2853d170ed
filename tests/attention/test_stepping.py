"""Steps of decoding in place: the outputs and the state are those of the recurrent function, token by token."""

import dataclasses

import pytest
import torch

from helpers.hybrid_inputs import SMALL, make_inputs, make_map
from helpers.hybrid_steps import assert_same_state, at, walk
from nalaformer.attention.hybrid import (
    SELECTIONS,
    HybridSettings,
    empty_state,
    hybrid_settings,
    hybrid_step_,
    recurrent_hybrid_attention,
    roll_,
    salient_tokens,
    stepping_state,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.pairwise]

TOKENS = 37


@pytest.mark.parametrize("rule", SELECTIONS.names())
@pytest.mark.parametrize("max_salient", [0, 3])
def test_steps_are_the_recurrent_function_for_every_rule(rule, max_salient):
    settings = dataclasses.replace(SMALL, selection=rule, max_salient=max_salient)
    tensors = make_inputs(TOKENS)
    scores = torch.randn(2, TOKENS, 2) if SELECTIONS[rule].needs_scores else None
    capacity = None if max_salient else salient_tokens(TOKENS, settings)
    # the sums of `received` are float32 in both, and are added in another order
    ours, expected, stepping, state = walk(
        tensors, 5, settings=settings, feature_map=make_map(), capacity=capacity, scores=scores
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    assert_same_state(stepping, state, atol=1e-6 if rule == "received" else 1e-10)


@pytest.mark.parametrize("merge", ["exact", "released"])
@pytest.mark.parametrize("gate_size", [0, 1, 6])
@pytest.mark.parametrize("select_per", ["key_head", "query_head"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_steps_are_the_recurrent_function_for_every_setting(merge, gate_size, select_per, key_heads):
    settings = dataclasses.replace(SMALL, merge=merge, select_per=select_per, max_salient=5)
    tensors = make_inputs(45, key_heads=key_heads)
    gate = torch.rand(2, 45, 4, gate_size, dtype=torch.float64) if gate_size else None
    ours, expected, stepping, state = walk(tensors, 0, settings=settings, feature_map=make_map(), gate=gate)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    assert_same_state(stepping, state, atol=1e-10)


@pytest.mark.parametrize(
    "settings",
    [
        hybrid_settings("window", chunk_size=8),
        dataclasses.replace(SMALL, linear=False, max_salient=4),
        dataclasses.replace(SMALL, keep_first=False, max_salient=4),
        HybridSettings(chunk_size=1, salient_per_chunk=1, max_salient=7),
        HybridSettings(chunk_size=8, salient_per_chunk=8, max_salient=100),
    ],
    ids=str,
)
@pytest.mark.parametrize("start", [0, 16, 30])
def test_steps_are_the_recurrent_function_for_baselines(settings, start):
    ours, expected, stepping, state = walk(make_inputs(TOKENS), start, settings=settings, feature_map=make_map())
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    assert_same_state(stepping, state, atol=1e-10)


@pytest.mark.parametrize("rule", ["key_norm", "self_saliency", "received", "random"])
@pytest.mark.parametrize("max_salient", [0, 3])
def test_samples_of_different_lengths_step_together(rule, max_salient):
    settings = dataclasses.replace(SMALL, selection=rule, max_salient=max_salient)
    tensors = make_inputs(TOKENS, batch=4, dtype=torch.float32)
    mask = torch.arange(TOKENS) >= torch.tensor([[0], [5], [27], [29]])
    ours, expected, stepping, state = walk(
        tensors,
        30,
        settings=settings,
        feature_map=make_map(dtype=torch.float32),
        capacity=None if max_salient else 20,
        mask=mask,
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert_same_state(stepping, state, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_other_types_are_those_of_the_recurrent_function(dtype):
    settings = dataclasses.replace(SMALL, max_salient=6)
    tensors = [x.to(dtype) for x in make_inputs(TOKENS)]
    ours, expected, _, _ = walk(tensors, 20, settings=settings, feature_map=make_map(dtype=torch.float32))
    assert ours.dtype == dtype
    # both round the same float32 numbers, which differ in their last bits
    torch.testing.assert_close(ours, expected, rtol=0 if dtype == torch.float32 else 2**-7, atol=1e-5)


@pytest.mark.parametrize("start", [0, 21, 32, 50])
def test_a_state_in_other_memory_is_itself(start):
    settings = dataclasses.replace(SMALL, selection="received", max_salient=6)
    _, _, stepping, state = walk(make_inputs(start + 1), start, settings=settings, feature_map=make_map())
    _, _, other, _ = walk([-x for x in make_inputs(40)], 30, settings=settings, feature_map=make_map())
    assert_same_state(stepping_state(stepping, settings=settings), state, atol=1e-6)
    assert_same_state(stepping.clone(), state, atol=1e-6)
    other.load_(stepping)
    assert_same_state(other, state, atol=1e-6)


@pytest.mark.parametrize("max_salient", [0, 11])
def test_a_store_without_room_grows_up_to_its_cap(max_salient):
    settings = dataclasses.replace(SMALL, max_salient=max_salient)
    # the chunks of 61 tokens fill a store up to its cap
    tokens = 61
    tensors, given = make_inputs(tokens), {"feature_map": make_map(), "settings": settings}
    expected, state = recurrent_hybrid_attention(*tensors, **given)
    stepping, ours, rooms = empty_state(*tensors, **given), [], []
    for place in range(tokens):
        stepping.make_room_(settings)
        ours.append(hybrid_step_(*at(tensors, slice(place, place + 1)), state=stepping, **given))
        if stepping.advance():
            roll_(stepping, **given)
        rooms.append(stepping.capacity)
    torch.testing.assert_close(torch.cat(ours, 1), expected, rtol=0, atol=1e-10)
    assert_same_state(stepping, state, atol=1e-10)
    # each growth has room for the salient tokens of one chunk more than needed
    assert sorted(set(rooms)) == [0, 4, 8, max_salient or 12]


def test_steps_leave_the_states_of_others_alone():
    tensors, given = make_inputs(30), {"feature_map": make_map(), "settings": SMALL}
    _, first = recurrent_hybrid_attention(*at(tensors, slice(0, 17)), **given)
    before = first.clone()
    # too short for a chunk to leave, so that the sums stay as they are
    _, second = recurrent_hybrid_attention(*at(tensors, slice(17, 19)), **given, state=first)
    for place in range(19, 30):
        second.make_room_(SMALL)
        hybrid_step_(*at(tensors, slice(place, place + 1)), state=second, **given)
        if second.advance():
            roll_(second, **given)
    assert first.lengths == before.lengths
    assert all(torch.equal(x, y) for x, y in zip(first.tensors().values(), before.tensors().values(), strict=True))


def test_a_step_moves_no_memory_and_asks_nothing():
    """What a CUDA graph needs: the same addresses before and after, and no number read by the host."""
    settings = dataclasses.replace(SMALL, selection="self_saliency", max_salient=6)
    q, k, v = make_inputs(40, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    given = {"feature_map": feature_map, "settings": settings}
    state = stepping_state(empty_state(q, k, v, **given), settings=settings)

    def addresses():
        return {name: value.data_ptr() for name, value in state.tensors().items()}

    class NoLook(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            asking = {"item", "tolist", "__bool__", "__int__", "__index__", "cpu", "numpy", "nonzero"}
            assert getattr(func, "__name__", "") not in asking
            # a scalar becomes a tensor of the host, which a captured `where` would copy
            if func is torch.where:
                assert all(isinstance(x, torch.Tensor) for x in args)
            assert func not in (torch.tensor, torch.as_tensor)
            return func(*args, **(kwargs or {}))

    before = addresses()
    for place in range(40):
        with NoLook():
            hybrid_step_(*at((q, k, v), slice(place, place + 1)), state=state, **given)
            if state.advance():
                roll_(state, **given)
    assert addresses() == before
    assert state.linear.count.tolist() == [40, 40]


def test_a_poisoned_sample_stays_so_alone():
    q, k, v = make_inputs(40, dtype=torch.float32)
    v[0, 3] = torch.nan
    settings = dataclasses.replace(SMALL, max_salient=6)
    ours, expected, stepping, _ = walk((q, k, v), 10, settings=settings, feature_map=make_map(dtype=torch.float32))
    assert ours[0].isnan().all()
    torch.testing.assert_close(ours[1], expected[1], rtol=0, atol=1e-5)
    assert stepping.is_poisoned.tolist() == [True, False]


def test_what_stepping_cannot_serve_is_refused():
    q, k, v = make_inputs(40)
    feature_map = make_map()
    _, state = recurrent_hybrid_attention(q, k, v, feature_map=feature_map, settings=SMALL)
    with pytest.raises(ValueError, match="capacity="):
        stepping_state(state, settings=SMALL)
    with pytest.raises(ValueError, match="must hold the 8 salient tokens"):
        stepping_state(state, settings=SMALL, capacity=7)
    with pytest.raises(ValueError, match="is the capacity"):
        stepping_state(state, settings=dataclasses.replace(SMALL, max_salient=9), capacity=10)
    with pytest.raises(ValueError, match="recurrent_step_"):
        stepping_state(state, settings=hybrid_settings("linear"))
    stepping = stepping_state(state, settings=SMALL, capacity=8)
    with pytest.raises(ValueError, match="one token of each of 2 samples"):
        hybrid_step_(q, k, v, state=stepping, feature_map=feature_map, settings=SMALL)
    with pytest.raises(ValueError, match=r"states of its own sizes, \(2, .* got \(1, "):
        stepping.select_(torch.tensor([1]))
