"""Study of converted softmax models: accuracy that remains, by method, and the cost of prompts and decoding."""

import csv
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.decoding import comparison, plan_decoding
from benchmarks.decoding_models import DecodeStudy
from benchmarks.prompts import PromptShape, PromptStudy, plan_prompts
from benchmarks.runner import Say, run_part, say_on_stdout
from nalaformer.atomic_files import write_csv
from nalaformer.folder_lock import only_writer
from nalaformer.machine import describe_machine
from nalaformer.registry import unknown_name

from ..recall import RecallStudy, run_recall, small_recall, toy_recall

PARTS = ("recall", "prompt", "decode")


@dataclass(frozen=True, kw_only=True)
class LinearizationStudy:
    """Everything that the study does."""

    recall: RecallStudy = field(default_factory=RecallStudy)
    prompt: PromptStudy = field(default_factory=PromptStudy)
    decode: DecodeStudy = field(default_factory=DecodeStudy)
    minutes: float = 9.0
    """After which nothing new is begun."""


def small_study() -> LinearizationStudy:
    """The recall of the study at a scale that a CPU core does in a quarter of an hour; decoding as on a GPU."""
    return LinearizationStudy(recall=small_recall(), minutes=20.0)


def toy_study() -> LinearizationStudy:
    """Sizes that run the whole study in a minute on a CPU core; its results mean nothing."""
    return LinearizationStudy(
        recall=toy_recall(),
        prompt=PromptStudy(
            shapes=(PromptShape(heads=2, key_heads=1, head_dim=8),),
            lengths=(64,),
            chunk_size=8,
            max_salient=8,
            checked=40,
            seconds=0.0,
        ),
        decode=DecodeStudy(
            layers=1,
            width=32,
            heads=2,
            key_heads=1,
            chunk_size=8,
            salient_per_chunk=2,
            max_salient=8,
            contexts=(64,),
            batches=(1,),
            steps=9,
            eager_steps=2,
            generated=8,
        ),
    )


SIZES = {"full": LinearizationStudy, "small": small_study, "toy": toy_study}


class Rows:
    """Results in a CSV file that is whole after each of them; what an earlier run left stays until it is measured anew."""

    KEY = ("part", "method", "task", "length", "batch", "timed", "teacher_seed")
    COLUMNS = (
        "part", "method", "task", "length", "batch", "teacher_seed", "accuracy", "teacher_accuracy", "recovery_percent",
        "cache_mib", "peak_mib", "ms", "ms_per_step", "tokens_per_second", "timed", "error", "trained_tokens", "seconds",
        "note",
    )  # fmt: skip

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.facts = describe_machine().columns(device)
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))
        self._write()

    def add(self, **values: Any) -> None:
        row = {name: _to_text(value) for name, value in values.items()} | self.facts
        self.rows = [old for old in self.rows if any(old.get(name, "") != row.get(name, "") for name in self.KEY)] + [row]
        self._write()

    def _write(self) -> None:
        write_csv(self.path, (*self.COLUMNS, *self.facts), self.rows)


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_linearization(
    study: LinearizationStudy,
    *,
    device: str,
    out: str | Path | None = None,
    parts: tuple[str, ...] = PARTS,
    teacher_folder: str | Path | None = None,
    teachers: int = 1,
    say: Say = say_on_stdout,
) -> Path:
    """Run the study; the CSV file is written after each result and is what a stopped run leaves. teachers: of recall."""
    for part in parts:
        if part not in PARTS:
            raise unknown_name("part", part, PARTS)
    path = Path(out or f"benchmarks/results/linearization_{device}.csv")
    # rows of earlier runs stay in the file, so two runs at once would lose each other's
    with only_writer(path, beside=True):
        rows = Rows(path, device)
        deadline = time.monotonic() + 60 * study.minutes
        say(f"{rows.facts['device']}, torch {rows.facts['torch']}, commit {rows.facts['commit']}")
        if "prompt" in parts:
            seconds = study.prompt.seconds
            run_part(plan_prompts(study.prompt, device), seconds=seconds, add=rows.add, say=say, deadline=deadline)
        if "decode" in parts:
            found = run_part(plan_decoding(study.decode, device), seconds=0.0, add=rows.add, say=say, deadline=deadline)
            for line in comparison(found):
                say(line)
        if "recall" in parts:
            run_recall(
                study.recall,
                device=device,
                add=rows.add,
                say=say,
                deadline=deadline,
                teacher_folder=teacher_folder,
                teachers=teachers,
            )
    say(f"results: {path}")
    return path
