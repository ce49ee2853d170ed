"""Pictures that a command writes; it never overwrites its inputs."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..data import SUFFIXES, find_images
from ..data.images import write_image

if TYPE_CHECKING:
    from PIL.Image import Image


class PictureWriter:
    """Writes a picture for each input: to `target` itself if it is named like an image, else into it as a folder.

    inputs: what was given to the command; a target that names a file needs a single image, and none of them is overwritten.
    """

    def __init__(self, target: Path, *, inputs: list[Path], option: str = "--out") -> None:
        self.target = target
        self.is_file = target.suffix.lower() in SUFFIXES and not target.is_dir()
        self.written: list[Path] = []
        found = find_images(inputs)
        self.taken = {path.resolve() for path in found}
        if self.is_file and len(found) != 1:
            raise ValueError(f"{option} names a file for one image, got {target} for {len(found)}; name a folder")
        if self.is_file and target.resolve() in self.taken:
            raise ValueError(f"{option} must not be an image that is read, got {target}")

    def write(self, source: Path, picture: "Image") -> Path:
        """As PNG where the target is a folder; two inputs of one name get a number."""
        path = self.target if self.is_file else self._free_name(source.stem)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_image(picture, path)
        self.written.append(path)
        return path

    def _free_name(self, stem: str) -> Path:
        number, path = 1, self.target / f"{stem}.png"
        # a picture of an earlier command is replaced, one of this command is not
        while path.resolve() in self.taken or path in self.written:
            number += 1
            path = self.target / f"{stem}_{number}.png"
        return path
