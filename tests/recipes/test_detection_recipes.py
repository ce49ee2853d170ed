"""The recipes that find objects are what their words say."""

import pytest

from nalaformer.recipes import RECIPES, build_model, recipe_words

FACTS = {"classes": ["a", "b"]}


@pytest.mark.parametrize(("schedule", "epochs", "falls"), [("1x", 12, (8, 11)), ("3x", 36, (27, 33))])
@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_the_coco_recipes_have_the_published_settings(detector, schedule, epochs, falls):
    name = f"coco_{detector}_{schedule}"
    recipe = RECIPES[name]()
    training, task = recipe.training, recipe.task
    assert (training.optimizer, training.learning_rate, training.weight_decay) == ("adamw", 1e-4, 1e-4)
    assert (training.epochs, training.schedule, training.decay_at, training.cooldown) == (epochs, "steps", falls, 0)
    assert (task.detector, task.eval_short_side, task.longest_side) == (detector, 800, 1333)
    # several sizes in the long schedule alone
    assert (len(task.short_sides) > 1) is (schedule == "3x")
    assert "published, not measured here" in recipe_words(name) or "none published" in recipe_words(name)


@pytest.mark.parametrize("name", ["shapes_retinanet", "shapes_mask_rcnn", "detection"])
def test_the_model_of_a_recipe_has_the_detector_of_its_task(name):
    recipe = RECIPES[name]()
    model = build_model(recipe, FACTS | {"detector": recipe.task.detector})
    assert model.config.kind == recipe.task.detector
    # a hundred thousand to ten million: a CPU trains it
    assert 1e5 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e7


def test_data_of_ones_own_has_a_plain_duration():
    training = RECIPES["detection"]().training
    assert (training.epochs, training.repeats, training.cooldown) == (20, 1, 0)
