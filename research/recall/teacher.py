"""A softmax decoder that learns to answer questions about long texts in minutes, from short texts to long ones."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.runner import Say
from nalaformer.atomic_files import atomic_folder, write_atomically
from nalaformer.child_processes import worker_pool
from nalaformer.data import seed_everything
from nalaformer.tasks.language import pretrained_model
from nalaformer.training import TrainingConfig

from ..fast_training.captured_training import CapturedTraining
from ..fast_training.data_on_device import load_to_device
from ..sequences import RecallLanguage
from .start import start_for_recall_

# a needle, key-value pairs, chains of variables, repeated phrases
FAMILIES = ("single", "multi_key", "variables", "induction")
# softmax attention for which transformers makes no mask: looking whether one is needed would ask the device
UNMASKED = "nala_unmasked_sdpa"
DEV_TEXTS = 128
# tokens of a lesson; after that its texts repeat
MOST_TOKENS = 2**24
# steps between two looks at the accuracy
BLOCK = 50


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Texts that are practised until they are mastered."""

    lengths: tuple[int, ...]
    """Lengths of the texts; each batch has texts of one length."""
    facts: int
    """Hidden in a text at most, all asked for; at least half as many."""
    steps: int = 1500
    """At most."""
    tokens: int = 65_536
    """Tokens of a batch of the longest texts."""


LESSONS = (
    Lesson(lengths=(128,), facts=16, steps=4000),
    Lesson(lengths=(256,), facts=32),
    Lesson(lengths=(512,), facts=48),
    Lesson(lengths=(1024,), facts=64),
    Lesson(lengths=(2048,), facts=64, tokens=131_072, steps=600),
    Lesson(lengths=(2048, 4096, 8192), facts=64, tokens=131_072, steps=800),
)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A small decoder of Llama's architecture, its language and its course.

    Cost of the defaults, by count: 2.6M parameters in layers of width 256, 16 MFLOP a token and at 8,192 tokens 60 more for
    attention; 100M to 300M tokens.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    key_heads: int = 4
    rotary_base: float = 1e5
    words: int = 64
    """Different words of the filler."""
    names: int = 128
    values: int = 64
    hops: int = 2
    """Longest chain of variables."""
    families: tuple[str, ...] = FAMILIES
    """Families of facts and questions, from data.sequences.FAMILIES."""
    lessons: tuple[Lesson, ...] = LESSONS
    """One after the other: from the start at full length nothing would be learned."""
    learning_rate: float = 1e-3
    mastered: float = 0.97
    """Accuracy in the worst group at which the next lesson begins; the last is practised to its end."""
    minutes: float = 4.0
    """After which it ends in any case; each lesson may take its part of what is left."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lessons:
            raise ValueError("lessons must hold at least one, got none")
        for lesson in self.lessons:
            # facts that find no room should say so now and not after minutes
            self.data(min(lesson.lengths), facts=lesson.facts, split="train", samples=1)

    def data(self, length: int, *, facts: int, split: str, samples: int, questions: int = 0) -> RecallLanguage:
        """Texts of one length; questions: 0 asks for every fact, so that each text teaches much."""
        return RecallLanguage(
            split=split, samples=samples, seed=self.seed, length=length, families=self.families, needles=facts,
            fewest_needles=max(1, facts // 2), hops=self.hops, questions=questions or facts, words=self.words,
            names=self.names, values=self.values, predict="answers",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Course:
    """Progress of the teacher."""

    model: Any
    lessons: int = 0
    """That are behind it."""
    tokens: int = 0
    seconds: float = 0.0


def build_teacher(config: TeacherConfig) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    longest = max(max(lesson.lengths) for lesson in config.lessons)
    language = config.data(longest, facts=1, split="train", samples=1)
    seed_everything(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=language.facts.vocabulary,
            hidden_size=config.width,
            intermediate_size=2 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_heads,
            max_position_embeddings=4 * longest,
            rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    start_for_recall_(model)
    return model


def train_teacher(config: TeacherConfig, *, device: str, say: Say, folder: str | Path | None = None) -> Course:
    """Train the teacher and return it; with a folder, save it after each lesson and resume after the last one there."""
    course = load_teacher(config, folder) if folder is not None else None
    if course is None:
        course = Course(model=build_teacher(config))
    elif course.lessons:
        say(f"teacher: {course.lessons} of {len(config.lessons)} lessons were taken before")
    course.model.to(device)
    begin = time.monotonic()
    end = begin + 60 * config.minutes
    with generators(device) as pool:
        for number in range(course.lessons, len(config.lessons)):
            now, left = time.monotonic(), len(config.lessons) - number
            if now >= end:
                say(f"teacher: the time is over after {number} of {len(config.lessons)} lessons")
                break
            # the last lesson takes all that is left, the others a fair part of it
            until = end if left == 1 else now + 1.6 * (end - now) / left
            tokens = take_lesson(course.model, config, number, device=device, until=until, pool=pool, say=say)
            course = Course(
                model=course.model,
                lessons=number + 1,
                tokens=course.tokens + tokens,
                seconds=course.seconds + time.monotonic() - now,
            )
            if folder is not None:
                save_teacher(course, config, folder)
    course.model.eval()
    return course


def take_lesson(
    model: Any, config: TeacherConfig, number: int, *, device: str, until: float, pool: Executor | None, say: Say
) -> int:
    """Practise until the worst group is mastered, the steps are done or the clock says so; the tokens that it took."""
    lesson, is_last = config.lessons[number], number == len(config.lessons) - 1
    rows = max(1, lesson.tokens // max(lesson.lengths))
    # as many of each length
    texts = max(rows, min(MOST_TOKENS // sum(lesson.lengths), rows * lesson.steps // len(lesson.lengths)))

    def buckets(split: str, samples: int) -> list[Any]:
        data = (config.data(length, facts=lesson.facts, split=split, samples=samples) for length in lesson.lengths)
        return [bucket for each in data for bucket in load_to_device(each, device, pool=pool)]

    start = time.monotonic()
    training_config = TrainingConfig(
        steps=lesson.steps,
        batch_size=rows,
        learning_rate=config.learning_rate,
        # the others end at any moment, so their rate does not fall
        min_learning_rate=config.learning_rate / 20 if is_last else config.learning_rate,
        warmup=min(BLOCK, lesson.steps // 10),
        weight_decay=0.01,
        beta2=0.98,
        clip_norm=1.0,
        precision="bfloat16" if device == "cuda" else "float32",
        eval_every=BLOCK,
        device=device,
    )
    groups = config.data(lesson.lengths[0], facts=lesson.facts, split="train", samples=1).groups
    training = CapturedTraining(
        Answering(model), training_config, train=buckets("train", texts), dev=buckets("val", min(DEV_TEXTS, texts)),
        groups=len(groups), steps=lesson.steps, seed=config.seed + number,
    )  # fmt: skip
    made = time.monotonic() - start
    where = f"teacher, lesson {number + 1}, {' and '.join(map(str, lesson.lengths))} tokens"
    say(f"{where}: {texts} texts of each made in {made:.1f} s")
    with disable_masks(model):
        is_over = False
        while not is_over:
            is_over = training.run(until=0.0) or time.monotonic() >= until
            shares = [0.0 if share is None else share for share in training.dev_shares]
            figures = ", ".join(f"{group} {share:.3f}" for group, share in zip(groups, shares, strict=True))
            say(f"{where}: step {training.progress.step}, {time.monotonic() - start:.0f} s ({training.how}): {figures}")
            if training.progress.is_diverged:
                raise ValueError(f"the teacher diverged at a learning rate of {config.learning_rate}; choose a lower one")
            is_over = is_over or (min(shares) >= config.mastered and not is_last)
    training.close()
    taken = [training.plan.before(training.progress.step), [bucket.inputs.shape[1] for bucket in training.train]]
    return sum(steps * rows * length for steps, length in zip(*taken, strict=True))


class Answering(nn.Module):
    """A causal language model that says the next token where it is asked."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, at: Tensor | None = None) -> Tensor:
        """tokens: [B, N]; at: [B, A] -> logits [B, A, vocabulary], or of every position."""
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        if at is not None:
            hidden = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        return self.model.lm_head(hidden)


