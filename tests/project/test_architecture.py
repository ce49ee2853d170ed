"""What the documents say of the rooms and of the ways through them is so."""

import pkgutil
import re
import tomllib

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
