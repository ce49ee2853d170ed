"""Speed and memory of the ops, side by side with their peers in one process."""

from .cases import Case, cases_for
from .implementations import IMPLEMENTATIONS, Implementation
from .machine import Machine, describe_machine, extras
from .memory import in_fresh_process, peak_extra_mib
from .ops import Measurement, Result, measure, plan
from .report import COLUMNS, results_table, summary_lines, write_csv
from .timing import median_ms
from .verdict import Bar, Growth, bars, growth

__all__ = [
    "COLUMNS",
    "IMPLEMENTATIONS",
    "Bar",
    "Case",
    "Growth",
    "Implementation",
    "Machine",
    "Measurement",
    "Result",
    "bars",
    "cases_for",
    "describe_machine",
    "extras",
    "growth",
    "in_fresh_process",
    "measure",
    "median_ms",
    "peak_extra_mib",
    "plan",
    "results_table",
    "summary_lines",
    "write_csv",
]
