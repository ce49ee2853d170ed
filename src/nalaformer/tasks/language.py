"""Predicting the next token of text."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.text import IGNORED, Encoder, PackedTokens, Tales, TokenShards, fingerprint, load_tokenizer, train_tokenizer
from ..data.text.corpus import TOKENIZER
from ..data.text.packing import PACKINGS
from ..data.text.tokenizer import TOKENIZER_FILES
from ..field_types import check_field_types, check_ranges
from ..json_text import parse_json
from ..weight_files import check_finite, check_names, without_warnings
from .base import TASKS, Loss, SummedMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATED = "tales"
# of a model's config.json
SIZES_OF_MODELS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Which text, and in which windows it is read."""

    data: str
    """A folder with train/, val/ and tokenizer/, as `nalaformer tokenize` writes it, or "tales": generated text."""
    window: int = 2048
    """Tokens of a sample."""
    packing: str = "stream"
    """"stream": documents one after the other, cut at every window; "whole": whole documents only, as prompts need."""
    tokenizer: str = ""
    """Folder of the tokenizer that made the tokens; empty: tokenizer/ beside them."""
    data_seed: int = 0
    """Seed of generated text."""
    train_documents: int = 10_000
    """Generated documents to learn from."""
    eval_documents: int = 200
    """Generated documents to evaluate on."""
    vocab_size: int = 512
    """Entries of the tokenizer that is trained on generated text."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.window < 2:
            raise ValueError(f"window must be at least 2, got {self.window}")
        if self.packing not in PACKINGS:
            raise ValueError(f"packing must be one of {', '.join(PACKINGS)}, got {self.packing!r}")
        check_ranges(self, not_negative=("data_seed",))


@TASKS.register("language")
class LanguageModelling:
    """Cross-entropy of the next token, perplexity, and bits per byte where the size of the text is known."""

    Config = LanguageConfig

    def __init__(self, config: LanguageConfig) -> None:
        self.config = config

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        config = self.config
        if config.data == GENERATED and not config.tokenizer:
            return train_tokenizer(self.tales("train"), vocab_size=config.vocab_size)
        if not Path(config.data).is_dir() and config.data != GENERATED:
            raise ValueError(f"data must be a folder that `nalaformer tokenize` wrote, or {GENERATED!r}, got {config.data!r}")
        beside = Path(config.data) / TOKENIZER
        if not config.tokenizer and not beside.is_dir():
            raise ValueError(
                f"data must be a folder that `nalaformer tokenize` wrote, got {config.data} without {TOKENIZER}/; `nalaformer "
                f"tokenize {config.data} --train-vocab 16000 --out DIR` makes one of texts, or set tokenizer to a folder"
            )
        return load_tokenizer(config.tokenizer or beside)

    def tales(self, split: str) -> Tales:
        documents = self.config.train_documents if split == "train" else self.config.eval_documents
        return Tales(split=split, documents=documents, seed=self.config.data_seed)

    @cached_property
    def train_data(self) -> PackedTokens:
        return self.packed("train")

    @cached_property
    def eval_data(self) -> PackedTokens:
        return self.packed("val")

    def packed(self, split: str) -> PackedTokens:
        config = self.config
        if config.data == GENERATED:
            tokens = Encoder(self.tokenizer).in_memory(self.tales(split))
        else:
            tokens = TokenShards.open(Path(config.data) / split)
            self.refuse_other_tokenizer(tokens)
        return PackedTokens(tokens, length=config.window, packing=config.packing)

    def refuse_other_tokenizer(self, tokens: TokenShards) -> None:
        if tokens.vocab_size != len(self.tokenizer):
            raise ValueError(
                f"the tokenizer must have the vocabulary that the tokens were made with ({tokens.vocab_size} entries), got "
                f"{len(self.tokenizer)}; set tokenizer to the folder of the right one"
            )
        if tokens.tokenizer and tokens.tokenizer != fingerprint(self.tokenizer):
            raise ValueError(
                f"the tokens of {tokens.place} were made with another tokenizer of the same size; set tokenizer to its folder"
            )

    def facts(self) -> dict[str, Any]:
        tokenizer = self.tokenizer
        ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        return {
            "vocab_size": len(tokenizer),
            "bos_token_id": ends[0],
            "eos_token_id": ends[1],
            # an embedding of padding learns nothing: a token that also begins or ends documents must not count as such
            "pad_token_id": None if tokenizer.pad_token_id in ends else tokenizer.pad_token_id,
            "tokenizer": fingerprint(tokenizer),
            "window": self.config.window,
        }

    @staticmethod
    def create_model(name: str, options: dict[str, Any], facts: dict[str, Any]) -> nn.Module:
        """A model of this library by its size, or the pretrained one of a local folder.

        `attention` names the mixers: one, or several with commas, which the layers take in turn.
        """
        if Path(name).is_dir():
            from ..models.language.lengths import length_note

            if options:
                raise ValueError(
                    f"a pretrained model is taken as it is, got options for {name}: {', '.join(options)}; leave them out "
                    "(attention= with nothing behind it, where a recipe names one)"
                )
            refuse_tokens_of_another(name, facts)
            pretrained = pretrained_model(name, vocab_size=facts["vocab_size"], dtype=torch.float32)
            # a longer window may be what is to be learned, but not without positions
            length_note(pretrained, facts["window"])
            return pretrained
        from ..models.language import NaLaConfig, NaLaForCausalLM

        changes = {key: facts[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
        changes |= {"max_position_embeddings": facts["window"]} | options
        if "attention" in changes:
            if "mixers" in changes:
                raise ValueError(
                    f"mixers are named by attention= (several with commas), got attention={changes['attention']} and mixers="
                    f"{changes['mixers']}; give one of them"
                )
            mixers = changes.pop("attention").split(",")
            layers = NaLaConfig.from_size(name, **changes).num_hidden_layers
            changes["mixers"] = mixers[0] if len(mixers) == 1 else [mixers[n % len(mixers)] for n in range(layers)]
        return NaLaForCausalLM(NaLaConfig.from_size(name, **changes))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        """The mean over the predicted tokens of the batch; the weight is their number."""
        losses, count = next_token_losses(model, batch)
        # a batch in which nothing is predicted weighs nothing, and divides by nothing
        return Loss(total=losses / count.clamp(min=1), weight=count.item())

    def metrics(self) -> "Perplexity":
        data = self.eval_data
        known = data.predicted is not None and data.data.bytes
        return Perplexity(tokens_per_byte=cast(int, data.predicted) / cast(int, data.data.bytes) if known else None)


def check_model_folder(folder: str | Path) -> None:
    """Refuse what is no folder of a model, or a config whose sizes transformers would divide by."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"a model must be a folder that save_pretrained wrote, got no config.json in {folder}; "
            "`nalaformer export RUN --out DIR` writes one from a run"
        )
    try:
        config = parse_json(file.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise ValueError(
            f"{file} must be the JSON that save_pretrained wrote: {error}; fetch or export the model again"
        ) from error
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for name in SIZES_OF_MODELS:
            number = part.get(name)
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} in {file} must be a positive whole number, got {number!r}; mend the file")


