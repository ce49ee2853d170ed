"""The demo: one small network, every attention, a task that needs sharp attention; a table and a report with pictures."""

from .entries import ENTRIES, Entry, demo_recipe
from .report import HOW_TO_READ, demo_table, write_report
from .study import DemoResult, Finding, run_demo

__all__ = ["ENTRIES", "HOW_TO_READ", "DemoResult", "Entry", "Finding", "demo_recipe", "demo_table", "run_demo", "write_report"]
