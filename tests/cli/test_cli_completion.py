"""What TAB offers in a shell."""

import sys

import pytest
from typer.testing import CliRunner

from nalaformer import cli
from nalaformer.models.vision import VARIANTS
from nalaformer.published import FAMILIES
from nalaformer.recipes import RECIPES


@pytest.fixture
def offered(monkeypatch, capsys):
    """The words that bash offers for the last one of a line."""

    def complete(line):
        words = line.split(" ")
        monkeypatch.setattr(sys, "argv", ["nalaformer"])
        monkeypatch.setenv("_NALAFORMER_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        with pytest.raises(SystemExit):
            cli.main()
        return capsys.readouterr().out.split()

    return complete


def starting(names, start):
    return sorted(name for name in names if name.startswith(start))


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("nalaformer train cu", starting(RECIPES.names(), "cu")),
        ("nalaformer recipes l", starting(RECIPES.names(), "l")),
        ("nalaformer models nalaformer_x", starting(VARIANTS, "nalaformer_x")),
        ("nalaformer convert a.pth --model vit", starting(VARIANTS, "vit")),
        ("nalaformer convert a.pth --family p", starting(FAMILIES, "p")),
        ("nalaformer train cue_grid --out a learning", ["learning_rate="]),
        ("nalaformer train cue_grid attention=p", ["attention=polaformer", "attention=polaformerpp"]),
        ("nalaformer train cue_grid steps=3 warm", ["warmup=", "warmup_learning_rate="]),
        ("nalaformer train no_such_recipe learning", []),
        ("nalaformer eval run --split t", ["test"]),
        ("nalaformer generate text --device c", ["cpu", "cuda"]),
        ("nalaformer generate images --sampler flow", ["flow_euler", "flow_heun"]),
        ("nalaformer comp", ["compare"]),
    ],
)
def test_tab_offers_names_that_fit(offered, line, names):
    assert sorted(offered(line)) == names
    assert names or "no_such" in line


def test_a_missing_package_offers_nothing_and_no_traceback(offered, monkeypatch):
    monkeypatch.setitem(sys.modules, "nalaformer.models.vision", None)
    assert offered("nalaformer models nalaformer_x") == []


def test_help_says_how_completion_is_installed():
    output = CliRunner().invoke(cli.build_app(), ["--help"], env={"COLUMNS": "200"}).output
    assert "--install-completion" in output
    assert "--show-completion" in output
