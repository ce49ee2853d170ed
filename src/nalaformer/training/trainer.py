"""The loop. It knows models and tasks only by what it asks of them."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..data import Batch, batches_from, map_tensors, seed_everything, steps_per_epoch
from ..folder_lock import only_writer
from ..registry import unknown_name
from ..stopping import stop_requests
from ..tasks.base import Loss, Task
from . import optimizer_state
from .checkpoint import Checkpoint, Checkpoints, reading_run
from .config import TrainingConfig
from .display import Display, figures_line
from .evaluation import evaluate
from .log import RunLog
from .plan import notes_of, refuse_other_run, refuse_small_disk
from .precision import precision_on
from .ranks import started
from .schedule import make_schedule

if TYPE_CHECKING:
    from rich.console import Console


class TrainingStopped(RuntimeError):
    """The run cannot go on; the message says why and what is left."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    step: int
    total_steps: int
    metrics: dict[str, float]
    """The figures of the last evaluation; empty if there was none."""
    skipped_steps: int
    """Steps whose loss or gradient was not finite."""
    best_step: int | None = None
    """The evaluated step whose first figure was the highest: its weights are those that other commands use."""
    best_value: float = -math.inf
    """That figure."""

    @property
    def is_finished(self) -> bool:
        return self.step == self.total_steps


