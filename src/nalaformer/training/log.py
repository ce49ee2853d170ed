"""What a run writes down: a JSON line for each step and evaluation, TensorBoard where asked."""

import json
import math
from pathlib import Path
from typing import Any, TextIO

from ..whole_files import write_atomically

Row = dict[str, Any]


class RunLog:
    """folder/log.jsonl, and folder/tensorboard. Resumed after step s, it forgets what was written beyond."""

    def __init__(self, folder: Path, *, after_step: int, tensorboard: bool) -> None:
        self.path = folder / "log.jsonl"
        kept = [row for row in read_log(self.path) if row["step"] <= after_step]
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
    """Every whole line; what a killed process has left unfinished is dropped."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def make_board(folder: Path, after_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ValueError("tensorboard=true needs a package: pip install 'nalaformer[tensorboard]'") from error
    return SummaryWriter(str(folder), purge_step=after_step + 1)
