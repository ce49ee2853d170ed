"""Generated sequences: a solver of its own agrees with every label, and nothing easier than the task gives it away."""

import hashlib

import numpy as np
import pytest
import torch

from nalaformer.data import batches_from
from nalaformer.data.glyphs import glyph_masks
from research.sequences import IGNORE, SEQUENCES, known_options, make_sequences, write
from research.tests.sequence_cases import CASES, make

RELEASED = {"text", "retrieval", "image", "pixels", "patches", "image_rows", "documents"}


def digest(arrays):
    # rounded: processors differ in the last bit of a cosine
    joined = b"".join((arrays[name].astype(np.float32).round(3) + 0.0).tobytes() for name in sorted(arrays))
    return hashlib.sha256(joined).hexdigest()[:12]


# ---- every kind


def test_every_sequence_dataset_is_tested_here():
    assert set(SEQUENCES.names()) == set(CASES) | RELEASED


@pytest.mark.parametrize("name", CASES)
def test_a_sample_depends_on_its_index_alone(name):
    data = make(name)
    together = data.batch(range(40))
    shuffled = make(name, samples=1000).batch([31, 7, 23])
    for key, array in together.items():
        assert np.array_equal(array[[31, 7, 23]], shuffled[key])
        assert np.array_equal(array[7], data[7][key].numpy())


@pytest.mark.parametrize("name", CASES)
def test_splits_and_seeds_have_no_sample_in_common(name):
    seen = set()
    for split, seed in (("train", 0), ("val", 0), ("test", 0), ("train", 1)):
        inputs = make(name, split=split, seed=seed).batch(range(40))["inputs"]
        seen |= {row.tobytes() for row in inputs}
    # short ones of a small kind may repeat by chance
    assert len(seen) > 150


@pytest.mark.parametrize("name", CASES)
def test_samples_are_as_the_facts_say(name):
    data = make(name)
    facts, arrays = data.facts, data.batch(range(40))
    inputs, targets = arrays["inputs"], arrays["targets"]
    assert inputs.shape[1] == facts.length
    if facts.vocabulary:
        assert inputs.min() >= 0
        assert inputs.max() < facts.vocabulary
    else:
        assert inputs.shape[2] == facts.channels
    if data.figure == "R^2":
        assert targets.shape == (*inputs.shape[:2], facts.outputs)
        assert data.chance == 0
    else:
        assert targets.shape == ((40,) if facts.answers == "sequence" else inputs.shape[:2])
        asked = targets[targets != IGNORE]
        assert len(asked) >= 40
        assert asked.min() >= 0
        assert asked.max() < facts.outputs
        assert 0 < data.chance <= 0.5
    assert set(arrays["group"]) <= set(range(len(data.groups)))
    assert len(data.group_lengths) == len(data.groups)


