"""A plugin of pytest that records which lines of the library each test executes; see tests/run_mutants.py.

A line is recorded once per test, and a function whose lines are all seen is traced no further: that keeps tracing cheap.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

# after so many calls in one test, what a function has not executed it rarely does
MOST_CALLS = 200


class ExecutedLines:
    """Appends a row {"test", "seconds", "lines": {file: [line, ...]}} for each test to a file of this process."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source = str(source.resolve()) + os.sep
        self.path = folder / f"lines_{os.getpid()}.jsonl"
        self.wanted: dict[CodeType, frozenset[int]] = {}
        self.seen: dict[CodeType, set[int]] = {}
        self.calls: dict[CodeType, int] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.seen, self.calls = {}, {}
        start = time.process_time()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.write(item.nodeid, time.process_time() - start)

    def write(self, test: str, seconds: float) -> None:
        lines: dict[str, set[int]] = {}
        for code, seen in self.seen.items():
            lines.setdefault(code.co_filename[len(self.source) :], set()).update(seen)
        row = {"test": test, "seconds": seconds, "lines": {name: sorted(found) for name, found in lines.items()}}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        wanted = self.wanted.get(code)
        if wanted is None:
            wanted = self.wanted[code] = self.lines_of(code)
        if not wanted:
            return None
        seen = self.seen.setdefault(code, set())
        calls = self.calls[code] = self.calls.get(code, 0) + 1
        if calls > MOST_CALLS or len(seen) >= len(wanted):
            return None

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                seen.add(frame.f_lineno)
            return line

        return line

    def lines_of(self, code: CodeType) -> frozenset[int]:
        """Return the lines of a function of the library; none of other functions and of modules, which run when imported."""
        if not code.co_filename.startswith(self.source) or code.co_name == "<module>":
            return frozenset()
        return frozenset(line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno)


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ["EXECUTED_LINES"])
    source = Path(os.environ["EXECUTED_SOURCE"])
    # with pytest-xdist the workers run the tests
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(ExecutedLines(source, folder))
