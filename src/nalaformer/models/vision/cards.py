"""Model cards of the backbones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...registry import unknown_name
from .known_costs import KNOWN_COSTS
from .multiply_adds import count_multiply_adds
from .variants import VARIANTS, build

if TYPE_CHECKING:
    from rich.table import Table


CAPTION = (
    "stages: l linear, v softmax. Multiply-adds of one image of 224 x 224, of 384 x 384 where the name ends so. top-1: as the "
    "authors publish it, with weights that they have released or announced; released files load by checkpoint_path=, and with "
    "random weights these networks agree with the authors' code."
)


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The size, cost and published accuracy of a backbone; size and cost are counted on its layers."""

    name: str
    attention: str
    """The method of the linear stages."""
    stages: str
    """"l" linear, "v" softmax, a letter per stage."""
    parameters: int
    """The number of parameters with 1000 classes."""
    multiply_adds: int
    """The multiply-adds of one image of 224 x 224, or 384 x 384 if the name ends so."""
    published_top1: float | None
    weights: str
    """"released" or "announced" by the authors, or empty."""
    note: str


def count(name: str) -> tuple[int, int]:
    """Count the parameters with 1000 classes and the multiply-adds of one image of the name's size, on a meta model."""
    model = build(name, device="meta")
    return sum(parameter.numel() for parameter in model.parameters()), count_multiply_adds(model, model.config.input_size)


def card(name: str) -> ModelCard:
    """Return the card of a backbone."""
    if name not in VARIANTS:
        raise unknown_name("backbone", name, VARIANTS)
    parameters, multiply_adds = KNOWN_COSTS[name] if name in KNOWN_COSTS else count(name)
    variant = VARIANTS[name]
    config = variant.config
    stages = ("l" if config.is_linear(stage) else "v" for stage in range(len(config.depths)))
    return ModelCard(
        name=name,
        attention=config.attention,
        stages="".join(stages),
        parameters=parameters,
        multiply_adds=multiply_adds,
        published_top1=variant.published_top1,
        weights=variant.weights,
        note=variant.note,
    )


def cards() -> list[ModelCard]:
    """Return the cards of all backbones."""
    return [card(name) for name in VARIANTS]


def cards_table(shown: Sequence[ModelCard]) -> "Table":
    """Return a table for a terminal; counted and published values have their own columns."""
    from rich.table import Table

    table = Table(caption=CAPTION, caption_justify="left")
    for heading in ("name", "attention", "stages"):
        table.add_column(heading, no_wrap=True)
    for heading in ("parameters", "multiply-adds", "top-1"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    for found in shown:
        accuracy = "-" if found.published_top1 is None else f"{found.published_top1:.1f}"
        size, cost = f"{found.parameters / 1e6:.1f} M", f"{found.multiply_adds / 1e9:.2f} G"
        table.add_row(found.name, found.attention, found.stages, size, cost, accuracy, found.weights or "-")
    return table


def notes_of(shown: Sequence[ModelCard]) -> list[str]:
    """Return a line for each note of these cards, with the names that share it."""
    names: dict[str, list[str]] = {}
    for found in shown:
        if found.note:
            names.setdefault(found.note, []).append(found.name)
    return [f"{', '.join(sharing)}: {note}" for note, sharing in names.items()]
