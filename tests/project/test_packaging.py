"""What an installed package and its repository say about themselves."""

import tomllib
from importlib.resources import files

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import nalaformer
from helpers.places import PROJECT
from nalaformer import cli


def test_type_checkers_find_that_the_package_is_typed():
    assert files("nalaformer").joinpath("py.typed").is_file()
    assert "Typing :: Typed" in tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["classifiers"]


def test_the_wheel_holds_the_package_alone():
    target = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert target == {"packages": ["src/nalaformer"]}


def test_the_citation_names_the_package_as_it_is():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"title", "authors", "message"} <= set(citation)
    same = {"title": "name", "license": "license", "abstract": "description", "keywords": "keywords"}
    assert {key: citation[key] for key in same} == {key: project[name] for key, name in same.items()}


def test_the_package_says_the_same_of_itself_everywhere():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["description"] == cli.app.HELP == nalaformer.__doc__


def test_every_dependency_has_one_tested_version_inside_its_range():
    # without one, an environment made tomorrow has other releases than the one that passed today
    tested = {}
    for line in (PROJECT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            tested[canonicalize_name(name)] = version
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for texts in [project["dependencies"], *(of_extra(project))] for text in texts]
    wrong = {str(wanted): tested.get(canonicalize_name(wanted.name)) for wanted in asked if wanted.name != project["name"]}
    wrong = {text: version for text, version in wrong.items() if version is None or version not in Requirement(text).specifier}
    assert wrong == {}, "make constraints writes the file anew"


def of_extra(project: dict) -> list[list[str]]:
    """Requirements of the extras that make installs; delta-kernels is one that no test needs."""
    return [texts for name, texts in project["optional-dependencies"].items() if name != "delta-kernels"]
