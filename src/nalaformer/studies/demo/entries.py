"""Which methods the demo compares, and on what."""

from dataclasses import dataclass, field, replace
from typing import Any

from ...recipes import RECIPES, Recipe


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the demo."""

    label: str
    attention: str
    """Name of the method."""
    options: dict[str, Any] = field(default_factory=dict)
    """Parts of the layer that differ from the method's own."""


# convolutions and positions inside attention are off for all: they hide what the maps do. Norm and gate are each method's own,
# and NaLaFormer's are also given to plain linear attention, to tell the map from what is around it
ENTRIES = (
    Entry(label="softmax", attention="softmax"),
    Entry(label="linear (ReLU)", attention="linear"),
    Entry(label="FLatten", attention="flatten"),
    Entry(label="PolaFormer", attention="polaformer"),
    Entry(label="MirrorLA", attention="mirrorla"),
    Entry(label="NaLaFormer", attention="nalaformer"),
    Entry(label="ReLU, NaLa's shell", attention="linear", options={"norm": True, "gate": "silu"}),
)


def demo_recipe(entry: Entry, *, seed: int, steps: int | None = None) -> Recipe:
    """The recipe cue_grid with the entry's attention; seeds change weights and order of the data."""
    base = RECIPES["cue_grid"]()
    model_options = dict(base.model_options)
    model_options["attention_options"] = model_options["attention_options"] | entry.options
    steps = base.training.steps if steps is None else steps
    training = replace(
        base.training,
        seed=seed,
        steps=steps,
        warmup=min(base.training.warmup, steps // 10),
        # five points make a curve; shorter runs are trials
        eval_every=steps // 5 if steps >= 100 else steps,
        save_every=0,
        device="cpu",
    )
    task = replace(base.task, eval_samples=500)
    return replace(base, attention=entry.attention, model_options=model_options, task=task, training=training)
