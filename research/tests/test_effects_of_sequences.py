"""Every option of every kind of sequence data does what its documentation says."""

from pathlib import Path

import numpy as np
import pytest

from helpers.option_effects import Effects
from research.sequences import IGNORE, SEQUENCES, known_options
from research.sequences.listops import CLOSE, FIRST_OPERATOR
from research.sequences.needles import ASK, FIRST_WORD, LET, MARK
from research.tests.sequence_cases import CASES

SEQUENCE_OPTIONS = Effects(f"{name}.{option}" for name in SEQUENCES.names() for option in known_options(name))


def test_every_option_has_an_effect_test():
    assert SEQUENCE_OPTIONS.missing() == []


def shows(names, *options):
    """Decorates the test of options that several kinds of data have; it is run for each kind."""
    entered = SEQUENCE_OPTIONS.of(*(f"{name}.{option}" for name in names for option in options))
    return lambda test: pytest.mark.parametrize("name", names)(entered(test))


def make(name, samples=30, split="train", **options):
    return SEQUENCES[name](split=split, samples=samples, **(CASES.get(name, {}) | options))


def arrays(name, **options):
    data = make(name, **options)
    return data, data.batch(range(len(data)))


# ---- ListOps

LISTS = ("listops", "listops_sky")


def lengths(name, **options):
    """One for a digit, two for an operator, as the bounds count them."""
    tokens = arrays(name, **options)[1]["inputs"]
    is_operator = (tokens >= FIRST_OPERATOR) & (tokens < CLOSE)
    return ((tokens > 0) & (tokens != CLOSE)).sum(1) + is_operator.sum(1)


@shows(LISTS, "shortest")
def test_lists_are_longer_than_the_shortest(name):
    assert lengths(name, shortest=30).min() > 30
    assert lengths(name, shortest=10).min() < 30


@shows(LISTS, "longest")
def test_lists_are_shorter_than_the_longest(name):
    assert lengths(name, longest=200, samples=60).max() > 73
    assert lengths(name, longest=40).max() < 40
    assert [make(name, longest=longest).facts.length for longest in (64, 65)] == [64, 128]


def brackets(**options):
    """The deepest nesting and the most arguments of a list."""
    deepest = widest = 0
    for row in arrays("listops", samples=60, **options)[1]["inputs"]:
        open_lists = []
        for token in row:
            if token == CLOSE:
                widest = max(widest, open_lists.pop())
            elif token:
                if open_lists:
                    open_lists[-1] += 1
                if token >= FIRST_OPERATOR:
                    open_lists.append(0)
            deepest = max(deepest, len(open_lists))
    return deepest, widest


@shows(LISTS, "max_depth")
def test_lists_are_at_most_so_deep(name):
    # the last level holds digits alone
    assert brackets(max_depth=3)[0] == 2
    assert brackets(max_depth=6)[0] == 5
    # without brackets depth cannot be read, but the lists are the same
    assert np.array_equal(arrays(name, max_depth=3)[1]["targets"], arrays("listops", max_depth=3)[1]["targets"])


@shows(LISTS, "max_arguments")
def test_operators_have_at_most_so_many_arguments(name):
    assert brackets(max_arguments=3)[1] == 3
    assert brackets(max_arguments=8)[1] == 8
    assert np.array_equal(arrays(name, max_arguments=3)[1]["targets"], arrays("listops", max_arguments=3)[1]["targets"])


# ---- Pathfinder

# few strokes in much room
PATHS = {
    "pathfinder": {"size": 28, "contour": 2, "distractors": 1, "distractor_length": 2, "seed_distance": 6},
    "pathx": {"size": 72, "contour": 2, "distractors": 1, "distractor_length": 2, "seed_distance": 14},
}
IMAGES = 12


def scene(name, **options):
    data = make(name, samples=IMAGES, **(PATHS[name] | options))
    return data, data.scene(np.arange(IMAGES))


