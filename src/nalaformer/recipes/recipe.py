"""What a recipe is."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..registry import Registry
from ..training import TrainingConfig
from .overrides import changed


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run, described to the last choice."""

    model: str
    """Name of the model: timm's for images, those of this library among them; a size or a folder for language."""
    attention: str = ""
    """Attention of the model (of its linear stages, where stages differ; models of this library only); empty: its own."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Further options of the model."""
    initial_weights: str = "model"
    """"model": as the model starts; "torch": linear layers as torch starts them, which short runs of small models need;
    otherwise a file of weights (safetensors, or a .pth file of tensors) or the folder of a run, for fine-tuning."""
    task: Any
    """What is learned: the description of a task in `nalaformer.tasks.TASKS`."""
    training: TrainingConfig
    """How."""

    def __post_init__(self) -> None:
        if not self.initial_weights:
            raise ValueError('initial_weights must be "model", "torch", a file or the folder of a run, got ""')


RECIPES: Registry[Callable[[], Recipe]] = Registry("recipe")


def every(steps: int) -> dict[str, Any]:
    """Settings of a run that is evaluated and saved after every so many steps."""
    return {"eval_every": steps, "save_every": steps}


def enter(name: str, make: Callable[[], Recipe], words: str) -> None:
    """Register a recipe whose words are put together, as the published figures of a size are."""

    def recipe() -> Recipe:
        return make()

    recipe.__doc__ = words
    RECIPES.register(name)(recipe)


def recipe_with(name: str, settings: list[str]) -> Recipe:
    """Return the recipe of that name with some settings changed, as `changed` does.

    The description of a task may have `check_against(original)`, which refuses data that the recipe is not about.
    """
    original = RECIPES[name]()
    recipe = changed(original, settings)
    if hasattr(recipe.task, "check_against"):
        recipe.task.check_against(original.task, name)
    return recipe


def recipe_words(name: str) -> str:
    """The recipe's own words: command, cost, expected result."""
    return inspect.getdoc(RECIPES[name]) or ""
