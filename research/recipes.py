"""Long-range and recall benchmarks: each protocol as published, and small forms for a CPU.

Take `attention=` from the methods and the feature maps alike: attention=softmax, attention=nalaformer, attention=split.
"""

from dataclasses import replace
from typing import Any

from nalaformer.recipes.recipe import RECIPES, Recipe, every
from nalaformer.training import TrainingConfig

from .sequence_task import SequencesConfig


def arena(task: SequencesConfig, *, batch_size: int, learning_rate: float, warmup: int, **training: Any) -> Recipe:
    """The small protocol of the Long Range Arena (Skyformer): 2 layers of width 64, 50,000 steps of AdamW, one linear cycle."""
    schedule: dict[str, Any] = {
        "steps": 50_000,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "warmup": warmup,
        # torch's one-cycle schedule starts and ends at these rates
        "warmup_learning_rate": learning_rate / 25,
        "min_learning_rate": 0.0,
        "schedule": "linear",
        "weight_decay": 0.0,
        "epsilon": 1e-6,
        "clip_value": 1.0,
        "eval_every": 500,
        "save_every": 500,
    }
    return Recipe(
        model="sequence_classifier", attention="nalaformer", task=task, training=TrainingConfig(**(schedule | training))
    )


@RECIPES.register("lra_listops")
def lra_listops() -> Recipe:
    """ListOps with its brackets: the value of nested lists of 500 to 2,000 tokens.

    Command: python -m research train lra_listops attention=nalaformer
    Cost: 1.6 million sequences of 2,048 tokens: a GPU. `python -m research.scoreboard run lra_listops` is the fast way.
    Expected: not measured; chance is 0.10, the root operator alone gives 0.36.
    """
    return arena(SequencesConfig(data="listops", train_samples=96_000), batch_size=32, learning_rate=1e-4, warmup=1000)


@RECIPES.register("lra_listops_sky")
def lra_listops_sky() -> Recipe:
    """ListOps without closing brackets, as the published small models saw it.

    Command: python -m research train lra_listops_sky attention=nalaformer
    Cost: as lra_listops.
    Expected: published: softmax 0.384, Performer 0.380, Nystromformer 0.385, Skyformer 0.387, PolaFormer 0.374 to 0.388.
    """
    return arena(SequencesConfig(data="listops_sky", train_samples=96_000), batch_size=32, learning_rate=1e-4, warmup=1000)


@RECIPES.register("lra_pathfinder")
def lra_pathfinder() -> Recipe:
    """Pathfinder, 32 pixels, hard: are two discs connected by a contour of 14 paddles? 1,024 tokens.

    Command: python -m research train lra_pathfinder attention=nalaformer; Skyformer's way of hiding black pixels:
        model_options='{"hide_zero": true}'; an easier rung first:
        data_options='{"contour": 6, "distractor_length": 2}'
    Cost: 6.4 million sequences of 1,024 tokens: a GPU. `python -m research.sequences pathfinder` makes the images once.
    Expected: published: softmax 0.653, Performer 0.663, Nystromformer 0.695, Skyformer 0.707, PolaFormer 0.690 to 0.705;
        where the discs lie tells 0.67, with the stroke at each 0.70.
    """
    task = SequencesConfig(data="pathfinder", train_samples=160_000, eval_samples=20_000)
    return arena(task, batch_size=128, learning_rate=2e-4, warmup=312)


@RECIPES.register("lra_pathx")
def lra_pathx() -> Recipe:
    """Path-X: Pathfinder of 128 pixels, 16,384 tokens.

    Command: python -m research train lra_pathx attention=nalaformer
    Cost: hours on a GPU; not measured.
    Expected: not measured; chance, which the models of the Long Range Arena paper do not leave, is 0.5.
    """
    task = SequencesConfig(data="pathx", train_samples=160_000, eval_samples=2_000)
    return arena(task, batch_size=32, learning_rate=2e-4, warmup=312)


@RECIPES.register("lra_text")
def lra_text() -> Recipe:
    """IMDb reviews as bytes, 4,000 tokens; needs the released files.

    Command: python -m research train lra_text data_options='{"root": "/path/to/aclImdb"}'
    Cost: 1.6 million sequences of 4,000 tokens: a GPU.
    Expected: published: PolaFormer 0.719 to 0.731; not measured here.
    """
    task = SequencesConfig(data="text", train_samples=25_000, eval_samples=6_400, test_samples=25_000)
    return arena(task, batch_size=32, learning_rate=1e-4, warmup=80)


@RECIPES.register("lra_retrieval")
def lra_retrieval() -> Recipe:
    """Pairs of papers as bytes, twice 4,000 tokens; needs the released files.

    Command: python -m research train lra_retrieval data_options='{"root": "/path/to/tsv"}'
    Cost: 0.8 million pairs of 4,000 tokens: a GPU.
    Expected: published: PolaFormer 0.804 to 0.815; not measured here.
    """
    task = SequencesConfig(data="retrieval", train_samples=147_086, eval_samples=4_800, test_samples=17_437)
    return arena(task, batch_size=16, learning_rate=2e-4, warmup=800, eval_every=1000)


