"""What a diffusion transformer is trained for, against the formulas written apart in float64."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from nalaformer.models.diffusion import OBJECTIVES

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(batch=4, channels=2):
    draw = torch.Generator().manual_seed(1)
    images = (torch.rand(batch, channels, 3, 5, generator=draw) * 2 - 1).round(decimals=1)
    noise = torch.randn(batch, channels, 3, 5, generator=draw)
    output = torch.randn(batch, 2 * channels, 3, 5, generator=draw)
    return images, noise, output, torch.arange(batch)


def bound_in_bits(x0, noise, output, t):
    """The variational bound of one image: betas, products and posteriors as the DDPM paper defines them."""
    betas = [1e-4 + (0.02 - 1e-4) * step / 999 for step in range(1000)]
    product = [math.prod(1 - beta for beta in betas[: step + 1]) for step in range(t + 1)]
    a, before = product[t], product[t - 1] if t else 1.0
    x0, noise, output = x0.double(), noise.double(), output.double()
    predicted, v = output.chunk(2)
    xt = math.sqrt(a) * x0 + math.sqrt(1 - a) * noise
    guess = (xt - math.sqrt(1 - a) * predicted) / math.sqrt(a)

    def mean(start):
        return math.sqrt(before) * betas[t] / (1 - a) * start + math.sqrt(1 - betas[t]) * (1 - before) / (1 - a) * xt

    # the posterior of the first step has no variance; that of the second stands for it
    first = math.prod(1 - beta for beta in betas[:2])
    variance = betas[t] * (1 - before) / (1 - a) if t else betas[1] * betas[0] / (1 - first)
    spread = torch.exp(((v + 1) / 2 * math.log(betas[t]) + (1 - v) / 2 * math.log(variance)) / 2)
    model = Normal(mean(guess), spread)
    if t:
        return kl_divergence(Normal(mean(x0), math.sqrt(variance)), model).mean() / math.log(2)
    upper = torch.where(x0 > 0.999, torch.ones_like(x0), model.cdf(x0 + 1 / 255))
    lower = torch.where(x0 < -0.999, torch.zeros_like(x0), model.cdf(x0 - 1 / 255))
    return -(upper - lower).clamp(min=1e-12).log().mean() / math.log(2)


@pytest.mark.parametrize("t", [0, 1, 500, 999])
def test_the_loss_of_ddpm_is_noise_error_and_variational_bound(t):
    images, noise, output, labels = drawn()
    seen = {}

    def predict(noisy, times, labels):
        seen.update(noisy=noisy, times=times)
        return output

    errors = OBJECTIVES["ddpm"].errors(predict, images, labels, noise, torch.full((4,), (t + 0.5) / 1000))
    assert seen["times"].tolist() == [t] * 4
    signal = math.prod(1 - (1e-4 + (0.02 - 1e-4) * step / 999) for step in range(t + 1))
    assert (seen["noisy"] - (math.sqrt(signal) * images + math.sqrt(1 - signal) * noise)).abs().max() < 2e-5
    simple = (output[:, :2] - noise).double().square().mean((1, 2, 3))
    torch.testing.assert_close(errors.error.double(), simple, rtol=2e-5, atol=0)
    expected = torch.stack([simple[i] + bound_in_bits(images[i], noise[i], output[i], t) for i in range(4)])
    torch.testing.assert_close(errors.loss.double(), expected, rtol=2e-4, atol=0)


def test_the_bound_teaches_the_variance_and_leaves_the_noise_alone():
    images, noise, output, labels = drawn()
    output.requires_grad_()
    levels = torch.tensor([0.0, 0.1, 0.5, 0.9])
    errors = OBJECTIVES["ddpm"].errors(lambda *_: output, images, labels, noise, levels)
    (gradient,) = torch.autograd.grad(errors.loss.sum(), output, retain_graph=True)
    (of_noise,) = torch.autograd.grad(errors.error.sum(), output)
    assert torch.equal(gradient[:, :2], of_noise[:, :2])
    assert gradient[:, 2:].abs().amax((1, 2, 3)).min() > 0


def test_the_flow_goes_straight_from_the_image_to_noise():
    images, noise, output, labels = drawn()
    levels = torch.tensor([0.0, 0.25, 0.5, 1.0])
    seen = {}

    def predict(noisy, times, labels):
        seen.update(noisy=noisy, times=times)
        return output[:, :2]

    errors = OBJECTIVES["flow"].errors(predict, images, labels, noise, levels)
    assert seen["times"].tolist() == [0.0, 250.0, 500.0, 1000.0]
    wanted = torch.stack([(1 - t) * x + t * n for t, x, n in zip(levels, images, noise, strict=True)])
    torch.testing.assert_close(seen["noisy"], wanted)
    torch.testing.assert_close(errors.loss, (output[:, :2] - (noise - images)).square().mean((1, 2, 3)))
    torch.testing.assert_close(errors.power, (noise - images).square().mean((1, 2, 3)))


@pytest.mark.parametrize("name", OBJECTIVES.names())
def test_a_perfect_prediction_has_no_error(name):
    images, noise, _, labels = drawn()
    target = {"ddpm": torch.cat((noise, torch.zeros_like(noise)), 1), "flow": noise - images}[name]
    errors = OBJECTIVES[name].errors(lambda *_: target, images, labels, noise, torch.rand(4))
    assert not errors.error.any()
    assert (errors.power > 0).all()
