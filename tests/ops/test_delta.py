"""The delta rule: every form computes the recurrence, in any cut of the tokens."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import nalaformer
from helpers.delta_inputs import GATES, inputs
from nalaformer import delta_rule, delta_step_
from nalaformer.ops import delta, unit_features


def recurrence(tensors: list[Tensor], decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """As the papers print it: S_t = a S (I - b k k^T) + b v k^T with the state [V, F], one sample and head at a time."""
    q, k, v, beta = tensors
    batch, tokens, heads, features = q.shape
    out = torch.zeros_like(v)
    states = torch.zeros(batch, heads, features, v.shape[-1], dtype=q.dtype)
    for b in range(batch):
        for h in range(heads):
            state = torch.zeros(v.shape[-1], features, dtype=q.dtype)
            for t in range(tokens):
                fade = 1.0 if decay is None else decay[b, t, h].exp()
                key, amount = k[b, t, h], beta[b, t, h]
                forget = torch.eye(features, dtype=q.dtype) - amount * torch.outer(key, key)
                state = fade * state @ forget + amount * torch.outer(v[b, t, h], key)
                out[b, t, h] = state @ q[b, t, h] / features**0.5
            states[b, h] = state.mT
    return out, states


@GATES
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 131])
def test_both_forms_are_the_printed_recurrence(tokens, gated, backend):
    tensors, decay = inputs(tokens, gated=gated)
    expected = recurrence(tensors, decay)
    torch.testing.assert_close(delta_rule(*tensors, log_decay=decay), expected, rtol=0, atol=1e-12)


@GATES
def test_float32_is_as_near_to_float64_as_the_recurrence(gated):
    tensors, decay = inputs(200, gated=gated, features=16, values=16)
    exact, _ = delta_rule(*tensors, log_decay=decay)
    short = [x.float() for x in tensors]
    fade = None if decay is None else decay.float()
    chunked = delta_rule(*short, log_decay=fade)[0]
    with nalaformer.use_backend("reference"):
        plain = delta_rule(*short, log_decay=fade)[0]
    size = exact.norm()
    # the solve inside a piece adds roundings that the recurrence spreads over its tokens: the same size, not the same bits
    assert (chunked - exact).norm() / size <= max(2 * (plain - exact).norm() / size, torch.tensor(2e-6))


@GATES
def test_state_continues_where_the_last_call_ended(gated, backend):
    tensors, decay = inputs(150, gated=gated)
    whole, last = delta_rule(*tensors, log_decay=decay)
    state, parts, start = None, [], 0
    for length in (70, 1, 79):
        cut = slice(start, start + length)
        start += length
        fade = None if decay is None else decay[:, cut]
        before = None if state is None else state.clone()
        out, after = delta_rule(*(x[:, cut] for x in tensors), log_decay=fade, state=state)
        assert before is None or torch.equal(before, state)
        state = after
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


@GATES
def test_steps_in_place_are_the_whole(gated):
    tensors, decay = inputs(9, gated=gated)
    whole, last = delta_rule(*tensors, log_decay=decay)
    state = torch.zeros_like(last)
    for t in range(9):
        fade = None if decay is None else decay[:, t : t + 1]
        out = delta_step_(state, *(x[:, t : t + 1] for x in tensors), log_decay=fade)
        torch.testing.assert_close(out, whole[:, t : t + 1], rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


@GATES
def test_gradients_of_the_chunked_form_are_those_of_the_recurrence(gated):
    tensors, decay = inputs(70, gated=gated, batch=1, heads=2)
    start = torch.randn(1, 2, 6, 5, dtype=torch.float64)
    leaves = [*tensors, start] if decay is None else [*tensors, start, decay]
    weights = torch.randn(1, 70, 2, 5, dtype=torch.float64), torch.randn_like(start)

    def gradients() -> tuple[Tensor, ...]:
        for leaf in leaves:
            leaf.requires_grad_()
        out, state = delta_rule(*leaves[:4], state=leaves[4], log_decay=None if decay is None else leaves[5])
        return torch.autograd.grad((out * weights[0]).sum() + (state * weights[1]).sum(), leaves)

    chunked = gradients()
    with nalaformer.use_backend("reference"):
        torch.testing.assert_close(chunked, gradients(), rtol=1e-9, atol=1e-10)


@GATES
def test_hidden_tokens_change_nothing_whatever_they_hold(gated, backend):
    tensors, decay = inputs(80, gated=gated)
    mask = torch.rand(2, 80) < 0.7
    spoiled = [torch.where(mask.reshape(2, 80, *[1] * (x.dim() - 2)), x, torch.nan) for x in tensors[1:]]
    out, state = delta_rule(tensors[0], *spoiled, log_decay=decay, key_mask=mask)
    for row in range(2):
        kept = [x[row : row + 1, mask[row]] for x in tensors]
        fade = None if decay is None else decay[row : row + 1, mask[row]]
        alone, last = delta_rule(*kept, log_decay=fade)
        torch.testing.assert_close(out[row : row + 1, mask[row]], alone, rtol=0, atol=1e-12)
        torch.testing.assert_close(state[row : row + 1], last, rtol=0, atol=1e-12)


@GATES
def test_packed_sequences_are_those_by_themselves(gated):
    tensors, decay = inputs(100, gated=gated, batch=1)
    start = torch.randn(3, 3, 6, 5, dtype=torch.float64)
    bounds = [0, 70, 71, 100]
    fade = None if decay is None else decay[0]
    out, states = delta_rule(*(x[0] for x in tensors), log_decay=fade, cu_seqlens=torch.tensor(bounds), state=start)
    for number, (a, b) in enumerate(pairwise(bounds)):
        fade = None if decay is None else decay[:, a:b]
        alone, last = delta_rule(*(x[:, a:b] for x in tensors), log_decay=fade, state=start[number : number + 1])
        torch.testing.assert_close(out[a:b], alone[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(states[number : number + 1], last, rtol=0, atol=1e-12)


def test_a_key_written_twice_holds_the_last_value():
    """What the rule is for: correction, where linear attention would hold the sum of both values."""
    key = torch.nn.functional.normalize(torch.randn(1, 1, 1, 8), dim=-1)
    values = torch.randn(1, 2, 1, 4)
    one = torch.ones(1, 2, 1)
    out, _ = delta_rule(key.expand(1, 2, 1, 8), key.expand(1, 2, 1, 8), values, one, scale=1.0)
    torch.testing.assert_close(out, values)


@pytest.mark.parametrize(("size", "length"), [(1e3, 1.0), (1e-6, 0.5**0.5), (1e-9, 1e-3)])
def test_features_have_length_one_and_fade_below_the_smallest_length(size, length):
    q, k = torch.nn.functional.normalize(torch.rand(2, 1, 5, 2, 8, dtype=torch.float64), dim=-1)
    found = unit_features(nalaformer.feature_map("relu", num_heads=2, head_dim=8), size * q, size * k)
    # 1e-9 / sqrt(1e-18 + 1e-12) is 1e-3 up to 5e-7 of it
    torch.testing.assert_close(found, (length * q, length * k), rtol=2e-6, atol=0)


def test_strong_decay_neither_overflows_nor_gives_nan():
    tensors, _ = inputs(130, gated=False, dtype=torch.float32)
    decay = torch.full((2, 130, 3), -50.0, requires_grad=True)
    tensors = [x.requires_grad_() for x in tensors]
    out, _ = delta_rule(*tensors, log_decay=decay)
    out.sum().backward()
    # everything before a token is forgotten: it reads what it wrote itself
    q, k, v, beta = tensors
    expected = (q * k).sum(-1, keepdim=True) * beta[..., None] * v / 6**0.5
    torch.testing.assert_close(out, expected)
    assert all(x.grad.isfinite().all() for x in (*tensors, decay))


def test_a_full_reset_forgets_what_came_before_and_nothing_else(backend):
    """exp(-inf) = 0, in the middle of a piece, at its beginning and end, and twice in a row: sequences that begin anew."""
    tensors, decay = inputs(140, gated=True, batch=1)
    start = torch.randn(1, 3, 6, 5, dtype=torch.float64)
    resets = [5, 63, 64, 65, 100]
    decay[:, resets] = -torch.inf
    out, last = delta_rule(*tensors, log_decay=decay, state=start)
    for a, b in pairwise([0, *resets, 140]):
        alone, state = delta_rule(*(x[:, a:b] for x in tensors), log_decay=decay[:, a:b], state=start if a == 0 else None)
        torch.testing.assert_close(out[:, a:b], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(last, state, rtol=0, atol=1e-12)


def test_gradients_of_a_full_reset_are_those_of_the_recurrence():
    tensors, decay = inputs(70, gated=True, batch=1, heads=2)
    decay[:, [0, 9, 66]] = -torch.inf
    leaves = [*tensors, decay]

    def gradients() -> tuple[Tensor, ...]:
        out, state = delta_rule(*(leaf.requires_grad_() for leaf in leaves[:4]), log_decay=leaves[4].requires_grad_())
        return torch.autograd.grad(out.square().sum() + state.sum(), leaves)

    chunked = gradients()
    with nalaformer.use_backend("reference"):
        torch.testing.assert_close(chunked, gradients(), rtol=1e-9, atol=1e-10)


def test_a_large_decay_costs_the_small_ones_after_it_no_digits():
    tensors, decay = inputs(64, gated=True, dtype=torch.float32)
    decay = 1e-3 * decay
    decay[:, 3] = -1e4
    exact, _ = delta_rule(*(x.double() for x in tensors), log_decay=decay.double())
    with nalaformer.use_backend("reference"):
        plain = delta_rule(*tensors, log_decay=decay)[0]
    out, _ = delta_rule(*tensors, log_decay=decay)
    assert (out - exact).norm() <= max(2 * (plain - exact).norm(), 2e-6 * exact.norm())


def test_kernels_that_take_differences_of_running_sums_are_given_no_infinity():
    given = {}

    def rule(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
        given.update(options)
        return v, torch.zeros(())

    tensors, decay = inputs(5, gated=True)
    decay[:, 2] = -torch.inf
    delta._run_fla(SimpleNamespace(chunk_gated_delta_rule=rule), delta.DeltaInputs(*tensors, decay), None, None, 1.0)
    assert given["g"].isfinite().all()
    assert torch.equal(given["g"][:, 3:], decay[:, 3:].float())
    # what is left of a state: nothing beside what a token writes
    assert (given["g"][:, 2].double().exp() < 1e-40).all()


def test_state_stays_float32_for_half_precision():
    tensors, decay = inputs(10, gated=True, dtype=torch.bfloat16)
    out, state = delta_rule(*tensors, log_decay=decay)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 5, 3, 7)}, "same features"),
        ({"v": (2, 4, 3, 5)}, "v must be"),
        ({"beta": (2, 5)}, "beta must be"),
        ({"state": (2, 3, 6, 6)}, "the state must be"),
        ({"key_mask": (2, 4)}, "key_mask must be"),
    ],
)
def test_wrong_shapes_are_named(change, message):
    shapes = {"q": (2, 5, 3, 6), "k": (2, 5, 3, 6), "v": (2, 5, 3, 5), "beta": (2, 5, 3)} | change
    with pytest.raises(ValueError, match=message):
        delta_rule(**{name: torch.zeros(shape) for name, shape in shapes.items()})
