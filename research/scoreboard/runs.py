"""Runs of a scoreboard: every method with every learning rate and seed, in one protocol, on the same data."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.runner import today
from nalaformer.folder_lock import only_writer
from nalaformer.machine import describe_machine
from nalaformer.recipes import Recipe, build_model
from nalaformer.stopping import stop_requests
from nalaformer.training import TrainingConfig
from nalaformer.training.config import PRECISIONS

from ..fast_training.captured_training import CapturedTraining
from ..models import state_size
from ..sequence_task import Sequences, SequencesConfig
from ..sequences import SEQUENCES, write
from ..sequences.stored import read_about
from .inside import attention_metrics
from .loaded import DataToMake, Loaded, Say, data_file, keep_data
from .methods import Method, parse_methods
from .order import Order
from .processes import finished_in_processes
from .report import Row, read_rows, save_rows

__all__ = ["Board", "Method", "Run", "parse_methods", "run_boards", "run_scoreboard"]

# fields of a training that have a column of their own, or change no figure here
NO_SETTINGS = {
    *("learning_rate", "seed", "steps", "epochs", "cooldown", "device", "workers", "compile", "checkpoint_activations"),
    *("save_every", "save_minutes", "keep", "tensorboard", "bad_steps", "on_corrupt", "most_corrupt"),
}
# share of right answers, or R^2, on dev at which a run ends: nothing is left to be told apart
SOLVED = 0.9995
# captured training fixes these settings whatever a recipe says, so a row must show them
FIXED_SETTINGS = {"optimizer": "adamw", "ema": 0.0, "accumulate": 1, "repeats": 1, "seed": 0, "eval_epochs": 0.0}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: what is trained, with which attention, rate and seed."""

    task: str
    recipe: Recipe
    method: Method
    rate: float
    seed: int
    steps: int

    @property
    def label(self) -> str:
        return f"{self.task}: {self.method.label}, lr {self.rate:.3g}, seed {self.seed}"

    @property
    def key(self) -> Row:
        """Key of the run: rows that agree in it are the same run."""
        training = asdict(self.training)
        # in proportion to the rate, so that all rates of a method have the same settings
        for name in ("warmup_learning_rate", "min_learning_rate"):
            training[name] = f"{training[name] / (self.rate or 1.0):.6g} of the rate"
        settings = {
            "model": {"name": self.recipe.model, **self.recipe.model_options},
            "data": asdict(self.recipe.task),
            "training": {name: value for name, value in training.items() if name not in NO_SETTINGS},
        }
        return {
            "task": self.task,
            "method": self.method.label,
            "learning_rate": f"{self.rate:.6g}",
            "seed": str(self.seed),
            "steps": str(self.steps),
            "settings": json.dumps(settings, sort_keys=True),
        }

    @property
    def file_name(self) -> str:
        """Under which it is put aside."""
        return sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16] + ".safetensors"

    def is_same(self, row: Row) -> bool:
        return all(row[name] == value for name, value in self.key.items())

    def is_in(self, rows: Sequence[Row]) -> bool:
        key = self.key
        return any(all(row[name] == key[name] for name in key) for row in rows)

    @property
    def training(self) -> TrainingConfig:
        """The recipe's in this many steps and with this rate: warm-up and floor keep their proportions."""
        training = self.recipe.training
        per_epoch = max(1, self.recipe.task.train_samples // training.batch_size)
        factor = self.rate / (training.learning_rate or 1.0)
        return replace(
            training,
            epochs=0.0,
            steps=self.steps,
            cooldown=0.0,
            warmup=training.in_steps(training.warmup, per_epoch) * self.steps / training.total_steps(per_epoch),
            learning_rate=self.rate,
            warmup_learning_rate=training.warmup_learning_rate * factor,
            min_learning_rate=training.min_learning_rate * factor,
            eval_every=min(training.eval_every or self.steps, self.steps),
        )


@dataclass(frozen=True, kw_only=True)
class Board:
    """One task with everything that is trained on it."""

    title: str
    recipe: Recipe
    methods: Sequence[Method]
    seeds: Sequence[int]
    learning_rates: Sequence[float]
    steps: int = 0
    """Of each run; 0: those of the recipe."""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps must be positive, or 0 for the recipe's, got {self.steps}")
        for name in ("methods", "seeds", "learning_rates"):
            if not getattr(self, name):
                raise ValueError(f"a scoreboard needs at least one run, got no {name}")
        check_training(self.recipe.training)

    @property
    def total_steps(self) -> int:
        training = self.recipe.training
        return self.steps or training.total_steps(max(1, self.recipe.task.train_samples // training.batch_size))

    def runs(self, seed: int) -> list[Run]:
        """Return the runs of one seed."""
        return [self.run(method, rate, seed) for rate in self.learning_rates for method in self.methods]

    def run(self, method: Method, rate: float, seed: int) -> Run:
        return Run(task=self.title, recipe=self.recipe, method=method, rate=rate, seed=seed, steps=self.total_steps)

    def check_models(self) -> None:
        """Check that every model can be built and described, before others have trained for hours."""
        # facts do not depend on the number of sequences
        facts = Sequences(replace(self.recipe.task, train_samples=1, eval_samples=1)).facts()
        for method in self.methods:
            state_size(make_model(self.recipe, method, facts))


def run_scoreboard(title: str, recipe: Recipe, *, out: str | Path, **given: Any) -> list[Row]:
    """Train every run of one task that `out` does not hold yet, and return all its rows of it.

    given: methods, seeds, learning_rates and steps of a `Board`, and what `run_boards` takes.
    """
    of_board = {name: given.pop(name) for name in ("methods", "seeds", "learning_rates", "steps") if name in given}
    rows = run_boards([Board(title=title, recipe=recipe, **of_board)], out=out, **given)
    return [row for row in rows if row["task"] == title]


def run_boards(
    boards: Sequence[Board],
    *,
    out: str | Path,
    device: str = "cpu",
    seconds: float = float("inf"),
    data_folder: str | Path | None = None,
    workers: int = 1,
    jobs: int = 1,
    every_rate: bool = False,
    say: Say = lambda line: None,
) -> list[Row]:
    """Train every run that `out` does not hold yet, and return all its rows; the file is whole after each run.

    The first seed of all boards comes first, with every rate; the others follow at the rate that was best on its dev data,
    or, if every_rate is set, with every rate too.
    seconds: after that many the runs in progress are put aside, and the same call resumes them; so it is on SIGTERM and
    Ctrl-C, after their next evaluation.
    data_folder: where generated data is kept for the next call, in a folder for each title if there are several boards;
    without it, data is made anew. workers: processes that make it. jobs: runs at a time, each in a process of its own, which
    makes the data itself where that takes seconds.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be the number of runs at a time, at least 1, got {jobs}")
    until = time.monotonic() + seconds
    out = Path(out)
    machine = describe_machine()
    with only_writer(out, beside=True):
        rows = read_rows(out)
        # before minutes of work: a file that cannot be written should say so
        save_rows(out, rows)
        order = Order(boards, rows, every_rate=every_rate)
        where = machine.device_name(device)
        for board in boards:
            of_all = Order([board], [], every_rate=every_rate).total
            say(f"{board.title}: {order.count_runs(board)} of {of_all} runs to do, {board.total_steps} steps each, on {where}")
        if order:
            for board in boards:
                board.check_models()
            with ExitStack() as stack:
                tasks: dict[str, Sequences] = {}
                for board in boards:
                    if order.count_runs(board):
                        place = Path(data_folder, board.title) if data_folder and len(boards) > 1 else data_folder
                        makers = workers
                        if place is None and jobs > 1:
                            if is_quick(board.recipe.task) or (len(boards) > 1 and workers == 1):
                                # by the processes themselves
                                makers = 1
                            else:
                                # made once, for all processes
                                place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                        tasks[board.title] = stack.enter_context(prepare_task(board.recipe.task, place, makers, say))
                finished = finished_runs if jobs == 1 else partial(finished_at_once, jobs=jobs)
                for row in finished(order, tasks, out, device=device, until=until, say=say):
                    rows.append({**row, **machine.columns(device), "date": today()})
                    save_rows(out, rows)
    return rows


def is_quick(config: SequencesConfig) -> bool:
    """Return True if a process makes these data in seconds."""
    return config.data in SEQUENCES.names() and SEQUENCES[config.data].is_quick


def finished_runs(
    order: Order, tasks: dict[str, Sequences], out: Path, *, device: str, until: float, say: Say
) -> Iterator[Row]:
    """Yield the row of each run as it ends, until the time is up or a stop is requested."""
    asked: list[bool] = []
    loaded: dict[str, Loaded] = {}
    with stop_requests(lambda: asked.append(True)):
        for number in range(1, order.total + 1):
            if asked or (number > 1 and time.monotonic() > until):
                why = "stopped" if asked else "the time is up"
                say(f"{why}; {len(order)} runs are left, and the same command goes on")
                break
            run = order.take()
            if run is None:
                break
            label = f"[{number}/{order.total}] {run.label}"
            named: Say = lambda line, label=label: say(f"{label}: {line}")  # type: ignore[misc]  # noqa: E731
            if run.task not in loaded:
                # one task at a time: a million sequences are gigabytes
                loaded = {run.task: Loaded(tasks[run.task], device, say)}
            figures = one_run(run, loaded[run.task], out, until, named, lambda: bool(asked))
            if figures is None:
                say(f"{label}: put aside, {'stopped' if asked else 'the time is up'}; the same command goes on")
                break
            yield run.key | figures


def finished_at_once(
    order: Order, tasks: dict[str, Sequences], out: Path, *, jobs: int, device: str, until: float, say: Say
) -> Iterator[Row]:
    """Yield rows like `finished_runs`, with several runs at a time."""
    configs = {title: task.config for title, task in tasks.items()}
    with tempfile.TemporaryDirectory() as folder:
        kept = None
        if len(tasks) > 1:
            # a process that goes from task to task would make the data of each again
            kept = Path(folder)
            started = time.monotonic()
            making, work_on_data = DataToMake(configs), partial(keep_data, folder=kept)
            made = list(finished_in_processes(making, work_on_data, jobs=jobs, device="cpu", until=float("inf"), say=say))
            if len(made) < making.total:
                # a stop was requested
                return
            say(f"data of {making.total} tasks in {time.monotonic() - started:.0f} s")
        work_on_runs = partial(run_apart, configs=configs, kept=kept, out=out, device=device, until=until)
        for number, run, figures in finished_in_processes(order, work_on_runs, jobs=jobs, device=device, until=until, say=say):
            said = f"dev {figures['dev']}, test {figures['test']}, {figures['seconds']} s"
            say(f"[{number}/{order.total}] {run.label}: {said}")
            yield run.key | figures


kept_by_process: dict[str, Loaded] = {}


def run_apart(
    run: Run,
    stop_file: Path,
    *,
    configs: dict[str, SequencesConfig],
    kept: Path | None,
    out: Path,
    device: str,
    until: float,
) -> Row | None:
    """One run in a process of its own, which keeps the data of its last task."""
    if run.task not in kept_by_process:
        kept_by_process.clear()
        file = None if kept is None else data_file(run.task, kept)
        kept_by_process[run.task] = Loaded(Sequences(configs[run.task]), device, lambda line: None, file)
    return one_run(run, kept_by_process[run.task], out, until, lambda line: None, stop_file.exists)


def check_training(training: TrainingConfig) -> None:
    """Reject settings that runs on the device do not follow."""
    for name, value in FIXED_SETTINGS.items():
        if getattr(training, name) != value:
            raise ValueError(
                f"a scoreboard trains with {name}={value} (seeds are counted from 0), got {name}={getattr(training, name)}; "
                "leave it out, or use `python -m research train`"
            )
    if training.batch_size < 1:
        raise ValueError(f"a scoreboard needs the number of sequences of a step, got batch_size={training.batch_size}; set it")
    if PRECISIONS.get(training.precision) == torch.float16:
        raise ValueError(
            f"a scoreboard scales no loss, which float16 needs, got precision={training.precision}; use bfloat16 or float32"
        )


def make_model(recipe: Recipe, method: Method, facts: dict[str, Any], *, seed: int = 0) -> nn.Module:
    """The recipe's model with the attention of the method, as it starts from that seed."""
    options = dict(recipe.model_options)
    if method.options:
        options["attention_options"] = options.get("attention_options", {}) | method.options
    recipe = replace(recipe, attention=method.name, model_options=options, initial_weights="model")
    return build_model(replace(recipe, training=replace(recipe.training, seed=seed)), facts)


def one_run(
    run: Run, loaded: Loaded, out: Path, until: float, say: Say, is_asked_to_stop: Callable[[], bool] = lambda: False
) -> Row | None:
    """Return the results of one run, or None if the time was up or a stop was requested before its end."""
    data = loaded.task.eval_data
    aside = out.with_name(f".{out.stem}_aside") / run.file_name
    training = make_training(run, loaded)
    if aside.exists():
        try:
            training.resume(aside)
        # a damaged file can raise any error; half of it may be in the model
        except Exception as error:
            say(f"what was put aside in {aside} cannot be read and is made anew ({' '.join(str(error).split())})")
            aside.unlink()
            training = make_training(run, loaded)
    model = training.model
    if not training.run(until=until, say=say, is_asked_to_stop=is_asked_to_stop, aside=aside):
        training.save(aside)
        training.close()
        return None
    progress = training.progress
    tested = training.test(loaded.test)
    training.close()
    # the longest sequences
    inside = attention_metrics(model, loaded.test[-1])
    by_group = {name: round(value, 5) for name, value in zip(data.groups, tested["groups"], strict=True) if value is not None}
    aside.unlink(missing_ok=True)
    say(f"dev {progress.best_dev:.4f} at step {progress.best_step}, test {tested['all']:.4f}, {progress.seconds:.0f} s")
    return {
        "dev": f"{progress.best_dev:.5f}",
        "test": f"{tested['all']:.5f}",
        "groups": json.dumps(by_group) if len(by_group) > 1 else "",
        "best_step": str(progress.best_step),
        "outcome": "diverged" if progress.is_diverged else "solved" if progress.is_solved else "finished",
        "parameters": str(sum(p.numel() for p in model.parameters())),
        "state_size": str(state_size(model)),
        "seconds": f"{progress.seconds:.1f}",
        "steps_per_second": f"{progress.step / max(progress.seconds, 1e-9):.1f}",
        "loop": f"{training.how}, {str(training.precision).removeprefix('torch.')}",
        "chance": f"{data.chance:.4g}",
        "shortcuts": json.dumps(data.shortcuts) if data.shortcuts else "",
        "figure": data.figure,
        "multiply_adds": str(getattr(model, "multiply_adds", "")),
        **inside,
    }


def make_training(run: Run, loaded: Loaded) -> CapturedTraining:
    model = make_model(run.recipe, run.method, loaded.facts, seed=run.seed)
    parts: Any = {"train": loaded.train, "dev": loaded.dev, "groups": len(loaded.task.eval_data.groups)}
    figure = loaded.task.figure
    return CapturedTraining(model, run.training, steps=run.steps, seed=run.seed, solved_at=SOLVED, figure=figure, **parts)


@contextmanager
def prepare_task(config: SequencesConfig, folder: str | Path | None, workers: int, say: Say) -> Iterator[Sequences]:
    """The task, its generated data written to a folder first where one is given or several workers make it."""
    if config.data not in SEQUENCES.names() or (folder is None and workers <= 1):
        yield Sequences(config)
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary)
        for split, samples in (("train", config.train_samples), ("val", config.eval_samples), ("test", config.test_samples)):
            options = config.data_options | (config.eval_options if split != "train" else {})
            if (place / split).exists():
                about = read_about(place / split)
                wanted = {"name": config.data, "seed": config.data_seed, "options": options}
                # a file with fewer samples is used whole
                most = max(about.get("samples", 0), about.get("asked", 0))
                if {name: about.get(name) for name in wanted} != wanted or most < samples:
                    found = f"{about.get('samples')} of { {name: about.get(name) for name in wanted} }"
                    raise ValueError(
                        f"{place / split} must hold {samples} samples of {wanted}, got {found}; name another folder"
                    )
                continue
            started = time.monotonic()
            write(config.data, place, split=split, samples=samples, seed=config.data_seed, options=options, workers=workers)
            say(f"made {samples} {split} sequences of {config.data} in {time.monotonic() - started:.0f} s")
        # the stored data replace the generated ones
        yield Sequences(replace(config, data=str(place)))