@RECIPES.register("lra_image")
def lra_image() -> Recipe:
    """CIFAR-10 in grey, pixel by pixel, 1,024 tokens; needs the released files, in their binary version.

    Command: python -m research train lra_image data_options='{"root": "/path/to/cifar-10-batches-bin"}'
    Cost: 12.8 million sequences of 1,024 tokens: a GPU.
    Expected: published: PolaFormer 0.419 to 0.428; not measured here.
    """
    task = SequencesConfig(data="image", train_samples=45_000, eval_samples=5_000, test_samples=10_000)
    return arena(task, batch_size=256, learning_rate=1e-4, warmup=175)


@RECIPES.register("listops_small")
def listops_small() -> Recipe:
    """Short ListOps for a CPU: 12 to 64 tokens, at most 4 deep.

    Command: python -m research train listops_small attention=nalaformer
    Cost: a few minutes on a CPU core.
    Expected: not measured; chance is 0.10.
    """
    options = {"shortest": 12, "longest": 64, "max_depth": 4, "max_arguments": 5}
    task = SequencesConfig(data="listops", data_options=options, train_samples=50_000, eval_samples=1_000, test_samples=2_000)
    return arena(task, steps=1_000, batch_size=64, learning_rate=1e-3, warmup=100, save_every=0)


@RECIPES.register("pathfinder_small")
def pathfinder_small() -> Recipe:
    """Short contours for a CPU: 16 pixels, contours of 3 paddles, two distractors of 2.

    Command: python -m research train pathfinder_small attention=nalaformer
    Cost: a few minutes on a CPU core.
    Expected: not measured; chance is 0.5.
    """
    options = {"size": 16, "contour": 3, "distractors": 2, "distractor_length": 2, "seed_distance": 5}
    task = SequencesConfig(
        data="pathfinder", data_options=options, train_samples=20_000, eval_samples=1_000, test_samples=2_000
    )
    return arena(task, steps=2_000, batch_size=64, learning_rate=1e-3, warmup=100, save_every=0)


@RECIPES.register("mqar")
def mqar() -> Recipe:
    """Multi-query associative recall in zoology's protocol: trained on up to 64 pairs, tested on up to 256.

    Command: python -m research train mqar attention=nalaformer learning_rate=0.00316
    Cost: 5.8 million sequences of up to 256 tokens: a GPU. Learning rates are compared over logspace(-3, -1.5, 4).
    Expected: published mean accuracies: Based 0.91 at a state of 4e4, Mamba-2 0.785 at 3.2e4, DeltaNet 0.96 at 3.4e4.
    """
    return Recipe(
        model="recall",
        attention="nalaformer",
        task=SequencesConfig(data="mqar", train_samples=180_000, eval_samples=7_000, test_samples=21_000),
        training=TrainingConfig(
            epochs=32,
            batch_size=256,
            learning_rate=10**-2.5,
            weight_decay=0.1,
            warmup_learning_rate=0.0,
            min_learning_rate=0.0,
            **every(703),
        ),
    )


@RECIPES.register("mqar_small")
def mqar_small() -> Recipe:
    """Recall for a CPU: 64 tokens, 4 and 8 pairs, 256 different tokens.

    Command: python -m research train mqar_small attention=split
    Cost: a few minutes on a CPU core.
    Expected: not measured; chance is 0.008.
    """
    task = SequencesConfig(
        data="mqar",
        data_options={"vocabulary": 256, "mixture": [[64, 4], [64, 8]]},
        train_samples=50_000,
        eval_samples=500,
        test_samples=2_000,
    )
    training = replace(mqar().training, epochs=0, steps=1_500, batch_size=64, learning_rate=3e-3, warmup=100, eval_every=250)
    return Recipe(model="recall", attention="nalaformer", model_options={"dim": 64}, task=task, training=training)


# training of models that learn to look something up: AdamW with a cosine
LOOKING_UP: dict[str, Any] = {
    "batch_size": 64,
    "learning_rate": 1e-3,
    "beta2": 0.98,
    "clip_norm": 1.0,
    "eval_every": 500,
    "save_every": 500,
}


def recall(data: str, *, options: dict[str, Any], model_options: dict[str, Any], steps: int = 5_000) -> Recipe:
    """A causal model on generated sequences."""
    return Recipe(
        model="recall",
        attention="nalaformer",
        model_options=model_options,
        task=SequencesConfig(data=data, data_options=options, train_samples=300_000, eval_samples=1_000, test_samples=4_000),
        training=TrainingConfig(**LOOKING_UP, steps=steps, weight_decay=0.1, warmup=200),
    )


