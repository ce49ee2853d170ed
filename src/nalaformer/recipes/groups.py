"""Recipes by what they need: data of your own first."""

from ..data import GENERATED
from ..tasks import SequencesConfig
from .recipe import RECIPES

OWN_DATA = (
    *("images", "detection", "segmentation", "super_resolution", "own_images_dit_tiny", "own_images_dit"),
    *("lm_text",),
)
# generated data of the tasks whose data has one name
GENERATED_NAMES = ("overlapping_shapes", "scenes", "shapes", "tales")
GROUPS = (
    "your own data",
    "generated data: nothing is needed",
    "published settings: a data set is needed",
    "long sequences and recall",
)


def group_of(name: str) -> str:
    """The one of GROUPS that the recipe belongs to."""
    if name in OWN_DATA:
        return GROUPS[0]
    task = RECIPES[name]().task
    if isinstance(task, SequencesConfig):
        return GROUPS[3]
    return GROUPS[1] if task.data in (*GENERATED.names(), *GENERATED_NAMES) else GROUPS[2]


def grouped_recipes() -> dict[str, list[str]]:
    """The names in each of GROUPS, in the order in which they were entered; data of your own from the simplest on."""
    names = [*OWN_DATA, *(name for name in RECIPES.names() if name not in OWN_DATA)]
    return {group: [name for name in names if group_of(name) == group] for group in GROUPS}
