"""What is left of a softmax model after its conversion, by method; and what decoding costs before and after.

A small decoder learns to answer questions about long texts (needles, chains of variables, repeated rows), is converted by every
method with the same few tokens, and is asked again. Recovery is its accuracy in percent of the teacher's, on the same texts.
"""

import copy
import csv
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..attention.hybrid import HybridSettings, hybrid_settings
from ..linearize import LinearizeConfig, linearize
from ..training import TrainingConfig
from .decoding import DecodeStudy, run_decoding
from .machine import describe_machine
from .recall_teacher import RecallSamples, TeacherConfig, measure_accuracy, train_teacher

RULES = ("key_norm", "learned", "received", "self_saliency", "oracle", "random", "recent")


@dataclass(frozen=True, kw_only=True)
class LinearizationStudy:
    """Everything that the study does."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    chunk_size: int = 64
    salient_per_chunk: int = 4
    max_salient: int = 512
    methods: tuple[str, ...] = (
        "key_norm",
        "window",
        "linear",
        "self_saliency",
        "learned",
        "received",
        "window_wide",
        "oracle",
        "random",
        "recent",
        "key_norm_released",
        "key_norm_no_linear",
    )
    """In this order, as long as there is time: a selection rule; "window" and "linear" as baselines; "window_wide": a window as
    large as window and salient tokens together; "_released": the published merge; "_no_linear": without the linear branch."""
    convert_length: int = 2048
    transfer_steps: int = 40
    finetune_steps: int = 40
    batch_size: int = 8
    eval_lengths: tuple[int, ...] = (2048, 4096, 8192)
    eval_texts: int = 64
    """Of each kind and length."""
    decode: DecodeStudy = field(default_factory=DecodeStudy)
    minutes: float = 9.0
    """After which nothing new is begun."""

    def settings(self, method: str) -> HybridSettings:
        """The attention of a method."""
        store: dict[str, Any] = {"chunk_size": self.chunk_size}
        if method == "linear":
            return hybrid_settings("linear")
        if method == "window":
            return hybrid_settings("window", **store)
        if method == "window_wide":
            return hybrid_settings("window", chunk_size=self.chunk_size + self.max_salient // 2)
        store |= {"salient_per_chunk": self.salient_per_chunk, "max_salient": self.max_salient}
        rule = method.removesuffix("_released").removesuffix("_no_linear")
        store |= {"merge": "released"} if method.endswith("_released") else {}
        store |= {"linear": False} if method.endswith("_no_linear") else {}
        return hybrid_settings("still", selection=rule, **store)


def toy_study() -> LinearizationStudy:
    """A look at the whole way in a minute of a CPU core; its figures mean nothing."""
    teacher = TeacherConfig(
        layers=2, width=32, heads=2, key_heads=1, lengths=(64,), kinds=("needles",), facts=4, keys=16, values=8, tokens=512,
        questions=4, minutes=0.05,
    )  # fmt: skip
    return LinearizationStudy(
        teacher=teacher,
        chunk_size=8,
        salient_per_chunk=2,
        max_salient=8,
        methods=("key_norm", "linear"),
        convert_length=64,
        transfer_steps=2,
        finetune_steps=2,
        batch_size=2,
        eval_lengths=(64,),
        eval_texts=4,
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
        ),
    )


class Rows:
    """Results in a CSV file that is complete after each of them."""

    COLUMNS = (
        "part", "method", "task", "length", "batch", "accuracy", "teacher_accuracy", "recovery_percent", "cache_mib",
        "peak_mib", "ms_per_step", "tokens_per_second", "timed", "error", "trained_tokens", "seconds", "note",
    )  # fmt: skip

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        machine = describe_machine()
        self.facts = {
            "device": machine.device_name(device),
            "torch": machine.torch,
            "triton": machine.triton,
            "nalaformer": machine.nalaformer,
            "commit": machine.commit,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        self._write()

    def add(self, **values: Any) -> None:
        self.rows.append({name: _plain(value) for name, value in values.items()})
        self._write()

    def _write(self) -> None:
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, (*self.COLUMNS, *self.facts), restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | self.facts for row in self.rows)


def _plain(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def run_linearization(
    study: LinearizationStudy,
    *,
    device: str,
    out: str | Path | None = None,
    parts: tuple[str, ...] = ("recall", "decode"),
    say: Callable[[str], object] | None = None,
) -> Path:
    """Run the study; the CSV file is written after each result and is what a stopped run leaves."""
    say = say or _say_on_stdout
    path = Path(out or f"benchmarks/results/linearization_{device}.csv")
    rows = Rows(path, device)
    deadline = time.monotonic() + 60 * study.minutes
    say(f"{rows.facts['device']}, torch {rows.facts['torch']}, commit {rows.facts['commit']}")
    if "decode" in parts:
        run_decoding(study.decode, device=device, add=rows.add, say=say, deadline=deadline)
    if "recall" in parts:
        _recall(study, device, rows, deadline, say)
    say(f"results: {path}")
    return path


def _recall(study: LinearizationStudy, device: str, rows: Rows, deadline: float, say: Callable[[str], object]) -> None:
    course = train_teacher(study.teacher, device=device, say=say)
    teacher = course.model
    tasks = study.teacher.tasks(study.convert_length)
    expected: dict[tuple[str, int], float] = {}
    for length in study.eval_lengths:
        for kind, task in study.teacher.tasks(length).items():
            expected[kind, length] = measure_accuracy(teacher, task, length, texts=study.eval_texts, device=device)
            say(f"teacher: {kind}, {length} tokens: {expected[kind, length]:.3f}")
            rows.add(
                part="recall", method="teacher", task=kind, length=length, accuracy=expected[kind, length],
                trained_tokens=course.tokens, seconds=course.seconds, note=f"trained to {course.reached} tokens",
            )  # fmt: skip
    steps = max(study.transfer_steps, study.finetune_steps)
    train = RecallSamples(list(tasks.values()), study.convert_length, steps * study.batch_size, seed=1)
    held_out = RecallSamples(list(tasks.values()), study.convert_length, 2 * study.batch_size, seed=2)
    for method in study.methods:
        if time.monotonic() > deadline:
            say(f"{method}: not begun, the time is over")
            continue
        start = time.monotonic()
        try:
            model, note = _converted(study, method, teacher, train, held_out, device)
            seconds = time.monotonic() - start
            for (kind, length), accuracy in expected.items():
                task = study.teacher.tasks(length)[kind]
                found = measure_accuracy(model, task, length, texts=study.eval_texts, device=device)
                recovery = 100 * found / accuracy if accuracy else math.nan
                say(f"{method}: {kind}, {length} tokens: {found:.3f}, {recovery:.0f}% of the teacher")
                trained = (study.transfer_steps + study.finetune_steps) * study.batch_size * study.convert_length
                rows.add(
                    part="recall", method=method, task=kind, length=length, accuracy=found, teacher_accuracy=accuracy,
                    recovery_percent=recovery, trained_tokens=trained, seconds=seconds, note=note,
                )  # fmt: skip
        except torch.OutOfMemoryError:
            say(f"{method}: out of memory")
            rows.add(part="recall", method=method, note="out of memory")
        if device == "cuda":
            torch.cuda.empty_cache()


def _converted(
    study: LinearizationStudy, method: str, teacher: Any, train: RecallSamples, held_out: RecallSamples, device: str
) -> tuple[Any, str]:
    """The teacher's copy after both stages, and what is to be noted of them."""

    def stage(steps: int, rate: float) -> TrainingConfig | None:
        if not steps:
            return None
        return TrainingConfig(
            steps=steps, batch_size=study.batch_size, learning_rate=rate, min_learning_rate=rate / 10, weight_decay=0.0,
            clip_norm=1.0, precision="bfloat16" if device == "cuda" else "float32", device=device,
        )  # fmt: skip

    config = LinearizeConfig(
        attention=study.settings(method),
        transfer=stage(study.transfer_steps, 1e-2),
        finetune=stage(study.finetune_steps, 1e-3),
    )
    with tempfile.TemporaryDirectory() as folder:
        result = linearize(copy.deepcopy(teacher), train, held_out, folder=folder, config=config)
    stages = [f"{name}: KL {v.divergence:.3g}, accuracy {v.accuracy:.3f}" for name, v in result.validations.items()]
    return result.model, "; ".join(stages)


def _say_on_stdout(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