@dataclass
class TrainerProgress:
    """What changes from step to step and is no tensor."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best_step: int | None = None
    best_value: float = -math.inf
    metrics: dict[str, float] | None = None


class Trainer:
    """Trains the model on the task; the folder keeps log and checkpoints, and a run in the same folder goes on where it was.

    settings: a description of everything that the caller chose, plain values; a folder with other settings is refused.
    made_from: what tells the model and the data from others with the same settings; a folder with others is refused.
    notes: lines about the run that its reader should know; said and logged when it begins.
    """

    def __init__(
        self,
        config: TrainingConfig,
        task: Task,
        model: nn.Module,
        folder: str | Path,
        *,
        settings: dict[str, Any] | None = None,
        made_from: dict[str, Any] | None = None,
        notes: Sequence[str] = (),
        title: str = "training",
        console: "Console | None" = None,
    ) -> None:
        check_optimizer(config.optimizer)
        config = config.fitted_to(len(task.train_data))
        self.config, self.task, self.model, self.notes = config, task, model, tuple(notes)
        self.folder, self.title, self.console = Path(folder), title, console
        self.settings = (settings or {}) | {"training": asdict(config)}
        # the order of an epoch follows from the number of samples
        self.made_from = {"samples": len(task.train_data)} | (made_from or {})
        self.checkpoints = Checkpoints(self.folder / "checkpoints")
        self.rejected_path = self.folder / "rejected.txt"
        self.per_epoch = steps_per_epoch(task.train_data, config.batch_size)
        self.total_steps = config.total_steps(self.per_epoch)
        self.progress = TrainerProgress()
        self.is_asked_to_stop = False

    def fit(self) -> Outcome:
        """Train to the end, or until SIGTERM or Ctrl-C, which save first; Ctrl-C is KeyboardInterrupt then."""
        with (
            stop_requests(self._ask_to_stop),
            started(self.config.device) as ranks,
            # one process writes for all
            only_writer(self.folder) if ranks.is_first else nullcontext(),
        ):
            self.ranks = ranks
            self._prepare()
            display = Display(
                self.console if ranks.is_first else None, title=self.title, done=self.progress.step, total=self.total_steps
            )
            log = None
            try:
                if ranks.is_first:
                    log = RunLog(self.folder, after_step=self.progress.step, tensorboard=self.config.tensorboard)
                if self.progress.step and self.progress.step < self.total_steps:
                    display.say(f"{self.title}: going on after step {self.progress.step} of {self.total_steps}")
                if self.progress.step == 0:
                    for note in notes_of(self, self.ranks.device):
                        display.say(f"{self.title}: {note}")
                        if log is not None:
                            log.write("note", 0, {"text": note})
                self._run(log, display)
            finally:
                display.close()
                if log is not None:
                    log.close()
            ranks.wait()
        progress = self.progress
        return Outcome(
            step=progress.step,
            total_steps=self.total_steps,
            metrics=progress.metrics or {},
            skipped_steps=progress.skipped,
            best_step=progress.best_step,
            best_value=progress.best_value,
        )

    @property
    def evaluated_model(self) -> nn.Module:
        """The moving average where there is one."""
        return cast(nn.Module, self.ema.module) if self.ema is not None else self.model

    def _prepare(self) -> None:
        """Optimiser, schedule and average, then what an earlier run has left."""
        from timm.optim import create_optimizer_v2

        from .moving_average import MovingAverage

        config = self.config
        self.precision = precision_on(self.ranks.device, config.precision)
        self.model.to(self.ranks.device)
        if config.checkpoint_activations:
            checkpoint_activations(self.model)
        options: Any = {"betas": (0.9, config.beta2), "eps": config.epsilon} if "adam" in config.optimizer.lower() else {}
        self.optimizer = create_optimizer_v2(
            self.model, opt=config.optimizer, lr=config.learning_rate, weight_decay=config.weight_decay, **options
        )
        self.schedule = make_schedule(config, self.optimizer, self.per_epoch)
        self.scaler = torch.amp.GradScaler(self.ranks.device.type, enabled=self.precision == torch.float16)
        self.ema = MovingAverage(self.model, decay=config.ema) if config.ema else None
        self._resume()
        # the state above is that of the plain model; what runs may be wrapped
        forward = torch.compile(self.model) if config.compile else self.model
        self.forward = cast(nn.Module, forward)
        if self.ranks.count > 1:
            devices = [self.ranks.device] if self.ranks.device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.forward, device_ids=devices)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rejected = self.read_rejected()

    def _run(self, log: RunLog | None, display: Display) -> None:
        config, progress = self.config, self.progress
        if progress.step >= self.total_steps:
            return
        batches = iter(self._batches())
        stop = False
        self.last_saved = time.monotonic()
        while progress.step < self.total_steps and not stop:
            figures, stop = self._step(batches, display)
            progress.step += 1
            if log is not None:
                log.write("step", progress.step, figures)
            display.step(progress.step, figures["loss"], config.batch_size)
            self._check_health(display)
            is_last = progress.step == self.total_steps
            is_better = False
            if is_last or self._is_time_to_evaluate():
                is_better = self._evaluate(log, display)
            due = (config.save_every and progress.step % config.save_every == 0) or self._is_time_to_save()
            if due or is_last or is_better or stop:
                self._save()
        if stop and progress.step < self.total_steps:
            display.say(f"{self.title}: stopped and saved at step {progress.step}; the same command goes on from there")

    def _ask_to_stop(self) -> None:
        self.is_asked_to_stop = True

    def _is_time_to_evaluate(self) -> bool:
        by_epochs = max(1, round(self.config.eval_epochs * self.per_epoch)) if self.config.eval_epochs else 0
        return any(every and self.progress.step % every == 0 for every in (self.config.eval_every, by_epochs))

    def _is_time_to_save(self) -> bool:
        """Only the process that saves looks at the clock, so the others need not agree."""
        return 0 < 60 * self.config.save_minutes <= time.monotonic() - self.last_saved

    def _batches(self) -> Any:
        config = self.config
        return batches_from(
            self.progress.step,
            self.task.train_data,
            seed=config.seed,
            batch_size=config.batch_size,
            last_step=self.total_steps,
            rank=self.ranks.rank,
            ranks=self.ranks.count,
            accumulate=config.accumulate,
            repeats=config.repeats,
            workers=config.workers,
            pin_memory=self.ranks.device.type == "cuda",
        )

    def _step(self, batches: Iterator[Batch], display: Display) -> tuple[dict[str, Any], bool]:
        """One optimiser step; its figures for the log, and whether any rank was asked to stop."""
        config, progress = self.config, self.progress
        # BatchNorm takes its statistics in the forward pass, before it is known whether the batch is any good
        statistics = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self.schedule.step_update(progress.step)
        self.model.train()
        weighted: list[Tensor] = []
        weight = 0.0
        names: tuple[str, ...] = ()
        rejected: list[str] = []
        for part in range(config.accumulate):
            batch = next(batches)
            rejected += batch.rejected
            content = map_tensors(batch.content, lambda t: t.to(self.ranks.device, non_blocking=True))
            # dropout, mixup and the like follow from the step and not from what ran before it
            seed_everything(config.seed, progress.step, part, self.ranks.rank)
            with self._not_yet_reduced(part):
                with torch.autocast(self.ranks.device.type, self.precision, enabled=self.precision != torch.float32):
                    loss = self.task.loss(self.forward, content)
                if not isinstance(loss, Loss) or loss.total.numel() != 1:
                    got = type(loss).__name__ if not isinstance(loss, Loss) else f"a total of shape {tuple(loss.total.shape)}"
                    raise TypeError(f"loss of a task must return Loss(total=a scalar, weight=its units), got {got}")
                # divided by the batch size, which changes nothing in the end but keeps half precision in its range
                self.scaler.scale(loss.total * (loss.weight / config.batch_size)).backward()
            names = tuple(loss.parts)
            weighted.append(
                loss.weight * torch.stack([loss.total.detach(), *(p.detach() for p in loss.parts.values())]).double()
            )
            weight += loss.weight
        mine = torch.stack(weighted).sum(0)
        counts = torch.tensor([weight, float(self.is_asked_to_stop), len(rejected)], dtype=torch.float64, device=mine.device)
        sums = self.ranks.sum(torch.cat((mine, counts)))
        total_weight, stops, total_rejected = sums[-3:].tolist()
        # ranks exchange text in steps that need it only
        if total_rejected:
            self._note_rejected(self.ranks.gather(rejected), display)
        means = (sums[:-3] / total_weight).tolist()
        norm = self._finish_gradients(total_weight)
        # a gradient may be too large for float16 until its scale has fallen to one; then it is bad by itself
        may_overflow = self.scaler.is_enabled() and self.scaler.get_scale() > 1
        is_finite = math.isfinite(means[0]) and (math.isfinite(norm) or may_overflow)
        figures = {"loss": means[0], **dict(zip(names, means[1:], strict=True)), "gradient_norm": norm}
        figures["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if is_finite:
            self.scaler.step(self.optimizer)
            progress.skipped_in_a_row = 0
            if self.ema is not None:
                self.ema.update(self.model, step=progress.step)
        else:
            with torch.no_grad():
                for buffer, before in statistics:
                    buffer.copy_(before)
            progress.skipped += 1
            progress.skipped_in_a_row += 1
            figures["skipped"] = True
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return figures, stops > 0

    def _not_yet_reduced(self, part: int) -> Any:
        """Gradients travel between ranks once a step, with its last part."""
        is_last = part == self.config.accumulate - 1
        return nullcontext() if is_last or self.ranks.count == 1 else self.forward.no_sync()  # type: ignore[operator]

    def _finish_gradients(self, total_weight: float) -> float:
        """Turn the sums of weighted gradients into their mean, clip, and return the norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        # DDP has divided by the number of ranks
        torch._foreach_mul_(gradients, self.ranks.count * self.config.batch_size / (total_weight or math.nan))
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm or math.inf).item()
        if self.config.clip_value:
            nn.utils.clip_grad_value_(self.parameters, self.config.clip_value)
        return norm

    def _check_health(self, display: Display) -> None:
        progress = self.progress
        if progress.skipped_in_a_row == 1:
            display.say(f"{self.title}: step {progress.step} skipped, its loss or gradient is not finite")
        if progress.skipped_in_a_row >= self.config.bad_steps:
            saved = self.checkpoints.steps()
            kept = f"the last good checkpoint is {self.checkpoints.path(saved[-1])}" if saved else "no checkpoint was due yet"
            raise TrainingStopped(
                f"loss or gradient was not finite in {progress.skipped_in_a_row} steps in a row, up to step {progress.step}; "
                f"all were skipped, and {kept}; lower learning_rate, set clip_norm, or look at the data"
            )

    def read_rejected(self) -> set[str]:
        """What the run has left out so far."""
        return set(self.rejected_path.read_text().splitlines()) if self.rejected_path.exists() else set()

    def _note_rejected(self, of_ranks: list[list[str]], display: Display) -> None:
        """Count what any rank has left out; all have the same count, so all stop together. The first one writes."""
        for line in chain.from_iterable(of_ranks):
            if line not in self.rejected:
                self.rejected.add(line)
                if self.ranks.is_first:
                    with self.rejected_path.open("a") as file:
                        file.write(line + "\n")
                display.say(f"{self.title}: skipped {line}; mend it or move it away")
            # those that an earlier part of the run has met stop this part too
            if self.config.on_corrupt == "stop":
                raise TrainingStopped(f"{line}; on_corrupt=skip would leave it out and go on")
            if len(self.rejected) > self.config.most_corrupt:
                raise TrainingStopped(
                    f"more than {self.config.most_corrupt} images cannot be read, listed in {self.rejected_path}; mend them "
                    "and remove that list, or raise most_corrupt"
                )

    def _evaluate(self, log: RunLog | None, display: Display) -> bool:
        """Evaluate; whether it is the best so far."""
        progress = self.progress
        self.ranks.share_buffers(self.evaluated_model)
        progress.metrics = evaluate(
            self.evaluated_model,
            self.task.eval_data,
            self.task.metrics(),
            batch_size=max(1, self.config.batch_size // self.ranks.count),
            ranks=self.ranks,
            precision=self.precision,
            workers=self.config.workers,
            rejected=lambda line: self._note_rejected([[line]], display),
        )
        if log is not None:
            log.write("eval", progress.step, progress.metrics)
        display.say(f"{self.title}: step {progress.step}  {figures_line(progress.metrics)}")
        if not progress.metrics:
            raise ValueError("the metrics of a task must give a figure, the one to be highest first, got none from result()")
        value = next(iter(progress.metrics.values()))
        if value > progress.best_value:
            progress.best_value, progress.best_step = value, progress.step
            return True
        return False

    def _save(self) -> None:
        if not self.ranks.is_first:
            return
        moments, values = optimizer_state.pack(self.optimizer)
        tensors: dict[str, dict[str, Tensor]] = {"model": self.model.state_dict(), "optimizer": moments}
        if self.ema is not None:
            tensors["ema"] = self.ema.module.state_dict()
        state = {
            "progress": asdict(self.progress),
            "optimizer": values,
            "scaler": self.scaler.state_dict(),
            "settings": self.settings,
            "made_from": self.made_from,
        }
        self.checkpoints.save(self.progress.step, Checkpoint(tensors=tensors, state=state))
        self.checkpoints.prune(keep=self.config.keep, also=self.progress.best_step)
        self.last_saved = time.monotonic()

    def _resume(self) -> None:
        """Everything as it was after the newest checkpoint that is whole."""
        if self.ranks.is_first:
            self.checkpoints.clean()
            refuse_small_disk(self)
        self.ranks.wait()
        found = self.checkpoints.newest()
        if found is None:
            if self.checkpoints.steps():
                raise ValueError(f"no checkpoint in {self.checkpoints.folder} is whole; move the folder away to start anew")
            return
        step, checkpoint = found
        with reading_run(self.folder):
            refuse_other_run(self, checkpoint)
            self.model.load_state_dict(checkpoint.tensors["model"])
            optimizer_state.unpack(self.optimizer, dict(checkpoint.tensors["optimizer"]), checkpoint.state["optimizer"])
            if self.ema is not None:
                self.ema.module.load_state_dict(checkpoint.tensors["ema"])
            self.scaler.load_state_dict(checkpoint.state["scaler"])
            self.progress = TrainerProgress(**checkpoint.state["progress"])
        # every rank has read by now; newer ones are damaged, and would count among those that are kept
        self.ranks.wait()
        if self.ranks.is_first:
            self.checkpoints.put_aside(after=step)


def checkpoint_activations(model: Any) -> None:
    """Ask the model for it as timm's models are asked, or transformers', whose older releases have another name for it."""
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)
    elif hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable()
    else:
        raise ValueError(
            "checkpoint_activations needs a model with set_grad_checkpointing, as timm's have, or "
            "gradient_checkpointing_enable, as transformers' have; leave it off"
        )


def check_optimizer(name: str) -> None:
    """Refuse a name that timm does not know, and an optimiser that no run can go on with, before anything is read or made."""
    from timm.optim import create_optimizer_v2, list_optimizers

    known = [str(each) for each in list_optimizers()]
    if name.lower().removeprefix("lookahead_") not in known:
        raise unknown_name("optimizer", name, known)
    # those that run on a GPU alone
    if name.lower().startswith(("bnb", "fused")):
        return
    # a step on a small matrix shows what a checkpoint would have to hold
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer = create_optimizer_v2([weight], opt=name, lr=1e-3)
    try:
        optimizer.step()
    except RuntimeError as error:
        raise ValueError(f"an optimizer must need no more than gradients, got {name} ({error}); choose another") from error
    optimizer_state.pack(optimizer)
