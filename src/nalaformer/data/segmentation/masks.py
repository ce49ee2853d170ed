"""Files that hold a class id for each pixel."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..bad_sample import BadSample
from ..images import listed, opened_image

if TYPE_CHECKING:
    from PIL.Image import Image

IGNORED = 255
"""Label of pixels that neither loss nor metric counts."""
# one channel: black and white, grey, numbers of a palette, 16 bits
ID_MODES = ("1", "L", "P", "I;16", "I")
# Pillow's names of greys that it spreads over 0 to 255, and of how many bits they are
SPREAD = {"L;2": 2, "L;4": 4}


def bits_of_spread_greys(image: "Image") -> int:
    """2 or 4; 0: the numbers of an opened image are those of its file."""
    kinds = [part for tile in getattr(image, "tile", ()) for part in (tile[3] if isinstance(tile[3], tuple) else (tile[3],))]
    return next((SPREAD[kind] for kind in kinds if isinstance(kind, str) and kind in SPREAD), 0)


def read_mask(path: str | Path) -> NDArray[np.int64]:
    """Class ids [H, W]; of a palette its numbers. Colours are refused: nothing says which class has which."""
    with listed(path), opened_image(path) as mask:
        if mask.mode not in ID_MODES:
            raise BadSample(
                path, f"a mask must have one channel, the class id of each pixel, got colours ({mask.mode}); save ids as PNG"
            )
        bits = bits_of_spread_greys(mask)
        if bits:
            raise BadSample(
                path,
                f"class ids must have 8 or 16 bits, got greys of {bits}, which readers spread over 0 to 255; save ids with 8",
            )
        ids = np.asarray(mask).astype(np.int64)
        # GIF has no 1 bit of its own: Pillow spreads black and white over 0 to 255, and stores other greys by a palette
        is_spread = mask.format == "GIF" and mask.mode == "L" and set(np.unique(ids)) <= {0, IGNORED}
        return ids // IGNORED if is_spread else ids