@contextmanager
def disable_masks(model: Any) -> Iterator[None]:
    """Inside the block a forward pass never waits for the device, so a CUDA graph can capture it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    before = model.config._attn_implementation
    model.set_attn_implementation(UNMASKED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def generators(device: str) -> Iterator[Executor | None]:
    """Processes that make texts while a GPU waits for them; none where the texts are few."""
    workers = min(12, (os.cpu_count() or 1) - 2)
    if device != "cuda" or workers < 2:
        yield None
        return
    # a process with threads and a GPU must not be forked
    with worker_pool(workers) as pool:
        yield pool


# ---- a teacher on disk


def save_teacher(course: Course, config: TeacherConfig, folder: str | Path) -> None:
    """The model in a folder of its own for every number of lessons; course.json names the newest that is whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"after_{course.lessons}_lessons"
    if not (folder / name).exists():
        with atomic_folder(folder / name) as unfinished:
            course.model.save_pretrained(unfinished)
    facts = {"model": name, "lessons": course.lessons, "tokens": course.tokens, "seconds": course.seconds}
    write_atomically(folder / "course.json", json.dumps({**facts, "config": teacher_settings(config)}, indent=1).encode())
    for older in folder.glob("after_*_lessons"):
        if older.name != name:
            shutil.rmtree(older)


def load_teacher(config: TeacherConfig, folder: str | Path) -> Course | None:
    """The newest teacher of the folder, if it has one."""
    path = Path(folder) / "course.json"
    if not path.exists():
        return None
    facts = json.loads(path.read_text())
    if facts["config"] != teacher_settings(config):
        raise ValueError(f"the teacher in {folder} was trained with other settings ({facts['config']}); choose another folder")
    model: Any = pretrained_model(path.parent / facts["model"], vocab_size=1, dtype=torch.float32)
    return Course(model=model, lessons=facts["lessons"], tokens=facts["tokens"], seconds=facts["seconds"])


def teacher_settings(config: TeacherConfig) -> dict[str, Any]:
    """Everything that the weights depend on, as JSON has it."""
    settings = {name: value for name, value in asdict(config).items() if name != "minutes"}
    return json.loads(json.dumps(settings))
