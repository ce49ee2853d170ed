"""Recipes: named runs, each a function that returns its full description."""

from . import generated, imagenet  # noqa: F401  (enter their recipes)
from .overrides import changed
from .recipe import RECIPES, Recipe, describe
from .run import LoadedRun, build_model, load_run, make_trainer

__all__ = ["RECIPES", "LoadedRun", "Recipe", "build_model", "changed", "describe", "load_run", "make_trainer"]
