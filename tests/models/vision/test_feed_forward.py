"""The feed-forward network of a block: its convolution computes the GELU before it only where nothing else can tell."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nalaformer.models.vision.block import FeedForward

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, nn.GELU: F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def make(activation="gelu", mix=True):
    torch.manual_seed(0)
    return FeedForward(6, 10, mix=mix, activation=activation, drop=0.0).double()


def in_steps(layer, x, grid, activated):
    """fc2(y + local(y)), y = activation(fc1(x)), layer by layer."""
    y = activated(layer.fc1(x))
    if layer.local is not None:
        image = y.transpose(1, 2).unflatten(2, grid)
        y = y + nn.Conv2d.forward(layer.local, image).flatten(2).transpose(1, 2)
    return layer.fc2(y)


@pytest.mark.parametrize("mix", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_comes_before_the_convolution(activation, mix):
    layer, x = make(activation, mix), torch.randn(2, 12, 6, dtype=torch.float64)
    expected = in_steps(layer, x, (3, 4), ACTIVATIONS[activation])
    torch.testing.assert_close(layer(x, (3, 4)), expected, rtol=1e-12, atol=1e-12)


def test_an_activation_that_somebody_watches_is_called():
    layer, x = make(), torch.randn(1, 6, 6, dtype=torch.float64)
    expected, seen = layer(x, (2, 3)), []
    layer.activation.register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.testing.assert_close(layer(x, (2, 3)), expected, rtol=1e-12, atol=1e-12)
    assert len(seen) == 1


def test_hooks_that_hand_the_input_over_as_another_tensor_change_nothing():
    layer, x = make(), torch.randn(1, 6, 6, dtype=torch.float64, requires_grad=True)
    expected = layer(x, (2, 3))
    for hooked in (layer.local.register_full_backward_hook, layer.local.register_full_backward_pre_hook):
        hook = hooked(lambda *arguments: None)
        torch.testing.assert_close(layer(x, (2, 3)), expected, rtol=1e-12, atol=1e-12)
        hook.remove()
    layer.local.register_forward_pre_hook(lambda module, inputs: tuple(y.clone() if torch.is_tensor(y) else y for y in inputs))
    torch.testing.assert_close(layer(x, (2, 3)), expected, rtol=1e-12, atol=1e-12)


def test_an_activation_with_a_forward_of_its_own_is_called():
    layer, x = make(), torch.randn(1, 6, 6, dtype=torch.float64)
    layer.activation.forward = torch.zeros_like
    torch.testing.assert_close(
        layer(x, (2, 3)), layer.fc2(layer.local(torch.zeros(1, 6, layer.fc1.out_features, dtype=x.dtype), (2, 3)))
    )


@pytest.mark.parametrize(("activation", "is_left_to_it"), [("gelu", True), ("relu", False), ("gelu_tanh", False)])
def test_the_convolution_is_asked_for_gelu_alone(activation, is_left_to_it, monkeypatch):
    layer, asked = make(activation), []
    plain = type(layer.local).forward

    def listening(self, x, grid, plus=None, residual=False, gelu=False):
        asked.append(gelu)
        return plain(self, x, grid, plus, residual, gelu)

    monkeypatch.setattr(type(layer.local), "forward", listening)
    layer(torch.randn(1, 6, 6, dtype=torch.float64), (2, 3))
    assert asked == [is_left_to_it]
