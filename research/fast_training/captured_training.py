"""One training run with everything on the device: on a GPU a step is a CUDA graph, and the host only says "next".

The general trainer looks at every loss, may stop after any step and reads data from anywhere, so the device waits for the host
in every step, which a small model feels. Here the host waits for the device at evaluations alone.
"""

import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nalaformer.atomic_files import clear_disk_errors, write_atomically
from nalaformer.data import seed_everything
from nalaformer.ops.graphs import NotCapturable, captured
from nalaformer.training.config import TrainingConfig
from nalaformer.training.display import SECONDS_BETWEEN_LINES, in_digits
from nalaformer.training.precision import precision_on
from nalaformer.training.schedule import make_schedule
from research.fast_training.low_copies import LowCopies

from ..sequences import METRICS, Metric, flatten_answers
from .data_on_device import Bucket, Plan, make_plan

MOST_ANSWERS = 2**17


@dataclass
class TrainingProgress:
    """Progress of a run."""

    step: int = 0
    best_step: int = 0
    best_dev: float = -math.inf
    seconds: float = 0.0
    is_diverged: bool = False
    is_solved: bool = False


class CapturedTraining:
    """A model trained on resident data by a TrainingConfig; the weights that are best on the dev data are kept.

    figure: what is trained and looked at. solved_at: the figure on dev at which a run ends before its last step, where higher
    is better.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        *,
        train: list[Bucket],
        dev: list[Bucket],
        groups: int,
        steps: int,
        seed: int,
        eval_batch: int = 0,
        solved_at: float = float("inf"),
        figure: Metric = METRICS["accuracy"],
    ) -> None:
        # a bucket that fills no batch is never asked
        train = [each for each in train if len(each) >= config.batch_size] or train
        self.device = train[0].group.device
        self.model, self.config, self.steps, self.seed = model.to(self.device), config, steps, seed
        self.train, self.dev, self.groups, self.solved_at, self.figure = train, dev, groups, solved_at, figure
        self.eval_batch = eval_batch or 4 * config.batch_size
        self.plan: Plan = make_plan(train, steps=steps, batch_size=config.batch_size, seed=seed)
        self.progress = TrainingProgress(best_dev=figure.worst)
        self.dev_shares: list[float | None] = [None] * groups
        """The figure of each group of the dev data when it was last looked at."""
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        # statistics of batch norms belong to the weights they were taken with
        self.buffers = list(self.model.buffers())
        self.best = [tensor.detach().clone() for tensor in (*self.parameters, *self.buffers)]
        self.on_gpu = self.device.type == "cuda"
        self.precision = precision_on(self.device, config.precision)
        self.low = LowCopies(self.model, self.precision)
        # evaluations stay as they are: few, and in batches of other sizes
        self.trained: Callable[..., Tensor] = torch.compile(self.low.__call__) if config.compile else self.low
        self.optimizer = self._make_optimizer()
        self.host_rates = self._rates()
        self.rates = torch.tensor(self.host_rates, dtype=torch.float32, device=self.device)
        # counters on the device: a captured step finds its batch and its rate by itself
        self.done = torch.zeros(1, dtype=torch.long, device=self.device)
        self.cursors = [torch.zeros(1, dtype=torch.long, device=self.device) for _ in train]
        self.loss_sum = torch.zeros((), device=self.device)
        self.graphs: list[Callable[[], object]] = []
        self.how = "compiled" if config.compile else "eager"

    def _make_optimizer(self) -> torch.optim.AdamW:
        config = self.config
        # as timm does: no decay of biases and norms
        matrices = [p for p in self.parameters if p.dim() > 1]
        vectors = [p for p in self.parameters if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        rate: Any = torch.tensor(config.learning_rate, device=self.device) if self.on_gpu else config.learning_rate
        options: dict[str, Any] = {"capturable": True, "fused": True} if self.on_gpu else {}
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=rate, betas=(0.9, config.beta2), eps=config.epsilon, **options
        )

    def _rates(self) -> list[float]:
        """The learning rate of every step, by the trainer's own schedule."""
        probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=self.config.learning_rate)
        per_epoch = max(1, sum(len(each) for each in self.train) // self.config.batch_size)
        schedule = make_schedule(self.config, probe, per_epoch)
        rates = []
        for step in range(self.steps):
            schedule.step_update(step)
            rates.append(float(probe.param_groups[0]["lr"]))
        return rates

    def run(
        self,
        *,
        until: float = float("inf"),
        say: Callable[[str], None] = lambda line: None,
        is_asked_to_stop: Callable[[], bool] = lambda: False,
        aside: Path | None = None,
    ) -> bool:
        """Train to the end, until the clock (time.monotonic), or until asked to stop. Returns True if the end was reached.

        The end comes early where the task is solved or the loss is no number.

        One block of steps, up to an evaluation, is always done: however short the time, repeated calls come to an end. aside:
        where the run is saved on the way, after the blocks that end when save_minutes have passed.
        """
        config, progress = self.config, self.progress
        if not self.graphs:
            self._prepare()
        block = config.eval_every or self.steps
        first = progress.step
        last_saved = last_said = time.monotonic()
        while progress.step < self.steps and not (progress.is_diverged or progress.is_solved):
            if is_asked_to_stop() or (progress.step > first and time.monotonic() > until):
                return False
            started = time.monotonic()
            # dropout follows from the seed and the step, so a resumed run is the same run
            seed_everything(self.seed, progress.step)
            last = min(progress.step + block, self.steps)
            self.model.train()
            self.loss_sum.zero_()
            for step in range(progress.step, last):
                self.graphs[int(self.plan.bucket_of[step])]()
                # a GPU is behind the host, which waits for it at evaluations alone
                if not self.on_gpu and time.monotonic() - last_said > SECONDS_BETWEEN_LINES:
                    say(f"step {step + 1}/{self.steps}")
                    last_said = time.monotonic()
            loss = self.loss_sum.item() / (last - progress.step)
            progress.step = last
            found = self.evaluate(self.dev)
            dev, self.dev_shares = found["all"], found["groups"]
            progress.is_diverged = loss != loss
            progress.is_solved = self.figure.higher_is_better and dev >= self.solved_at and not progress.is_diverged
            if self.figure.is_better(dev, progress.best_dev) and not progress.is_diverged:
                progress.best_dev, progress.best_step = dev, last
                self._copy([*self.parameters, *self.buffers], self.best)
            spent = time.monotonic() - started
            progress.seconds += spent
            say(f"step {last}/{self.steps}  loss {loss:.4f}  dev {dev:.4f}  {in_digits(block / max(spent, 1e-9))} steps/s")
            last_said = time.monotonic()
            if aside is not None and 0 < 60 * config.save_minutes <= time.monotonic() - last_saved:
                self.save(aside)
                last_saved = time.monotonic()
        return True

    def _prepare(self) -> None:
        """A callable for each bucket that takes one step."""
        for number, cursor in enumerate(self.plan.before(self.progress.step)):
            self.cursors[number].fill_(cursor)
        self.done.fill_(self.progress.step)
        self.low.follow()
        self.graphs = [partial(self._step, number) for number in range(len(self.train))]
        if self.on_gpu:
            try:
                self.graphs = self._capture(self.graphs)
                self.how = "compiled CUDA graph" if self.config.compile else "CUDA graph"
            except (NotCapturable, torch.OutOfMemoryError) as failure:
                # slower, and the same numbers; any other failure is one of the step itself
                warnings.warn(f"training steps are no CUDA graphs and wait for Python instead: {failure}", stacklevel=3)

    def _step(self, number: int) -> None:
        config = self.config
        if self.on_gpu:
            rate = self.rates.index_select(0, self.done)[0]
            for group in self.optimizer.param_groups:
                group["lr"].copy_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = self.host_rates[int(self.done)]
        self.optimizer.zero_grad(set_to_none=True)
        rows = self.plan.rows[number].index_select(0, self.cursors[number])[0]
        inputs, at, targets, _ = self.train[number].batch(rows)
        loss = self.figure.loss(*self._answers(self.trained, inputs, at, targets))
        loss.backward()
        self.low.give_gradients()
        if config.clip_norm:
            nn.utils.clip_grad_norm_(self.parameters, config.clip_norm)
        if config.clip_value:
            nn.utils.clip_grad_value_(self.parameters, config.clip_value)
        self.optimizer.step()
        self.low.follow()
        self.loss_sum += loss.detach()
        self.done += 1
        self.cursors[number] += 1

    def _answers(
        self, model: Callable[..., Tensor], inputs: Tensor, at: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Outputs of the model and targets, a row for each answer."""
        is_low = self.precision != torch.float32
        # the cache of casts would outlive a captured step
        with torch.autocast(self.device.type, self.precision, enabled=is_low, cache_enabled=False):
            outputs = model(inputs) if at is None else model(inputs, at=at)
        return flatten_answers(outputs, targets)

    def _capture(self, steppers: list[Callable[[], object]]) -> list[Callable[[], object]]:
        """The steps as CUDA graphs; weights, statistics, moments and counters stay as they are."""
        for parameter in self.parameters:
            # as the optimizer's first step makes them: what is there can be restored
            if not self.optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.zeros((), device=self.device), **moments}
        moments_of_all = [value for state in self.optimizer.state.values() for value in state.values()]
        changed = [
            *(p.detach() for p in (*self.parameters, *self.low.copies.values())),
            *(*moments_of_all, *self.buffers, self.done, *self.cursors, self.loss_sum),
        ]
        self.model.train()
        try:
            return [captured(stepper, restore=changed, device=self.device) for stepper in steppers]
        finally:
            # gradients of a captured step lie in the memory of its graph
            self.optimizer.zero_grad(set_to_none=True)
            self.low.clear_gradients()

    @torch.no_grad()
    def evaluate(self, buckets: list[Bucket]) -> dict[str, Any]:
        """The figure of each group (None where it has no answer), and the mean over groups."""
        self.model.eval()
        sums: Tensor | None = None
        for each in buckets:
            # the logits of a batch of many questions over a large vocabulary are gigabytes
            at_once = max(1, min(self.eval_batch, MOST_ANSWERS // (each.targets.numel() // len(each))))
            for rows in torch.arange(len(each), device=self.device).split(at_once):
                inputs, at, targets, group = each.batch(rows)
                terms = self.figure.terms(*self._answers(self.model, inputs, at, targets))
                if sums is None:
                    sums = terms.new_zeros(self.groups, terms.shape[1])
                sums.index_add_(0, group.repeat_interleave(len(terms) // len(group), output_size=len(terms)), terms)
        assert sums is not None
        found = [self.figure.value(of_group) if of_group[0] else None for of_group in sums.tolist()]
        known = [value for value in found if value is not None]
        return {"all": sum(known) / len(known), "groups": found}

    def test(self, buckets: list[Bucket]) -> dict[str, Any]:
        """Evaluate the weights that were best on dev."""
        self._copy(self.best, [*self.parameters, *self.buffers])
        return self.evaluate(buckets)

    @staticmethod
    @torch.no_grad()
    def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
        for old, new in zip(target, source, strict=True):
            old.copy_(new)

    def close(self) -> None:
        """Give the memory of the captured steps back."""
        self.graphs = []
        if self.on_gpu:
            torch.cuda.empty_cache()

    # ---- save and resume

    def save(self, path: Path) -> None:
        """Weights, statistics, moments and counters; the file is the old one or the new one, whatever happens."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        for number, (tensor, best) in enumerate(zip((*self.parameters, *self.buffers), self.best, strict=True)):
            tensors |= {f"{number}.weight": tensor.detach(), f"{number}.best": best}
        for number, parameter in enumerate(self.parameters):
            tensors |= {f"{number}.{name}": value for name, value in self.optimizer.state[parameter].items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"progress": json.dumps(asdict(self.progress))}
        with clear_disk_errors(path):
            # a copy: parameters may share memory, which the format does not write
            write_atomically(path, save({name: tensor.cpu().clone() for name, tensor in tensors.items()}, metadata=facts))

    def resume(self, path: Path) -> None:
        """Resume where `save` was called; the model must have been built in the same way."""
        from safetensors import safe_open

        with safe_open(path, "pt", device=str(self.device)) as file:
            facts = file.metadata()
            names = set(file.keys())
            with torch.no_grad():
                for number, (tensor, best) in enumerate(zip((*self.parameters, *self.buffers), self.best, strict=True)):
                    tensor.copy_(file.get_tensor(f"{number}.weight"))
                    best.copy_(file.get_tensor(f"{number}.best"))
                for number, parameter in enumerate(self.parameters):
                    kept = [name for name in ("step", "exp_avg", "exp_avg_sq") if f"{number}.{name}" in names]
                    self.optimizer.state[parameter] = {name: file.get_tensor(f"{number}.{name}") for name in kept}
        self.progress = TrainingProgress(**json.loads(facts["progress"]))
