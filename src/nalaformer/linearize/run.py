"""The whole way: convert, transfer, fine-tune, validate, save."""

import json
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..atomic_files import clear_disk_errors, write_atomically
from ..data import Samples, seed_everything
from ..folder_lock import only_writer
from ..json_text import parse_json
from ..models.hybrid.attention import converted_attentions
from ..models.hybrid.config import HybridConfig
from ..models.hybrid.model import HybridForCausalLM, restore_attention_
from ..models.hybrid.support import check_config
from ..training import Trainer, TrainingConfig, TrainingStopped
from ..training.display import counted
from ..training.ranks import started
from .batches import SomeSamples
from .compatibility import check_model
from .config import LinearizeConfig
from .finetune import NextToken, with_adapter
from .fingerprint import data_fingerprint, longest, model_fingerprint
from .head_budget import TEXTS, choose_budget, lookup_scores
from .preflight import check_settings, check_windows
from .sharding import shard_frozen_, whole
from .trainable import Trainable, freeze
from .transfer import AttentionTransfer, TransferModel
from .validation import Validation, validate

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel


BUDGET = "budget.json"


@dataclass(frozen=True, kw_only=True)
class Linearized:
    """A converted model and how it came to be."""

    model: Any
    """HybridForCausalLM; under peft's adapter where merge_adapter is off."""
    transfer_errors: dict[str, float]
    """Squared error of each layer's head outputs, as a part of their square; empty without stage 1."""
    validations: dict[str, Validation]
    """After "conversion", "transfer" and "finetune", as far as these were done."""
    config: LinearizeConfig
    windows: int
    """Samples that it learned from."""
    length: int
    """Tokens of the longest of them, as far as they were looked at."""


