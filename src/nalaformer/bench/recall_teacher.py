"""A softmax decoder that learns to answer questions about long texts, from short texts to long ones."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from .recall_tasks import IGNORED, KINDS, RecallTask, accuracy


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A small decoder of Llama's architecture, and its course."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    key_heads: int = 4
    lengths: tuple[int, ...] = (48, 96, 192, 384, 768, 1536, 3072, 8192)
    """Of the texts, one after the other; the next begins once the last is mastered."""
    kinds: tuple[str, ...] = KINDS
    facts: int = 64
    """Of the long texts; shorter ones have fewer."""
    keys: int = 256
    values: int = 64
    questions: int = 16
    tokens: int = 65_536
    """Of a step."""
    learning_rate: float = 1e-3
    mastered: float = 0.97
    """Accuracy over recent steps, in the worst kind, at which texts become longer."""
    minutes: float = 3.5
    """After which it ends in any case; each length may take its part of what is left."""
    seed: int = 0

    def tasks(self, length: int, *, dense: bool = False) -> dict[str, RecallTask]:
        """The texts of one length: as many facts as it holds well; dense: as many questions, so that each text teaches much."""
        found = {}
        for kind in self.kinds:
            hops = 2 if kind == "variables" else 1
            facts = max(2, min(self.facts, length // (16 * hops), self.keys // hops))
            questions = min(self.questions, facts)
            if dense:
                questions = max(questions, min(2 * self.questions, (length - 4 * hops * facts) // 3))
            found[kind] = RecallTask(kind=kind, facts=facts, questions=questions, hops=hops, keys=self.keys, values=self.values)
        return found


@dataclass(frozen=True, kw_only=True)
class Course:
    """How the teacher was trained."""

    model: Any
    tokens: int
    seconds: float
    reached: int
    """Length of the longest texts that it has seen."""


def build_teacher(config: TeacherConfig) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    longest = max(config.lengths)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=RecallTask(kind="needles", facts=2, questions=2, keys=config.keys, values=config.values).vocab_size,
            hidden_size=config.width,
            intermediate_size=2 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_heads,
            max_position_embeddings=16 * longest,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def train_teacher(config: TeacherConfig, *, device: str, say: Callable[[str], object]) -> Course:
    """Longer texts as soon as the shorter ones are mastered: from the start at full length it would learn nothing."""
    torch.manual_seed(config.seed)
    random = Generator(device).manual_seed(config.seed)
    model = build_teacher(config).to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=device == "cuda"
    )
    begin, step, tokens, reached = time.monotonic(), 0, 0, 0
    end = begin + 60 * config.minutes
    for place, length in enumerate(config.lengths):
        now = time.monotonic()
        if now >= end:
            break
        # the last length takes all that is left, the others a fair part of it
        until = now + (end - now) / (len(config.lengths) - place) * (1.0 if place == len(config.lengths) - 1 else 1.6)
        recent = dict.fromkeys(config.kinds, 0.0)
        tasks, reached, is_last = config.tasks(length, dense=True), length, place == len(config.lengths) - 1
        while True:
            now = time.monotonic()
            share = (now - begin) / (end - begin)
            if now >= min(until, end) or (min(recent.values()) >= config.mastered and not is_last):
                break
            # half a second of warm-up would be another one on another machine: it is counted in steps
            rate = config.learning_rate * min(1.0, (step + 1) / 200) * min(1.0, max(0.05, (1 - share) / 0.25))
            for group in optimizer.param_groups:
                group["lr"] = rate
            rows = max(1, config.tokens // length // len(tasks))
            batches = [task.batch(rows, length, random) for task in tasks.values()]
            text, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
            loss, logits = answer_loss(model, text, targets, device)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step, tokens = step + 1, tokens + text.numel()
            if step % 10 == 0:
                right = answered(logits.detach(), targets, rows)
                recent = {kind: 0.8 * recent[kind] + 0.2 * part for kind, part in zip(tasks, right, strict=True)}
        figures = ", ".join(f"{kind} {value:.2f}" for kind, value in recent.items())
        say(f"teacher: {length} tokens, step {step}, {time.monotonic() - begin:.0f} s, recent accuracy {figures}")
    return Course(model=model.eval(), tokens=tokens, seconds=time.monotonic() - begin, reached=reached)


def answer_loss(model: Any, text: Tensor, targets: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the answers, and their logits; only answers pass through the vocabulary."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = model.model(input_ids=text, use_cache=False).last_hidden_state
        is_answer = targets != IGNORED
        logits = model.lm_head(hidden[is_answer])
    return F.cross_entropy(logits.float(), targets[is_answer]), logits


def answered(logits: Tensor, targets: Tensor, rows: int) -> list[float]:
    """The part of right answers in each group of rows."""
    right = (logits.argmax(-1) == targets[targets != IGNORED]).float()
    counts = (targets != IGNORED).sum(1).split(rows)
    return [part.mean().item() for part in right.split([int(count.sum()) for count in counts])]


@torch.no_grad()
def measure_accuracy(model: Any, task: RecallTask, length: int, *, texts: int, device: str, tokens: int = 65_536) -> float:
    """Right answers of the model to the same questions at every call."""
    random = Generator(device).manual_seed(10_000 + length)
    rows = max(1, min(texts, tokens // length))
    right = asked = 0
    for start in range(0, texts, rows):
        text, targets = task.batch(min(rows, texts - start), length, random)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=text, use_cache=False).logits
        some_right, some = accuracy(logits, targets)
        right, asked = right + some_right, asked + some
    return right / asked


class RecallSamples:
    """Texts of all kinds as samples for the trainer, made once; kinds take turns."""

    def __init__(self, tasks: Sequence[RecallTask], length: int, samples: int, *, seed: int) -> None:
        random = Generator().manual_seed(seed)
        share = -(-samples // len(tasks))
        batches = [task.batch(share, length, random) for task in tasks]
        texts, targets = (torch.stack(parts, 1).flatten(0, 1) for parts in zip(*batches, strict=True))
        self.texts, self.targets = texts[:samples], targets[:samples]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[index], "targets": self.targets[index]}