@RECIPES.register("copying")
def copying() -> Recipe:
    """Repeat 128 random tokens.

    Command: python -m research train copying attention=nalaformer
    Cost: 5,000 steps of 64 x 256 tokens; not measured.
    Expected: not measured; chance is 0.016.
    """
    return recall("copying", options={"length": 256}, model_options={})


@RECIPES.register("induction")
def induction() -> Recipe:
    """Name the token that followed the last one when it came before, anywhere in 256 tokens.

    Command: python -m research train induction attention=nalaformer data_options='{"length": 256, "answers": 16}'
    Cost: 5,000 steps of 64 x 256 tokens; not measured.
    Expected: softmax 1.00 after 500 steps with 16 answers; of one answer for each sequence it learned nothing in 4,000 steps.
    """
    return recall("induction", options={"length": 256}, model_options={})


@RECIPES.register("needles")
def needles() -> Recipe:
    """Find facts in a long text (RULER-style): one, one of many, all values of a name.

    Command: python -m research train needles attention=nalaformer; longer:
        data_options='{"length": 2048, "needles": 64, "fewest_needles": 4, "predict": "answers"}'
    Cost: 20,000 steps of 64 x 512 tokens: a GPU; not measured.
    Expected: not measured; chance is 0.004.
    """
    options = {"length": 512, "needles": 16, "fewest_needles": 1, "predict": "answers"}
    return recall("needles", options=options, model_options={"depth": 4, "mlp_ratio": 4}, steps=20_000)


@RECIPES.register("variables")
def variables() -> Recipe:
    """Follow assignments through a long text, 1 to 4 steps.

    Command: python -m research train variables attention=nalaformer
    Cost: 20,000 steps of 64 x 512 tokens: a GPU; not measured.
    Expected: not measured; chance is 0.004.
    """
    options = {"length": 512, "needles": 16, "fewest_needles": 1, "predict": "answers"}
    return recall("variables", options=options, model_options={"depth": 4, "mlp_ratio": 4}, steps=20_000)


def probe_recipe(data: str) -> Recipe:
    """Vectors as tokens, all of which see each other."""
    return Recipe(
        model="sequence_classifier",
        attention="nalaformer",
        model_options={"dropout": 0.0},
        task=SequencesConfig(data=data, train_samples=100_000, eval_samples=500, test_samples=2_000),
        training=TrainingConfig(**LOOKING_UP, steps=10_000, weight_decay=0.01, warmup=500),
    )


@RECIPES.register("pointing")
def pointing() -> Recipe:
    """Name the class of the nearest of 256 directions: sharp attention.

    Command: python -m research train pointing attention=nalaformer
    Cost: 10,000 steps of 64 x 272 tokens; not measured.
    Expected: not measured; chance is 0.125.
    """
    return probe_recipe("pointing")


@RECIPES.register("majority")
def majority() -> Recipe:
    """Name the class that most of 256 tokens have: flat attention, in which linear attention must not lose.

    Command: python -m research train majority attention=nalaformer
    Cost: as pointing.
    Expected: not measured; chance is 0.125.
    """
    return probe_recipe("majority")


@RECIPES.register("pointing_control")
def pointing_control() -> Recipe:
    """Count the tokens of a class among 256: flat attention, in which linear attention must not lose.

    Command: python -m research train pointing_control attention=nalaformer
    Cost: as pointing.
    Expected: not measured; chance is 0.125.
    """
    return probe_recipe("pointing_control")


@RECIPES.register("cue_cells")
def cue_cells() -> Recipe:
    """Name the glyph whose colour the marked cell of a grid shows, a vector for each cell: sharp attention.

    Command: python -m research train cue_cells attention=nalaformer
    Cost: 10,000 steps of 64 x 64 tokens; not measured.
    Expected: not measured; chance is 0.25. `cue_grid` is the same as an image, for backbones.
    """
    return probe_recipe("cue_cells")


@RECIPES.register("softmax_teacher")
def softmax_teacher() -> Recipe:
    """Give the outputs of exact attention with norms of queries from 0.5 to 16: attention that is flat and sharp.

    Command: python -m research train softmax_teacher attention=nalaformer
    Cost: 4,000 steps of 64 x 64 tokens, one layer; a few minutes on a CPU core.
    Expected: R^2 1.00 with softmax, 0.36 with ReLU (600 steps, one seed, a CPU); 0 is the mean.
    """
    return Recipe(
        model="one_attention",
        attention="nalaformer",
        task=SequencesConfig(data="softmax_teacher", train_samples=20_000, eval_samples=500, test_samples=2_000),
        training=TrainingConfig(**(LOOKING_UP | {"learning_rate": 3e-3}), steps=4_000, weight_decay=0.0, warmup=200),
    )
