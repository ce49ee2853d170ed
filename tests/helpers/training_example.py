"""A small task and model for the tests of the trainer, and a run of them in a process of its own."""

import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from nalaformer.data import BadSample
from nalaformer.tasks import Loss, SummedMetrics
from nalaformer.training import Trainer, TrainingConfig


class Points:
    """Points in the plane of a curve that is to be learned; bad ones have the target NaN, corrupt ones cannot be read."""

    def __init__(self, count=60, bad=(), corrupt=()):
        self.count, self.bad, self.corrupt = count, bad, corrupt

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.corrupt:
            raise BadSample(f"{index}.png", "made so")
        x = torch.from_numpy(np.random.default_rng(index).normal(size=4)).float()
        # stands for augmentation
        x = x + 0.01 * torch.randn(4)
        target = torch.tensor(float("nan")) if index in self.bad else x.sin().sum()
        # units of a sample: boxes and tokens are never the same number
        return x, target, torch.tensor(float(1 + index % 3))


class Regression:
    """Weighted squared error: the weight of a batch is the sum of its samples' units."""

    def __init__(self, bad=(), seconds=0.0, corrupt=()):
        self.train_data, self.eval_data = Points(bad=bad, corrupt=corrupt), Points(20, corrupt=corrupt)
        self.seconds = seconds

    def loss(self, model, batch):
        time.sleep(self.seconds)
        x, target, units = batch
        errors = (model(x)[:, 0] - target) ** 2
        total = (units * errors).sum() / units.sum()
        return Loss(total=total, weight=units.sum().item(), parts={"largest_unit": units.mean()})

    def metrics(self):
        return MeanError()


class MeanError(SummedMetrics):
    def __init__(self):
        self.sums = torch.zeros(2, dtype=torch.float64)

    def update(self, model, batch):
        x, target, _ = batch
        self.sums += torch.stack((-(model(x)[:, 0] - target).abs().sum().cpu(), torch.tensor(float(len(x))))).double()

    def result(self):
        return {"negative_error": (self.sums[0] / self.sums[1]).item()}


def make_model(norm=True, dropout=0.1):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1)]
    return nn.Sequential(*layers)


def make_trainer(folder, *, task=None, model=None, **settings):
    defaults = {"steps": 24, "batch_size": 12, "learning_rate": 1e-2, "warmup": 4, "save_every": 5, "eval_every": 8, "ema": 0.9}
    config = TrainingConfig(device="cpu", **(defaults | settings))
    return Trainer(config, task or Regression(), model or make_model(), folder)


def stop_at(trainer, step):
    """Ask the trainer to stop in the course of that step, as a signal would."""
    loss = trainer.task.loss

    def counted(model, batch):
        if trainer.progress.step == step - 1:
            trainer.is_asked_to_stop = True
        return loss(model, batch)

    trainer.task.loss = counted
    return trainer


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(folder, seconds):
    """Run the example in a process of its own, each step at least that long; the file `outcome` says how it ended."""
    torch.set_num_threads(1)
    outcome = make_trainer(folder, task=Regression(seconds=seconds)).fit()
    (Path(folder) / "outcome").write_text("finished" if outcome.is_finished else f"stopped at {outcome.step}")


def learn_on_ranks(folder, corrupt):
    """Three runs in the same ranks: files that cannot be read, and batch norms without and with averaged weights."""
    plain = {"model": make_model(norm=False, dropout=0), "optimizer": "sgd", "accumulate": 2}
    make_trainer(folder / "plain", task=Regression(corrupt=corrupt), steps=8, **plain).fit()
    for ema in (0.0, 0.5):
        make_trainer(folder / f"ema_{ema}", model=make_model(norm=True, dropout=0), ema=ema, steps=8, eval_every=0).fit()
