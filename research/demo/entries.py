"""Methods that the demo compares, and their tasks."""

from dataclasses import dataclass, field, replace
from typing import Any

from nalaformer.recipes import Recipe

from ..recipes import RECIPES


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the demo."""

    label: str
    attention: str
    """Name of the method or feature map."""
    contrast: str = "none"
    """The layer's contrast: "none" or "learned"."""
    contrast_offset: float = 0.0
    """Where a learned one starts."""


# the feature map is all that differs, and the contrast where an entry has one: norm, gate, convolutions and positions inside
# attention are off for everyone
SHELL = {"norm": False, "gate": "none"}
OURS = Entry(label="channel softmax + contrast (ours)", attention="channel_softmax", contrast="learned", contrast_offset=-0.75)
ENTRIES = (
    Entry(label="softmax", attention="softmax"),
    Entry(label="linear (ReLU)", attention="linear"),
    Entry(label="FLatten", attention="flatten"),
    Entry(label="PolaFormer", attention="polaformer"),
    Entry(label="MirrorLA", attention="mirrorla"),
    Entry(label="NaLaFormer", attention="nalaformer"),
    Entry(label="Hedgehog", attention="hedgehog"),
    OURS,
)
# not run by default, since each makes the demo longer by an eighth: 1 + ELU points as plain ReLU does, and our map points less
# well without its contrast
MORE_ENTRIES = (
    Entry(label="1 + ELU", attention="elu"),
    Entry(label="channel softmax", attention="channel_softmax"),
)


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """One column of the demo."""

    name: str
    recipe: str
    needs: str
    """Which attention: "sharp" or "flat"."""
    steps: int
    data_options: dict[str, Any] = field(default_factory=dict)


# accuracy at the first grows smoothly with how sharp attention can be; at the second all weights should be alike
TASKS = (
    DemoTask(name="pointing", recipe="pointing", needs="sharp", steps=500, data_options={"keys": 32}),
    DemoTask(name="majority", recipe="majority", needs="flat", steps=200, data_options={"keys": 32}),
)


def demo_recipe(task: DemoTask, entry: Entry, *, seed: int, steps: int | None = None) -> Recipe:
    """The task's recipe, cut to seconds, with the entry's attention; seeds change weights and order of the data."""
    base = RECIPES[task.recipe]()
    steps = steps or task.steps
    training = replace(
        base.training,
        seed=seed,
        steps=steps,
        batch_size=32,
        learning_rate=3e-3,
        warmup=min(50, steps // 10),
        # five points make a curve; shorter runs are trials
        eval_every=steps // 5 if steps >= 100 else steps,
        save_every=0,
        device="cpu",
    )
    # nothing is seen twice
    data = replace(base.task, train_samples=32 * steps, eval_samples=300, data_options=task.data_options)
    options = SHELL | {"contrast": entry.contrast, "contrast_offset": entry.contrast_offset}
    return replace(
        base,
        attention=entry.attention,
        model_options=base.model_options | {"attention_options": options},
        task=data,
        training=training,
    )
