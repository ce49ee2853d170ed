"""Classification: what is learned from images, and how recipes describe it."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from nalaformer.data import GENERATED, Augmentation
from nalaformer.recipes import RECIPES, Recipe, build_model, changed, load_run, make_trainer, recipe_words, settings_of
from nalaformer.recipes.overrides import keys
from nalaformer.tasks import Classification, ClassificationConfig, TopAccuracy
from nalaformer.training import TrainingConfig, TrainingStopped, evaluate
from nalaformer.training.log import read_log

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path):
    """Red and blue images with some noise, in the ImageNet layout."""
    for split, (label, name), number in itertools.product(("train", "val"), enumerate(("red", "blue")), range(8)):
        path = tmp_path / "data" / split / name / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 120, (40, 36, 3), dtype=np.uint8)
        pixels[..., 2 * label] = 220
        Image.fromarray(pixels).save(path)
    return tmp_path / "data"


def tiny(**task):
    """A run of seconds on generated images."""
    options = {
        "embed_dims": [16],
        "depths": [1],
        "num_heads": [2],
        "mlp_ratios": 1,
        "attention_stages": "l",
        "layer_scale": [None],
    }
    options |= {"key_reduction": 1, "softmax_key_reduction": 1, "patch_size": 8, "img_size": 48, "global_pool": "max"}
    return Recipe(
        model="vit_nala_tiny_patch16",
        attention="linear",
        model_options=options,
        initial_weights="torch",
        task=ClassificationConfig(**({"data": "cue_grid", "train_samples": 8, "eval_samples": 8} | task)),
        training=TrainingConfig(steps=4, batch_size=8, learning_rate=1e-2, device="cpu"),
    )


class Fixed(nn.Module):
    """Answers what it is told."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, images):
        return self.logits[: len(images)]


def test_accuracy_counts_the_first_and_the_first_five():
    logits = torch.zeros(5, 7)
    logits[0, 3] = 9  # right
    logits[1] = torch.tensor([5.0, 4, 3, 2, 1, 0, 0])  # right is third
    logits[2] = torch.tensor([5.0, 4, 3, 2, 1, 0.5, 0])  # right is last
    logits[3, 0] = 9  # right
    logits[4] = torch.tensor([5.0, 4, 3, 2, 1, 0, 0])  # right is fifth
    labels = torch.tensor([3, 2, 6, 0, 4])
    metrics = TopAccuracy()
    metrics.update(Fixed(logits), (torch.zeros(5, 3, 8, 8), labels))
    result = metrics.result()
    assert (result["top1"], result["top5"], result["images"]) == (0.4, 0.8, 5)
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, labels).item())


def test_accuracy_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one image"):
        TopAccuracy().result()


def test_the_loss_is_cross_entropy_over_the_images():
    task = Classification(ClassificationConfig(data="cue_grid", smoothing=0.1))
    logits, labels = torch.randn(6, 4), torch.randint(4, (6,))
    loss = task.loss(Fixed(logits), (torch.zeros(6, 3, 48, 48), labels))
    assert loss.weight == 6
    assert loss.total.item() == pytest.approx(F.cross_entropy(logits, labels, label_smoothing=0.1).item())


def test_mixing_follows_the_random_state_and_leaves_the_batch_alone():
    task = Classification(ClassificationConfig(data="cue_grid", mixup=0.8, cutmix=1.0, smoothing=0.1))
    images, labels, seen = torch.randn(6, 3, 48, 48), torch.randint(4, (6,)), []
    before = images.clone()

    def model(x):
        seen.append(x)
        return x.mean((2, 3)) @ torch.ones(3, 4)

    totals = []
    for seed in (0, 0, 1):
        np.random.seed(seed)
        totals.append(task.loss(model, (images, labels)).total.item())
    assert torch.equal(images, before)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], images)
    assert totals[0] == totals[1]
    with pytest.raises(ValueError, match=r"an even number of images at once.*got 5; choose another batch_size"):
        task.loss(model, (images[:5], labels[:5]))


@pytest.mark.parametrize("name", GENERATED.names())
def test_a_small_network_learns_eight_images_by_heart(name, tmp_path):
    # a fifteenth of the first loss is what is left of the slowest of them
    recipe = changed(tiny(data=name), ["steps=70"])
    size = Classification(recipe.task).image_size
    recipe = dataclasses.replace(recipe, model_options=recipe.model_options | {"img_size": size})
    make_trainer(recipe, tmp_path).fit()
    losses = [row["loss"] for row in read_log(tmp_path / "log.jsonl") if row["kind"] == "step"]
    assert losses[-1] < 0.2 * losses[0]


def folder_recipe(folder, **task):
    recipe = tiny(data=str(folder), image_size=32, **task)
    return dataclasses.replace(recipe, model_options=recipe.model_options | {"img_size": 32})


def test_a_folder_of_images_is_learned_and_evaluated(folder, tmp_path):
    augmentation = Augmentation(auto_augment="rand-m9-mstd0.5-inc1", random_erasing=0.25, smallest_crop=0.5)
    recipe = changed(folder_recipe(folder, augmentation=augmentation), ["steps=30", "batch_size=16", "repeats=3"])
    outcome = make_trainer(recipe, tmp_path / "run").fit()
    assert outcome.metrics["images"] == 16
    assert outcome.metrics["top1"] > 0.9


def spoil(folder, count):
    for path in sorted((folder / "train" / "red").iterdir())[:count]:
        path.write_bytes(path.read_bytes()[:200])


def test_corrupt_images_are_skipped_counted_and_named(folder, tmp_path):
    spoil(folder, 2)
    recipe = changed(folder_recipe(folder), ["steps=4", "batch_size=16"])
    assert make_trainer(recipe, tmp_path / "run").fit().is_finished
    lines = (tmp_path / "run" / "rejected.txt").read_text().splitlines()
    assert len(lines) == 2
    assert all("train/red/" in line for line in lines)


