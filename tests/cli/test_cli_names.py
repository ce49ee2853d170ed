"""Names that Rich would take for markup or emoji: every command prints them as they are, on a terminal and into a file."""

import io
import json
import re
import sys

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from nalaformer import cli
from nalaformer.analysis import methods
from nalaformer.data.text import Tales
from nalaformer.training.display import Display, counted

pytestmark = pytest.mark.usefixtures("one_thread")

# a closing tag without an opening one is an error to Rich, an opening one vanishes, and a word between colons is an emoji
CLASSES = ("[red]dog", "cat[bold]", ":cat:")
FOLDER = "w[/a] [red]b :cat:  two spaces"
SETTINGS = ("steps=1", "warmup=0", "batch_size=2", "eval_every=0", "save_every=0", "workers=0", "device=cpu")
VIT = {"embed_dims": [8], "depths": [1], "num_heads": [2], "patch_size": 16, "img_size": 32}
VIT_OF_ONE_STAGE = {
    "attention_stages": "l",
    "mlp_ratios": 2,
    "key_reduction": 1,
    "softmax_key_reduction": 1,
    "layer_scale": [None],
}


@pytest.fixture(params=["terminal", "file"])
def run(request, monkeypatch):
    """A command's output without colours; a terminal so wide that no name is folded, or no terminal at all."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    if request.param == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "800")
    else:
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("COLUMNS", "20")

    def invoke(*arguments):
        result = CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments], catch_exceptions=False)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", result.output)

    return invoke


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / FOLDER
    place.mkdir(parents=True)
    return place


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on images of these classes, and those images."""
    place = tmp_path_factory.mktemp("run") / FOLDER
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    for split in ("train", "val"):
        for name in CLASSES:
            (place / "images" / split / name).mkdir(parents=True)
            for number in range(2):
                Image.fromarray(pixels).save(place / "images" / split / name / f"{number}.png")
    options = f"model_options={json.dumps(VIT | VIT_OF_ONE_STAGE)}"
    settings = [f"data={place / 'images'}", "image_size=32", options, *SETTINGS]
    arguments = ["train", "cue_grid", *settings, "--out", str(place / "run")]
    result = CliRunner().invoke(cli.build_app(), arguments, catch_exceptions=False)
    return place, result.output


def test_train_names_its_folder(trained):
    place, output = trained
    assert f"run: {place / 'run'}" in output


def test_eval_names_the_run_and_what_it_left_out(trained, run):
    place, _ = trained
    broken = place / "images" / "val" / CLASSES[0] / "z[/].png"
    broken.parent.mkdir(parents=True, exist_ok=True)
    broken.write_bytes(b"nothing")
    output = run("eval", place / "run", "--device", "cpu")
    broken.unlink()
    assert f"{place / 'run'}, step 1" in output
    assert f"left out: {broken}" in output


def test_predict_names_images_and_classes(trained, run, folder):
    place, _ = trained
    (folder / "broken.png").write_bytes(b"nothing")
    good = next((place / "images").rglob("*.png"))
    output = run("predict", folder / "broken.png", good, "--run", place / "run", "--device", "cpu")
    assert f"by {place / 'run'}" in output
    assert str(good) in output
    assert f"left out: {folder / 'broken.png'} is no image that can be used" in output
    assert all(f"{name} " in output for name in CLASSES)


def test_tokenize_names_its_folder_and_bad_lines(run, folder):
    tales = "".join(json.dumps({"text": tale}) + "\n" for tale in Tales(split="train", documents=20))
    (folder / "[i]a.jsonl").write_text(tales + "broken\n")
    out = folder / "tokens[/]"
    output = run("tokenize", folder / "[i]a.jsonl", "--train-vocab", 280, "--val-part", 0.2, "--out", out)
    assert f"tokens: {out}" in output
    assert f"{folder / '[i]a.jsonl'}:21: no JSON" in output


def test_compare_names_its_picture(run, folder, monkeypatch):
    monkeypatch.setattr("nalaformer.analysis.compare.time_call", lambda phi: 1.0)
    some = methods()[:1]
    monkeypatch.setattr("nalaformer.analysis.methods", lambda: some)
    monkeypatch.setattr("nalaformer.analysis.draw_entropy_against_norm", lambda rows, path, num_tokens: path)
    assert f"picture: {folder / 'entropy_vs_norm.png'}" in run("compare", "--out", folder, "--tokens", 16)


