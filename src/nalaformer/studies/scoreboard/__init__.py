"""Which attention does a task best: every method with every learning rate and seed, in one protocol, on the same data."""

from .report import Standing, read_rows, scoreboard_table, standings
from .runs import Method, parse_methods, run_scoreboard

__all__ = ["Method", "Standing", "parse_methods", "read_rows", "run_scoreboard", "scoreboard_table", "standings"]
