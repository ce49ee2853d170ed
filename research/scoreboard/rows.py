"""The rows of the scoreboard: tasks in one protocol each, with what they ask of attention."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nalaformer.recipes import Recipe, recipe_with
from nalaformer.registry import unknown_name

from ..recipes import RECIPES
from ..sequence_task import SequencesConfig
from .methods import parse_methods
from .runs import Board


@dataclass(frozen=True, kw_only=True)
class BoardRow:
    """A task of the scoreboard: a recipe with settings, its learning rates, and a form of it that takes no time."""

    recipe: str
    settings: dict[str, Any]
    tiny: dict[str, Any]
    """Further settings of the form that --smoke runs."""
    learning_rates: tuple[float, ...]
    asks: str
    """What it asks of attention, in a sentence."""
    file_option: str = ""
    """The option of the data that names a file of the user's, if it needs one."""

    @property
    def is_causal(self) -> bool:
        """True if tokens see earlier ones alone."""
        return RECIPES[self.recipe]().model == CAUSAL_MODEL

    def make(self, settings: Sequence[str] = ()) -> Recipe:
        return recipe_with(self.recipe, [*assignments(self.settings), *settings])


def assignments(settings: dict[str, Any]) -> list[str]:
    """Return settings as the command line takes them."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]


CAUSAL_MODEL = "recall"
SAMPLES = {"train_samples": 50_000, "eval_samples": 500, "test_samples": 2_000}
FEW = {"train_samples": 4, "eval_samples": 2, "test_samples": 2, "batch_size": 2, "warmup": 0}
# bfloat16 on a GPU that computes in it
QUICK = {"precision": "auto"}
# two layers of 128 channels, two heads of 64
VECTORS = {"dropout": 0.0, "dim": 128, "mlp_dim": 256}
TINY_VECTORS = {"dim": 8, "mlp_dim": 8, "depth": 1}


TINY_PROBES = {"keys": 56, "probes": 2}


def probe_row(
    recipe: str,
    asks: str,
    tiny: dict[str, Any] = TINY_PROBES,
    learning_rates: tuple[float, ...] = (5e-4, 1e-3),
    **data: Any,
) -> BoardRow:
    """Rows of vectors that all see each other."""
    settings = {"model_options": VECTORS, "steps": 4_000, "warmup": 200, "eval_every": 500, **SAMPLES, **QUICK}
    small = {"data_options": tiny, "model_options": TINY_VECTORS}
    return BoardRow(recipe=recipe, settings=settings | data, tiny=small, learning_rates=learning_rates, asks=asks)


def recall_row(recipe: str, asks: str, *, tiny: dict[str, Any], **data: Any) -> BoardRow:
    """Causal rows: two blocks of a gated short convolution and attention, 128 channels."""
    settings = {"steps": 4_000, "warmup": 200, "batch_size": 64, "eval_every": 500, **SAMPLES, **QUICK}
    small = {"data_options": tiny, "eval_options": {}, "model_options": {"dim": 8, "depth": 1}}
    return BoardRow(recipe=recipe, settings=settings | data, tiny=small, learning_rates=(1.5e-3, 5e-3), asks=asks)


def arena(recipe: str, asks: str, tiny: dict[str, Any], **given: Any) -> BoardRow:
    """Rows of the Long Range Arena, in its small protocol. given: further settings."""
    return BoardRow(
        recipe=recipe,
        settings={"test_samples": 20_000, **QUICK, **given},
        tiny={"data_options": tiny, "model_options": given.get("model_options", {}) | TINY_VECTORS},
        learning_rates=(RECIPES[recipe]().training.learning_rate,),
        asks=asks,
    )


def images(data: str, asks: str, *, tiny: dict[str, Any] = TINY_VECTORS, **given: Any) -> BoardRow:
    """Rows of images from a file, two layers, about 10 epochs of 54,000 images in batches of 128. given: further settings."""
    settings = {"data": data, "steps": 4_200, "batch_size": 128, "warmup": 200, "eval_every": 420, "clip_value": 0.0}
    sizes = {"train_samples": 54_000, "eval_samples": 6_000, "test_samples": 10_000, "weight_decay": 0.01, "clip_norm": 1.0}
    return BoardRow(
        recipe="lra_image",
        settings=settings | sizes | QUICK | given,
        tiny={"model_options": tiny},
        learning_rates=(1e-3, 3e-3),
        asks=asks,
        file_option="file",
    )


def regression(recipe: str, asks: str, tiny: dict[str, Any]) -> BoardRow:
    """One attention between two projections, two heads of 64; in float32, since the figure sees what rounding costs."""
    return BoardRow(
        recipe=recipe,
        settings={"precision": "float32"},
        tiny={"data_options": tiny, "model_options": {"dim": 8}},
        learning_rates=(1e-3, 3e-3),
        asks=asks,
    )


def documents(asks: str) -> BoardRow:
    """A causal model of texts from a file: four layers of 256 channels, 2,000 steps of 16 windows of 2,048 tokens."""
    model = {"dim": 256, "depth": 4, "num_heads": 4, "mlp_ratio": 4.0}
    sizes = {"train_samples": 6_000, "eval_samples": 128, "test_samples": 256, "batch_size": 16}
    return BoardRow(
        recipe="copying",
        settings={"data": "documents", "data_options": {}, "model_options": model, "steps": 2_000, "eval_every": 250}
        | sizes
        | QUICK,
        tiny={"model_options": {"dim": 8, "depth": 1, "mlp_ratio": 1.0}},
        learning_rates=(1e-3, 3e-3),
        asks=asks,
        file_option="file",
    )


# black pixels are masked as keys, as published; the fullest of 40,000 images has 517 others
LIT_PIXELS = {"hide_zero": True, "mean_over": "visible", "most_visible": 576}
SHORT_LISTS = {"shortest": 8, "longest": 32, "max_depth": 3}
ROWS: dict[str, BoardRow] = {
    "pointing_256": probe_row("pointing", "Name the class of the nearest of 256 directions: sharp attention."),
    "cue_grid": probe_row(
        "cue_cells",
        "Name the glyph of the colour that a marked cell shows: sharp attention.",
        {"cells": 3},
        # linear maps are best at 0.001 or above
        learning_rates=(5e-4, 1e-3, 2e-3),
        # 49 kB each
        train_samples=25_000,
    ),
    "majority_256": probe_row("majority", "Name the class that most of 256 tokens have: flat attention."),
    "counting_256": probe_row("pointing_control", "Count the tokens of a class among 256: flat attention."),
    "teacher_regression": regression(
        "softmax_teacher",
        "Give the outputs of exact attention, flat for short queries and sharp for long ones.",
        {"tokens": 16, "size": 4},
    ),
    "mqar_80": recall_row(
        "mqar",
        "Give the values of 80 keys that were said before: recall.",
        epochs=0,
        # without them the rate of 0.005, the only one at which maps with a flat start learn, is a matter of luck
        clip_norm=1.0,
        beta2=0.98,
        data_options={"vocabulary": 1024, "mixture": [[64, 16], [128, 32], [320, 80]]},
        eval_options={"mixture": [[320, 80]]},
        tiny={"vocabulary": 16, "mixture": [[8, 2]]},
    ),
    "copying_256": recall_row("copying", "Repeat 128 random tokens.", tiny={"length": 8, "vocabulary": 6}),
    "induction_256": recall_row(
        "induction",
        "Name what followed a token when it came before.",
        tiny={"length": 8, "vocabulary": 6},
        # with one answer per sequence, softmax learned nothing in 4,000 steps
        data_options={"length": 256, "answers": 16},
    ),
    "listops": arena("lra_listops", "Evaluate nested lists of 500 to 2,000 tokens.", SHORT_LISTS),
    "listops_sky": arena("lra_listops_sky", "The same without closing brackets, as published.", SHORT_LISTS),
    "pathfinder": arena(
        "lra_pathfinder",
        "Say whether two discs lie on one contour, pixel by pixel.",
        {"size": 12, "contour": 2, "distractors": 1, "distractor_length": 2, "seed_distance": 3},
        model_options=LIT_PIXELS,
    ),
    "image_pixels": images(
        "pixels",
        "Name what an image shows, pixel by pixel; needs a file, such as Fashion-MNIST.",
        model_options={"dropout": 0.1},
    ),
    "image_patches": images(
        "patches",
        "Name what an image shows, patch by patch; needs a file, such as Fashion-MNIST.",
        model_options={"dropout": 0.1, "dim": 128, "mlp_dim": 256},
    ),
    "image_backbone": images(
        "image_rows",
        "Name what an image shows, through a backbone with convolutions; needs a file, such as Fashion-MNIST.",
        model="small_backbone",
        model_options={},
        tiny={"embed_dims": [8, 16], "depths": [1, 1], "num_heads": [1, 1]},
    ),
    "manuals": documents("Guess the next token of texts, 2,048 at a time; needs a file of them, such as manuals."),
}
ALL = "all"


def row_names(text: str) -> list[str]:
    """Names separated by commas; "all" is every row that needs no file."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError("a scoreboard needs a task: the name of a row or a recipe")
    free = [name for name, row in ROWS.items() if not row.file_option]
    return list(dict.fromkeys(each for name in names for each in (free if name == ALL else [name])))


