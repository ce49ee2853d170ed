"""Every field of a recipe, and of the task on text, does what its documentation says."""

import json
from dataclasses import asdict, fields, replace
from functools import reduce

import pytest
import torch
from torch import nn

from helpers.option_effects import Effects
from nalaformer.data.text import ShardWriter, Tales, fingerprint, train_tokenizer
from nalaformer.recipes import RECIPES, Recipe, build_model, changed, make_trainer
from nalaformer.recipes.overrides import keys
from nalaformer.tasks import (
    Classification,
    ClassificationConfig,
    DetectionConfig,
    LanguageConfig,
    LanguageModelling,
    SuperResolutionConfig,
    task_name,
)
from nalaformer.training import TrainingConfig

pytestmark = pytest.mark.usefixtures("one_thread")
RECIPE, LANGUAGE = (Effects(field.name for field in fields(kind)) for kind in (Recipe, LanguageConfig))


def test_no_setting_is_without_a_test_of_its_effect():
    assert [*RECIPE.missing(), *LANGUAGE.missing()] == []


# ---- settings of the command line

ONE_OF_EACH_TASK = {task_name(RECIPES[name]().task): name for name in RECIPES.names()}
# of those that there are
OTHER_NAMES = {"precision": "bf16", "on_corrupt": "stop", "schedule": "linear", "initial_weights": "torch", "packing": "whole"}
OTHER_NAMES |= {"detector": "mask_rcnn", "objective": "ddpm", "levels": "uniform"}


