"""The demo: one small network, every attention, a task that needs sharp attention; a table and a report with pictures."""

from .entries import ENTRIES, Entry, demo_recipe
from .report import demo_table, write_report
from .study import DemoResult, Finding, run_demo

__all__ = ["ENTRIES", "DemoResult", "Entry", "Finding", "demo_recipe", "demo_table", "run_demo", "write_report"]