def test_convert_names_its_file(run, folder, monkeypatch):
    monkeypatch.setattr("nalaformer.published.convert_file", lambda source, out, family, model: ["a"])
    out = folder / "a.safetensors"
    assert f"1 tensors: {out}" in run("convert", folder / "a.pth", "--family", "nalaformer", "--out", out)


def test_export_names_its_folder(run, folder, monkeypatch):
    monkeypatch.setattr("nalaformer.recipes.export_run", lambda run, out, tokenizer, step: out)
    assert f"model and tokenizer: {folder}" in run("export", folder, "--out", folder)


def test_info_gives_the_line_that_brings_a_missing_extra(run, monkeypatch):
    from importlib import metadata

    monkeypatch.setattr(metadata, "requires", lambda name: ["no-such-package; extra == 'rare'"])
    assert "missing no-such-package: pip install 'nalaformer[rare]'" in run("info")


def test_recipes_show_lists_as_they_are(run):
    assert "[64]" in run("recipes", "cue_grid")


@pytest.mark.parametrize(("seconds", "rate"), [(100, "0.08 samples/s"), (2, "4 samples/s"), (0.01, "800 samples/s")])
def test_a_slow_run_has_a_rate(tmp_path, monkeypatch, seconds, rate):
    with (tmp_path / "out").open("w+") as file:
        display = Display(Console(file=file, width=200), title="run", done=0, total=2)
        display.last_line = -1e9
        monkeypatch.setattr("time.monotonic", lambda: display.started + seconds)
        display.step(1, 0.5, 8)
        file.seek(0)
        assert f"  {rate}  " in file.read()


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_run_says_is_printed_as_it_is(tmp_path, terminal):
    with (tmp_path / "out").open("w+") as file:
        # a console of the caller, with markup and emoji as Rich has them by default
        console = Console(file=file, force_terminal=terminal, width=200)
        display = Display(console, title="w[/x] :cat:", done=0, total=2)
        display.last_line = -1e9
        display.step(1, 0.5, 8)
        display.say("skipped w[/x] :cat:.png")
        display.close()
        file.seek(0)
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.read())
    assert "skipped w[/x] :cat:.png" in text
    assert text.count("w[/x] :cat:") >= 2


@pytest.mark.parametrize("terminal", [True, False])
def test_counted_work_is_shown_before_it_is_done(tmp_path, terminal):
    with (tmp_path / "out").open("w+") as file:
        console = Console(file=file, force_terminal=terminal, width=80)
        with counted(console, "w[/x] :cat:", 5) as advance:
            assert terminal or (tmp_path / "out").read_text() == "w[/x] :cat:\n"
            advance(3)
        text = (tmp_path / "out").read_text()
    assert "w[/x] :cat:" in text
    assert ("3/5" in text) == terminal


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", FOLDER),
        ("predict", FOLDER, "--run", "r"),
        ("convert", f"{FOLDER}.safetensors", "--family", "nalaformer", "--out", "a.safetensors"),
        ("tokenize", FOLDER, "--out", "o", "--train-vocab", "300"),
        ("generate", "text", "--model", FOLDER, "--prompt", "a"),
        ("generate", "images", "--run", FOLDER),
        ("linearize", FOLDER, "--data", FOLDER),
        ("train", FOLDER),
        ("models", FOLDER),
        ("data", "unpack", FOLDER, "--out", "o"),
        ("train", "cue_grid", f"data={FOLDER}", "device=cpu"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]).replace(FOLDER, "NAME"),
)
def test_an_error_names_what_came(monkeypatch, capsys, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nalaformer", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert (error.startswith("error: "), error.count("\n")) == (True, 1)
    assert FOLDER in error


def test_a_name_that_is_no_text_is_printed_all_the_same(tmp_path):
    """A file name may hold bytes that are no UTF-8: Python keeps them as surrogates, which no stream can encode."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        cli.app.print_what_streams_cannot_encode()
        cli.console.make_console().print("picture: \udcff.png", soft_wrap=True)
    stream.flush()
    assert stream.buffer.getvalue() == b"picture: \\udcff.png\n"