def another(name, value):
    """Another value of that setting."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {"cells": 7}
    if isinstance(value, tuple):
        return (3, 7)
    if isinstance(value, str):
        return "another"
    return value + 1 if isinstance(value, int) else value / 2 + 0.125


@pytest.mark.parametrize("task", ONE_OF_EACH_TASK)
def test_a_key_of_the_command_line_changes_its_setting_and_no_other(task):
    recipe = RECIPES[ONE_OF_EACH_TASK[task]]()
    recipe = replace(recipe, training=replace(recipe.training, schedule="cosine", precision="float32"), initial_weights="model")
    # a run has one of them, and the other takes its place
    paths = [path for path in keys(recipe) if path[-1] not in ("steps", "epochs")]
    assert len(paths) > 35

    def values(config):
        return {path: reduce(getattr, path, config) for path in paths}

    before = values(recipe)
    for path in paths:
        value = another(path[-1], before[path])
        text = json.dumps(value) if isinstance(value, dict | bool) else str(value)
        if isinstance(value, tuple):
            text = ",".join(map(str, value))
        for key in (path[-1], ".".join(path)):
            assert values(changed(recipe, [f"{key}={text}"])) == before | {path: value}


@pytest.mark.parametrize("settings", [["steps=0", "epochs=2.5"], ["epochs=2.5", "steps=0"]])
def test_settings_that_are_valid_together_alone_may_come_in_any_order(settings):
    training = changed(RECIPES["cue_grid"](), settings).training
    assert (training.epochs, training.steps) == (2.5, 0)


def test_a_duration_in_the_other_unit_takes_the_place_of_the_old_one():
    # 300 epochs, 5 of them warm-up, and 10 of cool-down
    training = changed(RECIPES["imagenet_nalaformer_t"](), ["steps=60"]).training
    assert (training.steps, training.epochs, training.warmup, training.cooldown) == (60, 0, 1, 0)
    assert training.total_steps(46) == 60
    # 650 steps, 65 of them warm-up
    training = changed(RECIPES["cue_grid"](), ["epochs=2"]).training
    assert (training.steps, training.epochs, training.warmup) == (0, 2, pytest.approx(0.2))
    # what is given counts as it is given
    training = changed(RECIPES["imagenet_nalaformer_t"](), ["warmup=7", "steps=60", "cooldown=2"]).training
    assert (training.warmup, training.cooldown, training.total_steps(46)) == (7, 2, 62)
    # in the same unit they stay
    training = changed(RECIPES["imagenet_nalaformer_t"](), ["epochs=2"]).training
    assert (training.warmup, training.cooldown, training.total_steps(46)) == (5, 10, 552)
    with pytest.raises(ValueError, match="by epochs or by steps"):
        changed(RECIPES["cue_grid"](), ["steps=5", "epochs=1"])
    for name, usual in (("imagenet_nalaformer_t", "300 epochs"), ("cue_grid", "650 steps")):
        with pytest.raises(ValueError, match=f"at least one step, got steps=0; leave it out for {usual}"):
            changed(RECIPES[name](), ["steps=0"])
        with pytest.raises(ValueError, match="steps must not be negative, got -5"):
            changed(RECIPES[name](), ["steps=-5"])


@pytest.mark.parametrize("name", ["cue_grid", "imagenet_nalaformer_t", "lm_tiny"])
def test_a_fraction_is_read_where_the_recipe_has_a_whole_number(name):
    training = changed(RECIPES[name](), ["warmup=0.5", "cooldown=1.5", "weight_decay=0"]).training
    assert (training.warmup, training.cooldown, training.weight_decay) == (0.5, 1.5, 0)


def test_yes_and_no_are_read_in_their_words():
    for word, value in (("true", True), ("Yes", True), ("1", True), ("false", False), ("No", False), ("0", False)):
        before = changed(RECIPES["cue_grid"](), [f"compile={str(not value).lower()}"])
        assert before.training.compile is not value
        assert changed(before, [f"compile={word}"]).training.compile is value


def test_numbers_are_listed_with_commas():
    training = changed(RECIPES["coco_mask_rcnn_1x"](), ["decay_at=7.5, 9", "short_sides="])
    assert training.training.decay_at == (7.5, 9)
    assert training.task.short_sides == ()
    with pytest.raises(ValueError, match="short_sides must be numbers with commas between them, got '480;800'"):
        changed(RECIPES["coco_mask_rcnn_1x"](), ["short_sides=480;800"])


def test_the_last_of_two_values_counts():
    assert changed(RECIPES["cue_grid"](), ["batch_size=8", "training.batch_size=16"]).training.batch_size == 16


def test_defaults_are_those_that_figures_were_measured_with():
    """Recipes leave these out: another default changes every run of theirs."""
    training = {
        **{"accumulate": 1, "optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.05, "beta2": 0.999, "epsilon": 1e-8},
        **{"schedule": "cosine", "warmup": 0, "warmup_learning_rate": 1e-6, "min_learning_rate": 1e-5, "cooldown": 0},
        **{"clip_norm": 0, "clip_value": 0, "ema": 0, "repeats": 1, "precision": "float32", "seed": 0, "batch_size": 64},
        **{"decay_at": (), "keep": 2, "bad_steps": 10, "on_corrupt": "skip", "most_corrupt": 100},
        **{"eval_every": 0, "save_every": 0},
    }
    assert training.items() <= asdict(TrainingConfig(steps=1)).items()
    augmentation = {"auto_augment": "", "color_jitter": 0.0, "random_erasing": 0.0, "smallest_crop": 0.08, "flip": 0.5}
    images = {
        "holdout": 0.0,
        "image_size": 224,
        "eval_crop": 0.9,
        "mixup": 0.0,
        "cutmix": 0.0,
        "smoothing": 0.0,
        "data_seed": 0,
    }
    images |= {"train_samples": 100_000, "eval_samples": 2_000, "data_options": {}, "augmentation": augmentation}
    assert asdict(ClassificationConfig(data="d")) == images | {"data": "d"}
    text = {"window": 2048, "packing": "stream", "tokenizer": "", "data_seed": 0, "vocab_size": 512}
    assert asdict(LanguageConfig(data="d")) == text | {"data": "d", "train_documents": 10_000, "eval_documents": 200}
    enlarging = {"scale": 2, "patch_size": 192, "patches_per_image": 100, "eval_crop": 0, "kept_mib": 2048, "data_seed": 0}
    enlarging |= {"train_samples": 32, "eval_samples": 8, "image_size": 160, "generated_folder": "runs/data"}
    assert asdict(SuperResolutionConfig(data="d")) == enlarging | {"data": "d"}
    objects = {"data_options": {}, "data_seed": 0, "train_samples": 1_000, "eval_samples": 200, "generated_folder": "runs/data"}
    objects |= {"detector": "retinanet", "short_sides": (800,), "eval_short_side": 800, "longest_side": 1333}
    assert asdict(DetectionConfig(data="d")) == objects | {"data": "d", "flip": 0.5, "empty_images": True, "holdout": 0.0}


# ---- recipes

DATA_OF_RECIPES = {
    **{name: name for name in ("cue_grid", "count_grid", "marked_pair")},
    **{"lm_tiny": "tales", "lm_text": "tokens", "images": "images"},
    **{f"ade20k_{decoder}_nalaformer_{size}": "ade20k" for decoder in ("semantic_fpn", "upernet") for size in "ts"},
    **{"scenes": "scenes", "cityscapes_upernet_nalaformer_t": "cityscapes", "segmentation": "your_folder"},
    **{f"div2k_x{scale}": "DIV2K" for scale in (2, 3, 4)},
    **{"super_resolution_small": "scenes", "super_resolution": "photographs"},
    **{"shapes_retinanet": "overlapping_shapes", "shapes_mask_rcnn": "overlapping_shapes", "detection": "my_objects"},
    **{"shapes_dit_tiny": "shapes", "shapes_dit": "shapes", "own_images_dit": "images", "own_images_dit_tiny": "images"},
    **{f"coco_{detector}_{schedule}": "coco" for detector in ("retinanet", "mask_rcnn") for schedule in ("1x", "3x")},
}


@pytest.mark.parametrize("name", RECIPES.names())
def test_a_recipe_learns_from_the_data_of_its_name(name):
    expected = "imagenet" if name.startswith("imagenet") else "slimpajama" if name.startswith("nala_lm") else None
    assert RECIPES[name]().task.data == (expected or DATA_OF_RECIPES[name])


TINY = {
    **{"embed_dims": [16], "depths": [1], "num_heads": [2], "mlp_ratios": 1, "attention_stages": "l", "layer_scale": [None]},
    **{"key_reduction": 1, "softmax_key_reduction": 1, "patch_size": 8, "img_size": 48, "global_pool": "max"},
}
FACTS = {"classes": ["a", "b", "c"]}


def recipe_of(**changes):
    usual = {
        "model": "vit_nala_tiny_patch16",
        "attention": "linear",
        "model_options": TINY,
        "task": ClassificationConfig(data="cue_grid", train_samples=8, eval_samples=8),
        "training": TrainingConfig(steps=2, batch_size=4, device="cpu"),
    }
    return Recipe(**(usual | changes))


def layers_of(model):
    return sorted({type(module).__name__ for module in model.modules()})


@RECIPE.of("model")
def test_the_model_is_the_one_that_is_named():
    model = build_model(recipe_of(model="resnet10t", attention="", model_options={}), FACTS)
    assert type(model).__name__ == "ResNet"
    assert model.num_classes == 3


@RECIPE.of("attention")
def test_the_model_has_the_attention_that_is_named():
    softmax, linear = (build_model(recipe_of(attention=name), FACTS) for name in ("softmax", "linear"))
    assert layers_of(softmax) != layers_of(linear)
    text = Recipe(model="nano", attention="softmax", task=LanguageConfig(data="tales"), training=TrainingConfig(steps=1))
    facts = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "window": 8}
    assert build_model(text, facts).config.mixers == "softmax"


@RECIPE.of("model_options")
def test_options_reach_the_model():
    sizes = [
        sum(p.numel() for p in build_model(recipe_of(model_options=TINY | {"depths": [depth]}), FACTS).parameters())
        for depth in (1, 2, 3)
    ]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 1000


@RECIPE.of("initial_weights")
def test_linear_layers_start_as_torch_starts_them():
    def largest(initial_weights):
        model = build_model(recipe_of(initial_weights=initial_weights), FACTS)
        return max(
            module.weight.abs().max().item() * module.in_features**0.5
            for module in model.modules()
            if isinstance(module, nn.Linear)
        )

    # uniform up to 1 / sqrt(inputs), against a normal distribution of standard deviation 0.02
    assert 0.9 < largest("torch") <= 1
    assert largest("model") < 0.6


@RECIPE.of("task")
def test_the_task_is_the_one_that_is_described(tmp_path):
    task = ClassificationConfig(data="count_grid", train_samples=8, eval_samples=5)
    trainer = make_trainer(recipe_of(task=task), tmp_path)
    assert isinstance(trainer.task, Classification)
    assert len(trainer.task.classes) == trainer.model.num_classes == 8
    assert trainer.fit().metrics["images"] == 5


@RECIPE.of("training")
def test_the_training_is_the_one_that_is_described(tmp_path):
    trainer = make_trainer(recipe_of(training=TrainingConfig(steps=3, batch_size=2, seed=5, device="cpu")), tmp_path)
    assert trainer.config.batch_size == 2
    assert trainer.fit().step == 3
    # the weights follow from its seed
    weights = [
        torch.cat([p.detach().flatten() for p in build_model(recipe_of(training=training), FACTS).parameters()])
        for training in (trainer.config, replace(trainer.config, seed=6), trainer.config)
    ]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


# ---- text


def language(**settings):
    config = LanguageConfig(data="tales", window=40, train_documents=30, eval_documents=5, vocab_size=300)
    return LanguageModelling(replace(config, **settings))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Tokens of two documents in each split, and their tokenizer, which lies elsewhere."""
    folder = tmp_path_factory.mktemp("tokens")
    words = train_tokenizer(Tales(split="train", documents=20), vocab_size=280)
    words.save_pretrained(str(folder / "elsewhere"))
    for split, first in (("train", 1), ("val", 100)):
        writer = ShardWriter(folder / "data" / split, vocab_size=280, tokenizer=fingerprint(words))
        for size in (5, 6):
            writer.add(range(first, first + size))
        writer.close()
    return folder


