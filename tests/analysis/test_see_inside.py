"""The page that shows where attention looks: what its maps hold, what it lets through, and how it is served."""

import _thread
import base64
import http.client
import json
import math
import re
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from helpers.small_vit import HOSTILE, small_images, small_look, small_subject, softmax_weights
from nalaformer.analysis.attention_page import (
    ExploreServer,
    explorer_of,
    load_subject,
    look_into,
    read_images,
    serve,
    write_report,
)
from nalaformer.analysis.attention_page.maps import MOST_BYTES, Layer, compute_maps, fit_layers, pooling_matrix
from nalaformer.analysis.attention_page.report import sharpest_layer, stored_page
from nalaformer.conversion import convert

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def look():
    return small_look()


@pytest.fixture(scope="module")
def page(look):
    return stored_page([look]).text()


@pytest.fixture(scope="module")
def explorer(look):
    return explorer_of([look])


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


# ---- maps


def test_a_map_of_the_page_is_within_its_stated_error_of_the_formula(look, page):
    data = data_of(page)
    weights = softmax_weights(look.subject, small_images()[1][1])
    for layer, exact in zip(data["models"][0]["layers"], weights, strict=True):
        raw = base64.b64decode(layer["rows"][1])
        queries, heads = 4 * 4 + 1, 2
        # largest weight, entropy and class token of each query and head, then a byte for each cell
        facts = np.frombuffer(raw, "<f4", queries * heads * 3).reshape(queries, heads, 3)
        codes = np.frombuffer(raw, np.uint8, offset=facts.nbytes).reshape(queries, heads, 16)
        # the patches come first, the class token last
        rows = torch.cat((exact[:, 1:], exact[:, :1]), dim=1).transpose(0, 1).numpy()
        error = np.abs(facts[..., :1] * (codes / 255.0) ** 2 - rows[..., 1:])
        assert (error <= (1 / 255 + 1e-5) * rows[..., 1:].max(-1, keepdims=True)).all()
        np.testing.assert_allclose(facts[..., 2], rows[..., 0], atol=1e-5)
        entropy = -(rows * np.log2(rows)).sum(-1)
        np.testing.assert_allclose(facts[..., 1], entropy, atol=1e-4)


def test_the_server_gives_the_row_of_the_formula(look, explorer):
    weights = softmax_weights(look.subject, small_images()[1][1])
    # row 3, column 2 of 4 x 4 patches, behind the class token; and the class token itself
    for question, query in (({"y": "0.6", "x": "0.3"}, 1 + 2 * 4 + 1), ({"token": "0"}, 0)):
        values = np.frombuffer(explorer.rows({"model": "0", "image": "1", **question}), "<f4").reshape(2, 2, 2 + 16)
        for found, exact in zip(values, weights, strict=True):
            # after the entropy: class token, then patches
            np.testing.assert_allclose(found[:, 1:], exact[:, query].numpy(), atol=1e-5)


@pytest.mark.parametrize("attention", ["", "nalaformer"])
def test_a_coarse_map_keeps_all_weight(attention):
    look = small_look(attention=attention, images=1, depth=1)
    coarse = replace(look.layers[0], cells=(3, 2))
    maps = compute_maps(look.records[0], coarse, coarse.stored_queries())
    assert maps.cells.shape[2:] == (3, 2)
    total = maps.cells.sum((2, 3)) + maps.beside.sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)


def test_a_token_on_a_border_is_shared_by_both_cells():
    expected = torch.tensor([[1, 0.5, 0], [0, 0.5, 1]], dtype=torch.float64)
    torch.testing.assert_close(pooling_matrix(3, 2), expected)


def big_layers(count, heads, side):
    grid = (side, side)
    layer = Layer(name="", kind="", heads=heads, grid=grid, key_grid=grid, prefix=1, queries=grid, cells=grid)
    return [layer] * count


@pytest.mark.parametrize(("count", "heads", "side"), [(2, 1, 4), (24, 16, 14), (48, 10, 56)])
def test_a_page_has_room_for_large_models(count, heads, side):
    chosen = fit_layers(big_layers(count, heads, side), images=4)
    assert 4 * sum(layer.bytes for layer in chosen) <= MOST_BYTES
    # a small one loses nothing
    assert (chosen[0].queries == (side, side)) == (side == 4)


def test_a_page_without_room_says_what_to_do():
    with pytest.raises(ValueError, match="show fewer images"):
        fit_layers(big_layers(48, 16, 56), images=200)


