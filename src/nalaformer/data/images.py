"""Image files, none of them trusted."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

# 64 Mpx: a few kilobytes of PNG can unpack to gigabytes
MOST_PIXELS = 64 * 2**20
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


class CorruptImage(ValueError):
    """A file that cannot be decoded to the end, or that would decode to too much."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path} is no image that can be used: {' '.join(reason.split())}")
        self.path = str(path)
        self.reason = reason

    # a loader's worker hands the error to the main process
    def __reduce__(self) -> tuple[type["CorruptImage"], tuple[str, str]]:
        return type(self), (self.path, self.reason)


def read_image(path: str | Path) -> "Image":
    """The whole image in RGB, or CorruptImage: a truncated file is refused and not filled with grey."""
    from PIL import Image, ImageFile

    try:
        with Image.open(path) as image:
            if image.width * image.height > MOST_PIXELS:
                raise CorruptImage(path, f"{image.width} x {image.height} pixels, more than {MOST_PIXELS} in all")
            before = ImageFile.LOAD_TRUNCATED_IMAGES
            # other libraries switch this on for the whole process
            ImageFile.LOAD_TRUNCATED_IMAGES = False
            try:
                return image.convert("RGB")
            finally:
                ImageFile.LOAD_TRUNCATED_IMAGES = before
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    # decoders raise whatever they like on hostile bytes
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, Image.DecompressionBombError) as error:
        if isinstance(error, CorruptImage):
            raise
        raise CorruptImage(path, str(error) or type(error).__name__) from error


def find_images(paths: list[Path]) -> list[Path]:
    """The files as given, and every image below the folders as given, sorted within each."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            if not inside:
                raise ValueError(f"a folder of images must hold at least one ({', '.join(SUFFIXES)}), got none below {path}")
            found.extend(inside)
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"an image or a folder of images must exist, got {path}")
    return found