@LANGUAGE.of("data")
def test_text_is_generated_or_the_tokens_of_a_folder(tokens):
    task = language()
    assert (
        task.tokenizer.decode(task.train_data[0]["input_ids"].tolist()).removeprefix("<|endoftext|>") in task.tales("train")[0]
    )
    task = language(data=str(tokens / "data"), tokenizer=str(tokens / "elsewhere"), window=5)
    assert task.train_data[0]["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert task.eval_data[0]["input_ids"].tolist() == [100, 101, 102, 103, 104]


@LANGUAGE.of("window")
def test_samples_have_so_many_tokens():
    for window in (16, 40):
        task = language(window=window)
        assert task.train_data[0]["input_ids"].shape == task.eval_data[0]["input_ids"].shape == (window,)
        assert task.facts()["window"] == window
        assert task.create_model("nano", {}, task.facts()).config.max_position_embeddings == window


@LANGUAGE.of("packing")
def test_documents_are_cut_or_whole(tokens):
    settings = {"data": str(tokens / "data"), "tokenizer": str(tokens / "elsewhere"), "window": 8}
    stream, whole = (language(packing=packing, **settings) for packing in ("stream", "whole"))
    assert stream.train_data[0]["input_ids"].tolist() == [1, 2, 3, 4, 5, 1, 2, 3]
    assert whole.train_data[0]["input_ids"].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert whole.eval_data[1]["input_ids"].tolist() == [100, 101, 102, 103, 104, 105, 0, 0]


@LANGUAGE.of("tokenizer")
def test_the_tokenizer_of_the_folder_is_used(tokens):
    assert len(language(tokenizer=str(tokens / "elsewhere")).tokenizer) == 280
    assert len(language(data=str(tokens / "data"), tokenizer=str(tokens / "elsewhere")).tokenizer) == 280
    with pytest.raises(ValueError, match="data without tokenizer/; `nalaformer tokenize"):
        language(data=str(tokens / "data")).tokenizer  # noqa: B018


@LANGUAGE.of("data_seed")
def test_a_seed_gives_other_tales_in_both_splits():
    zero, one = language(), language(data_seed=1)
    for split in ("train", "val"):
        assert not set(zero.tales(split)) & set(one.tales(split))


@LANGUAGE.of("train_documents", "eval_documents")
def test_so_many_tales_are_generated():
    task = language(train_documents=21, eval_documents=4)
    assert (task.train_data.data.documents, task.eval_data.data.documents) == (21, 4)


@LANGUAGE.of("vocab_size")
def test_the_trained_tokenizer_has_so_many_entries():
    for size in (270, 330):
        task = language(vocab_size=size)
        assert len(task.tokenizer) == task.facts()["vocab_size"] == size
        assert task.create_model("nano", {}, task.facts()).config.vocab_size == size
