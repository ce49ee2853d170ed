"""What the documents show must run."""

import re

import pytest

from helpers.places import PROJECT

PAGES = sorted([PROJECT / "README.md", *(PROJECT / "docs").glob("*.md")])
EXAMPLES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL), 1)
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "example", "exec"), {"__name__": "example"})  # noqa: S102


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_installs_a_package_that_is_not_published(page):
    assert re.findall(r"pip install\s+'?nalaformer", page.read_text()) == []


def test_every_make_target_of_the_readme_exists():
    makefile = (PROJECT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", (PROJECT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
