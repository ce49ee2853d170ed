"""The demo: one small network with every attention, at a task that needs sharp attention and one that needs flat."""

from .entries import ENTRIES, MORE_ENTRIES, OURS, TASKS, DemoTask, Entry, demo_recipe
from .report import HOW_TO_READ, demo_table, write_report
from .study import DemoResult, Finding, run_demo

__all__ = [
    "ENTRIES",
    "HOW_TO_READ",
    "MORE_ENTRIES",
    "OURS",
    "TASKS",
    "DemoResult",
    "DemoTask",
    "Entry",
    "Finding",
    "demo_recipe",
    "demo_table",
    "run_demo",
    "write_report",
]
