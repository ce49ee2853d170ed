"""What a run writes down: a JSON line for each step and evaluation, TensorBoard where asked."""

import json
import math
import warnings
from pathlib import Path
from typing import Any, TextIO

from ..atomic_files import write_atomically

Row = dict[str, Any]


class RunLog:
    """folder/log.jsonl, and folder/tensorboard. Resumed after step s, it forgets what was written beyond."""

    def __init__(self, folder: Path, *, after_step: int, tensorboard: bool) -> None:
        self.path = folder / "log.jsonl"
        rows, bad = read_rows(self.path)
        if bad:
            warnings.warn(
                f"{self.path}: {len(bad)} of its lines are no rows of a log and are left out, the first of them line {bad[0]}",
                stacklevel=2,
            )
        kept = [row for row in rows if row["step"] <= after_step]
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self.file: TextIO = self.path.open("a")
        self.board = make_board(folder / "tensorboard", after_step) if tensorboard else None

    def write(self, kind: str, step: int, figures: Row) -> None:
        """One line: the kind ("step" or "eval"), the step, the figures; numbers that are not finite become null."""
        safe = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in figures.items()}
        self.file.write(json.dumps({"kind": kind, "step": step, **safe}) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in figures.items():
                if isinstance(value, (int, float)):
                    self.board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def read_log(path: Path) -> list[Row]:
    """Every row; lines that are damaged, and what a killed process has left unfinished, are left out."""
    return read_rows(path)[0]


def read_rows(path: Path) -> tuple[list[Row], list[int]]:
    """The rows, and the numbers of the lines that are none; an unfinished last line is no surprise and does not count."""
    rows: list[Row] = []
    bad: list[int] = []
    if not path.exists():
        return rows, bad
    # bytes: what is no text is a bad line, and takes no other with it
    *lines, unfinished = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        row = row_of(line)
        if row is None:
            bad.append(number)
        else:
            rows.append(row)
    last = row_of(unfinished)
    return (rows if last is None else [*rows, last]), bad


def row_of(line: bytes) -> Row | None:
    """None if the line is not what `RunLog.write` writes."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and isinstance(row.get("kind"), str)
    return row if is_row else None


def make_board(folder: Path, after_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ValueError("tensorboard=true needs a package: pip install 'nalaformer[tensorboard]'") from error
    return SummaryWriter(str(folder), purge_step=after_step + 1)
