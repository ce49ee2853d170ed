"""The study of conversions: its texts are what they claim, and the whole of it runs at toy size."""

import csv

import pytest
import torch

from nalaformer.bench.recall_tasks import ASK, IGNORED, KINDS, MARK, SET, RecallTask

pytestmark = pytest.mark.usefixtures("one_thread")


def make(kind, **changes):
    return RecallTask(kind=kind, **({"facts": 8, "questions": 5, "keys": 40, "values": 9, "filler": 7} | changes))


def answers_of(text, targets):
    return [(int(place), int(targets[place])) for place in (targets != IGNORED).nonzero()[:, 0]]


@pytest.mark.parametrize("questions", [5, 13])
def test_a_reader_of_needles_answers_every_question(questions):
    text, targets = make("needles", questions=questions).batch(6, 97, torch.Generator().manual_seed(0))
    assert text.shape == (6, 97)
    for row, wanted in zip(text, targets, strict=True):
        tokens = row.tolist()
        meaning = {tokens[i + 1]: tokens[i + 2] for i, token in enumerate(tokens[:-2]) if token == MARK}
        assert len(meaning) == 8
        found = answers_of(row, wanted)
        assert len(found) == questions
        for place, answer in found:
            assert tokens[place - 1] == ASK
            assert meaning[tokens[place]] == answer


def test_a_reader_of_variables_follows_every_chain():
    text, targets = make("variables", hops=3).batch(6, 150, torch.Generator().manual_seed(0))
    for row, wanted in zip(text, targets, strict=True):
        tokens, meaning = row.tolist(), {}
        for i, token in enumerate(tokens[:-2]):
            if token == SET:
                # a chain is written from its value on, so what a name stands for is known when it comes
                meaning[tokens[i + 1]] = meaning.get(tokens[i + 2], tokens[i + 2])
        for place, answer in answers_of(row, wanted):
            assert meaning[tokens[place]] == answer


def test_a_repeated_row_is_the_row_before():
    text, targets = make("induction", facts=10).batch(6, 61, torch.Generator().manual_seed(0))
    for row, wanted in zip(text, targets, strict=True):
        keys = [token for token in row.tolist() if token >= 3 + 7]
        found = answers_of(row, wanted)
        assert len(found) == 8
        first, again = keys[:10], keys[10:]
        assert first[:-1] == again
        assert [answer for _, answer in found] == first[2:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_makes_the_same_texts(kind):
    one, two = (make(kind).batch(3, 120, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    other = make(kind).batch(3, 120, torch.Generator().manual_seed(6))
    assert not torch.equal(one[0], other[0])


def test_texts_too_short_for_their_facts_are_refused():
    with pytest.raises(ValueError, match="at least 47 tokens"):
        make("needles").batch(1, 40, torch.Generator())
    with pytest.raises(ValueError, match="key of its own"):
        make("needles", facts=41)
    with pytest.raises(ValueError, match="did you mean 'needles'"):
        make("needle")


def test_the_study_runs_and_leaves_its_rows(tmp_path):
    pytest.importorskip("peft")
    from nalaformer.bench.linearization import run_linearization, toy_study

    lines = []
    path = run_linearization(toy_study(), device="cpu", out=tmp_path / "rows.csv", say=lines.append)
    rows = list(csv.DictReader(path.open()))
    assert [row["method"] for row in rows if row["part"] == "recall"] == ["teacher", "key_norm", "linear"]
    decode = [row for row in rows if row["part"] == "decode"]
    methods = ["softmax", "still, at most 8 salient", "still, no cap", "window"]
    assert [row["method"] for row in decode] == [method for method in methods for _ in range(2)]
    assert {row["timed"] for row in decode} == {"eager, in place", "eager"}
    assert all(float(row["ms_per_step"]) > 0 and float(row["cache_mib"]) > 0 for row in decode)
    # a float32 step in place against the eager model
    assert all(float(row["error"]) < 1e-4 for row in decode)
    assert all(row["commit"] and row["torch"] for row in rows)
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows if row["part"] == "recall")
