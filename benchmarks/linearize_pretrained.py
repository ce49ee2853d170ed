"""STILL on a pretrained model: convert it in several ways and measure what is left, one CSV row each.

Needs a folder with the model (a Hugging Face folder, or one with a .gguf file), token arrays train.npy, val.npy and
wikitext.npy, and the multiple-choice files *.jsonl.gz. Nothing of it is in the repository.

    python benchmarks/linearize_pretrained.py --model FOLDER --data FOLDER --out OUT.csv --variants teacher,budget,...
"""

import argparse
import csv
import gzip
import json
import math
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nalaformer.attention.hybrid import hybrid_settings
from nalaformer.evaluation.pass_keys import PHRASES, find_pass_keys, make_pass_keys
from nalaformer.linearize import LinearizeConfig, linearize
from nalaformer.linearize.repeats import WithRepeats
from nalaformer.models.hybrid.model import HybridForCausalLM
from nalaformer.training import TrainingConfig

PROJECT = Path(__file__).parents[1]
LENGTHS = (512, 1024, 2048, 4096, 7000)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Windows(torch.utils.data.Dataset):
    """Consecutive windows of a token array."""

    def __init__(self, ids: Tensor, length: int, first: int = 0) -> None:
        self.ids, self.length, self.first = ids, length, first

    def __len__(self) -> int:
        return (len(self.ids) - 1 - self.first) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self.first + index * self.length
        window = self.ids[start : start + self.length + 1]
        return {"input_ids": window[:-1], "targets": window[1:]}


def settings(**changes: Any) -> Any:
    return hybrid_settings("still", **changes)


