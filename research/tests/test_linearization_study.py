"""The study of conversions: a teacher that starts near what it is to learn, and the whole of it at toy size."""

import csv
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.places import PROJECT
from research.sequences import IGNORE
from research.sequences.needles import MARK

pytest.importorskip("peft")

from research.fast_training.data_on_device import load_to_device
from research.linearization import Rows, run_linearization, toy_study
from research.recall import tables
from research.recall.study import RecallStudy, Texts, accuracies, small_recall, toy_recall
from research.recall.teacher import (
    Answering,
    Lesson,
    TeacherConfig,
    build_teacher,
    disable_masks,
    load_teacher,
    train_teacher,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def small_teacher(**changes):
    sizes = {"width": 64, "heads": 2, "key_heads": 2, "rotary_base": 1e4, "words": 16, "names": 32, "values": 16}
    sizes["lessons"] = (Lesson(lengths=(64,), facts=6, steps=1),)
    return TeacherConfig(**(sizes | changes))


def quiet(line):
    pass


# ---- the start


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2), (3, 1)])
def test_half_the_first_heads_start_on_the_token_before(heads, key_heads):
    config = small_teacher(width=96, heads=heads, key_heads=key_heads)
    model = build_teacher(config)
    model.set_attn_implementation("eager")
    tokens = torch.randint(0, model.config.vocab_size, (2, 61))
    weights = model.model(input_ids=tokens, use_cache=False, output_attentions=True).attentions[0]
    before = weights.diagonal(-1, 2, 3).mean((0, 2))  # [heads]
    group = heads // key_heads
    looking = max(1, key_heads // 2) * group
    assert (before[:looking] > 0.6).all()
    assert (before[looking:] < 0.2).all()


@pytest.mark.parametrize("key_heads", [4, 2])
def test_a_question_starts_by_preferring_the_token_after_what_it_asks_for(key_heads):
    config = small_teacher(layers=2, width=256, heads=4, key_heads=key_heads, families=("multi_key",))
    model = build_teacher(config)
    model.set_attn_implementation("eager")
    arrays = config.data(96, facts=12, split="train", samples=8).batch(range(8))
    tokens = torch.from_numpy(arrays["inputs"]).long()
    weights = model.model(input_ids=tokens, use_cache=False, output_attentions=True).attentions[1][:, 2:]
    right, other = [], []
    for sample, place in zip(*arrays["answers"].nonzero(), strict=True):
        names = (tokens[sample] == tokens[sample, place]).nonzero()[:, 0].tolist()
        values = [mark + 2 for mark in (tokens[sample] == MARK).nonzero()[:, 0].tolist()]
        for value in values:
            (right if value == names[0] + 1 else other).append(weights[sample, :, place, value])
    # means over the heads that do not look back; with unprepared weights both would be alike
    assert (torch.stack(right).mean(0) > 4 * torch.stack(other).mean(0)).all()


def test_a_teacher_learns_to_look_up_from_this_start_in_a_few_hundred_small_steps():
    lesson = Lesson(lengths=(64,), facts=8, steps=150, tokens=1024)
    config = small_teacher(layers=2, families=("multi_key",), lessons=(lesson,), learning_rate=3e-3, minutes=3.0)
    course = train_teacher(config, device="cpu", say=quiet)
    data = config.data(64, facts=8, split="test", samples=64)
    # guessing among the values of the text: 0.15
    assert accuracies(course.model, data, device="cpu", tokens=4096)["multi_key"] > 0.9


# ---- the course


def test_texts_are_the_same_whoever_makes_them():
    data = small_teacher().data(64, facts=6, split="train", samples=1030)
    (alone,) = load_to_device(data, "cpu")
    with ThreadPoolExecutor(3) as pool:
        (together,) = load_to_device(data, "cpu", pool=pool)
    assert torch.equal(alone.inputs, together.inputs)
    assert torch.equal(alone.targets, together.targets)


def test_answers_equal_the_whole_model_at_asked_places():
    model = build_teacher(small_teacher(layers=2))
    tokens, at = torch.randint(0, 60, (2, 37)), torch.tensor([[3, 36], [0, 20]])
    whole = model(input_ids=tokens, use_cache=False).logits
    with disable_masks(model):
        asked = Answering(model)(tokens, at=at)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(asked, whole[torch.arange(2)[:, None], at])


def test_a_teacher_on_disk_resumes_with_the_next_lesson(tmp_path):
    config = toy_recall().teacher
    said = []
    whole = train_teacher(config, device="cpu", say=quiet)
    first = train_teacher(replace(config, minutes=0.0), device="cpu", say=said.append, folder=tmp_path)
    assert first.lessons == 0
    assert "the time is over after 0 of 2 lessons" in said[-1]
    one = train_teacher(replace(config, lessons=config.lessons[:1]), device="cpu", say=quiet)
    assert one.lessons == 1
    kept = train_teacher(config, device="cpu", say=quiet, folder=tmp_path)
    assert [path.name for path in tmp_path.glob("after_*")] == ["after_2_lessons"]
    loaded = train_teacher(config, device="cpu", say=said.append, folder=tmp_path)
    assert said[-1] == "teacher: 2 of 2 lessons were taken before"
    assert (loaded.lessons, loaded.tokens) == (kept.lessons, kept.tokens)
    for course in (kept, loaded):
        for expected, found in zip(whole.model.parameters(), course.model.parameters(), strict=True):
            assert torch.equal(expected, found)
    with pytest.raises(ValueError, match="trained with other settings"):
        load_teacher(replace(config, learning_rate=0.5), tmp_path)


def test_every_study_has_room_for_its_facts_and_knows_its_methods():
    for study in (RecallStudy(), small_recall(), toy_recall()):
        for length in (*study.eval_lengths, study.convert_length):
            assert study.texts(length).batch([0])["answers"].any()
        assert {study.settings(method).chunk_size for method in study.methods} >= {study.chunk_size}


# ---- conversions


def test_accuracy_by_group_does_not_depend_on_the_batching():
    data = small_teacher().data(64, facts=6, split="test", samples=11, questions=4)
    arrays = data.batch(range(11))
    answers = torch.from_numpy(arrays["targets"]).long().clamp(min=0)

    def right_but_at_the_end(input_ids, use_cache):
        """Knows all texts, but not their last answers."""
        rows = [int((torch.from_numpy(arrays["inputs"]).long() == text).all(1).nonzero()) for text in input_ids]
        logits = torch.nn.functional.one_hot(answers[rows], data.facts.vocabulary)
        logits[:, 58:] = 0
        return SimpleNamespace(logits=logits)

    is_right = (arrays["targets"] != IGNORE) & (np.arange(64) < 58)
    for tokens in (64, 200, 10**6):
        found = accuracies(right_but_at_the_end, data, device="cpu", tokens=tokens)
        for group, name in enumerate(data.groups):
            mine = arrays["group"] == group
            assert (name in found) == mine.any()
            if mine.any():
                assert found[name] == is_right[mine].sum() / arrays["answers"][mine].sum()
    assert any(0 < share < 1 for share in found.values())


def test_texts_reach_conversions_as_tokens_and_targets():
    data = small_teacher().data(64, facts=6, split="train", samples=5)
    texts = Texts(data)
    assert len(texts) == 5
    arrays = data.batch([3])
    assert np.array_equal(texts[3]["input_ids"].numpy(), arrays["inputs"][0])
    assert np.array_equal(texts[3]["targets"].numpy(), arrays["targets"][0])


def test_the_study_runs_and_leaves_its_rows(tmp_path):
    lines = []
    path = run_linearization(toy_study(), device="cpu", out=tmp_path / "rows.csv", say=lines.append)
    rows = list(csv.DictReader(path.open()))
    recall = [row for row in rows if row["part"] == "recall"]
    assert list(dict.fromkeys(row["method"] for row in recall)) == ["teacher", "key_norm", "linear"]
    asked = {row["task"] for row in recall if row["method"] == "teacher"}
    assert len(asked) > 2
    assert all({row["task"] for row in recall if row["method"] == method} == asked for method in ("key_norm", "linear"))
    decode = [row for row in rows if row["part"] == "decode"]
    assert decode
    assert all(float(row["ms_per_step"]) > 0 and float(row["cache_mib"]) > 0 for row in decode)
    assert all(float(row["ms"]) > 0 for row in rows if row["part"] == "prompt")
    assert {row["part"] for row in rows} == {"recall", "prompt", "decode"}
    assert all(row["commit"] and row["torch"] for row in rows)
    assert all(0 <= float(row["accuracy"]) <= 1 for row in recall)


def test_several_teachers_have_their_own_seeds_and_folders(tmp_path):
    study = replace(toy_study(), recall=replace(toy_recall(), methods=("linear",)))
    options = {"device": "cpu", "out": tmp_path / "rows.csv", "parts": ("recall",), "teacher_folder": tmp_path / "kept"}
    lines = []
    path = run_linearization(study, teachers=2, say=lines.append, **options)
    rows = list(csv.DictReader(path.open()))
    assert {(row["method"], row["teacher_seed"]) for row in rows} == {
        (method, seed) for method in ("teacher", "linear") for seed in ("0", "1")
    }
    kept = [load_teacher(replace(study.recall.teacher, seed=seed), tmp_path / "kept" / f"seed_{seed}") for seed in (0, 1)]
    weights = [course.model.lm_head.weight for course in kept]
    assert not torch.equal(*weights)
    assert any(line.startswith("teacher 1: linear: converted") for line in lines)
    run_linearization(replace(study, minutes=-1.0), teachers=3, say=lines.append, **options)
    assert "teacher 2: not begun, the time is over" in lines
    assert list(csv.DictReader(path.open())) == rows
    with pytest.raises(ValueError, match="teachers must be at least 1, got 0"):
        run_linearization(study, teachers=0, **options)


def test_tables_on_the_page_match_the_files():
    text = (PROJECT / "docs" / "linearize.md").read_text()
    assert tables.fill_page(text, PROJECT / "benchmarks" / "results") == text
    assert tables.MARK.search(text)


def test_a_table_has_the_mean_over_teachers_and_those_that_keep_most_first(tmp_path):
    rows = Rows(tmp_path / "some.csv", "cpu")
    for seed, accuracy in enumerate((1.0, 0.5)):
        for length in (64, 128):
            place = {"part": "recall", "task": "single", "length": length, "teacher_seed": seed}
            rows.add(method="teacher", accuracy=accuracy, **place)
            rows.add(method="window", accuracy=0.1, recovery_percent=10.0 / accuracy, **place)
            rows.add(method="learned", accuracy=accuracy, recovery_percent=100.0 - (length > 64), **place)
    rows.add(part="decode", method="learned", task="single", length=64, ms_per_step=1.0)
    # a method that failed has no results
    rows.add(part="recall", method="broken", task="single", length=64, teacher_seed=0, note="failed")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- recovery of some.csv: begin -->\nold\n<!-- recovery: end -->\nafter\n")
    tables.fill(page, tmp_path)
    lines = page.read_text().splitlines()
    assert lines[3:8] == [
        *("|  | single |", "| --- | --- |", "| `teacher` | 75 ± 35 / 75 ± 35 |"),
        *("| `learned` | 100 ± 0 / 99 ± 0 |", "| `window` | 15 ± 7 / 15 ± 7 |"),
    ]
    assert "at 64 / 128 tokens, mean ± standard deviation; teachers: 2" in lines[9]
    assert lines[-1] == "after"
    (tmp_path / "b.md").write_text("none")
    with pytest.raises(ValueError, match="must hold the marks"):
        tables.fill(tmp_path / "b.md", tmp_path)


def test_earlier_rows_stay_until_they_are_measured_again(tmp_path):
    path = tmp_path / "rows.csv"
    first = Rows(path, "cpu")
    first.add(part="recall", method="window", task="single", length=64, accuracy=0.5, note="old")
    first.add(part="recall", method="linear", task="single", length=64, accuracy=0.25)
    second = Rows(path, "cpu")
    second.add(part="recall", method="window", task="single", length=64, accuracy=0.75)
    second.add(part="recall", method="window", task="single", length=128, accuracy=1.0)
    written = list(csv.DictReader(path.open()))
    assert len(written) == 3
    rows = {(row["method"], row["length"]): row for row in written}
    assert {key: row["accuracy"] for key, row in rows.items()} == {
        ("linear", "64"): "0.25",
        ("window", "64"): "0.75",
        ("window", "128"): "1",
    }
    assert rows["window", "64"]["note"] == ""


def test_a_method_that_fails_leaves_its_reason_and_the_others_run(tmp_path, monkeypatch):
    import research.recall.study as recall_study

    asked = recall_study.convert

    def fail(study, method, *others):
        if method == "key_norm":
            raise RuntimeError("no such\nkernel")
        return asked(study, method, *others)

    monkeypatch.setattr(recall_study, "convert", fail)
    path = run_linearization(toy_study(), device="cpu", out=tmp_path / "rows.csv", parts=("recall",), say=quiet)
    rows = [row for row in csv.DictReader(path.open()) if row["method"] != "teacher"]
    assert {row["note"] for row in rows if row["method"] == "key_norm"} == {"failed: no such kernel"}
    assert any(row["method"] == "linear" and row["accuracy"] for row in rows)


def test_unknown_parts_methods_and_sizes_raise_before_anything_runs(tmp_path):
    from research.linearization.__main__ import run

    with pytest.raises(ValueError, match="did you mean 'recall'"):
        run_linearization(toy_study(), device="cpu", out=tmp_path / "rows.csv", parts=("recal",))
    study = replace(toy_study(), recall=replace(toy_recall(), methods=("key_norms",)))
    with pytest.raises(ValueError, match="did you mean 'key_norm'"):
        run_linearization(study, device="cpu", out=tmp_path / "rows.csv", parts=("recall",), say=quiet)
    with pytest.raises(ValueError, match="did you mean 'small'"):
        run("cpu", None, ("recall",), "smal", None, None, {})
    with pytest.raises(ValueError, match="at least one"):
        TeacherConfig(lessons=())
    with pytest.raises(ValueError, match="need a length of 195"):
        TeacherConfig(lessons=(Lesson(lengths=(256, 128), facts=32),))
