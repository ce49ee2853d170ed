"""What an installed package and its repository say about themselves."""

import tomllib
from importlib.resources import files

import yaml

from helpers.places import PROJECT


def test_type_checkers_find_that_the_package_is_typed():
    assert files("nalaformer").joinpath("py.typed").is_file()
    assert "Typing :: Typed" in tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["classifiers"]


def test_the_citation_names_the_package_as_it_is():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"title", "authors", "message"} <= set(citation)
    same = {"title": "name", "license": "license", "abstract": "description", "keywords": "keywords"}
    assert {key: citation[key] for key in same} == {key: project[name] for key, name in same.items()}
