"""The learning rate over the steps."""

from typing import Any

from torch.optim import Optimizer

from .config import TrainingConfig


def make_schedule(config: TrainingConfig, optimizer: Optimizer, steps_per_epoch: int) -> Any:
    """timm's schedule for the config: its `step_update(step)` sets the rate of a step."""
    from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler

    steps = config.in_steps(config.epochs or config.steps, steps_per_epoch)
    warmup = config.in_steps(config.warmup, steps_per_epoch)
    # learning_rate is the highest: neither end of the schedule lies above it
    first, last = (min(rate, config.learning_rate) for rate in (config.warmup_learning_rate, config.min_learning_rate))
    common: Any = {"warmup_t": warmup, "warmup_lr_init": first, "t_in_epochs": False}
    if config.schedule == "steps":
        # timm looks one step ahead
        times = [1 + config.in_steps(time, steps_per_epoch) for time in config.decay_at]
        return MultiStepLRScheduler(optimizer, decay_t=times, decay_rate=0.1, warmup_prefix=False, **common)
    common |= {"lr_min": last, "cycle_limit": 1}
    if config.schedule == "cosine":
        return CosineLRScheduler(optimizer, t_initial=steps, **common)
    # a polynomial of degree one that starts where the warm-up has ended
    return PolyLRScheduler(optimizer, t_initial=max(1, steps - warmup), power=1.0, warmup_prefix=True, **common)