def images(name, **options):
    data, found = scene(name, **options)
    return data.draw(found)


def ends(data, found):
    """First and far ends of all strokes, [B, P, 2]; images must have one margin."""
    return data.paddles(int(found.margin[0])).ends(found.contours.paddle, found.contours.place)


@shows(PATHS, "size")
def test_images_have_their_size(name):
    size = PATHS[name]["size"]
    for larger in (0, size):
        data, found = scene(name, size=size + larger)
        assert data.draw(found).shape == (IMAGES, size + larger, size + larger)
        assert data.facts.length == (size + larger) ** 2
    assert size < found.contours.place.max() < size + larger


def strokes(name, **options):
    return scene(name, **options)[1].contours.paddle.shape[1]


@shows(PATHS, "contour")
def test_two_contours_have_so_many_strokes(name):
    assert strokes(name, contour=3) - strokes(name, contour=2) == 2


@shows(PATHS, "distractors")
def test_there_are_so_many_short_contours(name):
    assert strokes(name, distractors=2) - strokes(name, distractors=0) == 4


@shows(PATHS, "distractor_length")
def test_short_contours_have_so_many_strokes(name):
    assert strokes(name, distractors=2, distractor_length=3) - strokes(name, distractors=2, distractor_length=1) == 4


@shows(PATHS, "paddle")
def test_strokes_have_their_length(name):
    usual = {"pathfinder": 2, "pathx": 5}[name]
    for length in (usual, usual + 1):
        data, found = scene(name, paddle=length, margins=[2], distractors=0)
        tails, heads = ends(data, found)
        assert np.linalg.norm(heads - tails, axis=-1) == pytest.approx(length)
        # one stroke, drawn in its own size, has as many pixels
        light = make(name, **(PATHS[name] | {"paddle": length, "antialias": 1, "thickness": 1.0})).paddles(2).light[180 + 0]
        assert (light > 0).sum() == length + 1


@shows(PATHS, "thickness")
def test_thick_strokes_light_more_pixels(name):
    thin, thick = ((images(name, thickness=width, distractors=0, antialias=1) > 0).mean() for width in (1.0, 3.0))
    assert thick > 1.2 * thin


@shows(PATHS, "margins")
def test_strokes_keep_their_margin(name):
    margins = {"pathfinder": (1, 2), "pathx": (2, 4)}[name]
    data, found = scene(name, margins=margins, distractors=0)
    assert set(found.margin) == set(margins)
    gaps = []
    for margin in margins:
        those = found.margin == margin
        tails, heads = data.paddles(margin).ends(found.contours.paddle[those], found.contours.place[those])
        gaps.append(np.linalg.norm(tails[:, 2:4] - heads[:, :2], axis=-1).mean())
    # two margins lie between two strokes of a contour, which bends between them
    assert gaps[1] > gaps[0] + 0.5 * (margins[1] - margins[0])


@shows(PATHS, "seed_distance")
def test_long_contours_begin_so_far_from_each_other(name):
    for distance in (PATHS[name]["seed_distance"], PATHS[name]["seed_distance"] + 3):
        place = scene(name, seed_distance=distance)[1].contours.place
        # on whole pixels
        assert np.linalg.norm(place[:, 0] - place[:, 1], axis=-1) == pytest.approx(distance, abs=0.75)


@shows(PATHS, "marker")
def test_discs_have_their_radius(name):
    # strokes are dark here, so that discs alone are white
    small, large = (
        (images(name, marker=radius, contrast=0.3, distractors=0) == 255).sum((1, 2)).mean() for radius in (2.0, 4.0)
    )
    assert large > 3 * small


@shows(PATHS, "continuity")
def test_contours_turn_less_where_they_continue(name):
    def turn(continuity):
        data, found = scene(name, continuity=continuity, contour=4, margins=[2], distractors=0)
        heading = data.paddles(2).heading[found.contours.paddle]
        return ((heading[:, 2:] - heading[:, :-2] + np.pi) % (2 * np.pi) - np.pi).std()

    assert turn(2.0) < 0.75 * turn(1.0)