@contextmanager
def reading_model(folder: str | Path) -> Iterator[None]:
    """Put around transformers' reading of a local folder: any fault of the folder becomes one ValueError that names it."""
    check_model_folder(folder)
    try:
        yield
    except ImportError:
        # a package that is missing is no fault of the folder
        raise
    # whatever a folder holds, transformers' many readers raise accordingly
    except Exception as error:
        raise ValueError(
            f"{folder} must hold a model that transformers can read, got {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


@contextmanager
def quiet_reading() -> Iterator[None]:
    """Silence the bars that transformers draws for each file, and its table of weights that do not fit, which are errors."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with without_warnings("transformers.modeling_utils"):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def refuse_tokens_of_another(folder: str | Path, facts: dict[str, Any]) -> None:
    """A pretrained model knows its own tokens; the numbers of another tokenizer mean nothing to it."""
    if (
        any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)
        and fingerprint(load_tokenizer(folder)) != facts["tokenizer"]
    ):
        raise ValueError(
            f"the data must be made with the tokenizer of the model, got tokens of another than that in {folder}; use "
            f"`nalaformer tokenize ... --tokenizer {folder}`, or save the tokenizer of the data there"
        )


def pretrained_model(folder: str | Path, *, vocab_size: int, dtype: torch.dtype | str, device: str | None = None) -> Any:
    """The model of a folder as save_pretrained writes it, which must know `vocab_size` tokens; no code of the folder is run.

    Weights that are missing, unexpected or not finite are refused. device: "meta" checks all but the values, in no memory.
    """
    from transformers import AutoModelForCausalLM

    from ..models import hybrid, language  # noqa: F401  (enter our models)

    with reading_model(folder), quiet_reading():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            dtype=dtype,
            output_loading_info=True,
            device_map=device,
        )
    model, found = loaded
    check_names(found["missing_keys"], found["unexpected_keys"], folder)
    check_finite(model.state_dict(), folder)
    known = model.get_input_embeddings().weight.shape[0]
    if known < vocab_size:
        raise ValueError(
            f"the model must know every token of the tokenizer ({vocab_size}), got {known} in {folder}; the tokenizer is "
            "another model's"
        )
    return model


def next_token_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of the losses of all predicted tokens, in float32, and their number."""
    targets, inputs = batch["targets"], {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    inner = getattr(model, "module", model)
    if model.training and getattr(inner, "trains_without_logits", False):
        # such a model sums the losses itself, divides by what it is told, and never holds the logits of all tokens
        summed = {"labels": targets, "shift_labels": targets, "num_items_in_batch": 1, "ignore_index": IGNORED}
        return model(**inputs, **summed, use_cache=False).loss, (targets != IGNORED).sum()
    logits = model(**inputs, use_cache=False).logits
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return losses, (targets != IGNORED).sum()


class Perplexity(SummedMetrics):
    """exp of the mean loss, over all predicted tokens together."""

    def __init__(self, *, tokens_per_byte: float | None = None) -> None:
        # sum of losses, tokens
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.tokens_per_byte = tokens_per_byte

    def update(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        self.sums += torch.stack([value.double().cpu() for value in next_token_losses(model, batch)])

    def result(self) -> dict[str, float]:
        losses, tokens = self.sums.tolist()
        if not tokens:
            raise ValueError("perplexity needs at least one predicted token, got none")
        loss = losses / tokens
        # first, and so what checkpoints are compared by: higher is better
        figures = {"log_likelihood": -loss, "loss": loss, "perplexity": perplexity_of(loss)}
        if self.tokens_per_byte is not None:
            figures["bits_per_byte"] = loss * self.tokens_per_byte / math.log(2)
        return figures | {"tokens": tokens}


def perplexity_of(loss: float) -> float:
    """exp, or infinity where a float has no room for it."""
    return math.exp(loss) if loss < 700 else math.inf
