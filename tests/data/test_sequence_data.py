"""Generated sequences: a solver of its own agrees with every label, and nothing easier than the task gives it away."""

import hashlib
import json

import numpy as np
import pytest
import torch

from helpers.sequence_cases import CASES
from nalaformer.data import batches_from
from nalaformer.data.sequences import (
    ENTROPY,
    IGNORE,
    SEQUENCES,
    Filler,
    Stored,
    contours,
    known_options,
    make_sequences,
    stored,
    write,
)
from nalaformer.data.sequences.listops import WORDS
from nalaformer.data.sequences.needles import FAMILIES, FIRST_WORD, LET, MARK

RELEASED = {"text", "retrieval", "image"}


def make(name, samples=40, split="train", seed=0, **options):
    return SEQUENCES[name](split=split, samples=samples, seed=seed, **(CASES.get(name, {}) | options))


def digest(arrays):
    # rounded: processors differ in the last bit of a cosine
    joined = b"".join((arrays[name].astype(np.float32).round(3) + 0.0).tobytes() for name in sorted(arrays))
    return hashlib.sha256(joined).hexdigest()[:12]


# ---- every kind


def test_every_kind_of_data_is_tested_here():
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
    assert targets.shape == ((40,) if facts.answers == "sequence" else inputs.shape[:2])
    asked = targets[targets != IGNORE]
    assert len(asked) >= 40
    assert asked.min() >= 0
    assert asked.max() < facts.outputs
    assert set(arrays["group"]) <= set(range(len(data.groups)))
    assert len(data.group_lengths) == len(data.groups)
    assert 0 < data.chance <= 0.5


