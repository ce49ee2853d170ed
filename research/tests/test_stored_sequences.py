"""Sequences on disk: written once, and read from the released files."""

import json

import numpy as np
import pytest

from helpers.bombs import BOMBS
from research.sequences import SEQUENCES, Stored, stored, stored_name, write
from research.tests.sequence_cases import CASES, make


def test_what_was_written_is_what_is_made(tmp_path):
    made = []
    options = CASES["mqar"]
    write("mqar", tmp_path, split="train", samples=45, seed=5, options=options, advance=made.append)
    data, again = make("mqar", samples=45, seed=5), Stored(tmp_path, split="train")
    assert sum(made) == len(again) == 45
    assert (again.facts, again.groups, again.group_lengths) == (data.facts, data.groups, data.group_lengths)
    for name, array in data.batch([3, 44, 0]).items():
        assert np.array_equal(array, again.batch([3, 44, 0])[name])
    assert len(Stored(tmp_path, split="train", samples=7)) == 7


def test_several_workers_write_the_same(tmp_path, monkeypatch):
    for workers in (1, 2):
        write("copying", tmp_path / str(workers), split="val", samples=1500, options=CASES["copying"], workers=workers)
    one, two = (Stored(tmp_path / str(workers), split="val").batch(range(1500)) for workers in (1, 2))
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(stored, "_fill", fail)
    with pytest.raises(OSError, match="disk full"):
        write("copying", tmp_path, split="train", samples=5, options=CASES["copying"])
    assert list(tmp_path.iterdir()) == []


def test_written_data_is_not_overwritten_and_missing_splits_are_named(tmp_path):
    write("copying", tmp_path, split="train", samples=5, options=CASES["copying"])
    with pytest.raises(ValueError, match="must not exist"):
        write("copying", tmp_path, split="train", samples=5)
    with pytest.raises(ValueError, match="has train"):
        Stored(tmp_path, split="val")
    assert json.loads((tmp_path / "train" / "about.json").read_text())["options"] == CASES["copying"]


def test_reviews_are_read_as_bytes(tmp_path):
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(3):
                (tmp_path / split / label / f"{number}.txt").write_bytes(f"{label} {number} é".encode())
    data = SEQUENCES["text"](split="train", samples=100, root=str(tmp_path), length=8)
    assert len(data) == 6
    sample = data[2]
    name = bytes(token - 1 for token in sample["inputs"].tolist() if token).decode(errors="replace")
    assert name.startswith("pos" if sample["targets"] else "neg")
    assert sample["inputs"].shape == (8,)
    assert {int(data[index]["targets"]) for index in range(6)} == {0, 1}


def test_paper_pairs_are_read_from_their_lines(tmp_path):
    lines = [f"{label}.0\tid{label}\tother\ttext {label}\tlonger text {label}" for label in (0, 1, 1)]
    for part in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{part}.tsv").write_text("\n".join(lines) + "\n")
    data = SEQUENCES["retrieval"](split="val", samples=100, root=str(tmp_path), length=9)
    assert len(data) == 3
    arrays = data.batch([2, 0])
    assert arrays["targets"].tolist() == [1, 0]
    assert bytes((arrays["inputs"][1, 1] - 1)[arrays["inputs"][1, 1] > 0].tolist()) == b"longer te"
    (tmp_path / "new_aan_pairs.train.tsv").write_text("only one field\n")
    with pytest.raises(ValueError, match="5 fields"):
        SEQUENCES["retrieval"](split="train", samples=1, root=str(tmp_path)).batch([0])


def test_images_are_read_from_the_binary_version(tmp_path):
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records = random.integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] = [1, 3, 5, 7]
        records.tofile(tmp_path / name)
    sizes = {}
    for split in ("train", "val", "test"):
        data = SEQUENCES["image"](split=split, samples=100, root=str(tmp_path))
        sizes[split] = len(data)
        assert data[0]["inputs"].shape == (1024,)
    assert sizes == {"train": 18, "val": 2, "test": 4}
    last = np.fromfile(tmp_path / "test_batch.bin", np.uint8).reshape(4, 3073)[3]
    red, green, blue = (int(last[1 + 1024 * colour + 5]) for colour in range(3))
    assert data[3]["inputs"][5] == round(0.299 * red + 0.587 * green + 0.114 * blue)
    (tmp_path / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match="records of 3073 bytes"):
        SEQUENCES["image"](split="test", samples=1, root=str(tmp_path))


def test_the_error_for_a_missing_released_folder_lists_its_files():
    with pytest.raises(ValueError, match=r"data_batch_1\.bin"):
        SEQUENCES["image"](split="train", samples=1)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_note_beside_sequences_that_is_a_bomb_is_named(tmp_path, bomb):
    place = write("copying", tmp_path, split="train", samples=2, options={"length": 12})
    (place / "about.json").write_bytes(BOMBS[bomb])
    for read in (lambda: Stored(tmp_path, split="train"), lambda: stored_name(tmp_path)):
        with pytest.raises(ValueError, match=r"about.json (cannot be read|is not as `python -m research.sequences` writes it)"):
            read()


def test_a_note_that_lacks_a_fact_is_named(tmp_path):
    place = write("copying", tmp_path, split="train", samples=2, options={"length": 12})
    (place / "about.json").write_text('{"name": "copying"}')
    with pytest.raises(ValueError, match=r"about.json is not as `python -m research.sequences` writes it: KeyError 'options'"):
        Stored(tmp_path, split="train")


def test_the_error_names_a_truncated_sequence_array(tmp_path):
    place = write("copying", tmp_path, split="train", samples=2, options={"length": 12})
    array = next(place.glob("*.npy"))
    array.write_bytes(array.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"\.npy must be a whole \.npy file"):
        Stored(tmp_path, split="train")


def test_a_manifest_that_claims_too_many_samples_raises(tmp_path):
    place = write("copying", tmp_path, split="train", samples=2, options={"length": 12})
    about = json.loads((place / "about.json").read_text())
    (place / "about.json").write_text(json.dumps(about | {"samples": 10**18}))
    with pytest.raises(ValueError, match=r"rows as about\.json states samples, 1000000000000000000, got \{.*'inputs': 2"):
        Stored(tmp_path, split="train")