def greys(name, **options):
    """Return the grey values of images drawn in their own size, so that edges are sharp."""
    return set(np.unique(images(name, antialias=1, **options)))


@shows(PATHS, "contrast")
def test_strokes_are_as_bright_as_their_contrast(name):
    for contrast in (0.4, 0.8):
        assert greys(name, contrast=contrast, distractors=0, thickness=1.0) == {0, 255 * contrast, 255}
    # scaled to the brightest
    assert greys(name, contrast=2.0, distractors=0, thickness=1.0) == {0, 128, 255}


@shows(PATHS, "distractor_contrast")
def test_short_contours_have_their_own_brightness(name):
    for contrast in (0.4, 0.8):
        assert greys(name, contrast=0.6, distractor_contrast=contrast, thickness=1.0) == {0, 255 * contrast, 153, 255}


@shows(PATHS, "antialias")
def test_edges_are_grey_where_images_are_drawn_larger(name):
    levels = [len(np.unique(images(name, antialias=scale, contrast=0.9, distractors=0, thickness=1.0))) for scale in (1, 2, 4)]
    assert levels[0] == 3
    assert levels[0] < levels[1] < levels[2]


# ---- recall


@SEQUENCE_OPTIONS.of("mqar.vocabulary")
def test_tokens_lie_in_the_vocabulary():
    for size in (67, 131):
        data, made = arrays("mqar", vocabulary=size, samples=60)
        assert 0.9 * size < made["inputs"].max() < size
        assert (data.facts.vocabulary, data.facts.outputs, data.chance) == (size, size, 2 / size)


@SEQUENCE_OPTIONS.of("mqar.mixture")
def test_samples_alternate_between_kinds():
    data, made = arrays("mqar", mixture=[[20, 2], [40, 7]])
    asked = (made["targets"] != IGNORE).sum(1)
    assert asked.tolist() == [2, 7] * 15
    assert data.group_lengths == (20, 40)
    assert data.facts.length == 40


@SEQUENCE_OPTIONS.of("mqar.power")
def test_a_large_power_asks_late():
    def mean_place(power):
        targets = arrays("mqar", mixture=[[64, 1]], power=power, samples=100)[1]["targets"]
        return np.nonzero(targets != IGNORE)[1].mean()

    assert mean_place(0.01) < 0.6 * mean_place(1.0)
    assert mean_place(1.0) < 0.9 * mean_place(4.0)


@SEQUENCE_OPTIONS.of("mqar.random_filler")
def test_what_is_between_is_random_or_blank():
    for is_random in (True, False):
        made = arrays("mqar", random_filler=is_random, mixture=[[40, 3]])[1]
        between = made["inputs"][:, 6:][made["targets"][:, 6:] == IGNORE]
        assert ((between > 0).mean() > 0.9) == is_random
        assert is_random or (between == 0).all()


