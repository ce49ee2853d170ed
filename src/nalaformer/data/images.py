"""Image files, none of them trusted."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..atomic_files import atomic_file
from ..field_types import LARGEST_SIDE
from .bad_sample import BadSample

if TYPE_CHECKING:
    from PIL.Image import Image

# 64 Mpx: a few kilobytes of PNG can unpack to gigabytes
MOST_PIXELS = LARGEST_SIDE**2
# in a note of files that are not read
MOST_NAMED = 5
# EXIF's number for how the camera was held
ORIENTATION = 0x0112
SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
# Pillow's names of these formats: of others it would start programs, such as Ghostscript for PostScript called cat.png
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")


class CorruptImage(BadSample):
    """A file that cannot be decoded to the end, or that would decode to too much."""

    rule = "is no image that can be used"


@contextmanager
def listed(path: str | Path) -> Iterator[None]:
    """A file of a folder that is not there, such as a link to one that was moved, or that may not be read is BadSample."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise BadSample(path, str(error.strerror)) from error


def read_image(path: str | Path, *, size: tuple[int, int] | None = None) -> "Image":
    """The whole image in RGB, or CorruptImage: a truncated file is refused and not filled with grey.

    8 bits a channel; of 16 the upper 8 count. Numbers of 32 bits are refused: nothing says which of them is white.
    Upright, as cameras note it beside the pixels (EXIF) and every viewer shows it. size: (width, height) in which objects or
    labels are annotated; an image that has it only as it is stored stays so.
    """
    with opened_image(path) as image:
        stored = read_stored(image)
        upright = turned_upright(stored, image)
        return stored if size == stored.size != upright.size else upright


def read_stored(image: "Image") -> "Image":
    """An opened image in RGB, its pixels as they are stored."""
    return in_eight_bits(image).convert("RGB")


def turned_upright(stored: "Image", image: "Image") -> "Image":
    """Pixels turned or mirrored as the EXIF data of their file say, if they do."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(ORIENTATION, 1))
    # broken notes beside an image do not make it another; their parser raises whatever it likes
    except Exception:
        return stored
    return stored if turn is None else stored.transpose(turn)


@contextmanager
def opened_image(path: str | Path) -> "Iterator[Image]":
    """Opens an image to be decoded inside the block; any error of the decoder becomes CorruptImage, truncated files too."""
    from PIL import Image, ImageFile, UnidentifiedImageError

    before = ImageFile.LOAD_TRUNCATED_IMAGES
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise CorruptImage(path, f"{image.width} x {image.height} pixels, more than {MOST_PIXELS} in all")
            # other libraries switch this on for the whole process
            ImageFile.LOAD_TRUNCATED_IMAGES = False
            yield image
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except UnidentifiedImageError as error:
        raise CorruptImage(path, f"it must be one of {', '.join(FORMATS)}, got another format or no image") from error
    # decoders raise whatever they like on hostile bytes
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, Image.DecompressionBombError) as error:
        if isinstance(error, BadSample):
            raise
        raise CorruptImage(path, str(error) or type(error).__name__) from error
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def in_eight_bits(image: "Image") -> "Image":
    """Grey of 16 bits by its upper 8, as Pillow reads colours of 16 bits; its own conversion would cut them off at 255."""
    from PIL import Image

    # a file of either format has at most 16 bits
    is_short = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if is_short:
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "integers" if image.mode == "I" else "floats"
        raise ValueError(f"pixels must be of 8 or 16 bits, got {kind} of 32, which have no agreed white; save it with 8 or 16")
    return image


def files_below(folder: Path) -> list[Path]:
    """Return all paths below a folder, sorted, without hidden ones and the notes that macOS adds to archives."""
    return [path for path in sorted(folder.rglob("*")) if not any(map(is_hidden, path.relative_to(folder).parts))]


def is_hidden(name: str) -> bool:
    """True if a file or folder of that name is nobody's data."""
    return name.startswith(".") or name == "__MACOSX"


def has_image_name(path: Path) -> bool:
    """True if the name ends as those of images do."""
    return path.suffix.lower() in SUFFIXES


def notes_of_ignored(paths: Iterable[str | Path]) -> list[str]:
    """Return a line that counts and names files that are not read as images; no line if there are none."""
    names = [str(path) for path in paths]
    if not names:
        return []
    shown = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
    return [f"files that are not read as images: {len(names):,} ({shown}); images end in {', '.join(SUFFIXES)}"]


def write_image(image: "Image", path: Path, **options: Any) -> None:
    """Write the image as its suffix says, as a whole file in the place of an old one; options are those of Pillow's format."""
    from PIL import Image

    kinds = Image.registered_extensions()
    if path.suffix.lower() not in kinds:
        raise ValueError(f"an image file must end in one of {', '.join(SUFFIXES)}, got {path}; name another")
    with atomic_file(path) as aside:
        image.save(aside, format=kinds[path.suffix.lower()], **options)


def find_images(paths: list[Path]) -> list[Path]:
    """The files as given, and every image below the folders as given, sorted within each."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [each for each in files_below(path) if has_image_name(each) and each.is_file()]
            if not inside:
                raise ValueError(f"a folder of images must hold at least one ({', '.join(SUFFIXES)}), got none below {path}")
            found.extend(inside)
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"an image or a folder of images must exist, got {path}; give the path of one that does")
    return found