def linearize(
    model: "PreTrainedModel",
    train_data: Samples,
    eval_data: Samples,
    *,
    folder: str | Path,
    config: LinearizeConfig | None = None,
    console: "Console | None" = None,
) -> Linearized:
    """Convert the model in place and train what is new in it; the same call again goes on where it was.

    train_data, eval_data: samples of token ids, [N] each, or {"input_ids", "targets"}. folder: log and checkpoints of both
    stages; one that was made from another model or other data is refused. The model's own weights change in stage 2 alone, and
    only if its adapter is merged.
    """
    config = config or LinearizeConfig()
    # before any work: everything that can be known now
    check_config(model.config)
    check_settings(config)
    check_windows(config, train_data, eval_data)
    stages = config.stages
    with (
        started(stages[0].device if stages else "auto") as ranks,
        only_writer(folder) if ranks.is_first else nullcontext(),
    ):
        nn.Module.to(model, ranks.device)
        check_model(model)
        made_from = {
            "model": f"{type(model).__name__} {model_fingerprint(model)}",
            "train_data": data_fingerprint(train_data),
            "eval_data": data_fingerprint(eval_data),
        }
        console = console if ranks.is_first else None
        held_out = SomeSamples(eval_data, config.validation_windows or len(eval_data))
        batch_size = max(1, (stages[0].batch_size if stages else 8) // ranks.count)

        def measure(stage: str, model: nn.Module) -> Validation:
            with counted(console, f"{stage}: {len(held_out)} windows beside the teacher", len(held_out)) as advance:
                return validate(model, held_out, batch_size=batch_size, advance=advance)

        budget = find_budget(model, train_data, config, Path(folder), made_from, console)
        # one for all processes, and for those who go on
        budget = ranks.gather(budget)[0]
        if ranks.is_first and budget is not None:
            note_budget(budget, config, Path(folder), made_from)
        # what is new in the model follows from the seed, however the budget came about
        seed_everything(stages[0].seed if stages else 0)
        hybrid = HybridForCausalLM.convert(model, config.attention, budget=budget)
        freeze(hybrid)
        stages_of = Stages(hybrid, train_data, held_out, config, Path(folder), made_from, console)
        validations = {"conversion": measure("conversion", hybrid)}
        errors: dict[str, float] = {}
        if config.transfer is not None:
            errors = stages_of.transfer(config.transfer)
            validations["transfer"] = measure("transfer", hybrid)
        settle(hybrid)
        result: Any = hybrid
        if config.finetune is not None:
            result = stages_of.finetune(config.finetune)
            validations["finetune"] = measure("finetune", result)
        if config.shard and ranks.count > 1:
            result = whole(result, stages_of.empty_copy())
        if config.finetune is not None and config.merge_adapter:
            result = result.merge_and_unload()
        result.eval()
        found = Linearized(
            model=result,
            transfer_errors=errors,
            validations=validations,
            config=config,
            windows=len(train_data),
            length=longest(train_data),
        )
        if ranks.is_first:
            write_figures(found, Path(folder))
    return found


def find_budget(
    model: "PreTrainedModel",
    data: Samples,
    config: LinearizeConfig,
    folder: Path,
    made_from: dict[str, str],
    console: "Console | None",
) -> list[list[str]] | None:
    """Return what each key head keeps; None: all of them what `config.attention` says. The model is left as it came.

    A folder in which the run began holds the answer: another device may see heads that are all but equal in another order.
    """
    if config.cache is None:
        return None
    try:
        noted = dict(parse_json((folder / BUDGET).read_bytes()))
    except (OSError, ValueError, TypeError):
        noted = {}
    budget: list[list[str]] = noted.pop("budget", [])
    if budget and noted == budget_origin(config, made_from):
        return budget
    implementation = model.config._attn_implementation
    trial = HybridForCausalLM.convert(model, config.attention)
    try:
        texts = min(TEXTS, len(data))
        with counted(console, f"budget: which heads look up what is far away, in {texts} texts", texts) as advance:
            scores = lookup_scores(trial, data, advance=advance)
        attention = converted_attentions(trial)[0].hybrid.parts[0]
    finally:
        restore_attention_(model)
        model.set_attn_implementation(implementation)
    group = attention.num_heads // scores.shape[1]
    sizes = {"group": group, "head_dim": attention.head_dim, "itemsize": model.dtype.itemsize}
    return choose_budget(scores, config.cache, config.attention, config.cache_length, **sizes)


def budget_origin(config: LinearizeConfig, made_from: dict[str, str]) -> dict[str, Any]:
    """Return what a budget follows from."""
    return made_from | {"attention": asdict(config.attention), "cache": config.cache, "cache_length": config.cache_length}


def note_budget(budget: list[list[str]], config: LinearizeConfig, folder: Path, made_from: dict[str, str]) -> None:
    write_json(folder / BUDGET, budget_origin(config, made_from) | {"budget": budget})


@dataclass(frozen=True)
class Stages:
    """The two stages of one conversion."""

    model: HybridForCausalLM
    train_data: Samples
    eval_data: Samples
    config: LinearizeConfig
    folder: Path
    made_from: dict[str, str]
    """Fingerprints of the pretrained model and of the data."""
    console: "Console | None"

    def transfer(self, training: TrainingConfig) -> dict[str, float]:
        """Stage 1, all layers or some at a time; the error of each layer."""
        number = len(converted_attentions(self.model))
        size = self.config.layers_at_once or number
        errors: dict[str, float] = {}
        for start in range(0, number, size):
            layers = range(start, min(start + size, number))
            name = "transfer" if size >= number else f"transfer_{layers[0]:02d}_{layers[-1]:02d}"
            learning = TransferModel(self.model, layers)
            if not learning.learned():
                # all heads there keep every token, as their teachers do
                errors |= {f"layer_{layer}": 0.0 for layer in layers}
                continue
            task = AttentionTransfer(self.train_data, self.eval_data, layers)
            metrics = self.fit(name, training, task, learning)
            errors |= {key: value for key, value in metrics.items() if key.startswith("layer_")}
        freeze(self.model)
        return errors

    def finetune(self, training: TrainingConfig) -> Any:
        """Stage 2; the model under its adapter."""
        # the adapter's start follows from the seed, whatever ran before
        seed_everything(training.seed)
        # an adapter belongs to the maps that it was learned with
        maps = nn.ModuleList(attention.hybrid for attention in converted_attentions(self.model))
        transferred = {"maps": model_fingerprint(maps)}
        adapted = with_adapter(self.model, self.config)
        task = NextToken(self.train_data, self.eval_data, from_teacher=self.config.finetune_loss == "teacher")
        self.fit("finetune", training, task, Trainable(adapted), transferred)
        return adapted

    def empty_copy(self) -> Any:
        """A model of the same shape as the result, on the same device and with the same types."""
        like = next(self.model.host.get_input_embeddings().parameters())
        copy: Any = HybridForCausalLM(deepcopy(cast(HybridConfig, self.model.config)))
        copy = copy.to(like.device, like.dtype)
        for attention in converted_attentions(copy):
            for part in attention.hybrid.parts:
                part.map.to(dtype=torch.promote_types(like.dtype, torch.float32))
        return with_adapter(copy, self.config) if self.config.finetune is not None else copy

    def fit(
        self, name: str, training: TrainingConfig, task: Any, trainable: Trainable, made_from: dict[str, str] | None = None
    ) -> dict[str, float]:
        """Train in a folder of that name; the last metrics. made_from: fingerprints beside those of model and data."""
        config = self.config
        if config.shard and torch.distributed.is_initialized():
            shard_frozen_(self.model, trainable)
        settings: dict[str, Any] = {
            "attention": asdict(config.attention),
            "layers_at_once": config.layers_at_once,
            "lora_rank": config.lora_rank,
            "lora_alpha": config.lora_alpha,
        }
        # what is not set is not noted: folders of before these options go on
        if config.cache is not None:
            settings |= {"cache": config.cache, "cache_length": config.cache_length}
        if name == "finetune" and config.finetune_loss != "next_token":
            settings["finetune_loss"] = config.finetune_loss
        trainer = Trainer(
            training,
            task,
            trainable,
            self.folder / name,
            settings=settings,
            made_from=self.made_from | (made_from or {}),
            title=name,
            console=self.console,
        )
        outcome = trainer.fit()
        if not outcome.is_finished:
            raise TrainingStopped(f"stopped and saved at step {outcome.step} of {name}; the same call goes on from there")
        return outcome.metrics


def settle(model: HybridForCausalLM) -> None:
    """Gates and scorers, trained in float32, in the type of the model's weights; the maps stay float32."""
    dtype = next(model.host.get_input_embeddings().parameters()).dtype
    for attention in converted_attentions(model):
        for part in attention.hybrid.parts:
            for learned in (part.gate, part.scorer):
                if learned is not None:
                    learned.to(dtype=dtype)


def write_figures(result: Linearized, folder: Path) -> Path:
    """Everything that was measured, as JSON."""
    config = result.config
    content = {
        "attention": asdict(config.attention),
        "transfer": asdict(config.transfer) if config.transfer else None,
        "finetune": asdict(config.finetune) if config.finetune else None,
        "transfer_errors": result.transfer_errors,
        "validations": {stage: validation.figures() for stage, validation in result.validations.items()},
    }
    return write_json(folder / "linearize.json", content)


def write_json(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with clear_disk_errors(path):
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return path
