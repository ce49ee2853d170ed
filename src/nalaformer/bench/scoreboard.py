"""Which attention does a task best: every method with every learning rate and seed, in one protocol, on the same data."""

import csv
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..data import seed_everything
from ..data.sequences import SEQUENCES, write
from ..models.sequence import state_size
from ..tasks import Sequences, SequencesConfig
from ..training import TrainingConfig
from .machine import Machine, describe_machine
from .report import replace_csv
from .resident import resident
from .sprint import Sprint

if TYPE_CHECKING:
    from rich.table import Table

Say = Callable[[str], None]
Row = dict[str, str]

# what makes a run: rows that agree in these are the same run and are not repeated
IDENTITY = ("task", "method", "learning_rate", "seed", "steps", "settings")
COLUMNS = (
    *IDENTITY,
    "dev",
    "test",
    "groups",
    "best_step",
    "outcome",
    "parameters",
    "state_size",
    "seconds",
    "steps_per_second",
    "loop",
    "chance",
    "shortcuts",
    "device",
    "torch",
    "triton",
    "nalaformer",
    "commit",
    "date",
)


class Described(Protocol):
    """What a scoreboard needs of a recipe."""

    @property
    def model(self) -> str: ...

    @property
    def model_options(self) -> dict[str, Any]: ...

    @property
    def task(self) -> Any: ...

    @property
    def training(self) -> TrainingConfig: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """An attention by name, with options."""

    name: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.name} {json.dumps(self.options)}" if self.options else self.name


def parse_methods(text: str) -> list[Method]:
    """Names separated by commas, each with options in braces if it has any: 'softmax, norm_aware {"powers": "mild"}'."""
    found = []
    rest = text.strip()
    while rest:
        end = min((place for place in (rest.find(","), rest.find("{")) if place >= 0), default=len(rest))
        name, rest = rest[:end].strip(), rest[end:]
        options: dict[str, Any] = {}
        if rest.startswith("{"):
            try:
                options, used = json.JSONDecoder().raw_decode(rest)
            except json.JSONDecodeError as error:
                raise ValueError(f"options of {name} must be a JSON object, got {rest}") from error
            rest = rest[used:].lstrip()
        if not name or (rest and not rest.startswith(",")):
            raise ValueError(f"methods are names separated by commas, got {text!r}")
        found.append(Method(name=name, options=options))
        rest = rest[1:].strip()
    if not found:
        raise ValueError("methods must name at least one attention")
    return found