def test_stored_patches_lie_in_the_middle_of_their_parts():
    layer = replace(big_layers(1, 1, 9)[0], queries=(3, 3))
    patches = [1 + row * 9 + column for row in (1, 4, 7) for column in (1, 4, 7)]
    assert layer.stored_queries().tolist() == [*patches, 0]


# ---- the page


def test_user_text_becomes_no_markup(look):
    hostile = replace(look, subject=replace(look.subject, name=HOSTILE, notes=[HOSTILE]))
    hostile = replace(hostile, images=[image | {"name": HOSTILE, "answer": HOSTILE} for image in look.images])
    page = stored_page([hostile]).text()
    assert "<img src=x" not in page
    assert page.count("</script>") == 2
    assert data_of(page)["models"][0]["images"][0]["name"] == HOSTILE


def test_a_page_names_no_other_place(page):
    attributes = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert [each for each in attributes if not each.startswith(("#", "data:"))] == []
    # names of formats in SVG elements are no addresses that a browser asks
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", page))
    assert all(each.startswith("http://www.w3.org/") for each in addresses)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none';")
    assert "connect-src" not in policy


def test_random_weights_are_said_loudly(look, page):
    trained = replace(look, subject=replace(look.subject, is_random=False))
    assert "⚠ Random weights: small" in page
    assert "⚠" not in stored_page([trained]).text()


def test_the_table_has_the_figures_of_every_layer_and_head(look, page):
    whole, heads = re.findall(r"<tbody>(.*?)</tbody>", page, re.DOTALL)
    assert whole.count("<tr>") == 2
    assert heads.count("<tr>") == 4
    first = look.statistics[0][1]
    assert f"<td>{first.entropy / math.log(2):.3g}</td>" in heads


def test_pictures_lie_beside_the_page_as_png_and_svg(look, tmp_path):
    page, *others = write_report([look, look], tmp_path / "new" / "report")
    assert page.read_text().startswith("<!doctype html>")
    names = {path.stem for path in others}
    assert names == {"entropy_by_layer", "entropy_against_norm", "entropy_against_norm_beside", "maps", "maps_beside"}
    for path in others:
        start = path.read_bytes()[:300]
        assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in start
    assert {path.suffix for path in others} == {".png", ".svg"}


def test_a_file_name_that_is_no_text_is_spelt_out(look, tmp_path):
    import os

    path = tmp_path / os.fsdecode(b"\xff$.png")
    small_images(1)[0][1].save(path)
    (name, _), *_ = read_images([path])[0]
    assert name == "\\udcff$.png"
    stored_page([replace(look, images=[image | {"name": name} for image in look.images])]).text().encode()


# ---- which model


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights of timm's small test model, as it is and converted, away from the start."""
    folder = tmp_path_factory.mktemp("weights")
    model = timm.create_model("test_vit")
    torch.nn.init.constant_(model.cls_token, 3.0)
    save_file(model.state_dict(), folder / "plain.safetensors")
    torch.nn.init.constant_(convert(model, "nalaformer").cls_token, 5.0)
    save_file(model.state_dict(), folder / "converted.safetensors")
    return folder


@pytest.mark.parametrize(
    ("text", "is_random", "token", "layers"),
    [
        ("test_vit", True, None, "softmax"),
        ("test_vit:nalaformer", True, None, "norm_aware"),
        ("test_vit@{}/plain.safetensors", False, 3.0, "softmax"),
        ("test_vit@{}/plain.safetensors:nalaformer", False, 3.0, "norm_aware"),
        ("test_vit:nalaformer@{}/converted.safetensors", False, 5.0, "norm_aware"),
    ],
)
def test_a_name_says_weights_and_attention_in_the_order_of_its_parts(weights, text, is_random, token, layers):
    from nalaformer.analysis import attention_layers

    subject = load_subject(text.format(weights))
    assert subject.is_random == is_random
    assert {layer.method for layer in attention_layers(subject.model)} == {layers}
    if token is not None:
        assert (subject.model.cls_token == token).all()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("test_vid", "did you mean test_vit"),
        ("test_vit:nalaforme", "did you mean 'nalaformer'"),
        ("test_vit@nowhere.safetensors", "weights must be a file"),
        ("test_resnet", "no attention layer"),
    ],
)
def test_a_model_that_cannot_be_looked_into_is_refused(text, error):
    from nalaformer.analysis.attention_page import look_into

    with pytest.raises(ValueError, match=error):
        look_into(load_subject(text), small_images(1))


