"""Language models: a minute on generated tales, your own text, and the paper's runs of 340 million parameters."""

from typing import Any

from ..tasks import LanguageConfig
from ..training import TrainingConfig
from .recipe import RECIPES, Recipe, enter, every


def language_model(model: str, attention: str, task: LanguageConfig, **training: Any) -> Recipe:
    """AdamW as it is usual for language models: a quick second moment and clipped gradients."""
    settings = TrainingConfig(beta2=0.95, clip_norm=1.0, **training)
    return Recipe(model=model, attention=attention, task=task, training=settings)


@RECIPES.register("lm_tiny")
def lm_tiny() -> Recipe:
    """A language model small enough for a CPU, on generated tales.

    Command: nalaformer train lm_tiny attention=linear
    Cost: about a minute on a CPU core.
    Expected: perplexity 2.80; with attention=gated_delta 2.76, with softmax 2.85 (one run each, measured on a CPU).
    """
    return language_model(
        "nano",
        "linear",
        LanguageConfig(data="tales", window=128, train_documents=4_000, eval_documents=100),
        steps=150,
        batch_size=16,
        learning_rate=4e-3,
        weight_decay=0.01,
        warmup=15,
        **every(50),
    )


@RECIPES.register("lm_text")
def lm_text() -> Recipe:
    """A language model on your own text, on one GPU.

    Command: nalaformer tokenize texts/ --train-vocab 16000 --out tokens
        nalaformer train lm_text data=tokens attention=gated_delta
    Cost: 10,000 steps of 65,536 tokens; not measured. Set steps, model and batch_size to your text.
    Expected: not measured.
    """
    return language_model(
        "small",
        "linear",
        LanguageConfig(data="tokens", window=1024),
        steps=10_000,
        batch_size=64,
        learning_rate=1e-3,
        weight_decay=0.1,
        warmup=500,
        min_learning_rate=1e-4,
        precision="bfloat16",
        workers=4,
        **every(500),
    )


# 0.5M tokens a step, 15B tokens
WINDOW, WINDOWS = 2048, 256
STEPS = round(15e9 / (WINDOW * WINDOWS))

# WikiText perplexity, LAMBADA perplexity, mean accuracy over PIQA, HellaSwag, WinoGrande, ARC-easy and ARC-challenge
PUBLISHED = {"linear": None, "delta": (27.82, 49.77, 44.3), "gated_delta": (25.89, 32.32, 44.8)}


def nala_340m(attention: str) -> Recipe:
    """340M parameters, 15B tokens. The paper gives size, corpus, tokens and batch; the rest is usual at this size."""
    return language_model(
        "340m",
        attention,
        LanguageConfig(data="slimpajama", window=WINDOW),
        steps=STEPS,
        batch_size=WINDOWS,
        accumulate=4,
        learning_rate=4e-4,
        weight_decay=0.01,
        warmup=1024,
        min_learning_rate=4e-5,
        precision="bfloat16",
        workers=4,
        **every(1000),
    )


def register(name: str, attention: str) -> None:
    """Enter the recipe of a mixer, with the published figures in its words."""
    figures = PUBLISHED[attention]
    result = "not measured, none published for this mixer"
    if figures is not None:
        result = "WikiText perplexity {}, LAMBADA perplexity {}, mean accuracy of five tasks {}".format(*figures)
        result += " (published, not measured here)"
    words = f"""340M parameters with {attention} mixers on 15B tokens, the size and budget of the paper's models.

    Command: torchrun --nproc-per-node 8 -m nalaformer train {name} data=/path/to/tokens
        with the tokens that `nalaformer tokenize` wrote of SlimPajama, with a tokenizer of 32,000 entries
    Cost: {STEPS:,} steps of 0.5M tokens, about 3.1e19 floating point operations: five hours on 8 GPUs if each keeps up 2e14
        a second. Not measured.
    Expected: {result}.
    """
    enter(name, lambda: nala_340m(attention), words)


for _attention in PUBLISHED:
    register("nala_lm_340m" if _attention == "linear" else f"nala_lm_340m_{_attention}", _attention)
