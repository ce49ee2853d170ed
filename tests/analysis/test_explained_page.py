"""The part of the page that shows what a classifier's answer rests on."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.small_vit import small_images, small_subject
from nalaformer.analysis import explain
from nalaformer.analysis.attention_page import load_subject, look_into
from nalaformer.analysis.attention_page.explained import overlay_heat
from nalaformer.analysis.attention_page.report import stored_page

pytestmark = pytest.mark.usefixtures("one_thread")


def looked(images, **changes):
    return look_into(replace(small_subject("small"), **({"names_classes": True} | changes)), images)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("look", "report"):
        monkeypatch.setattr(f"nalaformer.analysis.attention_page.{name}.as_inline_svg", lambda figure, label: "<svg></svg>")


def test_a_classifier_shows_both_maps_of_every_image():
    images = small_images(2)
    look = looked(images)
    assert [(each.image, each.method) for each in look.explanations] == [
        (name, method) for name, _ in images for method in ("rollout", "decision_aware")
    ]
    page = stored_page([look]).text()
    assert page.count('<figure class="plot"><img alt="') == 4
    assert "What does the answer rest on?" in page


def test_the_largest_share_is_that_of_the_explanation():
    images = small_images(1)
    look = looked(images)
    pixels = look.subject.prepare(images[0][1])
    for found in look.explanations:
        heat = explain(look.subject.model, pixels, method=found.method)
        assert found.largest == pytest.approx(heat.max().item())
        assert found.even == pytest.approx(1 / heat.numel())


def test_a_cell_is_the_brighter_the_more_it_counts():
    heat = torch.tensor([[0.1, 0.4], [0.3, 0.2]])
    bright = np.asarray(overlay_heat(Image.new("RGB", (20, 10)), heat).convert("L"), dtype=int)
    cells = bright.reshape(2, 5, 2, 10)[:, 2, :, 5]
    assert cells.flatten().argsort().tolist() == heat.flatten().argsort().tolist()
    assert (bright.reshape(2, 5, 2, 10) == cells[:, None, :, None]).all()


def test_a_model_that_names_no_class_has_no_such_part():
    look = looked(small_images(1), names_classes=False)
    assert look.explanations == []
    assert "What does the answer rest on?" not in stored_page([look]).text()


def test_an_answer_that_cannot_be_explained_is_told_in_the_notes(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no grid says which is where")

    monkeypatch.setattr("nalaformer.analysis.attention_page.explained.explain", refuse)
    look = looked(small_images(1), notes=[])
    assert look.explanations == []
    assert look.subject.notes == ["its answer is not explained: no grid says which is where"]


def test_names_of_images_are_no_markup():
    (_, picture), *_ = small_images(1)
    page = stored_page([looked([('<img src=x onerror="1">', picture)])]).text()
    assert not re.search(r'<img src=x|onerror="', page)


def test_models_by_name_are_classifiers_where_they_have_classes():
    assert load_subject("test_vit").names_classes