# checksums of the first 8 samples: changing a generator invalidates results that were measured with it
CHECKSUMS = {
    "listops": "6050ddbac0c9",
    "listops_sky": "6c12e75f4a94",
    "pathfinder": "84ea3e736783",
    "pathx": "4fc03922dca4",
    "mqar": "b2bcde2237dc",
    "pointing": "7d55aad1fc03",
    "pointing_control": "2e450f7ba250",
    "majority": "c8d8ec8b0706",
    "cue_cells": "079074eb56ef",
    "softmax_teacher": "582b7a52e955",
    "copying": "c0c228c834e5",
    "induction": "1218b8f465f6",
    "recall_language": "11b6a2135108",
    "needles": "e8fc50608601",
    "variables": "71650f057b43",
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_samples_are_those_behind_measured_results(name):
    assert digest(SEQUENCES[name](split="train", samples=8).batch(range(8))) == CHECKSUMS[name]


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_marked_cell_has_the_color_for_the_asked_glyph(split):
    arrays = make("cue_cells", samples=60, split=split).batch(range(60))
    cells = arrays["inputs"].reshape(60, 25, 3, 9, 9) + 0.5
    masks = glyph_masks(9)[:4]
    for patches, targets in zip(cells, arrays["targets"], strict=True):
        (asking,) = np.flatnonzero(targets != IGNORE)
        # the marked cell alone has a white corner and is one colour inside
        assert np.flatnonzero((patches[:, :, 0, 0] == 1).all(1)).tolist() == [asking]
        cue = patches[asking, :, 4, 4]
        shown = [patch for cell, patch in enumerate(patches) if cell != asking and patch.any()]
        kinds = [int(np.abs((patch.max(0) > 0) - masks).sum((1, 2)).argmin()) for patch in shown]
        # the colour is the same at every pixel of a glyph: the largest is it
        colours = np.array([patch.reshape(3, -1).max(1) for patch in shown])
        assert kinds[int(np.abs(colours - cue).max(1).argmin())] == targets[asking]
        assert np.abs(colours - cue).max(1).min() < 1e-6
        # no glyph is more frequent than others
        assert len(set(np.bincount(kinds, minlength=4))) == 1
        assert len(shown) == 24 or split == "train"


def test_a_teacher_returns_softmax_attention():
    data = make("softmax_teacher", samples=3)
    arrays = data.batch(range(3))
    seen = torch.from_numpy(arrays["inputs"]).double() @ torch.from_numpy(data.rotation).T
    outputs = []
    for head in range(3):
        # queries of all heads first, then keys, then values
        q, k, v = (seen[..., 15 * part + 5 * head :][..., :5] for part in range(3))
        outputs.append((q @ k.mT / 5**0.5).softmax(-1) @ v)
    np.testing.assert_allclose(arrays["targets"], torch.cat(outputs, -1), atol=1e-6)
    # one teacher for all: a model may learn it
    other = make("softmax_teacher", split="val", seed=5)
    assert np.array_equal(other.rotation, data.rotation)
    np.testing.assert_allclose(data.rotation @ data.rotation.T, np.eye(45), atol=1e-12)


def test_indices_beyond_the_data_and_unknown_splits_raise():
    data = make("copying")
    for wrong in ([40], [-1]):
        with pytest.raises(IndexError, match="0 to 39"):
            data.batch(wrong)
    with pytest.raises(IndexError, match="sample 40 of 40"):
        data[40]
    with pytest.raises(ValueError, match="train, val, test"):
        make("copying", split="dev")


@pytest.mark.parametrize("name", SEQUENCES.names())
def test_the_error_for_unknown_options_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=f"unknown option of {name}: 'lenght'") as refused:
        make_sequences(name, split="train", samples=2, options={"lenght": 8})
    assert all(option in str(refused.value) for option in known_options(name))
    assert not known_options(name).keys() & {"split", "samples", "seed"}


@pytest.mark.parametrize("options", [{"shortest": "long"}, {"longest": 64.5}, {"max_depth": True}, [1]])
def test_options_with_wrong_types_raise(options, tmp_path):
    with pytest.raises(ValueError, match="must be"):
        write("listops", tmp_path / "data", split="train", samples=2, options=options)
    with pytest.raises(ValueError, match="cannot be made with the options"):
        make_sequences("mqar", split="train", samples=2, options={"mixture": [3]})
    assert not (tmp_path / "data").exists()


def test_a_loader_gives_the_samples_in_batches():
    data = make("mqar")
    loader = batches_from(0, data, seed=3, batch_size=8, last_step=2)
    batch = next(iter(loader)).content
    assert batch["inputs"].shape == (8, 34)
    assert batch["inputs"].dtype == torch.int64
    known = {row.tobytes() for row in data.batch(range(40))["inputs"].astype(np.int64)}
    assert all(row.tobytes() in known for row in batch["inputs"].numpy())


@pytest.mark.parametrize("name", ["accuracy", "perplexity"])
def test_rows_without_questions_have_zero_loss(name):
    """A mean over nothing is no number, and times its weight of zero it would spoil the sum over the parts."""
    from research.sequences.answer_metrics import IGNORE, METRICS

    outputs, targets = torch.randn(4, 5, requires_grad=True), torch.tensor([1, 0, IGNORE, 3])
    expected = torch.nn.functional.cross_entropy(outputs[[0, 1, 3]], targets[[0, 1, 3]])
    torch.testing.assert_close(METRICS[name].loss(outputs, targets), expected)
    nothing = METRICS[name].loss(outputs, torch.full((4,), IGNORE))
    nothing.backward()
    assert nothing.item() == 0
    assert not outputs.grad.any()
