"""The kernel of a step of hybrid attention, in Triton's interpreter: what plain torch computes, and the same state after it."""

import dataclasses

import pytest
import torch

import nalaformer
from helpers.hybrid_inputs import SMALL, make_inputs, make_map
from helpers.hybrid_steps import assert_same_state, at, walk
from nalaformer.attention.hybrid import (
    HybridSettings,
    empty_state,
    hybrid_settings,
    hybrid_step_,
    recurrent_hybrid_attention,
    stepping_state,
)

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")
from nalaformer.ops.kernels.hybrid import step_op as kernels

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned_memory")

CAPPED = dataclasses.replace(SMALL, max_salient=5)
# places of a tile, programs
ONE_PIECE, PIECES, TILES = (64, 512), (16, 512), (16, 1)


def walk_on_kernel(tokens, start, *, settings, key_heads=2, head_dim=6, gate_size=0, map_name=None, **options):
    """Outputs of the kernel, and those of the recurrent function in float64 on the same numbers."""
    tensors = make_inputs(tokens, key_heads=key_heads, head_dim=head_dim, dtype=torch.float32)
    feature_map = make_map(4, head_dim, torch.float32)
    if map_name:
        feature_map = nalaformer.feature_map(map_name, num_heads=4, head_dim=head_dim)
    gate = torch.rand(2, tokens, 4, gate_size) if gate_size else None
    common = {"settings": settings, **options}
    ours, _, stepping, state = walk(tensors, start, feature_map=feature_map, gate=gate, backend="triton", **common)
    wide = [x.double() for x in tensors]
    gate = None if gate is None else gate.double()
    _, expected, _, _ = walk(wide, start, feature_map=feature_map.double(), gate=gate, **common)
    return ours, expected, stepping, state


@pytest.mark.parametrize(
    ("cut", "merge", "key_heads", "select_per"),
    [
        (ONE_PIECE, "exact", 2, "key_head"),
        (PIECES, "exact", 2, "key_head"),
        (TILES, "released", 2, "key_head"),
        (PIECES, "released", 2, "query_head"),
        (TILES, "exact", 1, "key_head"),
        (TILES, "exact", 4, "key_head"),
    ],
)
def test_outputs_are_those_of_the_recurrent_function(monkeypatch, cut, merge, key_heads, select_per):
    for name, number in zip(("TILE", "PROGRAMS"), cut, strict=True):
        monkeypatch.setattr(kernels, name, number)
    settings = dataclasses.replace(CAPPED, merge=merge, select_per=select_per)
    # the third chunk is filled on the way
    ours, expected, stepping, state = walk_on_kernel(26, 22, settings=settings, key_heads=key_heads, gate_size=6)
    # |v| ~ 1, some dozens of terms in float32
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-6)
    assert_same_state(stepping, state, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (hybrid_settings("window", chunk_size=8), {}),
        (dataclasses.replace(CAPPED, linear=False), {}),
        (CAPPED, {"map_name": "elu"}),
        (CAPPED, {"map_name": "hedgehog", "gate_size": 1}),
        (CAPPED, {"head_dim": 20, "gate_size": 20}),
        (dataclasses.replace(CAPPED, selection="received"), {}),
        (dataclasses.replace(CAPPED, selection="self_saliency"), {}),
        (SMALL, {"capacity": 8}),
        (HybridSettings(chunk_size=1, salient_per_chunk=1, max_salient=7), {}),
    ],
    ids=str,
)
def test_settings_maps_and_sizes_give_the_recurrent_outputs(settings, options):
    ours, expected, stepping, state = walk_on_kernel(18, 14, settings=settings, **options)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-6)
    assert_same_state(stepping, state, atol=1e-5)


def test_an_empty_state_takes_its_first_token():
    ours, expected, _, _ = walk_on_kernel(3, 0, settings=CAPPED)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-6)


def test_samples_of_different_lengths_step_together():
    mask = torch.arange(23) >= torch.tensor([[0], [11]])
    ours, expected, stepping, state = walk_on_kernel(23, 18, settings=CAPPED, mask=mask)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-6)
    assert_same_state(stepping, state, atol=1e-5)


def test_large_logits_neither_overflow_nor_vanish():
    tensors = [50 * x for x in make_inputs(20, dtype=torch.float32)[:2]] + [make_inputs(20, dtype=torch.float32)[2]]
    feature_map = make_map(dtype=torch.float32)
    ours, expected, _, _ = walk(tensors, 18, settings=CAPPED, feature_map=feature_map, backend="triton")
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("linear", [True, False])
def test_bad_numbers_spoil_their_sample_alone(linear):
    q, k, v = make_inputs(22, dtype=torch.float32)
    v[0, 3] = torch.nan
    k[0, 20] = torch.inf
    settings = dataclasses.replace(CAPPED, linear=linear)
    feature_map = make_map(dtype=torch.float32)
    ours, expected, _, _ = walk((q, k, v), 19, settings=settings, feature_map=feature_map, backend="triton")
    assert ours[0].isnan().all()
    torch.testing.assert_close(ours[1], expected[1], rtol=0, atol=1e-5)


def test_the_kernel_is_taken_where_it_can_run_and_only_there(monkeypatch):
    taken = []
    monkeypatch.setattr(kernels, "hybrid_step", lambda q, *rest: taken.append(q.dtype) or q)
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "triton"), (torch.float32, "reference")):
        tensors = make_inputs(1, dtype=dtype)
        given = {"feature_map": make_map(dtype=dtype), "settings": CAPPED}
        state = stepping_state(empty_state(*tensors, **given), settings=CAPPED)
        with nalaformer.use_backend(backend):
            hybrid_step_(*at(tensors, slice(0, 1)), state=state, **given)
    assert taken == [torch.float32]


def test_what_the_kernel_needs_of_the_map_is_computed_where_nobody_keeps_it():
    tensors, given = make_inputs(30, dtype=torch.float32), {"feature_map": make_map(dtype=torch.float32), "settings": CAPPED}
    _, state = recurrent_hybrid_attention(*at(tensors, slice(0, 29)), **given)
    kept, wrong = given["feature_map"].query_matrix().detach(), torch.eye(6).expand(4, -1, -1).contiguous()
    steps = [stepping_state(state, settings=CAPPED) for _ in range(3)]
    with nalaformer.use_backend("triton"):
        found, expected, other = (
            hybrid_step_(*at(tensors, slice(29, 30)), state=step, **given, query_matrix=matrix)
            for step, matrix in zip(steps, (None, kept, wrong), strict=True)
        )
    assert torch.equal(found, expected)
    assert not torch.equal(found, other)


def test_the_operator_says_what_it_changes():
    tensors = make_inputs(1, dtype=torch.float32)
    given = {"feature_map": make_map(dtype=torch.float32), "settings": CAPPED}
    state = stepping_state(empty_state(*tensors, **given), settings=CAPPED)
    linear, matrix = state.linear, given["feature_map"].query_matrix().detach()
    arguments = (*tensors, state.keys, state.values, linear.count, state.is_poisoned, linear.state, linear.key_sum)
    rest = (None, matrix, None, 8, 2, None, None, 1.0, 1e-6, True)
    torch.library.opcheck(kernels.hybrid_step, (*arguments, *rest), test_utils=("test_schema", "test_faketensor"))