# of the first 8 samples: a change of a generator changes figures that were measured with it
CHECKSUMS = {
    "listops": "6050ddbac0c9",
    "listops_sky": "6c12e75f4a94",
    "pathfinder": "30a68c6b3797",
    "pathx": "22ff160a423c",
    "mqar": "b2bcde2237dc",
    "pointing": "7d55aad1fc03",
    "pointing_control": "2e450f7ba250",
    "majority": "c8d8ec8b0706",
    "copying": "c0c228c834e5",
    "induction": "7d11268d2fed",
    "recall_language": "11b6a2135108",
    "needles": "e8fc50608601",
    "variables": "71650f057b43",
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_samples_are_those_that_figures_were_measured_with(name):
    assert digest(SEQUENCES[name](split="train", samples=8).batch(range(8))) == CHECKSUMS[name]


def test_indices_beyond_the_data_and_unknown_splits_are_refused():
    data = make("copying")
    for wrong in ([40], [-1]):
        with pytest.raises(IndexError, match="0 to 39"):
            data.batch(wrong)
    with pytest.raises(IndexError, match="sample 40 of 40"):
        data[40]
    with pytest.raises(ValueError, match="train, val, test"):
        make("copying", split="dev")


@pytest.mark.parametrize("name", SEQUENCES.names())
def test_options_that_the_data_does_not_have_are_refused_with_those_it_has(name):
    with pytest.raises(ValueError, match=f"unknown option of {name}: 'lenght'") as refused:
        make_sequences(name, split="train", samples=2, options={"lenght": 8})
    assert all(option in str(refused.value) for option in known_options(name))
    assert not known_options(name).keys() & {"split", "samples", "seed"}


@pytest.mark.parametrize("options", [{"shortest": "long"}, {"longest": 64.5}, {"max_depth": True}, [1]])
def test_options_of_the_wrong_kind_are_refused(options, tmp_path):
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


# ---- ListOps


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


def words_of(row):
    return [WORDS[token] for token in row if token]


@pytest.fixture(scope="module")
def listops():
    return SEQUENCES["listops"](split="train", samples=2500).batch(range(2500))


def test_every_label_is_the_value_of_its_list(listops):
    assert all(
        evaluate(words_of(row)) == label for row, label in zip(listops["inputs"][:400], listops["targets"], strict=False)
    )


def test_the_solver_finds_a_planted_mistake(listops):
    with pytest.raises(IndexError):
        evaluate(words_of(np.delete(listops["inputs"][0], 1)))
    # the digits turned around: some value must change
    turned = [words_of(np.where((r > 0) & (r <= 10), 11 - r, r)) for r in listops["inputs"][:20]]
    assert [evaluate(words) for words in turned] != listops["targets"][:20].tolist()


def test_lists_have_the_published_lengths_depth_and_arguments(listops):
    lengths = (listops["inputs"] > 0).sum(axis=1)
    assert lengths.min() > 500
    assert lengths.max() < 2000
    depths, arguments = [], []
    for row in listops["inputs"][:100]:
        open_lists = []
        deepest = 0
        for word in words_of(row):
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


def test_the_shortcuts_of_listops_are_as_stated(listops):
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
        assert words_of(bare) == [word for word in words_of(row) if word != "]"]
    assert np.array_equal(whole["targets"], sky["targets"])


def test_impossible_lists_are_refused():
    with pytest.raises(ValueError, match="longest >= shortest"):
        make("listops", shortest=50, longest=55)


# ---- Pathfinder


@pytest.fixture(scope="module")
def scene():
    data = SEQUENCES["pathfinder"](split="train", samples=3000)
    return data, data.scene(np.arange(3000))


def is_connected(tails, heads, markers, margin):
    """Follow the contour from the first marker, knowing nothing of which strokes belong together."""
    ends = np.stack((tails, heads), axis=1)  # [P, 2, 2]
    here = int(np.abs(ends - markers[0]).sum(-1).min(1).argmin())
    free = 1 - int(np.abs(ends[here] - markers[0]).sum(-1).argmin())
    seen = {here}
    while True:
        point = ends[here, free]
        distance = np.linalg.norm(ends - point, axis=-1)
        distance[list(seen)] = np.inf
        if distance.min() > margin + 1e-6:
            return bool(np.linalg.norm(point - markers[1]) < 1e-6)
        here, near = (int(place) for place in np.unravel_index(distance.argmin(), distance.shape))
        free = 1 - near
        seen.add(here)


def test_following_the_contour_gives_the_label(scene):
    _, found = scene
    contours = found.contours
    for image in range(300):
        connected = is_connected(contours.tails[image], contours.heads[image], found.markers[image], 1.0)
        assert connected == bool(found.labels[image])
    assert 0.45 < found.labels.mean() < 0.55


def test_strokes_of_different_places_keep_clear_of_each_other(scene):
    data, found = scene
    before = data.spec.predecessors
    part = np.linspace(0, 1, 9)[:, None]
    for image in range(40):
        tails, heads = found.contours.tails[image], found.contours.heads[image]
        points = tails[:, None] + part * (heads - tails)[:, None]  # [P, 9, 2]
        distance = np.linalg.norm(points[:, None, :, None] - points[None, :, None], axis=-1).min(axis=(2, 3))
        for stroke in range(len(tails)):
            others = [p for p in range(stroke) if p != before[stroke]]
            assert distance[stroke, others].min(initial=9) > 2.0 - 1e-6
        assert points.min() >= 1
        assert points.max() <= 31


@pytest.mark.parametrize(
    "options",
    [
        {"size": 64, "paddle": 10.0, "contour": 4},
        {"size": 80, "paddle": 9.0, "contour": 4, "margins": (1.0, 3.0), "thickness": 1.5},
    ],
    ids=["long paddles", "two margins"],
)
def test_strokes_of_any_length_do_not_cross(options):
    found = SEQUENCES["pathfinder"](split="train", samples=12, **options).scene(np.arange(12)).contours
    first, second = np.triu_indices(found.tails.shape[1], 1)
    a, b = (ends[:, first, 0] + 1j * ends[:, first, 1] for ends in (found.tails, found.heads))
    c, d = (ends[:, second, 0] + 1j * ends[:, second, 1] for ends in (found.tails, found.heads))

    # where the lines meet, as shares of the strokes: a + s (b - a) = c + t (d - c)
    def cross(u, v):
        return (u.conj() * v).imag

    s, t = cross(c - a, d - c) / cross(b - a, d - c), cross(c - a, b - a) / cross(b - a, d - c)
    assert not ((s >= 0) & (s <= 1) & (t >= 0) & (t <= 1)).any()


def test_contours_that_would_turn_back_on_themselves_are_refused():
    with pytest.raises(ValueError, match=r"continuity must be at least 1, got 0\.6"):
        make("pathfinder", continuity=0.6)


def test_turns_follow_the_square_of_the_cosine(scene):
    data, found = scene
    before = data.spec.predecessors
    direction = found.contours.heads - found.contours.tails
    heading = np.arctan2(direction[..., 1], direction[..., 0])
    later = np.flatnonzero(before >= 0)
    turn = (heading[:, later] - heading[:, before[later]] + np.pi) % (2 * np.pi) - np.pi
    assert np.abs(turn).max() <= np.pi / 2 + 1e-9
    # free turns have a standard deviation of 32.5 degrees; what is in the way changes it a little
    assert np.degrees(turn.std()) == pytest.approx(32.5, abs=4)


def logistic_accuracy(features, labels):
    """Of a logistic regression fitted to one half, on the other half."""
    x = torch.tensor((features - features.mean(0)) / features.std(0), dtype=torch.float64)
    y = torch.tensor(labels, dtype=torch.float64)
    half = len(y) // 2
    model = torch.nn.Linear(x.shape[1], 1).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x[:half])[:, 0], y[:half])
        loss.backward()
        return loss

    optimizer.step(closure)
    return ((model(x[half:])[:, 0] > 0) == (y[half:] > 0.5)).double().mean().item()


