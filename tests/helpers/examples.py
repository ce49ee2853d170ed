"""The documents and the Python examples in them."""

import re

import pytest

from helpers.places import PROJECT

PAGES = sorted([PROJECT / "README.md", *(PROJECT / "docs").glob("*.md")])
BESIDE = re.compile(r"^from (research|benchmarks)\b", re.MULTILINE)


def examples(*, beside: str | None = None) -> list:
    """Return the examples that need the package alone, or those that import from the folder `beside` it."""
    found = []
    for page in PAGES:
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL), 1):
            folder = BESIDE.search(block)
            if (folder and folder[1]) == beside:
                # torch takes long to write a program; test_own_images.py has it write a small one in every run
                marks = [pytest.mark.slow] if "export_onnx(" in block else []
                found.append(pytest.param(block, id=f"{page.stem}-{number}", marks=marks))
    return found


def run_example(block: str) -> None:
    exec(compile(block, "example", "exec"), {"__name__": "example"})  # noqa: S102
