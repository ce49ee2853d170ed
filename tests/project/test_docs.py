"""What the documents show must run."""

import re

import pytest

from helpers.examples import PAGES, examples, run_example
from helpers.places import PROJECT


@pytest.mark.parametrize("example", examples())
def test_example_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_example(example)


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
