"""Recipes by what they need: data of your own first."""

from ..data import GENERATED
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
    "tasks of other packages",
)


def group_of(name: str) -> str:
    """Return the one of GROUPS that the recipe belongs to."""
    if name in OWN_DATA:
        return GROUPS[0]
    task = RECIPES[name]().task
    if not type(task).__module__.startswith("nalaformer."):
        return GROUPS[3]
    return GROUPS[1] if task.data in (*GENERATED.names(), *GENERATED_NAMES) else GROUPS[2]


def grouped_recipes() -> dict[str, list[str]]:
    """Return the names in each of GROUPS that has any, in the order of registration; your own data from the simplest on."""
    groups: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name in [*OWN_DATA, *(name for name in RECIPES.names() if name not in OWN_DATA)]:
        groups[group_of(name)].append(name)
    return {group: names for group, names in groups.items() if names}
