"""Grids of coloured glyphs with one marked cell: pointing, which needs sharp attention, and counting, which needs flat."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ..field_types import check_side
from .generated import GENERATED, Generated, Image
from .glyphs import NAMES, glyph_masks


@dataclass(kw_only=True, eq=False)
class GlyphGrid(Generated):
    """A square of `cells` x `cells` cells of `cell_size` pixels: coloured glyphs, blanks, and one cell with a white frame.

    Colours are points of a sphere around grey, on black: all of them differ from each other by direction alone.
    """

    cells: int = 6
    cell_size: int = 8
    glyphs: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.glyphs <= len(NAMES):
            raise ValueError(f"glyphs must be between 2 and {len(NAMES)}, got {self.glyphs}")
        if (self.cells**2 - 1) // self.glyphs < 1:
            raise ValueError(f"a grid must have room for every glyph and the marked cell, got {self.cells**2} cells")
        self.image_size = self.cells * self.cell_size
        check_side("cells x cell_size", self.image_size)
        self.masks = glyph_masks(self.cell_size)[: self.glyphs]

    def place(self, random: Generator, patches: NDArray[np.float32]) -> tuple[Image, NDArray[np.int64]]:
        """Put patches [P, 3, size, size] into random cells, the rest stays black: the image, and the cell of each patch."""
        places = random.permutation(self.cells**2)[: len(patches)]
        filled = np.zeros((self.cells**2, *patches.shape[1:]), dtype=np.float32)
        filled[places] = patches
        rows = filled.reshape(self.cells, self.cells, 3, self.cell_size, self.cell_size)
        return rows.transpose(2, 0, 3, 1, 4).reshape(3, self.image_size, self.image_size), places

    def painted(self, directions: NDArray[np.float32], kinds: NDArray[np.int64]) -> NDArray[np.float32]:
        """Glyphs [P, 3, size, size] of these kinds in the colours grey + direction / 2; directions: [P, 3], unit vectors."""
        return (0.5 + 0.5 * directions)[:, :, None, None] * self.masks[kinds][:, None]

    def framed(self, inside: NDArray[np.float32]) -> NDArray[np.float32]:
        """The marked cell: a white frame around `inside`, which broadcasts to [3, size - 2, size - 2]."""
        patch = np.ones((3, self.cell_size, self.cell_size), dtype=np.float32)
        patch[:, 1:-1, 1:-1] = inside
        return patch


@GENERATED.register("cue_grid")
@dataclass(kw_only=True, eq=False)
class CueGrid(GlyphGrid):
    """The marked cell shows a colour; the label is the glyph that has it.

    Every glyph appears equally often and the colours say nothing about it, so without comparing the marked cell to all others
    nothing beats chance. No colour but the answer's lies within `separation` degrees of the cue, seen from grey.

    Copies of each glyph: 1 + floor(most * u^crowding), u uniform. Sparse images show the rule, full ones test sharpness; the
    eval split is full always.
    """

    separation: float = 10.0
    crowding: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.separation <= 60:
            raise ValueError(f"separation must be between 0 and 60 degrees: few colours lie beyond, got {self.separation}")
        if self.crowding <= 0:
            raise ValueError(f"crowding must be positive, got {self.crowding}")
        self.classes = NAMES[: self.glyphs]

    def draw(self, random: Generator) -> tuple[Image, int]:
        return self.arranged(random)[:2]

    def cue_and_answer(self, index: int) -> tuple[int, int]:
        """In which cells, counted row by row, cue and answer of a sample lie."""
        return self.arranged(self.random_of(index))[2]

    def arranged(self, random: Generator) -> tuple[Image, int, tuple[int, int]]:
        copies = (self.cells**2 - 1) // self.glyphs
        if self.split == "train":
            copies = 1 + int(copies * random.random() ** self.crowding)
        kinds = np.repeat(np.arange(self.glyphs), copies)
        target = int(random.integers(len(kinds)))
        directions = self.directions(random, len(kinds))
        cue = directions[0].copy()
        directions[[0, target]] = directions[[target, 0]]
        marked = self.framed((0.5 + 0.5 * cue)[:, None, None])
        pixels, places = self.place(random, np.concatenate((marked[None], self.painted(directions, kinds))))
        return pixels, int(kinds[target]), (int(places[0]), int(places[1 + target]))

    def directions(self, random: Generator, count: int) -> NDArray[np.float32]:
        """`count` unit vectors, all but the first at least `separation` degrees away from the first: [count, 3]."""
        limit = math.cos(math.radians(self.separation))
        # at 60 degrees a quarter of all directions is too near: three times as many leave enough
        drawn = unit_vectors(random, 3 * count + 12)
        far = drawn[1:][drawn[1:] @ drawn[0] < limit]
        assert len(far) >= count - 1
        return np.concatenate((drawn[:1], far[: count - 1]))


@GENERATED.register("count_grid")
@dataclass(kw_only=True, eq=False)
class CountGrid(GlyphGrid):
    """The control: the marked cell shows a glyph; the label is how many other cells show it, 1 to `most`.

    Attention must be spread over all of them. How many cells are filled says nothing: it is the same in every image.
    """

    most: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.most <= (self.cells**2 - 1) // 2:
            size = f"{self.cells} x {self.cells}"
            raise ValueError(f"most must be between 2 and half of the cells, got {self.most} for {size} cells")
        self.classes = tuple(str(number) for number in range(1, self.most + 1))

    def draw(self, random: Generator) -> tuple[Image, int]:
        cued, number = int(random.integers(self.glyphs)), int(random.integers(1, self.most + 1))
        filled = (self.cells**2 - 1) * 3 // 4
        others = (cued + random.integers(1, self.glyphs, size=filled - number)) % self.glyphs
        kinds = np.concatenate((np.full(number, cued), others))
        marked = self.framed(self.masks[cued][None, 1:-1, 1:-1])
        glyphs = self.painted(unit_vectors(random, filled), kinds)
        return self.place(random, np.concatenate((marked[None], glyphs)))[0], number - 1


def unit_vectors(random: Generator, count: int) -> NDArray[np.float32]:
    """Uniform on the sphere: [count, 3]."""
    drawn = random.standard_normal((count, 3)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
