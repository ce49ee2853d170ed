"""Samplers of diffusers by name, and the loop that denoises images under guidance."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.schedulers.scheduling_ddim import DDIMSchedulerOutput
from torch import Tensor

from ...registry import unknown_name
from .network import DiffusionTransformer, check_size
from .objectives import FIRST_BETA, LAST_BETA, OBJECTIVES, TRAINED_STEPS
from .prediction import prediction

# one latent image of 65,536 tokens costs as much as 64 small ones
MOST_TOKENS_AT_ONCE = 65_536


class LearnedRangeDDPM(diffusers.DDPMScheduler):
    """diffusers' ancestral sampler with the learned variance in its bounds for any number of steps.

    The upper bound is the beta of the current step, 1 - a_t / a_before, while diffusers always uses that of a step of 1000. The
    last step adds no noise, while diffusers skips the noise only at time 0, which only 1000 steps reach.
    """

    def _get_variance(self, t: int, predicted_variance: Tensor | None = None, variance_type: str | None = None) -> Tensor:
        before = self.previous_timestep(t)
        signal = self.alphas_cumprod[t]
        signal_before = self.alphas_cumprod[before] if before >= 0 else self.one
        beta = 1 - signal / signal_before
        smallest = (beta * (1 - signal_before) / (1 - signal)).clamp(min=1e-20)
        if predicted_variance is None:
            return smallest
        if before < 0:
            return smallest.log()
        fraction = (predicted_variance + 1) / 2
        return fraction * beta.log() + (1 - fraction) * smallest.log()


class ConnectedDDIM(diffusers.DDIMScheduler):
    """diffusers' deterministic sampler whose steps end where the next begins, for any number of steps.

    diffusers always goes back by 1000 // steps: by 1 with 600 steps, whose times lie 5/3 apart, so that noise stays.
    x_before = sqrt(a_before) x_0 + sqrt(1 - a_before) noise, x_0 = (x_t - sqrt(1 - a_t) noise) / sqrt(a_t).
    """

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor) -> DDIMSchedulerOutput:
        earlier = self.timesteps[self.timesteps < timestep]
        signal = self.alphas_cumprod[timestep]
        signal_before = self.alphas_cumprod[earlier[0]] if len(earlier) else self.final_alpha_cumprod
        image = (sample - (1 - signal).sqrt() * model_output) / signal.sqrt()
        if self.config.clip_sample:
            image = image.clamp(-self.config.clip_sample_range, self.config.clip_sample_range)
        previous = signal_before.sqrt() * image + (1 - signal_before).sqrt() * model_output
        return DDIMSchedulerOutput(prev_sample=previous, pred_original_sample=image)


def make_sampler(name: str, objective: str, *, clip: bool) -> Any:
    """Build the sampler of that name for networks of the objective; clip: clamp the estimated image to -1..1 in each step."""
    fitting = OBJECTIVES[objective].samplers
    if name not in fitting:
        owner = next((each for each in OBJECTIVES.names() if name in OBJECTIVES[each].samplers), None)
        if owner is None:
            raise unknown_name("sampler", name, fitting)
        raise ValueError(
            f"a network trained for the objective {objective} needs one of its samplers, {', '.join(fitting)}, got {name}, "
            f"which is for {owner}; choose {fitting[0]}"
        )
    noise = {
        "num_train_timesteps": TRAINED_STEPS,
        "beta_start": FIRST_BETA,
        "beta_end": LAST_BETA,
        "beta_schedule": "linear",
        # the first step starts from pure noise, however few steps there are
        "timestep_spacing": "trailing",
    }
    if name == "ddpm":
        return LearnedRangeDDPM(**noise, variance_type="learned_range", clip_sample=clip)
    if name == "ddim":
        return ConnectedDDIM(**noise, clip_sample=clip)
    if name == "dpm_solver":
        return diffusers.DPMSolverMultistepScheduler(**noise)
    if name == "unipc":
        return diffusers.UniPCMultistepScheduler(**noise)
    kinds = {"flow_euler": "FlowMatchEulerDiscreteScheduler", "flow_heun": "FlowMatchHeunDiscreteScheduler"}
    return getattr(diffusers, kinds[name])(num_train_timesteps=TRAINED_STEPS)


@torch.no_grad()
def denoise(
    network: DiffusionTransformer,
    labels: Tensor,
    *,
    objective: str,
    height: int,
    width: int,
    clip: bool,
    steps: int = 50,
    guidance: float = 1.0,
    sampler: str = "",
    seeds: Sequence[Sequence[int]],
    advance: Callable[[float], object] = lambda images: None,
) -> Tensor:
    """Sample images [N, C, height, width] of the labels [N], float32; each depends on its own seed, not on the others.

    guidance: prediction = p(no class) + guidance (p(class) - p(no class)); 1 uses the class alone, in half the time.
    sampler: a name; empty: the default. advance: called after each step with the fraction of images that it completes. Devices
    sum in different orders: another device, or another batch size, gives the same images up to rounding.
    """
    check_size(height, width, network.patch_size)
    network.check_labels(labels)
    if steps < 1 or steps > TRAINED_STEPS:
        raise ValueError(f"steps must lie in 1 .. {TRAINED_STEPS}, got {steps}; 50 is usual")
    if not 0 <= guidance < math.inf:
        raise ValueError(f"guidance must not be negative or infinite, got {guidance}; 1 is none, DiT takes 4")
    if guidance != 1 and network.no_class is None:
        raise ValueError(
            f"guidance needs a network that was trained with class_dropout above 0, got guidance={guidance} for one without; "
            "use guidance=1, or train with class_dropout=0.1"
        )
    name = sampler or OBJECTIVES[objective].samplers[0]
    tokens = height * width // network.patch_size**2
    at_once = max(1, MOST_TOKENS_AT_ONCE // tokens)
    done = []
    for start in range(0, len(labels), at_once):
        part = slice(start, start + at_once)
        schedule = make_sampler(name, objective, clip=clip)
        shape = (network.channels, height, width)
        done.append(_denoise_batch(network, labels[part], schedule, shape, steps, guidance, seeds[part], advance))
    return torch.cat(done) if done else torch.empty(0, network.channels, height, width)


def _denoise_batch(
    network: DiffusionTransformer,
    labels: Tensor,
    schedule: Any,
    shape: tuple[int, int, int],
    steps: int,
    guidance: float,
    seeds: Sequence[Sequence[int]],
    advance: Callable[[float], object],
) -> Tensor:
    parameter = next(network.parameters())
    device, labels = parameter.device, labels.to(parameter.device)
    # drawn on the CPU with one generator per image, so that they are the same on every device and in every batch
    generators = [torch.Generator().manual_seed(first_word(seed)) for seed in seeds]
    images = torch.stack([torch.randn(shape, generator=each) for each in generators]).to(device)
    set_times(schedule, steps, device)
    is_random = isinstance(schedule, LearnedRangeDDPM)
    options = {"generator": generators} if is_random else {}
    predict = prediction(network, images.to(parameter.dtype), labels, guidance, calls=len(schedule.timesteps))
    for time in schedule.timesteps:
        scaled = schedule.scale_model_input(images, time) if hasattr(schedule, "scale_model_input") else images
        output = predict(scaled.to(parameter.dtype), time).float()
        # only the ancestral sampler reads the variance
        told = output if is_random else output[:, : network.channels]
        images = schedule.step(told, time, images, **options).prev_sample
        # some samplers call the network twice a step
        advance(len(images) / len(schedule.timesteps))
    return images.float()


def set_times(schedule: Any, steps: int, device: torch.device) -> None:
    """Set the steps of a diffusers sampler, with times from 999 (of a flow 1000) down to 0 or above."""
    if isinstance(schedule, diffusers.FlowMatchEulerDiscreteScheduler):
        # equal steps; diffusers' reach 0.001 one step early, so that the last does nothing and two steps are one
        schedule.set_timesteps(sigmas=[1 - step / steps for step in range(steps)], device=device)
        return
    if isinstance(schedule, diffusers.FlowMatchHeunDiscreteScheduler):
        # equal steps here too; the last is an Euler step, since the velocity at time 0 is unknown
        schedule.sigma_min = 1 / steps
    schedule.set_timesteps(steps, device=device)
    if schedule.timesteps.min() < 0:
        # 1000 - steps * (1000 / steps) can round to above zero, as for 61 steps, and would become a time of -1
        schedule.set_timesteps(steps * (1 - 1e-12), device=device)


def first_word(seed: Sequence[int]) -> int:
    """Return a seed for torch from several whole numbers, at least 0."""
    return int(np.random.SeedSequence(tuple(seed)).generate_state(1, np.uint64)[0] >> 1)


def to_rgb(images: Tensor) -> Tensor:
    """Convert images [N, 1 or 3, H, W] in -1..1 to uint8 [N, 3, H, W]."""
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1)
