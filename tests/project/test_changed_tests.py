"""What `make check` runs after an edit."""

import pytest

import changed_tests

FILES = {
    "src/nalaformer/__init__.py": "",
    "src/nalaformer/ops/__init__.py": "from .interface import attend",
    "src/nalaformer/ops/interface.py": "from .chunked import walk\nattend = walk",
    "src/nalaformer/ops/chunked.py": "walk = None",
    "src/nalaformer/maps/__init__.py": "",
    "src/nalaformer/maps/registered.py": "",
    "tests/helpers/inputs.py": "from nalaformer.ops import attend",
    "tests/data/test_data.py": "",
    "tests/layers/test_layers.py": "from helpers.inputs import attend",
    "tests/maps/test_maps.py": "",
    "tests/project/test_imports.py": "from nalaformer.ops import attend",
    "tests/ops/test_steps.py": "from nalaformer.ops import attend",
}
USERS = {"tests/layers/test_layers.py", "tests/ops/test_steps.py"}


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, folder in {"PROJECT": "", "TESTS": "tests", "SOURCE": "src"}.items():
        monkeypatch.setattr(changed_tests, name, tmp_path / folder)


@pytest.mark.parametrize(
    ("changed", "concerned"),
    [
        ("src/nalaformer/ops/interface.py", USERS),
        # through the neighbor that uses it
        ("src/nalaformer/ops/chunked.py", USERS),
        ("tests/helpers/inputs.py", {"tests/layers/test_layers.py"}),
        # no test imports it: those of its room
        ("src/nalaformer/maps/registered.py", {"tests/maps/test_maps.py"}),
        ("tests/data/test_data.py", {"tests/data/test_data.py"}),
        ("docs/page.md", set()),
    ],
)
def test_a_change_concerns_the_tests_that_import_it_by_any_way(project, changed, concerned):
    assert changed_tests.tests_for({changed}) == concerned
