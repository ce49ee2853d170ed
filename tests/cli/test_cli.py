"""The command line as a user meets it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import nalaformer as nf
from nalaformer import cli


@pytest.fixture(autouse=True)
def one_thread():
    # threads that wait for each other crawl on a busy machine
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(cli.build_app(), list(arguments))


def test_version_is_that_of_the_package(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"nalaformer {nf.__version__}\n"


def test_help_names_every_command(run):
    output = run("--help").output
    names = typer.main.get_command(cli.build_app()).commands
    assert len(names) > 12
    first_words = {line.strip("│ ").split(" ")[0] for line in output.splitlines()}
    assert set(names) <= first_words


def test_compare_prints_every_method_and_writes_the_picture(run, tmp_path, monkeypatch):
    monkeypatch.setattr("nalaformer.analysis.compare.time_call", lambda phi: 1.0)
    result = run("compare", "--out", str(tmp_path / "out"), "--tokens", "32", "--seed", "3")
    assert result.exit_code == 0, result.output
    picture = tmp_path / "out" / "entropy_vs_norm.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"picture: {picture}" in result.output
    assert "32 random tokens" in result.output
    for label in ("softmax", "norm_aware split", "norm_aware cosine", *nf.FEATURE_MAPS.names()):
        assert label in result.output
    assert max(map(len, result.output.split("picture:")[0].splitlines())) <= 100


def test_info_says_what_would_run_and_why(run):
    result = run("info")
    assert result.exit_code == 0, result.output
    for value in nf.ops.backend.report().values():
        assert value[:60] in result.output
    assert nf.__version__ in result.output
    assert "extra cli" in result.output


def test_info_gives_the_line_that_brings_a_missing_extra(run, monkeypatch):
    from importlib import metadata

    monkeypatch.setattr(metadata, "requires", lambda name: ["no-such-package; extra == 'rare'"])
    assert "missing no-such-package: pip install 'nalaformer[rare]'" in run("info").output


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "--tokens", "3"),
        ("bench", "--device", "tpu"),
        ("compare", "--out", "/dev/null/a"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_two(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["nalaformer", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_file_that_is_not_there_is_named_in_words(monkeypatch, capsys):
    arguments = ["convert", "gone.pth", "--family", "nalaformer", "--model", "nalaformer_s", "--out", "x.safetensors"]
    monkeypatch.setattr(sys, "argv", ["nalaformer", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == "error: gone.pth: there is no such file or folder; name another place\n"


@pytest.mark.parametrize(
    ("place", "said"), [("file", "a file stands where a folder is needed"), ("file/below", "is a file and no folder")]
)
def test_a_folder_that_cannot_be_made_is_explained(monkeypatch, capsys, tmp_path, place, said):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["nalaformer", "train", "cue_grid", "steps=1", "--out", str(tmp_path / place)])
    with pytest.raises(SystemExit):
        cli.main()
    error = capsys.readouterr().err
    assert said in error
    assert str(tmp_path / "file") in error
    assert "Errno" not in error


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("place", "said"), [("/proc/none", "must lie on a disk, got /proc"), ("file/below", "must lie in a folder, got the file")]
)
def test_tokens_for_a_folder_that_cannot_be_made_are_refused_for_that(monkeypatch, capsys, tmp_path, place, said, more):
    (tmp_path / "file.txt").write_text("a text")
    (tmp_path / "file").touch()
    arguments = ["tokenize", tmp_path / "file.txt", "--train-vocab", 300, "--out", tmp_path / place, *more]
    monkeypatch.setattr(sys, "argv", ["nalaformer", *map(str, arguments)])
    with pytest.raises(SystemExit):
        cli.main()
    error = capsys.readouterr().err
    assert said in error
    assert "MB" not in error


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_the_command_says_what_to_install(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"{package}: pip install 'nalaformer\[cli\]'"):
        cli.main()


def test_the_installed_command_fails_without_a_traceback():
    command = Path(sys.executable).with_name("nalaformer")
    done = subprocess.run([command, "compare", "--tokens", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: a sweep over norms needs at least 16 tokens, got 3\n"
