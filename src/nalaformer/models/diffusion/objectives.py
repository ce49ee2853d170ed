"""Training objectives: prediction of noise (DDPM, with a learned variance as in DiT) or of a flow."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...ops.kept_tensors import kept
from ...registry import Registry

TRAINED_STEPS = 1000
FIRST_BETA, LAST_BETA = 1e-4, 0.02
# images, times in 0..1000, labels -> prediction
Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """For each image [B]: the loss, and the mean squares of the prediction's error and of its target."""

    loss: Tensor
    error: Tensor
    power: Tensor


class Objective(Protocol):
    """A noise schedule and the loss of the network's prediction."""

    learned_variance: bool
    """True if the network's output is twice as wide."""
    samplers: tuple[str, ...]
    """The samplers that fit, the default first."""

    def errors(self, predict: Predict, images: Tensor, labels: Tensor, noise: Tensor, levels: Tensor) -> Errors:
        """Return the errors for images and noise [B, C, H, W]; levels [B] in 0..1, from clean to noise."""


OBJECTIVES: Registry[Objective] = Registry("objective")


class NoisePrediction:
    """x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) noise; loss |noise - prediction|^2 + the variational bound in bits, as in DiT.

    a_t = prod (1 - beta), beta from 1e-4 to 0.02 in 1000 steps. The bound trains the variance alone: the prediction is
    detached there. exp(v log beta + (1 - v) log posterior variance) is the variance, v = (output + 1) / 2.
    """

    learned_variance = True
    samplers: tuple[str, ...] = ("ddim", "ddpm", "dpm_solver", "unipc")

    def errors(self, predict: Predict, images: Tensor, labels: Tensor, noise: Tensor, levels: Tensor) -> Errors:
        times = (levels * TRAINED_STEPS).long().clamp(max=TRAINED_STEPS - 1)
        signal, spread, mean_weight, largest, smallest = (
            row[times][:, None, None, None] for row in cached_noise_tables(device=images.device)
        )
        output = predict(signal * images + spread * noise, times, labels).float()
        predicted, variance = output.chunk(2, dim=1)
        error = (predicted - noise).square().mean((1, 2, 3))
        fraction = (variance + 1) / 2
        log_variance = fraction * largest + (1 - fraction) * smallest
        # posterior mean of the truth minus that of the prediction
        apart = mean_weight * (predicted.detach() - noise)
        bound = gaussian_divergence(apart, smallest, log_variance)
        likelihood = -eight_bit_log_likelihood(images, apart, log_variance)
        # the last step gives pixels, so its bound is their likelihood
        bound = torch.where((times == 0)[:, None, None, None], likelihood, bound)
        loss = error + bound.mean((1, 2, 3)) / math.log(2)
        return Errors(loss=loss, error=error, power=noise.square().mean((1, 2, 3)))


class FlowMatching:
    """x_t = (1 - t) x_0 + t noise; the network predicts the velocity noise - x_0, loss the mean square of its error."""

    learned_variance = False
    samplers: tuple[str, ...] = ("flow_euler", "flow_heun")

    def errors(self, predict: Predict, images: Tensor, labels: Tensor, noise: Tensor, levels: Tensor) -> Errors:
        t, target = levels[:, None, None, None], noise - images
        predicted = predict(images + t * target, levels * TRAINED_STEPS, labels).float()
        error = (predicted - target).square().mean((1, 2, 3))
        return Errors(loss=error, error=error, power=target.square().mean((1, 2, 3)))


OBJECTIVES.register("ddpm")(NoisePrediction())
OBJECTIVES.register("flow")(FlowMatching())


def noise_tables(*, device: torch.device) -> Tensor:
    """Return sqrt(a), sqrt(1 - a), weight of noise in the posterior mean, log beta, log posterior variance: [5, 1000]."""
    betas = torch.linspace(FIRST_BETA, LAST_BETA, TRAINED_STEPS, dtype=torch.float64)
    signal = (1 - betas).cumprod(0)
    before = torch.cat((torch.ones(1, dtype=torch.float64), signal[:-1]))
    # x_0 = (x_t - sqrt(1 - a) noise) / sqrt(a), with the factor beta sqrt(a before) / (1 - a) in the posterior mean
    mean_weight = betas * before.sqrt() / (1 - signal) * (1 / signal - 1).sqrt()
    posterior = betas * (1 - before) / (1 - signal)
    # the first is zero and is replaced by its neighbor, as in DiT
    posterior[0] = posterior[1]
    rows = (signal.sqrt(), (1 - signal).sqrt(), mean_weight, betas.log(), posterior.log())
    return torch.stack(rows).float().to(device)


cached_noise_tables: Callable[..., Tensor] = kept(noise_tables, maxsize=4)


def gaussian_divergence(apart: Tensor, log_variance: Tensor, other: Tensor) -> Tensor:
    """Return the KL divergence in nats between normal distributions whose means are `apart`."""
    return 0.5 * (other - log_variance - 1 + (log_variance - other).exp() + apart.square() * (-other).exp())


def eight_bit_log_likelihood(images: Tensor, apart: Tensor, log_variance: Tensor) -> Tensor:
    """Return the log probability of each pixel's bin, 2 / 255 wide, under a normal distribution with mean pixel - `apart`.

    The outermost bins are unbounded.
    """
    sharpness, half = (-0.5 * log_variance).exp(), 1 / 255
    # by symmetry both ends can lie in the lower tail, where small probabilities keep their digits
    far = apart.abs()
    inner = normal_cdf(sharpness * (half - far)) - normal_cdf(sharpness * (-half - far))
    white, black = normal_cdf(sharpness * (half - apart)), normal_cdf(sharpness * (half + apart))
    probability = torch.where(images > 0.999, white, torch.where(images < -0.999, black, inner))
    return probability.clamp(min=1e-12).log()


def normal_cdf(x: Tensor) -> Tensor:
    """Return the probability below x; torch's ndtr is 1 + erf, which has no digits left at -5 in float32."""
    return 0.5 * torch.erfc(-x / math.sqrt(2))
