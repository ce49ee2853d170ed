"""Arrays that stay on the disk until they are read."""

from pathlib import Path
from typing import Any

from numpy.lib.format import open_memmap
from numpy.typing import NDArray


def mapped(path: Path) -> NDArray[Any]:
    """The array of a .npy file, mapped; plain arrays only, nothing is unpickled."""
    try:
        # np.load would take a zip archive too, and return no array
        array = open_memmap(path, mode="r")
    # sizes may be integers that no computer counts to
    except (ValueError, EOFError, OverflowError) as error:
        raise ValueError(f"{path} must be a whole .npy file: {error}") from error
    return array
