"""From a recipe to a trainer, and from a folder back to the model that was trained in it."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..data import seed_everything
from ..tasks import TASKS, task_name
from ..training import Checkpoints, Trainer, TrainingConfig
from ..weight_files import load_all
from .initial_weights import backbone_of, load_weights
from .recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A trained model with what is needed to use it."""

    recipe: Recipe
    model: nn.Module
    task: Any
    facts: dict[str, Any]
    """Facts of its training data, such as the names of its classes; they are saved, so the data is not needed."""
    step: int
    """At which its weights were saved."""


def build_model(recipe: Recipe, facts: dict[str, Any]) -> nn.Module:
    """The recipe's model for data with these facts, with weights that follow from its seed."""
    options = dict(recipe.model_options)
    if recipe.attention:
        options["attention"] = recipe.attention
    seed_everything(recipe.training.seed)
    try:
        model = TASKS[task_name(recipe.task)].create_model(recipe.model, options, facts)
    except TypeError as error:
        if recipe.attention and "'attention'" in str(error):
            raise ValueError(
                f"attention= is for models of this library, got attention={recipe.attention} with model={recipe.model}; "
                "leave it out, or name one of `nalaformer models`"
            ) from error
        raise ValueError(f"the model {recipe.model} does not take its options {options}: {error}") from error
    if recipe.initial_weights == "torch":
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    return model


def make_trainer(recipe: Recipe, folder: str | Path, *, title: str = "training", console: "Console | None" = None) -> Trainer:
    """A trainer for the recipe; the same recipe in the same folder goes on where it was."""
    kind = task_name(recipe.task)
    task = TASKS[kind](recipe.task)
    # a task may have filled in what was left to the data
    recipe = replace(recipe, task=getattr(task, "config", recipe.task))
    settings: dict[str, Any] = {name: value for name, value in asdict(recipe).items() if name != "training"}
    settings |= {"kind": kind, "facts": task.facts()}
    model = build_model(recipe, settings["facts"])
    notes = task.notes() if hasattr(task, "notes") else []
    # a run that goes on has weights of its own, and may have outlived the file
    if recipe.initial_weights not in ("model", "torch") and not Checkpoints(Path(folder) / "checkpoints").steps():
        notes = [*notes, start_from(Path(recipe.initial_weights), model, task)]
    return Trainer(recipe.training, task, model, folder, settings=settings, notes=notes, title=title, console=console)


def start_from(source: Path, model: nn.Module, task: Any) -> str:
    """Put the weights of a file or of a run's best checkpoint into the model; which ones, in words."""
    if source.is_dir():
        run = load_run(source)
        return load_weights(model, task, source, backbone_of(run.task, run.model).state_dict())
    if not source.is_file():
        raise ValueError(
            f'initial_weights must be "model", "torch", a file of weights or the folder of a run, got {str(source)!r}, which '
            "does not exist"
        )
    return load_weights(model, task, source)


def load_run(folder: str | Path, *, step: int | None = None, data: str | None = None) -> LoadedRun:
    """Model and task of a run: its best checkpoint, or that of a step; the moving average where there is one.

    data: another folder of the same classes, for a run whose own has moved.
    """
    checkpoints = Checkpoints(Path(folder) / "checkpoints")
    found = checkpoints.newest()
    if found is None:
        raise ValueError(
            f"{folder} must be the folder of a run, got no checkpoint in {checkpoints.folder}; `nalaformer train` makes one"
        )
    newest, checkpoint = found
    best = checkpoint.state["progress"]["best_step"]
    wanted = step if step is not None else best
    if wanted is not None and wanted != newest:
        if wanted not in checkpoints.steps():
            raise ValueError(f"step must be one that was kept, got {wanted}; {folder} has {checkpoints.steps()}")
        newest, checkpoint = wanted, checkpoints.load(wanted)
    settings = checkpoint.state["settings"]
    if data is not None:
        settings = settings | {"task": settings["task"] | {"data": data}}
    recipe, facts = recipe_from(settings), settings["facts"]
    task = TASKS[settings["kind"]](recipe.task)
    model = build_model(recipe, facts)
    load_all(model, checkpoint.tensors["ema" if "ema" in checkpoint.tensors else "model"], f"{folder}, step {newest}")
    return LoadedRun(recipe=recipe, model=model.eval(), task=task, facts=facts, step=newest)


def recipe_from(settings: dict[str, Any]) -> Recipe:
    """The recipe that a checkpoint's settings describe."""
    parts = {"task": TASKS[settings["kind"]].Config(**settings["task"]), "training": TrainingConfig(**settings["training"])}
    return Recipe(**({name: value for name, value in settings.items() if name not in ("kind", "facts")} | parts))
