"""ListOps: every label is the value of its list, and shortcuts reach what is stated."""

import numpy as np
import pytest

from research.sequences import SEQUENCES
from research.sequences.listops import WORDS
from research.tests.sequence_cases import make


def evaluate(words):
    """The value of a list by reading it, with a stack."""
    stack = [[]]
    for word in words:
        if word == "]":
            operator, *arguments = stack.pop()
            ordered, middle = sorted(arguments), len(arguments) // 2
            median = ordered[middle] if len(ordered) % 2 else int((ordered[middle - 1] + ordered[middle]) / 2)
            result = {"[MIN": ordered[0], "[MAX": ordered[-1], "[MED": median, "[SM": sum(arguments) % 10}
            stack[-1].append(result[operator])
        elif word.startswith("["):
            stack.append([word])
        else:
            stack[-1].append(int(word))
    ((value,),) = stack
    return value


def to_words(row):
    return [WORDS[token] for token in row if token]


@pytest.fixture(scope="module")
def listops():
    return SEQUENCES["listops"](split="train", samples=2500).batch(range(2500))


def test_every_label_is_the_value_its_list_evaluates_to(listops):
    assert all(
        evaluate(to_words(row)) == label for row, label in zip(listops["inputs"][:400], listops["targets"], strict=False)
    )


def test_the_solver_finds_a_planted_mistake(listops):
    with pytest.raises(IndexError):
        evaluate(to_words(np.delete(listops["inputs"][0], 1)))
    # with reversed digits some value must change
    turned = [to_words(np.where((r > 0) & (r <= 10), 11 - r, r)) for r in listops["inputs"][:20]]
    assert [evaluate(words) for words in turned] != listops["targets"][:20].tolist()


def test_lists_have_the_published_lengths_depth_and_arguments(listops):
    lengths = (listops["inputs"] > 0).sum(axis=1)
    assert lengths.min() > 500
    assert lengths.max() < 2000
    depths, arguments = [], []
    for row in listops["inputs"][:100]:
        open_lists = []
        deepest = 0
        for word in to_words(row):
            if word == "]":
                arguments.append(open_lists.pop())
                continue
            if open_lists:
                open_lists[-1] += 1
            if word.startswith("["):
                open_lists.append(0)
            deepest = max(deepest, len(open_lists))
        depths.append(deepest)
    # ten levels, the last of digits alone
    assert max(depths) == 9
    counts = np.bincount(arguments, minlength=11) / len(arguments)
    assert counts[:2].sum() == 0
    assert counts[2:].sum() == pytest.approx(1)
    # 2..10 come evenly; long trees are a little favoured by the bound on the length
    assert counts[2:].min() > 0.08
    assert counts[2:].max() < 0.14


def test_no_list_comes_twice(listops):
    assert len({row.tobytes() for row in listops["inputs"]}) == len(listops["inputs"])


def test_listops_shortcuts_are_as_stated(listops):
    roots, labels = listops["inputs"][:, 0], listops["targets"]
    majority = np.bincount(labels).max() / len(labels)
    by_root = sum(np.bincount(labels[roots == root]).max() for root in np.unique(roots)) / len(labels)
    # one standard error is a point
    assert majority == pytest.approx(0.17, abs=0.02)
    assert by_root == pytest.approx(0.36, abs=0.025)
    stated = SEQUENCES["listops"](split="val", samples=1).shortcuts
    assert stated["root operator"] == 0.36
    assert make("listops").shortcuts == {}


def test_the_sky_form_is_the_same_lists_without_closing_brackets():
    whole, sky = (make(name).batch(range(40)) for name in ("listops", "listops_sky"))
    for row, bare in zip(whole["inputs"], sky["inputs"], strict=True):
        assert to_words(bare) == [word for word in to_words(row) if word != "]"]
    assert np.array_equal(whole["targets"], sky["targets"])


def test_impossible_lists_raise():
    with pytest.raises(ValueError, match="longest >= shortest"):
        make("listops", shortest=50, longest=55)
