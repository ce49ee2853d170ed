"""Arrays that stay on the disk until they are read."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def mapped(path: Path) -> NDArray[Any]:
    """The array of a .npy file, mapped; plain arrays only, nothing is unpickled."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} must be a whole .npy file: {error}") from error
    return array
