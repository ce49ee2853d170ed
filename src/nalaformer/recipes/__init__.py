"""Recipes: named runs, each a function that returns its full description."""

# imported for the recipes that they enter
from . import (  # noqa: F401
    detection,
    generated,
    generation,
    imagenet,
    language,
    own_images,
    segmentation,
    super_resolution,
)
from .export import export_onnx, export_run
from .groups import grouped_recipes
from .overrides import Setting, changed, settings_of
from .recipe import RECIPES, Recipe, recipe_with, recipe_words
from .run import LoadedRun, build_model, load_run, make_trainer
from .sampling import grid_of, load_pipeline
from .use import Evaluation, Prediction, answers_of, evaluate_run, load_answering_run, predict

__all__ = [
    "RECIPES",
    "Evaluation",
    "LoadedRun",
    "Prediction",
    "Recipe",
    "Setting",
    "answers_of",
    "build_model",
    "changed",
    "evaluate_run",
    "export_onnx",
    "export_run",
    "grid_of",
    "grouped_recipes",
    "load_answering_run",
    "load_pipeline",
    "load_run",
    "make_trainer",
    "predict",
    "recipe_with",
    "recipe_words",
    "settings_of",
]
