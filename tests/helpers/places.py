"""Where the tests and what they read lie."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PROJECT = TESTS.parent
ALL_TESTS = (TESTS, PROJECT / "research" / "tests", PROJECT / "benchmarks" / "tests")
GOLDEN = TESTS / "golden"
"""Data computed with the authors' published code."""
