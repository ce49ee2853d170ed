"""Order of runs: a sweep that is cut short should be complete for fewer seeds, and spend nothing on rates that lost."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .report import Row, task_metric

if TYPE_CHECKING:
    from .methods import Method
    from .runs import Board, Run


class Order:
    """The first seed of all boards with every rate; then the other seeds, each method at the rate that its first seed chose.

    rows: those of the file; whoever trains adds to them, and tells `failed` of runs that give none. every_rate: other seeds
    are trained with every rate too. A method waits until all rates of its first seed have ended.
    """

    def __init__(self, boards: "Sequence[Board]", rows: list[Row], *, every_rate: bool = False) -> None:
        self.rows = rows
        self.firm: deque[Run] = deque()
        self.open: list[tuple[Board, Method, int]] = []
        self.lost: list[Row] = []
        seeds = dict.fromkeys(seed for board in boards for seed in board.seeds)
        for seed in seeds:
            for board in boards:
                if seed not in board.seeds:
                    continue
                if every_rate or seed == board.seeds[0] or len(board.learning_rates) == 1:
                    self.firm.extend(run for run in board.runs(seed) if not run.is_in(rows))
                else:
                    chosen = ((method, self._choose_run(board, method, seed)) for method in board.methods)
                    # without a chosen rate, the run is still to come
                    self.open.extend((board, method, seed) for method, run in chosen if run is None or not run.is_in(rows))
        self.total = len(self)

    def __len__(self) -> int:
        """Runs that are left."""
        return len(self.firm) + len(self.open)

    def count_runs(self, board: "Board") -> int:
        """Count the runs of one board."""
        return sum(run.task == board.title for run in self.firm) + sum(each is board for each, *_ in self.open)

    def take(self) -> "Run | None":
        """The next run; None if there is none, or none before a run in progress has ended."""
        if self.firm:
            return self.firm.popleft()
        place = 0
        while place < len(self.open):
            board, method, seed = self.open[place]
            firsts = [board.run(method, rate, board.seeds[0]) for rate in board.learning_rates]
            if not all(run.is_in(self.rows) or run.is_in(self.lost) for run in firsts):
                # it waits, and keeps its place
                place += 1
                continue
            del self.open[place]
            chosen = self._choose_run(board, method, seed)
            # every rate failed: there is nothing to repeat; or the file had the chosen one already
            if chosen is not None and not chosen.is_in(self.rows):
                return chosen
        return None

    def mark_failed(self, run: "Run") -> None:
        """A run that will give no row."""
        self.lost.append(run.key)

    def _dev(self, run: "Run") -> float:
        return next(float(row["dev"]) for row in self.rows if run.is_same(row))

    def _choose_run(self, board: "Board", method: "Method", seed: int) -> "Run | None":
        """A later seed at the rate that the first one chose; None until all rates of that have ended, or if all failed."""
        firsts = [board.run(method, rate, board.seeds[0]) for rate in board.learning_rates]
        found = [run for run in firsts if run.is_in(self.rows)]
        missing = any(not run.is_in(self.rows) and not run.is_in(self.lost) for run in firsts)
        if missing or not found:
            return None
        best = max if task_metric([row for row in self.rows if found[0].is_same(row)]).higher_is_better else min
        return board.run(method, best(found, key=self._dev).rate, seed)