def make_board(
    name: str,
    *,
    methods: str,
    seeds: int,
    learning_rates: Sequence[float] = (),
    settings: Sequence[str] = (),
    steps: int = 0,
    smoke: bool = False,
) -> Board:
    """The runs of a row, or of a recipe on sequences, by name. smoke: two steps of its smallest form, one seed and rate."""
    if name not in ROWS and name not in RECIPES.names():
        asking = [recipe for recipe in RECIPES.names() if is_on_sequences(recipe)]
        raise unknown_name("task (a row of the scoreboard or a recipe on sequences)", name, [*dict.fromkeys([*ROWS, *asking])])
    row = ROWS.get(name)
    if row is None and not is_on_sequences(name):
        raise ValueError(f"a scoreboard needs a recipe on sequences, got {name}")
    small = [*assignments(({} if row is None else row.tiny) | FEW)] if smoke else []
    if row is not None and row.file_option and not any(each.startswith("data_options=") for each in settings):
        raise ValueError(f'{name} reads a file of yours: pass \'data_options={{"{row.file_option}": "/path/to/it"}}\'')
    recipe = row.make([*small, *settings]) if row is not None else recipe_with(name, [*small, *settings])
    original = RECIPES[name]() if row is None else row.make(small)
    check_settings(name, recipe, original)
    rates = list(learning_rates) or (list(row.learning_rates) if row is not None else [recipe.training.learning_rate])
    chosen = parse_methods(methods, causal=recipe.model == CAUSAL_MODEL)
    if smoke:
        recipe = replace(recipe, training=replace(recipe.training, eval_every=2))
        seeds, rates, steps = 1, rates[:1], steps or 2
    return Board(title=name, recipe=recipe, methods=chosen, seeds=range(seeds), learning_rates=rates, steps=steps)


def is_on_sequences(recipe: str) -> bool:
    return isinstance(RECIPES[recipe]().task, SequencesConfig)


def check_settings(name: str, recipe: Recipe, original: Recipe) -> None:
    """Reject settings that a scoreboard does not follow."""
    for setting, remedy in (("attention", "name it in --methods"), ("initial_weights", "models start as they are made")):
        value = getattr(recipe, setting)
        if value != getattr(original, setting):
            raise ValueError(f"a scoreboard does not follow {setting}={value}; leave it out: {remedy}")
