"""Tables of pages, made from files of results, so that no result is copied by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path

from nalaformer.atomic_files import write_atomically


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])


def fill_tables(page: str | Path, fill_text: Callable[[str], str], *, has_marks: Callable[[str], object], marks: str) -> None:
    """Write what `fill_text` makes of the text of a page, which must have the marks between which its tables stand."""
    path = Path(page)
    text = path.read_text(encoding="utf-8")
    if not has_marks(text):
        raise ValueError(f"{path} must hold the marks {marks}, between which its tables stand")
    write_atomically(path, fill_text(text).encode())
