"""Recall, copying, pointing and hidden facts: each answer is found by a reader of its own."""

import numpy as np
import pytest

from research.sequences import ENTROPY, IGNORE, SEQUENCES, Filler
from research.sequences.needles import FAMILIES, FIRST_WORD, LET, MARK
from research.tests.sequence_cases import make


def test_every_mqar_answer_is_the_value_for_its_key():
    data = SEQUENCES["mqar"](split="test", samples=21)
    arrays = data.batch(range(21))
    for row in range(21):
        tokens, pairs = data.kinds[arrays["group"][row]]
        inputs, targets = arrays["inputs"][row], arrays["targets"][row]
        table = dict(zip(inputs[0 : 2 * pairs : 2].tolist(), inputs[1 : 2 * pairs : 2].tolist(), strict=True))
        assert len(table) == pairs
        assert len(set(table.values())) == pairs
        assert max(table) < 4096 <= min(table.values())
        assert min(table) > 0
        asked = np.flatnonzero(targets != IGNORE)
        assert sorted(inputs[asked].tolist()) == sorted(table)
        assert all(table[int(inputs[place])] == targets[place] for place in asked)
        assert asked.min() >= 2 * pairs
        assert asked.max() < tokens
        assert (inputs[tokens:] == 0).all()


def test_the_mqar_mixture_is_the_published_one():
    data = SEQUENCES["mqar"](split="train", samples=180)
    counts = np.bincount(data.batch(range(180))["group"])
    assert dict(zip(data.kinds, counts.tolist(), strict=True)) == {
        (64, 4): 100,
        (128, 8): 20,
        (256, 16): 20,
        (256, 32): 20,
        (256, 64): 20,
    }
    assert SEQUENCES["mqar"](split="test", samples=1).kinds[-1] == (1024, 256)


def test_keys_are_asked_soon_more_often_than_late():
    data = make("mqar", samples=400, mixture=[[64, 1]], power=0.01)
    asked = np.nonzero(data.batch(range(400))["targets"] != IGNORE)[1]
    offsets = (asked - 2) // 2
    weight = np.arange(1, 32) ** -0.99
    assert (offsets == 0).mean() == pytest.approx(weight[0] / weight.sum(), abs=0.08)
    assert (offsets >= 15).mean() == pytest.approx(weight[15:].sum() / weight.sum(), abs=0.08)


def test_mqar_without_random_filler_is_blank_between_questions():
    arrays = make("mqar", random_filler=False, mixture=[[22, 3]]).batch(range(5))
    between = arrays["inputs"][:, 6:][arrays["targets"][:, 6:] == IGNORE]
    assert (between == 0).all()


def test_copies_repeat_and_induction_finds_what_followed():
    copies = make("copying").batch(range(40))
    assert np.array_equal(copies["targets"][:, 13:], copies["inputs"][:, :13])
    assert np.array_equal(copies["inputs"][:, 14:], copies["inputs"][:, :12])
    for answers in (1, 5):
        arrays = make("induction", answers=answers).batch(range(40))
        for inputs, targets in zip(arrays["inputs"], arrays["targets"], strict=True):
            assert (targets[:-answers] == IGNORE).all()
            for question, answer in zip(inputs[-answers:], targets[-answers:], strict=True):
                place, again = np.flatnonzero(inputs == question)
                assert place < len(inputs) - answers <= again
                assert answer == inputs[place + 1]


@pytest.mark.parametrize("answers", [0, 9, 14])
def test_too_many_answers_raise(answers):
    # 27 tokens of 11 kinds, of which 9 are drawn
    with pytest.raises(ValueError, match=f"answers must be between 1 and 8, .*, got {answers}; choose fewer"):
        make("induction", answers=answers)


def test_the_pointing_answer_is_the_nearest_keys_class():
    data = make("pointing", noise=0.3)
    arrays = data.batch(range(40))
    keys, probes = arrays["inputs"][:, :23], arrays["inputs"][:, 23:]
    assert np.linalg.norm(keys[:, :, :3], axis=2) == pytest.approx(1, abs=1e-5)
    for sample in range(40):
        for probe, answer in zip(probes[sample], arrays["targets"][sample, 23:], strict=True):
            nearest = np.linalg.norm(keys[sample, :, :3] - probe[:3], axis=1).argmin()
            assert keys[sample, nearest, 3:11].argmax() == answer
    assert (probes[:, :, 3:11] == 0).all()
    assert (arrays["targets"][:, :23] == IGNORE).all()


def test_the_control_asks_how_many_keys_have_a_class():
    arrays = make("pointing_control", samples=400).batch(range(400))
    keys, probes = arrays["inputs"][:, :61], arrays["inputs"][:, 61:]
    counts = keys[:, :, 3:11].sum(axis=1)
    asked = probes[:, :, 3:11].argmax(axis=2)
    assert np.array_equal(np.take_along_axis(counts, asked, axis=1), arrays["targets"][:, 61:])
    shares = np.bincount(arrays["targets"][:, 61:].ravel(), minlength=8) / 2000
    assert shares == pytest.approx(np.full(8, 1 / 8), abs=0.03)


