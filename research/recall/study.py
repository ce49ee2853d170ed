"""Measure the recall of converted models in long texts.

A small decoder learns to answer questions about facts in long texts (a needle, key-value pairs, chains of variables, repeated
phrases), is converted by every method with the same few tokens, and is asked again. Recovery is its accuracy in percent of the
teacher's, on the same texts.
"""

import copy
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measurement import failure_note, give_back_memory
from benchmarks.runner import Say
from nalaformer.attention.hybrid import HybridSettings, hybrid_settings
from nalaformer.folder_lock import only_writer
from nalaformer.linearize import LinearizeConfig, linearize
from nalaformer.training import TrainingConfig

from ..sequences import RecallLanguage, as_tensor
from .teacher import Lesson, TeacherConfig, train_teacher


@dataclass(frozen=True, kw_only=True)
class RecallStudy:
    """The teacher, the conversions, and what both are asked."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    facts: int = 64
    """In the texts of conversion and test; at least half as many."""
    chunk_size: int = 64
    salient_per_chunk: int = 4
    max_salient: int = 512
    methods: tuple[str, ...] = (
        "learned",
        "key_norm",
        "self_saliency",
        "window",
        "linear",
        "received",
        "random",
        "window_wide",
        "oracle",
        "recent",
        "key_norm_released",
        "key_norm_no_linear",
    )
    """In this order, as long as there is time: a selection rule; "window" and "linear" as baselines; "window_wide": a window as
    large as window and salient tokens together; "_released": the published merge; "_no_linear": without the linear branch."""
    convert_length: int = 4096
    transfer_steps: int = 40
    finetune_steps: int = 40
    batch_size: int = 16
    """Texts of a step in both stages: 80 steps of 16 texts of 4,096 tokens are 5.2M tokens for each method."""
    transfer_rate: float = 1e-2
    finetune_rate: float = 1e-3
    eval_lengths: tuple[int, ...] = (2048, 4096, 8192)
    eval_texts: int = 64
    """Texts of each family and length, on average."""
    questions: int = 16
    """About each of those."""
    eval_tokens: int = 65_536
    """That are computed at once."""

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

    def texts(self, length: int) -> RecallLanguage:
        """The texts that models are asked about."""
        samples = self.eval_texts * len(self.teacher.families)
        return self.teacher.data(length, facts=self.facts, split="test", samples=samples, questions=self.questions)


def small_recall() -> RecallStudy:
    """Texts of up to 1,024 tokens and chunks of 16."""
    lessons = (
        Lesson(lengths=(96,), facts=12, steps=1500, tokens=2048),
        Lesson(lengths=(192,), facts=24, steps=600, tokens=3072),
        Lesson(lengths=(512,), facts=24, steps=300, tokens=4096),
        Lesson(lengths=(512, 1024), facts=24, steps=150, tokens=8192),
    )
    teacher = TeacherConfig(width=128, words=16, names=64, values=32, lessons=lessons, mastered=0.95, minutes=10.0)
    return RecallStudy(
        teacher=teacher,
        facts=24,
        chunk_size=16,
        salient_per_chunk=2,
        max_salient=128,
        methods=("learned", "key_norm", "self_saliency", "window", "linear", "received", "random", "oracle"),
        convert_length=512,
        transfer_steps=30,
        finetune_steps=30,
        batch_size=8,
        eval_lengths=(512, 1024),
        eval_texts=16,
        questions=8,
        eval_tokens=8192,
    )


def toy_recall() -> RecallStudy:
    """Everything so small that only the way is tried."""
    lessons = (Lesson(lengths=(48,), facts=4, steps=4, tokens=192), Lesson(lengths=(48, 64), facts=4, steps=4, tokens=256))
    teacher = TeacherConfig(layers=2, width=32, heads=2, key_heads=1, words=8, names=16, values=8, lessons=lessons, minutes=0.2)
    return replace(
        small_recall(),
        teacher=teacher,
        facts=4,
        chunk_size=8,
        max_salient=8,
        methods=("key_norm", "linear"),
        convert_length=64,
        transfer_steps=2,
        finetune_steps=2,
        batch_size=2,
        eval_lengths=(64,),
        eval_texts=2,
        questions=4,
    )


def run_recall(
    study: RecallStudy,
    *,
    device: str,
    add: Callable[..., None],
    say: Say,
    deadline: float = math.inf,
    teacher_folder: str | Path | None = None,
    teachers: int = 1,
) -> None:
    """One teacher after the other, each with a seed of its own: train or load it, then convert and ask."""
    if teachers < 1:
        raise ValueError(f"teachers must be at least 1, got {teachers}; each has a seed of its own, from 0 on")
    # check names and packages now and not after minutes
    for method in study.methods:
        study.settings(method)
    if study.methods and study.finetune_steps and find_spec("peft") is None:
        raise ModuleNotFoundError("LoRA needs peft: pip install 'nalaformer[language]'", name="peft")
    for seed in range(teachers):
        if time.monotonic() > deadline:
            say(f"teacher {seed}: not begun, the time is over")
            continue
        run_with_teacher(
            replace(study, teacher=replace(study.teacher, seed=seed)),
            device=device,
            add=partial(add, teacher_seed=seed),
            say=say if teachers == 1 else partial(say_for_teacher, say, seed),
            deadline=deadline,
            teacher_folder=None if teacher_folder is None else Path(teacher_folder) / f"seed_{seed}",
        )


def say_for_teacher(say: Say, seed: int, line: str) -> None:
    say(f"teacher {seed}: {line.removeprefix('teacher: ')}")


def run_with_teacher(
    study: RecallStudy,
    *,
    device: str,
    add: Callable[..., None],
    say: Say,
    deadline: float,
    teacher_folder: Path | None,
) -> None:
    """A row for each method, length and group of questions."""
    with only_writer(teacher_folder) if teacher_folder is not None else nullcontext():
        course = train_teacher(study.teacher, device=device, say=say, folder=teacher_folder)
    expected: dict[int, dict[str, float]] = {}
    for length in study.eval_lengths:
        expected[length] = accuracies(course.model, study.texts(length), device=device, tokens=study.eval_tokens)
        for group, accuracy in expected[length].items():
            say(f"teacher: {group}, {length} tokens: {accuracy:.3f}")
            add(
                part="recall", method="teacher", task=group, length=length, accuracy=accuracy, trained_tokens=course.tokens,
                seconds=course.seconds, note=f"{course.lessons} of {len(study.teacher.lessons)} lessons",
            )  # fmt: skip
    for method in study.methods:
        if time.monotonic() > deadline:
            say(f"{method}: not begun, the time is over")
            continue
        try:
            ask_converted(study, method, course.model, expected, device=device, add=add, say=say)
        except Exception as error:
            # the other methods may well run
            why = failure_note(error)
            say(f"{method}: {why}")
            for length, of_teacher in expected.items():
                for group in of_teacher:
                    add(part="recall", method=method, task=group, length=length, note=why)
        give_back_memory()


def ask_converted(
    study: RecallStudy,
    method: str,
    teacher: Any,
    expected: dict[int, dict[str, float]],
    *,
    device: str,
    add: Callable[..., None],
    say: Say,
) -> None:
    """One method: both stages, then a row for everything that is asked."""
    start = time.monotonic()
    model, note = convert(study, method, teacher, device)
    seconds = time.monotonic() - start
    say(f"{method}: converted in {seconds:.0f} s; {note}")
    trained = (study.transfer_steps + study.finetune_steps) * study.batch_size * study.convert_length
    for length, of_teacher in expected.items():
        found = accuracies(model, study.texts(length), device=device, tokens=study.eval_tokens)
        for group, accuracy in found.items():
            recovery = 100 * accuracy / of_teacher[group] if of_teacher[group] else math.nan
            say(f"{method}: {group}, {length} tokens: {accuracy:.3f}, {recovery:.0f}% of the teacher")
            add(
                part="recall", method=method, task=group, length=length, accuracy=accuracy,
                teacher_accuracy=of_teacher[group], recovery_percent=recovery, trained_tokens=trained, seconds=seconds,
                note=note,
            )  # fmt: skip


def convert(study: RecallStudy, method: str, teacher: Any, device: str) -> tuple[Any, str]:
    """The teacher's copy after both stages, and what is to be noted of them."""

    def stage(steps: int, rate: float) -> TrainingConfig | None:
        if not steps:
            return None
        return TrainingConfig(
            steps=steps, batch_size=study.batch_size, learning_rate=rate, min_learning_rate=rate / 10, weight_decay=0.0,
            clip_norm=1.0, precision="bfloat16" if device == "cuda" else "float32", device=device,
        )  # fmt: skip

    def texts(split: str, samples: int) -> "Texts":
        return Texts(study.teacher.data(study.convert_length, facts=study.facts, split=split, samples=samples))

    config = LinearizeConfig(
        attention=study.settings(method),
        transfer=stage(study.transfer_steps, study.transfer_rate),
        finetune=stage(study.finetune_steps, study.finetune_rate),
    )
    train = texts("train", max(study.transfer_steps, study.finetune_steps, 1) * study.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        result = linearize(copy.deepcopy(teacher), train, texts("val", 2 * study.batch_size), folder=folder, config=config)
    stages = [f"{name}: KL {v.divergence:.3g}, accuracy {v.accuracy:.3f}" for name, v in result.validations.items()]
    return result.model, "; ".join(stages)


@torch.no_grad()
def accuracies(model: Any, data: RecallLanguage, *, device: str, tokens: int) -> dict[str, float]:
    """The part of right answers by group, of the groups that are asked; `tokens` are computed at once."""
    rows = max(1, tokens // data.length)
    sums = np.zeros((len(data.groups), 2))
    for start in range(0, len(data), rows):
        arrays = data.batch(np.arange(start, min(start + rows, len(data))))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=as_tensor(arrays["inputs"]).to(device), use_cache=False).logits
        is_right = logits.argmax(-1).cpu().numpy() == arrays["targets"]
        np.add.at(sums, arrays["group"], np.stack((is_right.sum(1), arrays["answers"].sum(1)), axis=1))
    return {group: right / asked for group, (right, asked) in zip(data.groups, sums, strict=True) if asked}


class Texts:
    """Texts under the names by which conversions know them."""

    def __init__(self, data: RecallLanguage) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        """A batch at once."""
        return [{"input_ids": sample["inputs"], "targets": sample["targets"]} for sample in self.data.__getitems__(indices)]