def test_a_model_with_nan_is_refused_and_its_layer_named():
    from nalaformer.analysis.attention_page import look_into

    subject = small_subject()
    with torch.no_grad():
        subject.model.blocks[1].attn.qkv.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"got NaN in blocks\.1\.attn of small; look for weights"):
        look_into(subject, small_images(1))


@pytest.mark.parametrize(
    ("recipe", "facts", "side", "grids"),
    [
        ("super_resolution_small", {"scale": 2}, 64, {(64, 64)}),
        ("scenes", {"classes": ["a", "b"]}, 224, {(56, 56), (28, 28), (14, 14), (7, 7)}),
    ],
)
def test_a_run_of_a_dense_task_shows_its_network(monkeypatch, tmp_path, recipe, facts, side, grids):
    """Built as `load_run` builds it; what is trained does not matter here."""
    from nalaformer.analysis import record
    from nalaformer.analysis.attention_page import subject as subjects
    from nalaformer.recipes import RECIPES, LoadedRun, build_model
    from nalaformer.tasks import TASKS, task_name

    chosen = RECIPES[recipe]()
    task = TASKS[task_name(chosen.task)](chosen.task)
    run = LoadedRun(recipe=chosen, model=build_model(chosen, facts), task=task, facts=facts, step=1)
    monkeypatch.setattr(subjects, "load_run", lambda folder: run)
    subject = load_subject(str(tmp_path))
    pixels = subject.prepare(small_images(1)[0][1])
    assert pixels.shape == (3, side, side)
    assert {found.grid for found in record(subject.model, pixels[None])} == grids


def test_the_picture_is_what_the_model_saw():
    subject, (_, image) = small_subject(), small_images(1)[0]
    assert subject.to_image(subject.prepare(image)).tobytes() == image.tobytes()


def test_a_layer_of_one_token_is_not_the_sharpest():
    """The last stage of a pyramid has one token of an image of 32 pixels: its one weight says nothing."""
    sizes = {"embed_dims": (16, 16, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "projection": 16}
    model = timm.create_model("nalaformer_xt", num_classes=0, **sizes).eval()
    found = look_into(replace(small_subject(), model=model), small_images(1))
    assert [layer.keys for layer in found.layers] == [64, 16, 4, 1]
    assert found.relative_entropy()[-1] == [1.0]
    assert sharpest_layer([found]) < 3


# ---- the server


@pytest.fixture(scope="module")
def server(explorer):
    with ExploreServer(explorer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, *, method="GET", body=None, **headers):
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    connection.request(method, path, body=body, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_the_server_has_the_page_and_rows(server):
    status, page = ask(server, "/")
    assert (status, page[:15]) == (200, b"<!doctype html>")
    assert data_of(page.decode())["live"]
    status, rows = ask(server, "/rows?model=0&image=0&y=0.5&x=0.5")
    assert (status, len(rows)) == (200, 4 * 2 * 2 * 18)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""])
def test_a_request_under_another_name_is_refused(server, host):
    status, content = ask(server, "/", Host=host.format(port=server.server_address[1]))
    assert (status, b"<html" in content) == (421, False)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/../../../etc/passwd", 404),
        ("//etc/passwd", 404),
        ("/page.py", 404),
        ("/rows", 400),
        ("/rows?model=1&image=0&y=0.5&x=0.5", 400),
        ("/rows?model=0&image=-1&y=0.5&x=0.5", 400),
        ("/rows?model=0&image=0&y=nan&x=0.5", 400),
        ("/rows?model=0&image=0&y=1e999&x=0.5", 400),
        ("/rows?model=0&model=0&image=0&y=0.5&x=0.5", 400),
        ("/rows?" + "&".join(f"a{number}=1" for number in range(20)), 400),
        ("/" + "a" * 400, 414),
    ],
)
def test_an_address_that_is_not_ours_is_refused(server, path, expected):
    assert ask(server, path)[0] == expected


def test_a_request_with_a_body_or_another_method_is_refused(server):
    assert ask(server, "/", body=b"x" * 10)[0] == 413
    assert ask(server, "/", method="POST", body=b"x" * 10)[0] == 501


def test_the_server_listens_on_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"


def test_an_interrupt_ends_the_server_and_frees_its_port(explorer):
    said = []

    def say(text):
        said.append(text)
        if text:
            threading.Timer(0.1, _thread.interrupt_main).start()

    serve(explorer, port=0, say=say)
    assert said[0].startswith("http://127.0.0.1:")
    assert said[1:] == [""]
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", int(said[0].rstrip("/").rpartition(":")[2])))
