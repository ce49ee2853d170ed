"""Colours of classes, and the classes of Cityscapes."""

import colorsys
from typing import NamedTuple


class CityscapesClass(NamedTuple):
    name: str
    number: int
    """Its id in labelIds."""
    colour: tuple[int, int, int]


# by label: the data set's trainIds
CITYSCAPES = (
    CityscapesClass("road", 7, (128, 64, 128)),
    CityscapesClass("sidewalk", 8, (244, 35, 232)),
    CityscapesClass("building", 11, (70, 70, 70)),
    CityscapesClass("wall", 12, (102, 102, 156)),
    CityscapesClass("fence", 13, (190, 153, 153)),
    CityscapesClass("pole", 17, (153, 153, 153)),
    CityscapesClass("traffic light", 19, (250, 170, 30)),
    CityscapesClass("traffic sign", 20, (220, 220, 0)),
    CityscapesClass("vegetation", 21, (107, 142, 35)),
    CityscapesClass("terrain", 22, (152, 251, 152)),
    CityscapesClass("sky", 23, (70, 130, 180)),
    CityscapesClass("person", 24, (220, 20, 60)),
    CityscapesClass("rider", 25, (255, 0, 0)),
    CityscapesClass("car", 26, (0, 0, 142)),
    CityscapesClass("truck", 27, (0, 0, 70)),
    CityscapesClass("bus", 28, (0, 60, 100)),
    CityscapesClass("train", 31, (0, 80, 100)),
    CityscapesClass("motorcycle", 32, (0, 0, 230)),
    CityscapesClass("bicycle", 33, (119, 11, 32)),
)


def spread_colours(count: int) -> tuple[tuple[int, int, int], ...]:
    """Colours whose neighbours are far apart: hues in steps of the golden ratio, in three brightnesses."""
    colours = []
    for number in range(count):
        hue, brightness = number * 0.618034 % 1, (1.0, 0.75, 0.5)[number // 12 % 3]
        red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, brightness)
        colours.append((round(255 * red), round(255 * green), round(255 * blue)))
    return tuple(colours)