def stage(steps: int, rate: float, length: int, tokens: int, **changes: Any) -> TrainingConfig | None:
    if not steps:
        return None
    given: dict[str, Any] = {
        "steps": steps,
        "batch_size": max(1, tokens // length),
        "learning_rate": rate,
        "min_learning_rate": rate / 20,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        "precision": "bfloat16",
        "eval_minutes": 1000.0,
        "save_minutes": 1000.0,
    }
    return TrainingConfig(**(given | changes))


BARE = {"linear": False, "gate": "none", "selection": "received", "max_salient": 256}
LINEAR = {"selection": "received", "max_salient": 256}
PLAN: dict[str, dict[str, Any]] = {
    "teacher": {},
    "untrained": {"attention": BARE, "cache": 0.25},
    "untrained_uncapped": {"attention": BARE | {"max_salient": 0}, "cache": 0.25},
    "untrained_key_norm": {"attention": BARE | {"selection": "key_norm"}, "cache": 0.25},
    "budget": {"attention": BARE, "cache": 0.25, "finetune": 300},
    "budget_next_token": {"attention": BARE, "cache": 0.25, "finetune": 300, "loss": "next_token"},
    "budget_linear": {"attention": LINEAR, "cache": 0.25, "transfer": 120, "finetune": 300},
    "budget_learned": {"attention": BARE | {"selection": "learned"}, "cache": 0.25, "transfer": 60, "finetune": 300},
    "published": {
        "attention": {"selection": "self_saliency", "select_per": "query_head", "merge": "released", "linear_mass": None},
        "transfer": 120,
        "finetune": 120,
        "loss": "next_token",
        "length": 1024,
        "repeats": 0,
    },
    "window_linear": {"attention": {"salient_per_chunk": 0}, "transfer": 120, "finetune": 300},
    "linear": {"attention": {"exact": False}, "transfer": 120, "finetune": 300},
}


def load(folder: Path, device: str) -> tuple[Any, Any]:
    """Return the model in bfloat16 and its tokenizer."""
    files = sorted(folder.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer" if (folder / "tokenizer").is_dir() else folder)
    given: dict[str, Any] = {"dtype": torch.bfloat16}
    if files:
        given |= {"gguf_file": files[0].name}
        if hasattr(transformers, "GgufConfig"):
            given |= {"quantization_config": transformers.GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folder, **given)
    model.eval().to(device)
    return model, tokenizer


@torch.no_grad()
def perplexities(model: Any, ids: Tensor, length: int, most: int, batch_tokens: int = 32768) -> tuple[float, list[float]]:
    """Return the perplexity over windows, and by position in each power of two."""
    device = next(model.parameters()).device
    number = min(most, (len(ids) - 1) // length)
    size = max(1, batch_tokens // length)
    losses = []
    for first in range(0, number, size):
        rows = [ids[i * length : (i + 1) * length + 1] for i in range(first, min(number, first + size))]
        tokens = torch.stack(rows).to(device)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        for row, target in zip(logits, tokens[:, 1:], strict=True):
            losses.append(torch.nn.functional.cross_entropy(row.float(), target, reduction="none").cpu())
    table = torch.stack(losses)
    parts, start = [], 0
    for end in [2**power for power in range(8, 14) if 2**power <= length]:
        parts.append(math.exp(table[:, start:end].mean()))
        start = end
    return math.exp(table.mean()), parts


def read_items(path: Path, most: int) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines][:most]


@torch.no_grad()
def choice_accuracy(model: Any, tokenizer: Any, path: Path, most: int) -> float:
    """Return how often the likeliest continuation by its mean log-probability per byte is the right one (acc_norm)."""
    items = read_items(path, most)
    pairs = [(item["query"], f" {choice}".rstrip()) for item in items for choice in item["choices"]]
    sums = continuation_scores(model, tokenizer, pairs)
    right, place = 0, 0
    for item in items:
        own = slice(place, place + len(item["choices"]))
        scores = [total / len(text) for (total, _), (_, text) in zip(sums[own], pairs[own], strict=True)]
        right += max(range(len(scores)), key=scores.__getitem__) == item["gold"]
        place += len(item["choices"])
    return right / len(items)


@torch.no_grad()
def last_word_accuracy(model: Any, tokenizer: Any, path: Path, most: int) -> float:
    """Return how often the last word is the likeliest (LAMBADA)."""
    items = read_items(path, most)
    pairs = [(item["context"].rstrip(), " " + item["continuation"].strip()) for item in items]
    return sum(is_greedy for _, is_greedy in continuation_scores(model, tokenizer, pairs)) / len(items)


@torch.no_grad()
def continuation_scores(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """Return log-probability of each continuation, and whether every token of it is the likeliest."""
    device = next(model.parameters()).device
    texts = [
        (tokenizer(a, add_special_tokens=False)["input_ids"], tokenizer(b, add_special_tokens=False)["input_ids"])
        for a, b in pairs
    ]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]) + len(texts[i][1]))
    found: list[tuple[float, bool]] = [(0.0, False)] * len(texts)
    place = 0
    while place < len(order):
        # texts of a batch have about one length, so that little is padded
        longest = sum(map(len, texts[order[min(place + 255, len(order) - 1)]]))
        some = order[place : place + min(256, max(1, 16384 // longest))]
        place += len(some)
        width = max(sum(map(len, texts[i])) for i in some)
        tokens = torch.zeros(len(some), width, dtype=torch.int64)
        for row, i in enumerate(some):
            ids = [*texts[i][0], *texts[i][1]]
            tokens[row, : len(ids)] = torch.tensor(ids)
        # padding comes after the text: nothing of it is seen
        logits = model(input_ids=tokens.to(device), use_cache=False).logits
        for row, i in enumerate(some):
            begin, end = len(texts[i][0]), sum(map(len, texts[i]))
            part = logits[row, begin - 1 : end - 1].float().log_softmax(-1)
            target = tokens[row, begin:end].to(device)
            total = part.gather(-1, target[:, None]).sum()
            found[i] = (float(total), bool((part.argmax(-1) == target).all()))
    return found


def evaluate(model: Any, tokenizer: Any, data: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all metrics of a model."""
    row: dict[str, Any] = {}
    val, wikitext = (torch.from_numpy(np.load(data / f"{name}.npy").astype(np.int64)) for name in ("val", "wikitext"))
    for length in (1024, 8192):
        if length <= arguments.longest:
            # both lengths read the same text
            total, parts = perplexities(model, val[: arguments.val_tokens], length, 10**6)
            row |= {f"ppl_{length}": total, f"ppl_{length}_by_position": " ".join(f"{part:.2f}" for part in parts)}
    row["ppl_wikitext_1024"] = perplexities(model, wikitext[: arguments.val_tokens], 1024, 10**6)[0]
    for name in ("hellaswag", "piqa", "arc_easy"):
        row[name] = choice_accuracy(model, tokenizer, data / f"{name}.jsonl.gz", arguments.items)
    row["lambada"] = last_word_accuracy(model, tokenizer, data / "lambada_openai.jsonl.gz", arguments.items)
    phrases = [PHRASES[number] for number in arguments.phrases]
    for haystack_name, haystack in (("manuals", val), ("wikitext", wikitext))[: arguments.haystacks]:
        for number, phrase in zip(arguments.phrases, phrases, strict=True):
            for length in LENGTHS:
                if length > arguments.longest:
                    continue
                keys = make_pass_keys(tokenizer, haystack, length=length, count=arguments.needles, phrase=phrase, seed=7)
                hits = find_pass_keys(model, tokenizer, keys, batch_size=max(1, arguments.batch_tokens // length))
                row[f"key_{haystack_name}_{number}_{length}"] = sum(hits) / len(hits)
    return row


def cache_bytes(model: Any, length: int) -> int:
    """Return the bytes that the model's cache holds after a prompt."""
    device = next(model.parameters()).device
    with torch.no_grad():
        out = model(input_ids=torch.randint(0, 1000, (1, length), device=device), use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def convert(name: str, model: Any, data: Path, arguments: argparse.Namespace, seed: int) -> tuple[Any, dict[str, Any]]:
    """Return the converted model and what its conversion took."""
    plan = PLAN[name]
    length = min(plan.get("length", arguments.length), arguments.longest)
    scale = arguments.steps_scale
    train = torch.from_numpy(np.load(data / "train.npy").astype(np.int64))
    samples: Any = Windows(train, length, first=seed * 37)
    if plan.get("repeats", 2):
        samples = WithRepeats(samples, every=plan.get("repeats", 2))
    val = Windows(torch.from_numpy(np.load(data / "val.npy").astype(np.int64)), length)
    config = LinearizeConfig(
        attention=settings(**plan["attention"]),
        transfer=stage(int(plan.get("transfer", 0) * scale), 1e-2, length, arguments.tokens, seed=seed),
        finetune=stage(
            int(plan.get("finetune", 0) * scale), plan.get("rate", 3e-4), length, arguments.tokens, seed=seed, warmup=10
        ),
        finetune_loss=plan.get("loss", "teacher"),
        cache=plan.get("cache"),
        cache_length=8192,
        lora_rank=plan.get("rank", 16),
        lora_alpha=2 * plan.get("rank", 16),
    )
    started = time.monotonic()
    folder = Path(arguments.runs) / f"{name}_{seed}"
    eval_data = torch.utils.data.Subset(val, range(min(8, len(val))))
    result = linearize(model, samples, eval_data, folder=folder, config=config)
    converted: HybridForCausalLM = result.model
    took = {"seconds": round(time.monotonic() - started, 1), "length": length}
    last = list(result.validations.values())[-1]
    took |= {"divergence": round(last.divergence, 4)}
    if (budget := converted.config.budget) is not None:
        took["full_heads"] = " ".join(
            f"{layer}.{head}" for layer, row in enumerate(budget) for head, each in enumerate(row) if each == "full"
        )
    return converted, took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", default="runs/pretrained")
    parser.add_argument("--variants", default="teacher,untrained")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8192, help="of a training step")
    parser.add_argument("--steps-scale", type=float, default=1.0)
    parser.add_argument("--needles", type=int, default=48)
    parser.add_argument("--phrases", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--haystacks", type=int, default=1)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--val-tokens", type=int, default=131073)
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new variant is begun after this many")
    arguments = parser.parse_args()
    begun = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=PROJECT, capture_output=True, text=True).stdout.strip()
    teacher, tokenizer = load(arguments.model, device)
    say(f"loaded after {time.monotonic() - begun:.0f} s")
    for seed in range(arguments.seeds):
        for name in arguments.variants.split(","):
            if time.monotonic() - begun > arguments.seconds:
                say(f"no time for {name} {seed}")
                continue
            if name == "teacher" and seed:
                continue
            row: dict[str, Any] = {"variant": name, "seed": seed, "device": place, "torch": torch.__version__, "commit": commit}
            try:
                model: Any = deepcopy(teacher)
                if name != "teacher":
                    model, took = convert(name, model, arguments.data, arguments, seed)
                    row |= took
                if device == "cuda":
                    torch.cuda.synchronize()
                started = time.monotonic()
                row |= {f"bytes_{length}": cache_bytes(model, length) for length in (1024, arguments.longest)}
                row |= evaluate(model, tokenizer, arguments.data, arguments)
                row["evaluation_seconds"] = round(time.monotonic() - started, 1)
            except Exception as error:
                import traceback

                row["error"] = repr(error)[:300]
                say(traceback.format_exc()[-3000:])
            del model
            say(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}))
            append(arguments.out, row)


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a CSV whose columns grow."""
    rows = list(csv.DictReader(path.open())) if path.is_file() else []
    rows.append(row)
    names = list(dict.fromkeys(name for each in rows for name in each))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