def test_the_majority_class_has_most_keys_and_all_classes_win_equally():
    arrays = make("majority", samples=4000).batch(range(4000))
    counts = arrays["inputs"][:, :23, 3:11].sum(axis=1)
    answers = arrays["targets"][:, 23:]
    assert (answers == answers[:, :1]).all()
    assert np.array_equal(counts.argmax(axis=1), answers[:, 0])
    assert (np.sort(counts, axis=1)[:, -1] > np.sort(counts, axis=1)[:, -2]).all()
    assert np.bincount(answers[:, 0]) / 4000 == pytest.approx(np.full(8, 1 / 8), abs=0.03)
    assert not arrays["inputs"][:, 23:, :-1].any()


def facts_in(data, tokens):
    """Return what a reader finds: values of marked names, sources of variables."""
    marked, variables = {}, {}
    for place in range(len(tokens) - 2):
        if tokens[place] == MARK:
            marked.setdefault(tokens[place + 1], []).append(tokens[place + 2])
        elif tokens[place] == LET:
            variables[tokens[place + 1]] = tokens[place + 2]
    return marked, variables


def find_answers(data, arrays, row):
    """For each question its name and the answer that the data gives."""
    text = [*arrays["inputs"][row].tolist(), int(arrays["targets"][row, -1])]
    places = np.flatnonzero(arrays["answers"][row])
    groups = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return text, [(text[group[0] - 1 : group[0] + 1], [text[place + 1] for place in group]) for group in groups]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reader_finds_every_answer(family):
    data = make("recall_language", samples=60, families=[family])
    arrays = data.batch(range(60))
    for row in range(60):
        text, questions = find_answers(data, arrays, row)
        body = text[: int(np.flatnonzero(arrays["answers"][row])[0]) - 1]
        marked, variables = facts_in(data, body)
        for (first, second), answer in questions:
            if family in ("single", "multi_key", "multi_value"):
                assert marked[second] == answer
                assert len(answer) == (4 if family == "multi_value" else 1)
            elif family == "variables":
                steps = 1
                value = variables[second]
                while value in variables:
                    value, steps = variables[value], steps + 1
                assert [value] == answer
                assert data.groups[arrays["group"][row]] == f"variables, {steps} {'hop' if steps == 1 else 'hops'}"
            else:
                (place,) = [p for p in range(len(body) - 2) if body[p : p + 2] == [first, second]]
                assert [body[place + 2]] == answer
        if family == "single":
            assert len(marked) == 1
        if family == "multi_key":
            assert 2 <= len(marked) <= 9


def test_a_variable_is_set_before_it_is_used():
    data = make("variables", samples=60)
    arrays = data.batch(range(60))
    for row in arrays["inputs"]:
        known = set()
        for place in np.flatnonzero(row == LET):
            name, source = int(row[place + 1]), int(row[place + 2])
            assert source >= data.first_value or source in known
            known.add(name)


def test_targets_are_the_next_tokens_and_answers_alone_on_request():
    whole, alone = (make("recall_language", predict=predict).batch(range(20)) for predict in ("all", "answers"))
    assert np.array_equal(whole["targets"][:, :-1], whole["inputs"][:, 1:])
    assert np.array_equal(alone["targets"] != IGNORE, whole["answers"])
    assert np.array_equal(alone["targets"][whole["answers"]], whole["targets"][whole["answers"]])


def test_the_filler_has_the_entropy_that_is_stated():
    assert pytest.approx(1.75 * np.log(2)) == ENTROPY
    data = SEQUENCES["recall_language"](split="train", samples=20, length=1024)
    arrays = data.batch(range(20))
    losses = []
    for row in range(20):
        words = arrays["inputs"][row]
        words = words[(words >= FIRST_WORD) & (words < data.first_name)] - FIRST_WORD
        losses.append(-data.filler.log_probability(words[None])[0])
    losses = np.concatenate(losses)
    # finite: the chain continues after a fact as if it were not there
    assert np.isfinite(losses).all()
    assert losses.mean() == pytest.approx(ENTROPY, abs=4 * losses.std() / len(losses) ** 0.5)
    assert data.is_filler(arrays).sum() == pytest.approx(len(losses), abs=60)


def test_the_filler_never_says_more_than_its_two_words_before():
    filler = Filler(words=5, seed=1)
    texts = filler.write(np.random.default_rng(0).random((3, 4000)))
    followers = {}
    for text in texts:
        for a, b, c in zip(text, text[1:], text[2:], strict=False):
            followers.setdefault((int(a), int(b)), []).append(int(c))
    shares = [np.sort(np.bincount(seen))[::-1][:4] / len(seen) for seen in followers.values() if len(seen) > 400]
    assert len(shares) > 5
    assert np.mean(shares, axis=0) == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.02)


def test_hundreds_fit_and_needle_difficulty_stays_within_bounds():
    data = SEQUENCES["needles"](
        split="train", samples=60, length=4096, needles=400, fewest_needles=10, names=512, families=["multi_key"]
    )
    counts = (data.batch(range(60))["inputs"] == MARK).sum(axis=1)
    assert counts.min() >= 10
    assert counts.max() <= 400
    # even on a log scale: half of them below the geometric mean
    assert (counts < 63).mean() == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": ["haystack"]}, "families must be some of"),
        ({"needles": 40}, "a name of its own"),
        ({"length": 40}, "need a length of"),
        ({"predict": "nothing"}, "predict must be"),
    ],
)
def test_facts_that_cannot_be_hidden_raise(options, message):
    with pytest.raises(ValueError, match=message):
        make("needles", **options)
