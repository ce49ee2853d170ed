"""Compare attention methods on a task: every learning rate and seed, one protocol, the same data."""

from .methods import METHODS_OF_THE_BOARD, Method, parse_methods
from .report import Standing, read_rows, scoreboard_table, standings
from .rows import ROWS, make_board, row_names
from .runs import Board, run_boards, run_scoreboard

__all__ = [
    "METHODS_OF_THE_BOARD",
    "ROWS",
    "Board",
    "Method",
    "Standing",
    "make_board",
    "parse_methods",
    "read_rows",
    "row_names",
    "run_boards",
    "run_scoreboard",
    "scoreboard_table",
    "standings",
]