@pytest.mark.parametrize(
    ("setting", "message"), [("on_corrupt=stop", "on_corrupt=skip"), ("most_corrupt=1", "more than 1 images")]
)
def test_corrupt_images_stop_the_run_by_choice_or_beyond_a_number(folder, tmp_path, setting, message):
    spoil(folder, 2)
    recipe = changed(folder_recipe(folder), ["batch_size=16", setting])
    with pytest.raises(TrainingStopped, match=message):
        make_trainer(recipe, tmp_path / "run").fit()


def test_folders_whose_classes_differ_are_refused(folder, tmp_path):
    (folder / "val" / "blue").rename(folder / "val" / "green")
    with pytest.raises(ValueError, match="same class folders"):
        make_trainer(folder_recipe(folder), tmp_path / "run")


def test_a_run_gives_back_the_model_that_was_trained(tmp_path):
    recipe = changed(tiny(), ["ema=0.5", "eval_every=2"])
    trainer = make_trainer(recipe, tmp_path)
    outcome = trainer.fit()
    run = load_run(tmp_path, step=4)
    assert run.recipe == recipe
    # ready for use: dropout is off
    assert not run.model.training
    assert run.facts["classes"] == list(trainer.task.classes)
    for ours, theirs in zip(run.model.parameters(), trainer.evaluated_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    again = evaluate(run.model, run.task.eval_data, run.task.metrics(), batch_size=3)
    assert again["top1"] == outcome.metrics["top1"]


def test_a_step_that_was_not_kept_is_refused(tmp_path):
    make_trainer(tiny(), tmp_path).fit()
    with pytest.raises(ValueError, match="one that was kept, got 3"):
        load_run(tmp_path, step=3)
    with pytest.raises(ValueError, match="must be the folder of a run"):
        load_run(tmp_path / "none")


# ---- recipes


@pytest.mark.parametrize("name", RECIPES.names())
def test_a_recipe_says_command_cost_and_expected_result(name):
    words = recipe_words(name)
    for part in (f"train {name}", "Cost:", "Expected:"):
        assert part in words
    assert isinstance(RECIPES[name](), Recipe)
    if name.startswith("imagenet"):
        assert "published, not measured here" in words or "not measured, none published" in words


IMAGE_RECIPES = [name for name in RECIPES.names() if isinstance(RECIPES[name]().task, ClassificationConfig)]


@pytest.mark.parametrize("name", IMAGE_RECIPES)
def test_the_model_of_every_recipe_on_images_can_be_built(name):
    recipe = RECIPES[name]()
    with torch.device("meta"):
        model = build_model(recipe, {"classes": [str(number) for number in range(10)]})
    assert sum(parameter.numel() for parameter in model.parameters()) > 1000


def test_the_imagenet_recipe_is_the_released_one():
    recipe = RECIPES["imagenet_nalaformer_t"]()
    training, task = recipe.training, recipe.task
    assert (training.epochs, training.warmup, training.cooldown, training.batch_size) == (300, 5, 10, 1024)
    assert (training.learning_rate, training.min_learning_rate, training.warmup_learning_rate) == (1e-3, 1e-5, 1e-6)
    assert training.ema == pytest.approx(0.99996**2)
    assert (task.mixup, task.cutmix, task.smoothing, training.weight_decay, training.repeats) == (0.8, 1.0, 0.1, 0.05, 3)
    assert task.augmentation == Augmentation(auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.4, random_erasing=0.25)


def test_every_setting_of_a_recipe_has_a_name_of_its_own_and_words():
    recipe = RECIPES["cue_grid"]()
    names = [path[-1] for path in keys(recipe)]
    assert len(set(names)) == len(names)
    assert all(setting.meaning for setting in settings_of(recipe))


def test_settings_change_what_they_name():
    recipe = changed(
        RECIPES["cue_grid"](),
        [
            "steps=7",
            "learning_rate=3e-4",
            "compile=true",
            "attention=softmax",
            'data_options={"cells": 4}',
            "augmentation.flip=0",
        ],
    )
    assert (recipe.training.steps, recipe.training.learning_rate, recipe.training.compile) == (7, 3e-4, True)
    assert recipe.attention == "softmax"
    assert recipe.task.data_options == {"cells": 4}
    assert recipe.task.augmentation.flip == 0


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("learning_rat=1", "did you mean 'learning_rate'"),
        ("steps", "key=value"),
        ("steps=many", "steps must be a number"),
        ("compile=maybe", "true or false"),
        ("data_options=3", "JSON object"),
        ("batch_size=-1", "batch_size must not be negative"),
    ],
)
def test_wrong_settings_are_refused_with_a_remedy(assignment, message):
    with pytest.raises(ValueError, match=message):
        changed(RECIPES["cue_grid"](), [assignment])


def test_unknown_models_and_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be created"):
        make_trainer(dataclasses.replace(tiny(), model="no_such_model"), tmp_path)
    with pytest.raises(ValueError, match="embed_dims"):
        make_trainer(dataclasses.replace(tiny(), model_options={"embed_dim": 3}), tmp_path)
    with pytest.raises(ValueError, match="does not take its options"):
        make_trainer(dataclasses.replace(tiny(), model="resnet18", attention="", model_options={"embed_dims": [3]}), tmp_path)
    with pytest.raises(ValueError, match="for models of this library, got attention=nalaformer with model=resnet18; leave"):
        make_trainer(dataclasses.replace(tiny(), model="resnet18", attention="nalaformer", model_options={}), tmp_path)
