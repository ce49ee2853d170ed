"""Files that hold a class id for each pixel."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..bad_sample import BadSample
from ..images import opened_image

IGNORED = 255
"""Label of pixels that neither loss nor metric counts."""
# one channel: black and white, grey, numbers of a palette, 16 bits
ID_MODES = ("1", "L", "P", "I;16", "I")


def read_mask(path: str | Path) -> NDArray[np.int64]:
    """Class ids [H, W]; of a palette its numbers. Colours are refused: nothing says which class has which."""
    with opened_image(path) as mask:
        if mask.mode not in ID_MODES:
            raise BadSample(
                path, f"a mask must have one channel, the class id of each pixel, got colours ({mask.mode}); save ids as PNG"
            )
        return np.asarray(mask).astype(np.int64)
