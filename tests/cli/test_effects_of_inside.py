"""Every option of the commands that show where attention looks."""

import _thread
import json
import re
import socket
import threading
from urllib.request import urlopen

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from helpers.option_effects import Effects, options_of_command
from nalaformer import cli
from nalaformer.analysis.attention_page import server

pytestmark = pytest.mark.usefixtures("one_thread")

ANALYZE, EXPLORE = Effects(options_of_command("analyze")), Effects(options_of_command("explore"))


def test_no_option_is_without_a_test_of_its_effect():
    assert ANALYZE.missing() == []
    assert EXPLORE.missing() == []


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What figures look like is seen to with the page."""
    for name in ("look", "report"):
        monkeypatch.setattr(f"nalaformer.analysis.attention_page.{name}.as_inline_svg", lambda figure, label: "<svg></svg>")
    monkeypatch.setattr("nalaformer.analysis.attention_page.report.save_png_and_svg", lambda figure, path: [path])


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (40, 40), (80 * number, 90, 10)).save(folder / f"{number}.png")
    return folder


def run(*arguments, fails=None):
    done = CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])
    if fails is None:
        assert done.exit_code == 0, f"{done.output} {done.exception!r}"
    else:
        assert fails in str(done.exception), done.output
    return done.output


def models_of(page):
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])["models"]


@ANALYZE.of("model", "images", "out", "beside", "most")
def test_analyze_writes_its_models_and_images_where_it_is_told(images, tmp_path):
    out = tmp_path / "deep" / "out"
    said = run("analyze", "test_vit", "--images", images, "--beside", "test_vit:linear", "--out", out, "--most", 2)
    assert f"page: {out / 'index.html'}" in said
    assert said.count("random weights") == 2
    first, second = models_of((out / "index.html").read_text())
    assert (first["name"], second["name"]) == ("test_vit", "test_vit:linear")
    assert [image["name"] for image in first["images"]] == ["0.png", "1.png"]
    assert first["layers"][0]["kind"] == "softmax"
    assert second["layers"][0]["kind"] != "softmax"


def test_analyze_names_an_image_that_it_leaves_out(images, tmp_path):
    (images / "1.png").write_bytes(b"nothing")
    said = run("analyze", "test_vit", "--images", images, "--out", tmp_path / "out")
    assert f"left out: {images / '1.png'}" in said
    found = models_of((tmp_path / "out" / "index.html").read_text())
    assert [image["name"] for image in found[0]["images"]] == ["0.png", "2.png"]


SMALL = {
    **{"embed_dims": [16], "depths": [1], "num_heads": [2], "mlp_ratios": 1, "attention_stages": "l", "layer_scale": [None]},
    **{"key_reduction": 1, "softmax_key_reduction": 1, "patch_size": 8, "img_size": 32, "global_pool": "max"},
}


def test_a_run_is_shown_with_its_trained_weights_and_what_it_says(images, tmp_path):
    settings = ("steps=1", "warmup=0", "batch_size=2", "eval_every=0", "save_every=0", "train_samples=4", "eval_samples=2")
    options = ('data_options={"cells": 4}', f"model_options={json.dumps(SMALL)}", "device=cpu")
    run("train", "cue_grid", *settings, *options, "--out", tmp_path / "run")
    said = run("analyze", tmp_path / "run", "--images", images / "0.png", "--out", tmp_path / "out", "--device", "cpu")
    assert "random weights" not in said
    page = (tmp_path / "out" / "index.html").read_text()
    assert "trained: vit_nala_tiny_patch16, step 1" in page
    (found,) = models_of(page)
    assert found["layers"][0]["grid"] == [4, 4]
    assert re.fullmatch(r"\w+ [\d.]+%, \w+ [\d.]+%", found["images"][0]["answer"])


@ANALYZE.of("device")
@EXPLORE.of("device")
def test_a_device_that_is_not_there_is_refused(images, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run("analyze", "test_vit", "--images", images, "--device", "cuda", fails="needs a CUDA device")
    run("explore", "test_vit", images, "--device", "cuda", fails="needs a CUDA device")


@EXPLORE.of("model", "images", "beside", "port", "most")
def test_explore_serves_its_models_and_images_on_its_port_until_it_is_interrupted(images, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pages = []

    def look_and_interrupt(explorer):
        try:
            pages.append(urlopen(f"http://127.0.0.1:{port}/", timeout=20).read().decode())
        finally:
            _thread.interrupt_main()

    class Watched(server.ExploreServer):
        def __init__(self, explorer, *, port):
            super().__init__(explorer, port=port)
            threading.Thread(target=look_and_interrupt, args=(explorer,)).start()

    monkeypatch.setattr(server, "ExploreServer", Watched)
    said = run("explore", "test_vit", images, "--beside", "test_vit:linear", "--port", port, "--most", 1)
    assert f"open http://127.0.0.1:{port}/" in said
    assert said.rstrip().endswith("ended")
    first, second = models_of(pages[0])
    assert (first["name"], second["name"]) == ("test_vit", "test_vit:linear")
    assert [image["name"] for image in first["images"]] == ["0.png"]
