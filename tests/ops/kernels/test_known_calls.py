"""A call like an earlier one is not checked again, and one that differs is."""

import math

import pytest
import torch

import nalaformer
from helpers.kernel_checks import DEVICE, make, relative_error
from nalaformer.ops import interface

pytestmark = pytest.mark.kernels

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")


@pytest.fixture
def known(monkeypatch):
    """A map with parameters, inputs that require gradients, and how often calls are checked; one call has been made."""
    from nalaformer.ops.kernels.linear import call as calls

    monkeypatch.setattr(calls, "CALLS", {})
    check, checked = interface.check_call, []
    monkeypatch.setattr(interface, "check_call", lambda *given, **named: checked.append(1) or check(*given, **named))
    feature_map = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8, learnable=True).to(DEVICE)
    qkv = [x.requires_grad_() for x in make(*[(1, 5, 2, 8)] * 3)]
    with nalaformer.use_backend("triton"):
        nalaformer.linear_attention(*qkv, feature_map=feature_map)
        yield feature_map, qkv, checked


def results(feature_map, qkv, **options):
    """The output and the gradients of inputs and parameters."""
    out = nalaformer.linear_attention(*qkv, feature_map=feature_map, **options)
    weights = torch.linspace(1, 2, out.numel(), device=DEVICE).view_as(out)
    return out, *torch.autograd.grad((out * weights).sum(), [*qkv, *feature_map.parameters()])


def check(feature_map, qkv, **options):
    found = results(feature_map, qkv, **options)
    with nalaformer.use_backend("reference"):
        expected = results(feature_map, qkv, **options)
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y.double()) < 1e-5


def test_a_call_like_an_earlier_one_is_right_and_not_checked_again(known):
    feature_map, qkv, checked = known
    found = results(feature_map, [x.detach().clone().requires_grad_() for x in qkv])
    assert len(checked) == 1
    check(feature_map, qkv)
    with torch.no_grad():
        assert torch.equal(nalaformer.linear_attention(*qkv, feature_map=feature_map), found[0])


def test_parameters_that_have_moved_are_read_again(known):
    feature_map, qkv, _ = known
    with torch.no_grad():
        feature_map.lambda_.add_(0.5)
    check(feature_map, qkv)


@pytest.mark.parametrize(("name", "value"), [("norm_scale", 0.25), ("direction", "cosine"), ("fixed_key_power", 2.0)])
def test_a_map_that_was_changed_is_looked_at_again(known, name, value):
    feature_map, qkv, _ = known
    setattr(feature_map, name, value)
    check(feature_map, qkv)


def test_other_inputs_and_options_are_calls_of_their_own(known):
    feature_map, qkv, checked = known
    # q alone lies in another order, which is part of a launch
    turned = [qkv[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(), *qkv[1:]]
    short = [x[:, :3] for x in qkv]
    others = [(qkv, {"causal": True}), (qkv, {"eps": 0.5}), (turned, {}), (short, {})]
    for number, (inputs, options) in enumerate(others, start=2):
        found = results(feature_map, inputs, **options)
        assert len(checked) == number
        with nalaformer.use_backend("reference"):
            expected = results(feature_map, inputs, **options)
        checked.pop()
        for x, y in zip(found, expected, strict=True):
            assert relative_error(x, y.double()) < 1e-5


@pytest.mark.parametrize("options", [{"eps": -1.0}, {"eps": math.nan}, {"eps": [1.0]}, {"causal": 0}])
def test_what_is_refused_at_first_is_refused_later(known, options):
    feature_map, qkv, _ = known
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(options))} must be"):
        nalaformer.linear_attention(*qkv, feature_map=feature_map, **options)


def test_blocks_are_no_part_of_a_known_causal_call(known):
    feature_map, qkv, _ = known
    nalaformer.linear_attention(*qkv, feature_map=feature_map, causal=True)
    with pytest.raises(ValueError, match="block"):
        nalaformer.linear_attention(*qkv, feature_map=feature_map, causal=True, block=2)


def test_a_map_for_other_heads_is_refused_later(known):
    feature_map, qkv, _ = known
    feature_map.num_heads = 3
    with pytest.raises(ValueError, match="made for 3 heads"):
        nalaformer.linear_attention(*qkv, feature_map=feature_map)


def test_another_backend_and_transforms_are_seen_later(known):
    feature_map, qkv, checked = known
    with nalaformer.use_backend("chunked"):
        nalaformer.linear_attention(*qkv, feature_map=feature_map)
    assert len(checked) == 2
    q, k, v = (x.detach() for x in qkv)
    with pytest.raises(ValueError, match=r"a transform of torch.func is at work"):
        torch.func.grad(lambda q: nalaformer.linear_attention(q, k, v, feature_map=feature_map).sum())(q)


def test_no_graph_of_a_learned_map_is_kept(known):
    from nalaformer.ops.kernels.linear import call as calls
    from nalaformer.ops.kernels.linear.known_calls import KnownCall

    (kept,) = (x for x in calls.CALLS.values() if isinstance(x, KnownCall))
    assert not kept.spec.parameters.requires_grad
