"""The kernels of the delta rule, piece by piece: blocks of features, packed rows, decays of every size."""

import pytest
import torch

import nalaformer
from helpers.delta_inputs import BAR, DEVICE, inputs, outcome, relative_error

pytestmark = pytest.mark.kernels


def largest_error(tensors, decay, state, upstream, bounds=None):
    """Of the kernels in float32, among outputs, last state and gradients."""
    exact = outcome("reference", torch.float64, tensors, decay, state, upstream, bounds)
    found = outcome("triton", torch.float32, tensors, decay, state, upstream, bounds)
    return max(relative_error(a, b) for a, b in zip(found, exact, strict=True))


def test_features_and_values_of_more_than_one_block_count(poisoned_memory):
    tensors, decay = inputs(3, gated=True, batch=2, heads=2, features=80, values=70)
    upstream = [torch.randn(2, 3, 2, 70), torch.randn(2, 2, 80, 70)]
    assert largest_error(tensors, decay, torch.randn(2, 2, 80, 70), upstream) < BAR


def test_packed_sequences_go_on_from_states_of_their_own(poisoned_memory):
    tensors, decay = inputs(72, gated=True, batch=1, heads=2)
    packed, fade, bounds = [x[0] for x in tensors], decay[0], torch.tensor([0, 1, 67, 72])
    upstream = [torch.randn(72, 2, 5), torch.randn(3, 2, 6, 5)]
    assert largest_error(packed, fade, torch.randn(3, 2, 6, 5), upstream, bounds) < BAR


def test_small_decays_behind_large_ones_keep_their_digits():
    """A running sum in one float would round them to multiples of 1e-4."""
    tensors, decay = inputs(64, gated=True, batch=1, heads=1)
    decay[:, :20], decay[:, 20:] = -99, -1e-3 * torch.rand(1, 44, 1)
    exact, _ = nalaformer.delta_rule(*tensors, log_decay=decay)
    with nalaformer.use_backend("triton"):
        out, _ = nalaformer.delta_rule(*(x.to(DEVICE).float() for x in tensors), log_decay=decay.to(DEVICE).float())
    assert relative_error(out.cpu(), exact) < BAR


def test_a_decay_that_is_no_number_shows_in_the_output():
    tensors, decay = inputs(4, gated=True, batch=1, heads=1)
    decay[0, 2, 0] = torch.nan
    with nalaformer.use_backend("triton"):
        out, state = nalaformer.delta_rule(*(x.to(DEVICE).float() for x in tensors), log_decay=decay.to(DEVICE).float())
    assert out[0, 2:].isnan().all()
    assert state.isnan().all()


def test_gradients_of_the_last_state_alone_are_those_of_the_recurrence():
    tensors, _ = inputs(66, gated=False, batch=1, heads=1)
    found = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in tensors[1:]]
        with nalaformer.use_backend(backend):
            _, state = nalaformer.delta_rule(tensors[0].to(DEVICE, dtype), *leaves)
        found.append(torch.autograd.grad(state.square().sum(), leaves))
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) < BAR


def test_views_of_other_layouts_are_read_as_they_are():
    tensors, decay = inputs(5, gated=True, batch=2, heads=2)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*tensors, decay)]
    upstream = [torch.randn(2, 5, 2, 5), torch.randn(2, 2, 6, 5)]
    plain = outcome("triton", torch.float32, tensors, decay, None, upstream)
    viewed = outcome(
        "triton",
        torch.float32,
        views[:4],
        views[4],
        None,
        [upstream[0].transpose(0, 1).contiguous().transpose(0, 1), upstream[1]],
    )
    torch.testing.assert_close(viewed, plain, rtol=0, atol=0)


def test_features_in_float32_serve_values_in_half_precision():
    (q, k, v, beta), decay = inputs(70, gated=True, batch=1, heads=1)
    v = v.half()
    exact, _ = nalaformer.delta_rule(q, k, v.double(), beta, log_decay=decay)
    with nalaformer.use_backend("triton"):
        out, _ = nalaformer.delta_rule(
            *(x.to(DEVICE).float() for x in (q, k)), v.to(DEVICE), beta.to(DEVICE), log_decay=decay.to(DEVICE)
        )
    assert out.dtype == torch.float16
    # features, corrections and outputs are rounded to half precision, one behind the other
    assert relative_error(out.cpu(), exact) < 4 * torch.finfo(torch.float16).eps
