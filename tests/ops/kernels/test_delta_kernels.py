"""The delta rule on kernels: the recurrence, and the features of length one that it reads."""

import pytest
import torch

import nalaformer
from helpers.delta_inputs import BAR, DEVICE, GATES, inputs, outcome, relative_error
from nalaformer.ops import delta_rule, unit_features

pytestmark = pytest.mark.kernels


@GATES
@pytest.mark.parametrize(("tokens", "has_state"), [(1, True), (65, False), (130, True)])
def test_outputs_states_and_gradients_are_those_of_the_recurrence(gated, tokens, has_state, poisoned_memory):
    tensors, decay = inputs(tokens, gated=gated, batch=1, heads=2, features=12, values=5)
    if decay is not None and tokens > 1:
        # a token that forgets all before it
        decay[0, tokens // 2, 0] = -torch.inf
    state = torch.randn(1, 2, 12, 5, dtype=torch.float64) if has_state else None
    upstream = [torch.randn(1, tokens, 2, 5), torch.randn(1, 2, 12, 5)]
    exact = outcome("reference", torch.float64, tensors, decay, state, upstream)
    for a, b in zip(outcome("triton", torch.float32, tensors, decay, state, upstream), exact, strict=True):
        assert relative_error(a, b) < BAR


def test_packed_sequences_are_rows_of_their_own():
    tensors, decay = inputs(70, gated=True, batch=1, heads=2)
    packed, fade, bounds = [x[0] for x in tensors], decay[0], torch.tensor([0, 66, 67, 70])
    upstream = [torch.randn(70, 2, 5), torch.randn(3, 2, 6, 5)]
    exact = outcome("reference", torch.float64, packed, fade, None, upstream, bounds)
    for a, b in zip(outcome("triton", torch.float32, packed, fade, None, upstream, bounds), exact, strict=True):
        assert relative_error(a, b) < BAR


def test_like_keys_lose_no_digits():
    """Powers of the matrix between them would grow as binomial coefficients."""
    (q, k, v, beta), _ = inputs(64, gated=False, batch=1, heads=1)
    tensors = [q, k[:, :1].expand_as(k), v, torch.ones_like(beta)]
    with nalaformer.use_backend("triton"):
        found, _ = delta_rule(*(x.to(DEVICE, torch.float32) for x in tensors))
    assert relative_error(found.cpu(), delta_rule(*tensors)[0]) < BAR


@pytest.mark.parametrize("name", ["norm_aware", "norm_aware cosine", "relu", "elu", "split"])
def test_features_of_length_one_and_their_gradients(name):
    name, *direction = name.split()
    feature_map = nalaformer.feature_map(name, num_heads=2, head_dim=20, **({"direction": direction[0]} if direction else {}))
    q, k = (torch.randn(1, 30, 2, 20) for _ in range(2))
    upstream = [torch.randn(1, 30, 2, 20 * (1 if name in ("relu", "elu") else 2)) for _ in range(2)]
    found = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (q, k)]
        with nalaformer.use_backend(backend):
            features = unit_features(feature_map.to(DEVICE), *leaves)
        gradients = torch.autograd.grad(features, leaves, [x.to(DEVICE, dtype) for x in upstream])
        found.append([*features, *gradients])
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) < BAR


def test_learned_powers_get_their_gradients():
    feature_map = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8, learnable=True).to(DEVICE)
    q, k = (torch.randn(1, 5, 2, 8, device=DEVICE) for _ in range(2))
    with nalaformer.use_backend("triton"):
        sum(x.square()[..., :3].sum() for x in unit_features(feature_map, q, k)).backward()
    assert feature_map.lambda_.grad.abs().min() > 0


def test_kernels_are_operators_that_torch_library_accepts():
    from nalaformer.ops.kernels.delta import delta_op, unit_features_op

    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    tensors, decay = inputs(5, gated=True, batch=1, heads=2, features=16, values=16, dtype=torch.float32)
    leaves = [x.to(DEVICE).requires_grad_() for x in (*tensors, decay)]
    state = torch.randn(1, 2, 16, 16, device=DEVICE, requires_grad=True)
    torch.library.opcheck(delta_op.forward, (*leaves, state, 0.25, None, None), test_utils=checks)
    dout, states, u = (torch.randn(shape, device=DEVICE) for shape in ((1, 5, 2, 16), (1, 2, 16, 16), (5, 2, 16)))
    torch.library.opcheck(delta_op.backward, (dout, None, *leaves, states, u, 0.25, None, None), test_utils=checks)
    spec = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8).kernel_spec(torch.device(DEVICE))
    x, settings = torch.randn(9, 8, device=DEVICE, requires_grad=True), spec.settings(streams=1, eps=0.0)
    torch.library.opcheck(
        unit_features_op.forward, (x, spec.parameters, *settings, True, 1e-6, torch.float32), test_utils=checks
    )
    more = (torch.randn(9, 16, device=DEVICE), x, spec.parameters, *settings, True, 1e-6)
    torch.library.opcheck(unit_features_op.backward, more, test_utils=checks)