def leak_features(data, found):
    images = data.drawn(found)
    distance = np.linalg.norm(found.markers[:, 0] - found.markers[:, 1], axis=1)
    brightness = images.mean(axis=(1, 2))
    return np.stack((distance, distance**2, brightness, brightness**2), axis=1)


def test_marker_distance_and_brightness_do_not_tell_the_label(scene):
    data, found = scene
    assert logistic_accuracy(leak_features(data, found), found.labels) < 0.53


@pytest.mark.parametrize("contour", [6, 9])
def test_easier_rungs_do_not_tell_the_label_either(contour):
    data = SEQUENCES["pathfinder"](split="val", samples=3000, contour=contour)
    found = data.scene(np.arange(3000))
    assert logistic_accuracy(leak_features(data, found), found.labels) < 0.53


def test_the_leak_check_finds_a_leak():
    # without equal distances the two ends of one contour are nearer to each other
    data = SEQUENCES["pathfinder"](split="train", samples=1000, contour=4, match=99.0)
    found = data.scene(np.arange(1000))
    assert logistic_accuracy(leak_features(data, found), found.labels) > 0.53


def test_discs_are_white_and_strokes_visible(scene):
    data, found = scene
    images = data.drawn(found)[:50]
    middle = (found.contours.tails + found.contours.heads) / 2
    for image in range(50):
        x, y = np.floor(found.markers[image]).astype(int).T
        assert (images[image][y, x] == 255).all()
        # a thin stroke through the corner of a pixel may light its neighbour instead
        lit = np.lib.stride_tricks.sliding_window_view(np.pad(images[image], 1), (3, 3)).max(axis=(2, 3))
        x, y = np.floor(middle[image]).astype(int).T
        assert (lit[y, x] > 90).all()
    assert 0.05 < (images > 0).mean() < 0.4


def test_contours_that_find_no_place_are_given_up(monkeypatch):
    monkeypatch.setattr(contours, "MOST_RESTARTS", 3)
    # by their area alone they would fit
    with pytest.raises(ValueError, match=r"100 paddles .* begun 3 times in vain; choose shorter"):
        make("pathfinder", size=32, contour=40, distractors=5, distractor_length=4, seed_distance=7.0).batch([0, 1])


def test_too_many_strokes_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        SEQUENCES["pathfinder"](split="train", samples=1, size=12)


# ---- recall


def test_every_answer_of_mqar_is_the_value_of_its_key():
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


def test_the_mixture_of_mqar_is_the_published_one():
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
    arrays = make("induction").batch(range(40))
    for inputs, targets in zip(arrays["inputs"], arrays["targets"], strict=True):
        (place,) = np.flatnonzero(inputs[:-1] == inputs[-1])
        assert targets[-1] == inputs[place + 1]
        assert (targets[:-1] == IGNORE).all()


def test_pointing_asks_for_the_class_of_the_nearest_key():
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


def test_the_majority_is_the_class_of_most_keys_and_every_class_wins_as_often():
    arrays = make("majority", samples=4000).batch(range(4000))
    counts = arrays["inputs"][:, :23, 3:11].sum(axis=1)
    answers = arrays["targets"][:, 23:]
    assert (answers == answers[:, :1]).all()
    assert np.array_equal(counts.argmax(axis=1), answers[:, 0])
    assert (np.sort(counts, axis=1)[:, -1] > np.sort(counts, axis=1)[:, -2]).all()
    assert np.bincount(answers[:, 0]) / 4000 == pytest.approx(np.full(8, 1 / 8), abs=0.03)
    assert not arrays["inputs"][:, 23:, :-1].any()


# ---- hidden facts


def facts_in(data, tokens):
    """What a reader finds: values of marked names, sources of variables."""
    marked, variables = {}, {}
    for place in range(len(tokens) - 2):
        if tokens[place] == MARK:
            marked.setdefault(tokens[place + 1], []).append(tokens[place + 2])
        elif tokens[place] == LET:
            variables[tokens[place + 1]] = tokens[place + 2]
    return marked, variables


def answers_of(data, arrays, row):
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
        text, questions = answers_of(data, arrays, row)
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
    # finite: the chain goes on after a fact as if it had not been
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


def test_hundreds_of_needles_fit_and_difficulty_is_drawn_between_its_bounds():
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
def test_facts_that_cannot_be_hidden_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make("needles", **options)


# ---- on disk


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


# ---- released files


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


def test_pairs_of_papers_are_read_from_their_lines(tmp_path):
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


def test_a_missing_folder_of_released_files_says_what_it_must_hold():
    with pytest.raises(ValueError, match=r"data_batch_1\.bin"):
        SEQUENCES["image"](split="train", samples=1)
