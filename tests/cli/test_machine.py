"""What a row says of the machine: commit, versions, missing extras."""

import re
import subprocess

import pytest
import torch

import nalaformer as nf
from nalaformer.machine import describe_machine, extras, source_commit

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "code.py").write_text("x = 1\n")
    git("init", "-q")
    git("add", "package")
    git("commit", "-q", "-m", "first")
    return tmp_path


def test_the_commit_of_clean_and_of_changed_source(checkout):
    clean = source_commit(checkout / "package")
    assert re.fullmatch(r"[0-9a-f]{12}", clean)
    (checkout / "results.csv").write_text("a result beside the package does not make it another package")
    assert source_commit(checkout / "package") == clean
    (checkout / "package" / "code.py").write_text("x = 2\n")
    assert source_commit(checkout / "package") == f"{clean}+dirty"


def test_changed_code_beside_the_package_is_another_measurement(checkout):
    (checkout / "studies").mkdir()
    (checkout / "studies" / "measure.py").write_text("what measures may change a figure too")
    assert source_commit(checkout / "package").endswith("+dirty")


def test_a_package_installed_inside_another_checkout_has_no_commit(checkout):
    installed = checkout / "site-packages"
    installed.mkdir()
    (installed / "code.py").write_text("x = 1\n")
    assert source_commit(installed) == "unknown"


def test_source_outside_git_has_no_commit(tmp_path):
    assert source_commit(tmp_path) == "unknown"


def test_the_machine_names_what_it_runs_on():
    machine = describe_machine()
    assert machine.cpu
    assert machine.torch == torch.__version__
    assert machine.nalaformer == nf.__version__
    assert machine.device_name("cpu") == machine.cpu


def test_a_missing_extra_says_how_to_get_it(monkeypatch):
    from importlib import metadata

    wanted = ["torch>=2", "rich>=1; extra == 'cli'", "no-such-package>=1; extra == 'rare'", "rich; extra == 'all'"]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    found = {extra.name: extra for extra in extras()}
    assert set(found) == {"cli", "rare"}
    assert found["cli"].missing == ()
    assert found["cli"].present[0].startswith("rich ")
    assert found["rare"].missing == ("no-such-package",)
    assert found["rare"].install == "pip install 'nalaformer[rare]'"
