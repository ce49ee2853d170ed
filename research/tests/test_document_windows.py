"""A file of texts as windows of tokens, and the row of the scoreboard that learns them."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from research.scoreboard import make_board, run_boards
from research.scoreboard.methods import METHODS_OF_THE_BOARD, short_name
from research.sequences import IGNORE, SEQUENCES, make_sequences
from research.sequences.documents import train_encoder

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = [f"document {number} says {' '.join(str(number * step) for step in range(1, 9))}" for number in range(200)]


def write_rows(path, texts):
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("texts") / "texts.jsonl.gz", TEXTS)


def windows(split, file, samples=10_000, **options):
    given = {"file": file, "vocabulary": 300, "length": 16} | options
    return SEQUENCES["documents"](split=split, samples=samples, **given)


def documents(split, file, **options):
    """The texts that the windows of a split hold."""
    data = windows(split, file, **options)
    files = [Path(path) for path in (file, options.get("test_file", "")) if path]
    encoder, _ = train_encoder(tuple((str(path), path.stat().st_mtime_ns) for path in files), data.vocabulary)
    stream = data.batch(range(len(data)))["inputs"].flatten().tolist()
    return [text for text in encoder.tokenizer.decode(stream).split("<|endoftext|>") if text]


def test_each_document_is_in_one_split_and_none_is_lost(file, tmp_path):
    found = {split: documents(split, file) for split in ("train", "val", "test")}
    assert sorted(found["val"]) == sorted(TEXTS[0::50])
    assert sorted(found["test"]) == sorted(TEXTS[1::50])
    # the last window is filled with token 0, which is the end of a text
    assert sorted(text for texts in found.values() for text in texts) == sorted(TEXTS)
    # with a file of its own for test, the second of fifty is for train
    other = write_rows(tmp_path / "other.jsonl", ["something else", "and more"])
    assert sorted(documents("test", file, test_file=other)) == ["and more", "something else"]
    assert TEXTS[1] in documents("train", file, test_file=other)


def test_the_target_is_the_next_token_in_the_document(file):
    data = windows("train", file)
    arrays = data.batch(range(len(data)))
    inputs, targets = arrays["inputs"].flatten(), arrays["targets"].flatten()
    asked = targets[:-1] != IGNORE
    assert (targets[:-1][asked] == inputs[1:][asked]).all()
    # the begin of a document, after the end of another, is not asked
    end = inputs[0]
    assert (inputs[:-1][~asked] == end).all()
    assert asked.mean() > 0.9
    assert inputs.max() < 300


@pytest.mark.parametrize(("option", "value"), [("vocabulary", 280), ("length", 23)])
def test_vocabulary_and_length_are_as_asked(file, option, value):
    data = windows("train", file, **{option: value})
    facts = data.facts
    assert getattr(facts, option) == value
    assert facts.outputs == facts.vocabulary == data.chance
    inputs = data.batch(range(5))["inputs"]
    assert inputs.shape == (5, facts.length)
    assert inputs.max() < facts.vocabulary
    assert len(windows("train", file, samples=3)) == 3


def test_the_shortcut_is_the_frequency_perplexity(file):
    train, test = windows("train", file), windows("test", file)
    tokens = train.batch(range(len(train)))["inputs"].flatten().tolist()
    targets = test.batch(range(len(test)))["targets"].flatten()
    shares = np.array([1 + tokens.count(token) for token in range(300)], float)
    shares /= shares.sum()
    expected = math.exp(-np.mean([math.log(shares[token]) for token in targets if token != IGNORE]))
    # the filling of the last window of train is no token that was counted
    assert test.shortcuts["frequencies of tokens"] == pytest.approx(expected, rel=0.01)
    assert expected < 100


def test_files_without_text_raise(file, tmp_path):
    with pytest.raises(ValueError, match=r"file must be a file of texts that ends in .*, got ''"):
        make_sequences("documents", split="train", samples=1)
    with pytest.raises(ValueError, match=r"test_file must be a file of texts .*gone\.jsonl"):
        windows("test", file, test_file=str(tmp_path / "gone.jsonl"))
    with pytest.raises(ValueError, match="some documents must be left for train"):
        windows("val", write_rows(tmp_path / "two.jsonl", ["a", "b"]))
    with pytest.raises(ValueError, match="vocab_size must exceed 256"):
        windows("train", file, vocabulary=256)
    with pytest.raises(ValueError, match="length must be the tokens of a window"):
        windows("train", file, length=0)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"text": "some words"}\n' * 99)[:-12])
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz must be a whole \.gz file"):
        windows("train", str(cut))


def test_every_method_takes_two_steps_on_texts_with_perplexity(file, tmp_path):
    options = json.dumps({"file": file, "vocabulary": 300, "length": 16})
    board = make_board("manuals", methods="all", seeds=1, smoke=True, settings=[f"data_options={options}"])
    rows = run_boards([board], out=tmp_path / "a.csv")
    assert {short_name(row["method"]) for row in rows} == {*METHODS_OF_THE_BOARD} - {"rala_map", "mhla_map"}
    assert {(row["outcome"], row["figure"], row["chance"]) for row in rows} == {("finished", "perplexity", "300")}
    # the model has learned nothing yet
    assert all(200 < float(row["test"]) < 400 for row in rows)
    with pytest.raises(ValueError, match="manuals reads a file of yours"):
        make_board("manuals", methods="relu", seeds=1)


def test_windows_that_are_kept_serve_the_next_call_though_the_file_has_fewer_than_asked(file, tmp_path):
    from research.scoreboard.runs import prepare_task

    options = json.dumps({"file": file, "vocabulary": 300, "length": 16})
    config = make_board("manuals", methods="relu", seeds=1, settings=[f"data_options={options}"]).recipe.task
    said: list[str] = []
    for _ in range(2):
        with prepare_task(config, tmp_path / "kept", 1, said.append) as task:
            assert len(task.eval_data) < config.eval_samples
    assert len(said) == 3
    more = json.dumps({"file": file, "vocabulary": 280, "length": 16})
    config = make_board("manuals", methods="relu", seeds=1, settings=[f"data_options={more}"]).recipe.task
    with (
        pytest.raises(ValueError, match=r"must hold 6000 samples of .*280.*got \d+ of .*300.*name another folder"),
        prepare_task(config, tmp_path / "kept", 1, said.append),
    ):
        pass
