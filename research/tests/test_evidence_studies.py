"""Explanations and token filters, judged on images whose evidence has a known place."""

import csv
from functools import partial

import pytest
import torch
from torch import nn

from research.evidence import explanations, filtering, study_explanations, study_filtering
from research.evidence.explanations import Judged, judge, judged_rows
from research.evidence.glyph_pair import (
    BLACK,
    CELL_SIZE,
    CELLS,
    GLYPHS,
    GlyphPair,
    make_vit,
    pair_accuracy,
    pair_batch,
    pair_loss,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def cell(image, place):
    row, column = divmod(place, CELLS)
    return image[:, row * CELL_SIZE : (row + 1) * CELL_SIZE, column * CELL_SIZE : (column + 1) * CELL_SIZE]


def test_the_two_glyphs_stand_where_the_data_says():
    data = GlyphPair(split="val", samples=20)
    images, kinds, places = pair_batch(data, range(20))
    for image, pair, cells in zip(images, kinds.tolist(), places.tolist(), strict=True):
        assert pair[0] != pair[1]
        for kind, place in zip(pair, cells, strict=True):
            shown = (cell(image, place) - BLACK).amax(0) > 0
            assert torch.equal(shown, torch.from_numpy(data.masks[kind]) > 0)
    assert torch.equal(images[3], data[3][0])
    assert data.pairs[data[3][1]] == tuple(sorted(kinds[3].tolist()))


class Brightness(nn.Module):
    """The logit of class 1 is the brightness of cell 7, of class 0 that of cell 0."""

    def forward(self, images):
        cells = [(cell_of_batch - BLACK).mean((1, 2, 3)) for cell_of_batch in (images[:, :, :8, :8], images[:, :, 8:16, 8:16])]
        return 8 * torch.stack(cells, dim=1) - 4


def test_heat_on_the_evidence_is_judged_better_than_heat_elsewhere():
    judged = Judged(torch.ones(3, 3, 48, 48), torch.ones(3, dtype=torch.long), torch.full((3, 1), 7), CELLS, True)
    right, wrong = torch.zeros(2, 3, 12, 12)
    right[:, 2:4, 2:4] = 1
    wrong[:, 0, 0] = 1
    good, bad = (judge(Brightness(), judged, heat) for heat in (right, wrong))
    assert (good["pointing"], good["heat_on_evidence"]) == (1, 1)
    assert (bad["pointing"], bad["heat_on_evidence"]) == (0, 0)
    assert good["deletion"] < 0.2 < bad["deletion"]
    assert good["insertion"] > 0.8 > bad["insertion"]


def test_decision_aware_explanations_find_the_asked_glyph_and_rollout_does_not():
    torch.manual_seed(0)
    model = train(make_vit("softmax"), partial(pair_batch, GlyphPair(split="train", samples=2**31)), pair_loss, steps=200)
    images, kinds, places = pair_batch(GlyphPair(split="val", samples=32), range(32))
    assert pair_accuracy(model, images, kinds) > 0.8
    judged = Judged(torch.cat((images, images)), kinds.T.flatten(), places.T.flatten()[:, None], CELLS, True)
    rows = {row["method"]: row for row in judged_rows(model, judged, {})}
    # rollout knows no class: of two glyphs it finds one at best
    assert rows["rollout"]["pointing"] < 0.6
    assert rows["decision_aware"]["pointing"] > 0.85
    assert rows["decision_aware"]["heat_on_evidence"] > 2 * rows["rollout"]["heat_on_evidence"]
    assert rows["decision_aware"]["deletion"] < rows["rollout"]["deletion"]
    assert rows["random"]["pointing"] < 0.3


@pytest.mark.slow
def test_the_explanation_study_writes_a_row_for_each_model_and_method(tmp_path, monkeypatch):
    monkeypatch.setattr(explanations, "POINTS", 2)
    rows = study_explanations(tmp_path / "e.csv", seeds=1, steps=1, images=2, say=lambda _: None)
    with (tmp_path / "e.csv").open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows) == 5 * (len(explanations.EXPLANATIONS) + 1)
    assert {(row["task"], row["model"]) for row in written} == {
        ("glyph_pair", "vit softmax"),
        ("glyph_pair", "vit nalaformer"),
        ("glyph_pair", "pyramid nalaformer"),
        ("cue_grid", "vit softmax"),
        ("cue_grid", "vit nalaformer"),
    }
    assert all(0 <= float(row["pointing"]) <= 1 and row["torch"] for row in written)


def test_the_filter_study_writes_its_rows_and_curves(tmp_path, monkeypatch):
    monkeypatch.setattr(filtering, "SHARES", (1.0, 0.25))
    monkeypatch.setattr(filtering, "images_per_second", lambda model, images: 100.0)
    rows = study_filtering(tmp_path / "f.csv", steps=1, tuning_steps=1, images=4, say=lambda _: None)
    # each model whole, and by both rules without training and fine-tuned
    assert [(row["by"], row["fine_tuned"], row["share"]) for row in rows[:5]] == [
        ("attention", 0, 1.0),
        ("attention", 0, 0.25),
        ("attention", 1, 0.25),
        ("random", 0, 0.25),
        ("random", 1, 0.25),
    ]
    assert len(rows) == 15
    assert (tmp_path / "f.csv").read_text().count("\n") == 16
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "f.svg").read_text()


def test_speed_counts_the_images_in_one_batch():
    assert filtering.images_per_second(make_vit("softmax"), torch.zeros(2, 3, 48, 48), repeats=1) > 0
    assert make_vit("softmax")(torch.zeros(1, 3, 48, 48)).shape == (1, GLYPHS)
