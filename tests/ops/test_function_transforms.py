"""torch.func over the op and over layers: grad, vmap, jvp and hessian are those of the function itself."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jvp, vmap

from nalaformer import FEATURE_MAPS, feature_map, linear_attention, use_backend
from nalaformer.attention import METHODS, build
from nalaformer.ops import delta_rule
from nalaformer.ops.backend import INTERPRETING, TRITON_FOUND

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = 1e-5


def inputs(num_tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, num_tokens, 2, 4, dtype=torch.float64) for _ in range(3))


@pytest.fixture(params=[False, True], ids=["all see all", "causal"])
def causal(request) -> bool:
    return request.param


def attending(name: str, causal: bool):
    mapped = feature_map(name, num_heads=2, head_dim=4).double().requires_grad_(False)
    return lambda q, k, v: linear_attention(q, k, v, feature_map=mapped, causal=causal)


@pytest.mark.parametrize("name", FEATURE_MAPS.names())
def test_gradients_of_each_sample_are_those_of_the_sample_alone(name, causal):
    attend, (q, k, v) = attending(name, causal), inputs()

    def loss(q, k, v):
        return attend(q[None], k[None], v[None]).square().sum()

    found = vmap(grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for sample in range(2):
        alone = [x[sample].clone().requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(loss(*alone), alone)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[sample], other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["norm_aware", "polarity", "elu"])
def test_forward_and_second_derivatives_are_differences(name, causal):
    attend, (q, k, v), (direction, weights, _) = attending(name, causal), inputs(), inputs()

    def loss(k):
        return (attend(q, k, v) * weights).sum()

    out, change = jvp(lambda k: attend(q, k, v), (k,), (direction,))
    torch.testing.assert_close(out, attend(q, k, v), rtol=1e-9, atol=1e-9)
    difference = (attend(q, k + STEP * direction, v) - attend(q, k - STEP * direction, v)) / (2 * STEP)
    torch.testing.assert_close(change, difference, rtol=1e-5, atol=1e-6)
    second = torch.einsum("abcdefgh,efgh->abcd", hessian(loss)(k), direction)
    difference = (grad(loss)(k + STEP * direction) - grad(loss)(k - STEP * direction)) / (2 * STEP)
    torch.testing.assert_close(second, difference, rtol=1e-4, atol=1e-5)


def test_many_pieces_are_transformed_as_one(causal):
    """vmap over keys alone: a piece of batched numbers has no place in an output of unbatched ones."""
    attend, (q, k, v) = attending("norm_aware", causal), inputs(700)
    many = torch.stack((k, 2 * k))
    with torch.no_grad():
        found = vmap(lambda k: attend(q, k, v))(many)
        for one, each in zip(found, many, strict=True):
            torch.testing.assert_close(one, attend(q, each, v), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_a_layers_weights_for_each_sample(method):
    layer, x = build(method, dim=16, num_heads=2).double(), torch.randn(2, 6, 16, dtype=torch.float64)
    weights = dict(layer.named_parameters())

    def loss(weights, x):
        return functional_call(layer, weights, (x[None], (2, 3))).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    expected = torch.autograd.grad(loss(weights, x[1]), list(weights.values()))
    for name, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(found[name][1], gradient, rtol=1e-8, atol=1e-9)


def test_the_delta_rule_is_transformed_too():
    q, k, v = inputs(70)
    k, beta = k / 4, torch.rand(2, 70, 2, dtype=torch.float64)

    def loss(q, k, v, beta):
        return delta_rule(q[None], k[None], v[None], beta[None])[0].square().sum()

    found = vmap(grad(loss, argnums=1))(q, k, v, beta)
    alone = k[1].clone().requires_grad_()
    expected = torch.autograd.grad(loss(q[1], alone, v[1], beta[1]), alone)[0]
    torch.testing.assert_close(found[1], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not (TRITON_FOUND and INTERPRETING), reason="runs the kernels on a CPU")
def test_kernels_that_are_asked_for_refuse_transforms_and_give_way_otherwise():
    mapped = feature_map("norm_aware", num_heads=2, head_dim=4)
    q, k, v = (x.float() for x in inputs())

    def loss(q):
        return linear_attention(q, k, v, feature_map=mapped).sum()

    with use_backend("triton"), pytest.raises(ValueError, match=r"a transform of torch.func is at work"):
        grad(loss)(q)
