"""What the documents say of the rooms and of the ways through them is so."""

import pkgutil
import re
import tomllib
from collections import Counter

import pytest

from helpers.places import PROJECT

PAGE = (PROJECT / "docs" / "architecture.md").read_text()
HOPS = sorted(set(re.findall(r"`(nalaformer\.[\w.]+)`", PAGE)))


def rooms() -> list[str]:
    """The folders of the package in the order of the import contract, from the top."""
    layers = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    names = [name.strip().removeprefix("nalaformer.") for layer in layers for name in layer.split("|")]
    return [name for name in names if (PROJECT / "src" / "nalaformer" / name).is_dir()]


@pytest.mark.parametrize("hop", HOPS)
def test_a_hop_that_a_walk_names_exists(hop):
    pkgutil.resolve_name(hop)


def test_the_walks_name_their_hops():
    walks = PAGE.split("\n## ")[1:]
    assert len(walks) == 4
    assert all(len(re.findall(r"`nalaformer\.", walk)) >= 6 for walk in walks)


def test_the_contract_knows_every_room():
    folders = {path.parent.name for path in (PROJECT / "src" / "nalaformer").glob("*/__init__.py")}
    assert set(rooms()) == folders


def test_the_picture_shows_every_room_from_the_top_down():
    picture = (PROJECT / "docs" / "architecture.svg").read_text()
    shown = re.findall(r'font-weight="bold">(\w+)<', picture)
    order = rooms()
    assert sorted(shown) == sorted(order)
    # rooms of one layer stand side by side, in any order
    from_top = {name: number for number, name in enumerate(order)}
    below = [(a, b) for a in shown for b in shown if shown.index(a) < shown.index(b)]
    beside = {frozenset(pair) for pair in below if height(picture, pair[0]) == height(picture, pair[1])}
    assert all(from_top[a] < from_top[b] for a, b in below if frozenset((a, b)) not in beside)


def height(picture: str, room: str) -> int:
    found = re.search(rf'y="(\d+)" font-weight="bold">{room}<', picture)
    assert found is not None
    return int(found[1])


def test_contributing_lists_the_rooms_in_the_order_of_the_contract():
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    listed = re.findall(r"^      (\w+) {2,}\S", text.split("src/nalaformer/\n")[1], re.MULTILINE)
    order = rooms()
    assert [name for name in listed if name in order] == order[::-1], "from the bottom up"


def sources():
    """The files of the package, by path."""
    return {path: path.read_text() for path in (PROJECT / "src" / "nalaformer").rglob("*.py")}


def test_no_file_of_the_package_has_more_than_450_lines():
    long = {path.name: count for path, text in sources().items() if (count := len(text.splitlines())) > 450}
    assert not long, "split it by idea"


def test_the_kernels_show_at_most_six_entries():
    folder = PROJECT / "src" / "nalaformer" / "ops" / "kernels"
    assert len([path for path in folder.iterdir() if path.name != "__pycache__"]) <= 6


def test_a_class_name_has_one_meaning_in_the_package():
    names = Counter(name for text in sources().values() for name in re.findall(r"^class (\w+)", text, re.MULTILINE))
    assert not {name for name, count in names.items() if count > 1 and not name.startswith("_")}


def test_neither_the_package_nor_its_tests_need_research_or_benchmarks():
    """The wheel holds neither, and `make test` is about the wheel."""
    names_them = re.compile(r"^\s*(from|import) (research|benchmarks)\b|[\"\'](research|benchmarks)\.", re.MULTILINE)
    files = [path for folder in ("src", "tests") for path in (PROJECT / folder).rglob("*.py")]
    assert not [path.name for path in files if names_them.search(path.read_text()) and path.name != "test_architecture.py"]


def test_no_test_imports_from_another_test_file():
    """What tests share lies in tests/helpers."""
    imports_a_test = re.compile(r"^\s*(from|import) (tests\.)?(\w+\.)*test_", re.MULTILINE)
    assert not [path.name for path in (PROJECT / "tests").rglob("test_*.py") if imports_a_test.search(path.read_text())]
