"""README.md of a converted model: what somebody else needs to load it, and to know what it is."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data import steps_per_epoch
from ..json_text import parse_json
from ..models.hybrid.attention import converted_attentions
from ..models.hybrid.model import HybridForCausalLM
from ..training import TrainingConfig
from .head_budget import head_bytes
from .report import results_table
from .run import Linearized

LENGTHS = (1024, 4096, 16_384, 32_768, 131_072)
# of the lines between the first two `---` of a card
LICENSE_LINE = re.compile(r"^(license|license_name|license_link):[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)


def model_card(
    result: Linearized, model: HybridForCausalLM, *, teacher: Path | None, data: Sequence[str] = (), has_adapter: bool = False
) -> str:
    """Return the card of a result. model: the one that is saved; teacher: the folder it was read from; data: names of files."""
    host, config = type(model.host).__name__, result.config
    name = host if teacher is None else f"{name_of(teacher)} ({host})"
    known = {} if teacher is None else license_of(teacher)
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["nalaformer"]} | known
    if teacher is not None and "/" in name_of(teacher):
        front["base_model"] = name_of(teacher)
    stages = [
        f"- {title}: {duration_of(stage, result.windows)}"
        for title, stage in (("attention transfer", config.transfer), ("LoRA", config.finetune))
        if stage is not None
    ]
    lines = [
        "---",
        # JSON is YAML, whatever is in a name
        *(f"{key}: {json.dumps(value)}" for key, value in front.items()),
        "---",
        "",
        f"# {name} with hybrid attention",
        "",
        "Converted by `nalaformer linearize`: softmax over the latest tokens and the salient older ones, linear attention over",
        "all others ([STILL](https://arxiv.org/abs/2602.02180)).",
        "",
        "## Load it",
        "",
        "By itself transformers does not know this architecture and asks to be updated. What it needs is",
        "`import nalaformer.models.hybrid`.",
        "",
        "```sh",
        "pip install 'nalaformer[language]'",
        "```",
        "",
        "```python",
        "import nalaformer.models.hybrid",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'folder = "."  # this folder, or its name on the Hub',
        "model = AutoModelForCausalLM.from_pretrained(folder)",
        *adapter_lines(has_adapter),
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        "```",
        "",
        "## Cache of one text",
        "",
        "| tokens | this model, MiB | softmax, MiB | part |",
        "|---:|---:|---:|---:|",
        *(cache_row(model, length) for length in LENGTHS),
        "",
        f"Computed from the sizes of the model, with the cache in {str(model.dtype).removeprefix('torch.')}. "
        "How well the model uses texts of a length is another question.",
        "",
        "## Training",
        "",
        f"Text: {', '.join(f'`{each}`' for each in data) if data else 'given to the library in Python'}, {result.windows:,} "
        f"windows of {result.length:,} tokens. No longer text was seen in training or measured below.",
        "",
        *(stages or ["Nothing was trained."]),
        "",
        "## Results on held-out windows",
        "",
        *results_table(result),
        "",
        "## Teacher and license",
        "",
        f"The weights are those of {name}, changed as said above.",
        license_sentence(known),
        "",
    ]
    return "\n".join(lines)


def adapter_lines(has_adapter: bool) -> list[str]:
    """Return the lines that add a kept adapter."""
    if not has_adapter:
        return []
    return ["from peft import PeftModel", 'model = PeftModel.from_pretrained(model, folder, subfolder="adapter")']


def name_of(folder: Path) -> str:
    """Return the name of a model's folder; of a download of the Hub that of its repository."""
    for part in reversed(folder.resolve().parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return folder.resolve().name


def license_of(folder: Path) -> dict[str, str]:
    """Return what the card in a model's folder says of its license, or else its config."""
    card, config = folder / "README.md", folder / "config.json"
    if card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        front = text.split("\n---", 1)[0] if text.startswith("---") else ""
        if found := {key: value.strip("\"'") for key, value in LICENSE_LINE.findall(front)}:
            return found
    if config.is_file():
        value = dict(parse_json(config.read_bytes())).get("license")
        if isinstance(value, str) and value:
            return {"license": value}
    return {}


def license_sentence(known: dict[str, str]) -> str:
    if not known:
        return "Its folder names no license: ask where it came from before you pass this model on."
    parts = ", ".join(f"{key}: {value}" for key, value in known.items())
    return f"Its own card or config says: {parts}."


def duration_of(stage: TrainingConfig, windows: int) -> str:
    """Return how long a stage was, in steps."""
    steps = stage.total_steps(steps_per_epoch(range(windows), stage.batch_size))
    return f"{steps:,} steps of {stage.batch_size} windows"


def cache_row(model: HybridForCausalLM, length: int) -> str:
    own, softmax = cache_bytes(model, length)
    return f"| {length:,} | {own / 2**20:,.2f} | {softmax / 2**20:,.2f} | {own / softmax:.1%} |"


def cache_bytes(model: HybridForCausalLM, length: int) -> tuple[int, int]:
    """Return the bytes that the model remembers of one text of `length` tokens, and those that softmax attention would."""
    size, own, softmax = model.dtype.itemsize, 0, 0
    parts: list[Any] = [part for attention in converted_attentions(model) for part in attention.hybrid.parts]
    for part in parts:
        sizes = {"group": part.num_heads // part.num_key_heads, "head_dim": part.head_dim, "itemsize": size}
        # its settings are those of its budget already
        own += part.num_key_heads * head_bytes("salient", part.settings, length, **sizes)
        softmax += part.num_key_heads * 2 * length * part.head_dim * size
    return own, softmax