@shows(("copying", "induction"), "length")
def test_sequences_have_their_length(name):
    for length in (12, 30):
        data, made = arrays(name, length=length)
        assert made["inputs"].shape == (30, length)
        assert data.facts.length == length
        asked = (made["targets"] != IGNORE).sum(1)
        assert (asked == (length // 2 if name == "copying" else 1)).all()


@shows(("copying", "induction"), "vocabulary")
def test_tokens_are_drawn_from_the_vocabulary(name):
    for size in (5, 40):
        data, made = arrays(name, vocabulary=size)
        assert made["inputs"].max() == size - 1
        assert data.facts.outputs == data.facts.vocabulary == size
        assert data.chance == 1 / (size - 2 - (name == "induction"))


@SEQUENCE_OPTIONS.of("induction.answers")
def test_more_tokens_are_asked_for():
    for answers in (1, 4):
        data, made = arrays("induction", answers=answers, vocabulary=16)
        assert ((made["targets"] != IGNORE).sum(1) == answers).all()
        assert data.chance == 1 / (14 - answers)


# ---- pointing

PROBED = ("pointing", "pointing_control", "majority")


@shows(PROBED, "keys")
def test_so_many_keys_come_first(name):
    data, made = arrays(name, keys=70)
    assert (made["inputs"][:, :, -1] == 0).sum(1).tolist() == [70] * 30
    assert data.facts.length == 75


@shows(PROBED, "probes")
def test_so_many_positions_ask(name):
    made = arrays(name, probes=9)[1]
    assert (made["inputs"][:, :, -1] == 1).sum(1).tolist() == [9] * 30
    assert (made["targets"] != IGNORE).sum(1).tolist() == [9] * 30


@shows(PROBED, "dimensions")
def test_directions_have_so_many_dimensions(name):
    data, made = arrays(name, dimensions=5)
    assert made["inputs"].shape[2] == data.facts.channels == 5 + 8 + 1
    assert np.linalg.norm(made["inputs"][:, :20, :5], axis=2) == pytest.approx(1, abs=1e-5)


@SEQUENCE_OPTIONS.of("pointing.noise")
def test_probes_lie_so_far_from_their_keys():
    def distance(noise):
        made = arrays("pointing", noise=noise)[1]["inputs"][:, :, :3]
        return np.linalg.norm(made[:, 23:, None] - made[:, None, :23], axis=-1).min(2).mean()

    assert distance(0.0) < 1e-5
    assert 0.02 < distance(0.03) < 0.08
    assert distance(0.3) > 2 * distance(0.03)


@SEQUENCE_OPTIONS.of("cue_cells.cells", "cue_cells.cell_size")
def test_a_grid_has_the_given_cells():
    for cells, size in ((3, 8), (4, 9)):
        assert arrays("cue_cells", cells=cells, cell_size=size)[1]["inputs"].shape == (30, cells**2, 3 * size**2)


def make_queries(**options):
    """Inputs, targets, and queries [B, N, heads, size] as the teacher sees them."""
    data, found = arrays("softmax_teacher", samples=60, **options)
    seen = found["inputs"].astype(np.float64) @ data.rotation.T
    return found, seen.reshape(*seen.shape[:2], 3, data.heads, data.size)[:, :, 0]


@SEQUENCE_OPTIONS.of("softmax_teacher.tokens", "softmax_teacher.heads", "softmax_teacher.size")
def test_a_teacher_has_the_given_tokens_and_head_sizes():
    found, _ = make_queries(tokens=7, heads=2, size=4)
    assert found["inputs"].shape == (60, 7, 3 * 2 * 4)
    assert found["targets"].shape == (60, 7, 2 * 4)
    with pytest.raises(ValueError, match="needs tokens >= 2, heads >= 1, size >= 2, got 1, 2, 4"):
        make_queries(tokens=1, heads=2, size=4)


@SEQUENCE_OPTIONS.of("softmax_teacher.shortest", "softmax_teacher.longest")
@pytest.mark.parametrize(("shortest", "longest"), [(0.5, 16.0), (2.0, 3.0)])
def test_query_norms_are_between_the_shortest_and_the_longest(shortest, longest):
    norms = np.linalg.norm(make_queries(shortest=shortest, longest=longest)[1], axis=-1)
    # the numbers that are shown are rounded to float32
    assert shortest - 1e-5 < norms.min() < shortest * 1.03
    assert longest / 1.03 < norms.max() < longest + 1e-5
    # half of them lie below the geometric mean: 1,980 norms in all
    assert (norms < (shortest * longest) ** 0.5).mean() == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match=r"norms of queries must be positive and in order, got 2\.0 to 1\.0"):
        make("softmax_teacher", shortest=2.0, longest=1.0)


@SEQUENCE_OPTIONS.of("majority.lead")
def test_the_majority_class_leads_by_the_given_margin():
    def leads(lead):
        made = arrays("majority", lead=lead)[1]
        counts = np.sort(made["inputs"][:, :23, 3:11].sum(axis=1), axis=1)
        return counts[:, -1] - counts[:, -2]

    assert leads(1).min() == 1
    # one more than others at least, and each taken key may have been of the second
    assert leads(6).min() >= 6
    for lead in (0, 12):
        with pytest.raises(ValueError, match="lead must be 1 to 11"):
            arrays("majority", lead=lead)


# ---- hidden facts

FACTS = ("recall_language", "needles", "variables")


def count_facts(name, family, **options):
    """In each text, whichever family it is of."""
    inputs = arrays(name, families=[family], **options)[1]["inputs"]
    return (inputs == (LET if family == "variables" else MARK)).sum(1)


def count_questions(name, family, **options):
    return (arrays(name, families=[family], **options)[1]["inputs"] == ASK).sum(1)


@shows(FACTS, "length")
def test_texts_have_their_length(name):
    data, made = arrays(name, length=160)
    assert made["inputs"].shape == made["targets"].shape == (30, 160)
    assert data.facts.length == 160


@shows(FACTS, "families")
def test_texts_come_from_the_families(name):
    data, made = arrays(name, families=["single", "multi_key"])
    assert data.groups == ("single", "multi_key")
    assert set(made["group"]) == {0, 1}
    assert not (made["inputs"] == LET).any()
    by_default = {
        "needles": {"single", "multi_key", "multi_value"},
        "variables": {"variables"},
        "recall_language": {"single", "multi_key", "multi_value", "variables", "induction"},
    }
    assert {group.split(",")[0] for group in make(name).groups} == by_default[name]


@shows(FACTS, "needles")
def test_so_many_facts_are_hidden(name):
    for needles in (3, 9):
        assert (count_facts(name, "multi_key", needles=needles, fewest_needles=0) == needles).all()


@shows(FACTS, "fewest_needles")
def test_the_fact_count_starts_at_the_fewest(name):
    found = count_facts(name, "multi_key", needles=9, fewest_needles=4, samples=60)
    assert (found.min(), found.max()) == (4, 9)


@shows(FACTS, "hops")
def test_variables_are_followed_so_many_steps(name):
    for hops in (1, 3):
        data, made = arrays(name, families=["variables"], hops=hops, samples=60)
        assert len(data.groups) == hops
        assert set(made["group"]) == set(range(hops))


@shows(FACTS, "values_per_name")
def test_a_name_has_so_many_values(name):
    for each in (2, 3):
        made = arrays(name, families=["multi_value"], values_per_name=each)[1]
        for row in made["inputs"]:
            names = row[np.flatnonzero(row == MARK) + 1]
            assert set(np.unique(names, return_counts=True)[1]) == {each}
        # a question and a name, then the values: answers come in runs of that length
        starts = np.diff(made["answers"].astype(int), prepend=0, axis=1) == 1
        assert made["answers"].sum() == each * starts.sum()


@shows(FACTS, "questions")
def test_so_many_questions_are_asked(name):
    for questions in (1, 3):
        assert (count_questions(name, "multi_key", questions=questions, fewest_needles=0) == questions).all()


@shows(FACTS, "words")
def test_the_filler_has_so_many_words(name):
    for words in (7, 13):
        data, made = arrays(name, words=words)
        assert data.first_name == FIRST_WORD + words
        between = made["inputs"][(made["inputs"] >= FIRST_WORD) & (made["inputs"] < data.first_name)]
        assert set(between) == set(range(FIRST_WORD, FIRST_WORD + words))


@shows(FACTS, "names")
def test_names_come_from_the_given_number(name):
    for names in (12, 31):
        data, made = arrays(name, names=names, families=["multi_key"], samples=60)
        used = made["inputs"][(made["inputs"] >= data.first_name) & (made["inputs"] < data.first_value)]
        assert set(used) == set(range(data.first_name, data.first_name + names))
        assert data.facts.vocabulary == FIRST_WORD + 13 + names + 17


@shows(FACTS, "values")
def test_values_come_from_the_given_number(name):
    for values in (5, 17):
        data, made = arrays(name, values=values, families=["multi_key"], samples=60)
        assert set(made["inputs"][made["inputs"] >= data.first_value]) == set(
            range(data.first_value, data.first_value + values)
        )
        assert data.chance == 1 / values


@shows(FACTS, "predict")
def test_answers_alone_are_learned_on_request(name):
    for predict in ("all", "answers"):
        made = arrays(name, predict=predict)[1]
        asked = made["targets"] != IGNORE
        assert asked.all() if predict == "all" else np.array_equal(asked, made["answers"])


@shows(FACTS, "language")
def test_another_language_has_other_words_and_the_same_facts(name):
    (data, zero), (_, one) = (arrays(name, language=language) for language in (0, 1))
    is_word = (zero["inputs"] >= FIRST_WORD) & (zero["inputs"] < data.first_name)
    assert np.array_equal(zero["inputs"][~is_word], one["inputs"][~is_word])
    assert (zero["inputs"][is_word] != one["inputs"][is_word]).mean() > 0.5


# seen to in tests/data/test_image_file.py
SEQUENCE_OPTIONS.of("pixels.file", "patches.file", "patches.patch", "image_rows.file")
# in test_document_windows.py
SEQUENCE_OPTIONS.of(*(f"documents.{name}" for name in ("file", "test_file", "vocabulary", "length")))

# ---- released files


@pytest.fixture
def released_folder(tmp_path):
    """A folder with files of every kind of released data; reviews and papers are 40 letters long."""
    for split in ("train", "test"):
        for label, letter in (("neg", "n"), ("pos", "p")):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                (folder / f"{number}.txt").write_text(f"{split} {number} " + letter * 40)
    for part in ("train", "eval", "test"):
        lines = (f"{number % 2}\ta\tb\t{part}{number}{'x' * 40}\t{'y' * 40}\n" for number in range(6))
        (tmp_path / f"new_aan_pairs.{part}.tsv").write_text("".join(lines))
    for number, name in enumerate((*(f"data_batch_{batch}.bin" for batch in range(1, 6)), "test_batch.bin")):
        np.full((4, 3073), number, np.uint8).tofile(tmp_path / name)
    return tmp_path


def decode_text(row):
    return bytes(int(token) - 1 for token in row if token).decode()


@shows(("text", "retrieval", "image"), "root")
def test_files_are_read_from_the_root_by_split(name, released_folder):
    first = {"text": ("train", "test", "test"), "retrieval": ("train", "eval", "test"), "image": (0, 4, 5)}[name]
    for split, expected in zip(("train", "val", "test"), first, strict=True):
        sample = SEQUENCES[name](split=split, samples=99, root=str(released_folder))[0]["inputs"]
        if name == "image":
            assert set(sample.tolist()) == {expected}
        else:
            assert decode_text(sample if name == "text" else sample[0]).startswith(expected)


@shows(("text", "retrieval"), "length")
def test_texts_are_cut_to_their_length(name, released_folder):
    for length in (11, 60):
        data = SEQUENCES[name](split="train", samples=99, root=str(released_folder), length=length)
        assert data[0]["inputs"].shape[-1] == data.facts.length == length
        filled = (data[0]["inputs"] > 0).sum(-1)
        assert (filled == 11).all() if length == 11 else ((filled >= 40) & (filled < 60)).all()


def test_reviews_come_in_one_order_whatever_the_disk_says(released_folder, monkeypatch):
    found = []
    for reverse in (False, True):
        listed = Path.glob
        monkeypatch.setattr(
            Path, "glob", lambda *arguments, listed=listed, reverse=reverse: sorted(listed(*arguments), reverse=reverse)
        )
        found.append(SEQUENCES["text"](split="train", samples=99, root=str(released_folder)).files)
    assert found[0] == found[1]
