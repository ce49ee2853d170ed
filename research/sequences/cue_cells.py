"""The grid of coloured glyphs with one marked cell as a sequence: a vector for each cell."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nalaformer.data.glyph_grids import CueGrid

from .base import IGNORE, SEQUENCES, Arrays, SequenceData, SequenceFacts


@SEQUENCES.register("cue_cells")
@dataclass(kw_only=True, eq=False)
class CueCells(SequenceData):
    """The marked cell repeats the colour of one glyph and asks which glyph that is; no other cell asks.

    Cells row by row, each the pixels of its colours minus one half: [cells^2, 3 cell_size^2]. As in the images of `CueGrid`,
    those of the train split hold few glyphs or many, and those of others are full.
    """

    stream_name = "cue_cells"

    cells: int = 8
    cell_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        split = "train" if self.split == "train" else "val"
        self.grid = CueGrid(split=split, samples=1, cells=self.cells, cell_size=self.cell_size)
        self.chance = 1 / self.grid.glyphs

    @property
    def facts(self) -> SequenceFacts:
        channels = 3 * self.cell_size**2
        return SequenceFacts(answers="tokens", outputs=self.grid.glyphs, length=self.cells**2, channels=channels)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        inputs = np.zeros((len(indices), self.facts.length, self.facts.channels), np.float32)
        targets = np.full(inputs.shape[:2], IGNORE)
        for row, index in enumerate(indices):
            image, glyph, (cue, _) = self.grid.arranged(self.generator_for(int(index)))
            pieces = image.reshape(3, self.cells, self.cell_size, self.cells, self.cell_size).transpose(1, 3, 0, 2, 4)
            inputs[row] = pieces.reshape(inputs.shape[1:]) - 0.5
            targets[row, cue] = glyph
        return {"inputs": inputs, "targets": targets}
