"""Objects anywhere in the image, two of them marked; the label is how those two relate."""

import numpy as np
from numpy.random import Generator

from ..field_types import check_side
from .generated import GENERATED, Generated, Image
from .glyphs import glyph_masks

COLOURS = np.array([[1, 0.2, 0.2], [0.2, 0.9, 0.3], [0.3, 0.4, 1], [1, 0.9, 0.2], [0.9, 0.3, 1], [0.2, 0.9, 0.9]], np.float32)
SHAPES = 4


@GENERATED.register("marked_pair")
class MarkedPair(Generated):
    """Two objects stand in white frames; the label says whether they share shape and colour: four classes, equally often.

    No patch and no histogram tells: the unmarked objects are drawn so that pairs of every relation abound, and the marked two
    are far apart as often as near.
    """

    classes = ("both differ", "same colour", "same shape", "both same")

    def __init__(
        self, *, split: str, samples: int, seed: int = 0, image_size: int = 64, object_size: int = 9, distractors: int = 10
    ) -> None:
        super().__init__(split=split, samples=samples, seed=seed)
        check_side("image_size", image_size)
        frame = object_size + 4
        slots = image_size // frame
        if slots**2 < distractors + 2:
            raise ValueError(
                f"the objects need a place each: {distractors} + 2 of {frame} pixels do not fit into {image_size} x "
                f"{image_size}; choose a larger image_size or fewer distractors"
            )
        if distractors < 4:
            raise ValueError(f"distractors must be at least 4, so that pairs of every relation abound, got {distractors}")
        self.image_size, self.object_size, self.distractors = image_size, object_size, distractors
        self.slots, self.room = slots, image_size // slots
        self.masks = glyph_masks(object_size)[:SHAPES]

    def draw(self, random: Generator) -> tuple[Image, int]:
        label = int(random.integers(4))
        shapes, colours = random.integers(SHAPES, size=2), random.integers(len(COLOURS), size=2)
        shapes[1] = shapes[0] if label & 2 else (shapes[0] + random.integers(1, SHAPES)) % SHAPES
        colours[1] = colours[0] if label & 1 else (colours[0] + random.integers(1, len(COLOURS))) % len(COLOURS)
        shapes = np.concatenate((shapes, random.integers(SHAPES, size=self.distractors)))
        colours = np.concatenate((colours, random.integers(len(COLOURS), size=self.distractors)))
        pixels = np.zeros((3, self.image_size, self.image_size), dtype=np.float32)
        size = self.object_size
        places = random.permutation(self.slots**2)[: len(shapes)]
        # a few pixels to and fro: places are no patches
        shifts = random.integers(2, self.room - size - 1, size=(len(shapes), 2))
        for number, (shape, colour, place, shift) in enumerate(zip(shapes, colours, places, shifts, strict=True)):
            top, left = np.array(divmod(int(place), self.slots)) * self.room + shift
            if number < 2:
                pixels[:, top - 2 : top + size + 2, left - 2 : left + size + 2] = 1
                pixels[:, top - 1 : top + size + 1, left - 1 : left + size + 1] = 0
            pixels[:, top : top + size, left : left + size] = COLOURS[colour][:, None, None] * self.masks[shape]
        return pixels, label
