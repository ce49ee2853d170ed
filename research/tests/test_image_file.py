"""Images of a .npz file as sequences."""

import numpy as np
import pytest

from research.scoreboard import make_board, run_boards
from research.sequences import SEQUENCES, make_sequences


@pytest.fixture
def arrays():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (30, 8, 12), np.uint8)
    return {
        "train_images": images[:20],
        "train_labels": np.arange(20) % 3,
        "test_images": images[20:],
        "test_labels": np.arange(10) % 3,
    }


@pytest.fixture
def file(arrays, tmp_path):
    np.savez(tmp_path / "images.npz", **arrays)
    return str(tmp_path / "images.npz")


def test_a_token_is_a_pixel_and_val_is_the_last_tenth_from_train(file, arrays):
    images, labels = arrays["train_images"].reshape(20, -1), arrays["train_labels"]
    for split, place in (("train", slice(0, 18)), ("val", slice(18, 20))):
        data = SEQUENCES["pixels"](split=split, samples=100, file=file)
        found = data.batch(range(len(data)))
        assert (found["inputs"] == images[place]).all()
        assert (found["targets"] == labels[place]).all()
    test = SEQUENCES["pixels"](split="test", samples=4, file=file)
    assert len(test) == 4
    assert (test.batch([3])["inputs"][0] == arrays["test_images"][3].flatten()).all()
    assert (test.facts.length, test.facts.vocabulary, test.facts.outputs, test.chance) == (96, 256, 3, 1 / 3)


def test_a_patch_is_a_square_with_pixels_from_minus_one_to_one(file, arrays):
    data = SEQUENCES["patches"](split="train", samples=100, file=file, patch=4)
    assert (data.facts.length, data.facts.channels) == (6, 16)
    vectors = data.batch([5])["inputs"][0]
    # the second row of patches, the third in it
    expected = arrays["train_images"][5, 4:8, 8:12].astype(np.float32).flatten() / 127.5 - 1
    np.testing.assert_allclose(vectors[5], expected, atol=1e-6)
    assert SEQUENCES["patches"](split="train", samples=100, file=file, patch=2).facts.length == 24
    with pytest.raises(ValueError, match="patch must divide the sides of the images, 8 x 12, got 3"):
        SEQUENCES["patches"](split="train", samples=1, file=file, patch=3)


@pytest.mark.parametrize("name", ["pixels", "patches", "image_rows"])
def test_a_missing_file_and_color_images_raise(name, tmp_path):
    with pytest.raises(ValueError, match=r"file must be a \.npz file .*, got ''"):
        make_sequences(name, split="train", samples=1)
    colours = {f"{part}_images": np.zeros((3, 4, 4, 3), np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "c.npz", **colours, train_labels=np.arange(3), test_labels=np.arange(3))
    with pytest.raises(ValueError, match=r"images must be grey, .*, got \[3, 4, 4, 3\]"):
        make_sequences(name, split="train", samples=1, options={"file": str(tmp_path / "c.npz")})


def test_pixel_rows_form_the_image(file, arrays):
    data = SEQUENCES["image_rows"](split="train", samples=100, file=file)
    assert (data.facts.length, data.facts.channels, data.facts.vocabulary) == (8, 12, 0)
    np.testing.assert_allclose(127.5 * (data.batch([5])["inputs"][0] + 1), arrays["train_images"][5], atol=1e-4)


@pytest.mark.parametrize("name", ["image_pixels", "image_patches", "image_backbone"])
def test_image_rows_train_from_the_file_and_ask_for_it(name, file, tmp_path):
    asked = {"methods": "softmax, nala", "seeds": 1, "smoke": True}
    rows = run_boards([make_board(name, settings=[f'data_options={{"file": "{file}"}}'], **asked)], out=tmp_path / "a.csv")
    assert [row["outcome"] for row in rows] == ["finished"] * 2
    assert all(bool(row["multiply_adds"]) == (name == "image_backbone") for row in rows)
    with pytest.raises(ValueError, match=f"{name} reads a file of yours"):
        make_board(name, **asked)