def run_scoreboard(
    title: str,
    recipe: Described,
    *,
    methods: Sequence[Method],
    seeds: Sequence[int],
    learning_rates: Sequence[float],
    out: str | Path,
    steps: int = 0,
    device: str = "cpu",
    seconds: float = float("inf"),
    data_folder: str | Path | None = None,
    workers: int = 1,
    say: Say = lambda line: None,
) -> list[Row]:
    """Train every run that `out` does not hold yet, and return all its rows of this task; the file is whole after each run.

    steps: 0 takes the recipe's. seconds: after that many the run in progress is put aside, and the same call goes on with it.
    data_folder: where generated data is kept for the next call; without it, data is made anew.
    """
    until = time.monotonic() + seconds
    out = Path(out)
    machine = describe_machine()
    rows = read_rows(out)
    # before minutes of work: a file that cannot be written should say so
    save_rows(out, rows)
    with prepared(recipe.task, data_folder, workers, say) as task:
        total = steps or recipe.training.total_steps(max(1, len(task.train_data) // recipe.training.batch_size))
        planned = [(m, lr, seed) for seed in seeds for lr in learning_rates for m in methods]
        facts = task.facts()
        todo = [plan for plan in planned if not has_row(rows, identity(title, recipe, total, *plan))]
        say(f"{title}: {len(todo)} of {len(planned)} runs to do, {total} steps each, on {machine.device_name(device)}")
        loaded = Loaded(task, device, say) if todo else None
        for number, (method, rate, seed) in enumerate(todo, 1):
            assert loaded is not None
            if number > 1 and time.monotonic() > until:
                say(f"the time is up; {len(todo) + 1 - number} runs are left, and the same command goes on")
                break
            key = identity(title, recipe, total, method, rate, seed)
            label = f"[{number}/{len(todo)}] {method.label}, lr {rate:.3g}, seed {seed}"
            row = one_run(key, label, recipe, method, rate, seed, total, facts, loaded, out, until, say)
            if row is None:
                say(f"{label}: put aside, the time is up; the same command goes on")
                break
            rows.append(key | row | origin(machine, device))
            save_rows(out, rows)
    return [row for row in rows if row["task"] == title]


class Loaded:
    """The three splits on the device."""

    def __init__(self, task: Sequences, device: str, say: Say) -> None:
        started = time.monotonic()
        self.task = task
        self.train = resident(task.train_data, device)
        self.dev, self.test = (resident(data, device, only_answers=True) for data in (task.eval_data, task.test_data))
        counts = [sum(len(bucket) for bucket in part) for part in (self.train, self.dev, self.test)]
        say(f"data: {counts[0]} train, {counts[1]} dev, {counts[2]} test sequences in {time.monotonic() - started:.0f} s")


def one_run(
    key: Row,
    label: str,
    recipe: Described,
    method: Method,
    rate: float,
    seed: int,
    steps: int,
    facts: dict[str, Any],
    loaded: Loaded,
    out: Path,
    until: float,
    say: Say,
) -> Row | None:
    """The figures of one run, or None if the time was up before its end."""
    data = loaded.task.eval_data
    options = dict(recipe.model_options) | {"attention": method.name}
    if method.options:
        options["attention_options"] = recipe.model_options.get("attention_options", {}) | method.options
    seed_everything(seed)
    model = Sequences.create_model(recipe.model, options, facts)
    # warm-up and the like keep their share of the run
    config = rescaled(recipe.training, steps, len(loaded.task.train_data), rate)
    sprint = Sprint(model, config, train=loaded.train, dev=loaded.dev, groups=len(data.groups), steps=steps, seed=seed)
    aside = out.with_name(f".{out.stem}_aside") / f"{abs_hash(key)}.safetensors"
    if aside.exists():
        sprint.resume(aside)
    if not sprint.run(until=until, say=lambda line: say(f"{label}: {line}")):
        sprint.save(aside)
        sprint.close()
        return None
    course = sprint.course
    tested = sprint.test(loaded.test)
    sprint.close()
    by_group = {name: round(value, 5) for name, value in zip(data.groups, tested["groups"], strict=True) if value is not None}
    aside.unlink(missing_ok=True)
    say(f"{label}: dev {course.best_dev:.4f} at step {course.best_step}, test {tested['accuracy']:.4f}, {course.seconds:.0f} s")
    return {
        "dev": f"{course.best_dev:.5f}",
        "test": f"{tested['accuracy']:.5f}",
        "groups": json.dumps(by_group) if len(by_group) > 1 else "",
        "best_step": str(course.best_step),
        "outcome": "diverged" if course.is_diverged else "finished",
        "parameters": str(sum(p.numel() for p in model.parameters())),
        "state_size": str(state_size(model)),
        "seconds": f"{course.seconds:.1f}",
        "steps_per_second": f"{course.step / max(course.seconds, 1e-9):.1f}",
        "loop": sprint.how,
        "chance": f"{data.chance:.4g}",
        "shortcuts": json.dumps(data.shortcuts) if data.shortcuts else "",
    }


def rescaled(training: TrainingConfig, steps: int, samples: int, rate: float) -> TrainingConfig:
    """The same training in another number of steps and with another rate: its warm-up and floor keep their proportions."""
    per_epoch = max(1, samples // training.batch_size)
    whole = training.total_steps(per_epoch)
    share = steps / whole
    return replace(
        training,
        epochs=0.0,
        steps=steps,
        cooldown=0.0,
        warmup=training.in_steps(training.warmup, per_epoch) * share,
        learning_rate=rate,
        warmup_learning_rate=training.warmup_learning_rate * rate / (training.learning_rate or 1.0),
        min_learning_rate=training.min_learning_rate * rate / (training.learning_rate or 1.0),
        eval_every=min(training.eval_every or steps, steps),
    )


@contextmanager
def prepared(config: SequencesConfig, folder: str | Path | None, workers: int, say: Say) -> Iterator[Sequences]:
    """The task, its generated data written to a folder first where one is given or several workers make it."""
    if config.data not in SEQUENCES.names() or (folder is None and workers <= 1):
        yield Sequences(config)
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary)
        for split, samples in (("train", config.train_samples), ("val", config.eval_samples), ("test", config.test_samples)):
            options = config.data_options | (config.eval_options if split != "train" else {})
            if (place / split).exists():
                about = json.loads((place / split / "about.json").read_text())
                wanted = {"name": config.data, "seed": config.data_seed, "options": options}
                if {name: about[name] for name in wanted} != wanted or about["samples"] < samples:
                    raise ValueError(
                        f"{place / split} must hold {samples} samples of {wanted}, got {about['samples']} of others"
                    )
                continue
            started = time.monotonic()
            write(config.data, place, split=split, samples=samples, seed=config.data_seed, options=options, workers=workers)
            say(f"made {samples} {split} sequences of {config.data} in {time.monotonic() - started:.0f} s")
        # what was written is what the names mean
        yield Sequences(replace(config, data=str(place)))


def identity(title: str, recipe: Described, steps: int, method: Method, rate: float, seed: int) -> Row:
    task, training = asdict(recipe.task), asdict(recipe.training)
    settings = {
        "model": {"name": recipe.model, **recipe.model_options},
        "data": {name: task[name] for name in ("data", "data_options", "eval_options", "data_seed", "train_samples")},
        "training": {name: training[name] for name in ("batch_size", "weight_decay", "schedule", "precision")},
    }
    return {
        "task": title,
        "method": method.label,
        "learning_rate": f"{rate:.6g}",
        "seed": str(seed),
        "steps": str(steps),
        "settings": json.dumps(settings, sort_keys=True),
    }


def abs_hash(key: Row) -> str:
    from hashlib import sha256

    return sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def origin(machine: Machine, device: str) -> Row:
    return {
        "device": machine.device_name(device),
        "torch": machine.torch,
        "triton": machine.triton,
        "nalaformer": machine.nalaformer,
        "commit": machine.commit,
        "date": datetime.now(UTC).date().isoformat(),
    }


def has_row(rows: Sequence[Row], key: Row) -> bool:
    return any(all(row[name] == key[name] for name in IDENTITY) for row in rows)


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and set(rows[0]) != set(COLUMNS):
        raise ValueError(f"{path} must be a scoreboard's file or a new one, got the columns {', '.join(rows[0])}")
    return rows


def save_rows(path: Path, rows: Sequence[Row]) -> None:
    replace_csv(path, COLUMNS, (dict(row) for row in rows))


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A method at its best learning rate."""

    method: str
    learning_rate: str
    dev: float
    test: float
    spread: float
    """Standard deviation over seeds; 0 for one seed."""
    seeds: int
    parameters: int
    state_size: int
    steps: int

    @property
    def standard_error(self) -> float:
        return self.spread / self.seeds**0.5


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Each method at the rate whose mean over seeds is best on dev, the best on test first. Test chooses nothing."""
    found = []
    for method, steps in dict.fromkeys((row["method"], row["steps"]) for row in rows):
        by_rate: dict[str, list[Row]] = {}
        for row in rows:
            if (row["method"], row["steps"]) == (method, steps):
                by_rate.setdefault(row["learning_rate"], []).append(row)
        rate, best = max(by_rate.items(), key=lambda item: statistics.mean(float(row["dev"]) for row in item[1]))
        tests = [float(row["test"]) for row in best]
        found.append(
            Standing(
                method=method,
                learning_rate=rate,
                dev=statistics.mean(float(row["dev"]) for row in best),
                test=statistics.mean(tests),
                spread=statistics.stdev(tests) if len(tests) > 1 else 0.0,
                seeds=len(tests),
                parameters=int(best[0]["parameters"]),
                state_size=int(best[0]["state_size"]),
                steps=int(steps),
            )
        )
    return sorted(found, key=lambda standing: -standing.test)


def scoreboard_table(title: str, rows: Sequence[Row]) -> "Table":
    """Methods with mean and spread; chance and shortcuts stand in the last lines."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    table.add_column("method")
    for name in ("test", "± sd", "seeds", "dev", "best lr", "steps", "parameters", "state"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in standings(rows):
        table.add_row(
            each.method,
            f"{each.test:.4f}",
            f"{each.spread:.4f}" if each.seeds > 1 else "-",
            str(each.seeds),
            f"{each.dev:.4f}",
            each.learning_rate,
            f"{each.steps:,}",
            f"{each.parameters:,}",
            f"{each.state_size:,}" if each.state_size else "grows",
        )
    if rows:
        table.add_section()
        table.add_row("chance", rows[0]["chance"])
        for name, value in json.loads(rows[0]["shortcuts"] or "{}").items():
            table.add_row(f"shortcut: {name}", f"{value:.4g}")
    return table
