"""Every option of the commands of the studies."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from helpers.option_effects import Effects, options_of_command
from nalaformer.training.log import read_log
from research import demo, linearization
from research.demo import ENTRIES, study, trained
from research.linearization import __main__ as linearization_command
from research.recipes import RECIPES
from research.scoreboard import runs as scoreboard
from research.scoreboard.report import read_rows, scoreboard_table
from research.sequences import Stored
from research.tests.commands import STUDIES, invoke

pytestmark = pytest.mark.usefixtures("one_thread")
COMMANDS = Effects(
    f"{' '.join(path)}.{option}"
    for path in (("demo",), ("linearization",), ("scoreboard", "run"), ("scoreboard", "page"), ("sequences",))
    for option in options_of_command(*path[1:], build=STUDIES[path[0]])
)


def test_every_option_has_an_effect_test():
    assert COMMANDS.missing() == []


def run(name, *arguments, fails=None):
    """Return the output of a command or, where it should fail, its error."""
    done = invoke(name, *arguments)
    if fails is None:
        assert done.exit_code == 0, f"{done.output} {done.exception!r}"
        return done.output
    assert done.exception is not None, done.output
    assert fails in str(done.exception)
    return str(done.exception)


# ---- sequences


def test_recipes_on_sequences_are_trained_and_evaluated_in_both_splits(tmp_path):
    settings = ["steps=1", "warmup=0", "batch_size=4", "eval_every=0", "save_every=0", "device=cpu", "train_samples=8"]
    settings += ["eval_samples=6", "test_samples=5", 'data_options={"length": 12}', 'model_options={"dim": 16}']
    run("train", "copying", *settings, "--out", tmp_path / "run")
    for split, sequences in (("val", 6), ("test", 5)):
        shown = run("eval", tmp_path / "run", "--split", split, "--device", "cpu")
        rows = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]
        assert ["", "answers", str(6 * sequences), ""] in rows


@COMMANDS.of("sequences.dry_run")
def test_a_dry_run_says_what_would_be_made_and_writes_nothing(tmp_path):
    counts = ("--samples", 20, "--val-samples", 0, "--test-samples", 0)
    said = run("sequences", "copying", "--out", tmp_path / "data", *counts, "--dry-run")
    assert said.startswith("train: 20 sequences")
    assert said.rstrip().endswith("; new")
    assert not list(tmp_path.iterdir())


@COMMANDS.of(
    *("sequences.name", "sequences.out", "sequences.samples", "sequences.val_samples", "sequences.test_samples"),
    *("sequences.seed", "sequences.options"),
)
def test_the_command_writes_the_sequences_that_are_asked_for(tmp_path):
    counts = ("--samples", 7, "--val-samples", 5, "--test-samples", 3)
    run("sequences", "induction", "--out", tmp_path / "a", *counts, "--options", '{"length": 12}')
    for split, count in (("train", 7), ("val", 5), ("test", 3)):
        data = Stored(tmp_path / "a", split=split)
        assert (data.name, data.split, len(data), data.facts.length, data.seed) == ("induction", split, count, 12, 0)
    counts = ("--samples", 7, "--val-samples", 0, "--test-samples", 0)
    run("sequences", "induction", "--out", tmp_path / "b", *counts, "--options", '{"length": 12}', "--seed", 1)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["train"]
    zero, one = (Stored(tmp_path / name, split="train") for name in "ab")
    assert one.seed == 1
    assert not torch.equal(zero[0]["inputs"], one[0]["inputs"])


@COMMANDS.of("sequences.workers")
def test_writing_has_so_many_workers(tmp_path, monkeypatch):
    # that several of them write what one writes is seen where they are started
    asked = []
    monkeypatch.setattr("research.sequences.write", lambda *_, workers, **__: asked.append(workers))
    for workers in (1, 3):
        run("sequences", "copying", "--out", tmp_path, "--samples", 2, "--workers", workers)
    assert asked == [1, 1, 1, 3, 3, 3]


# ---- the scoreboard


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


BOARD = (
    *("train_samples=16", "eval_samples=6", "test_samples=5", "batch_size=8", "eval_every=1", "warmup=0"),
    *('data_options={"vocabulary": 32, "mixture": [[16, 2]]}', 'model_options={"dim": 16}'),
)


def board(out, *arguments, task="mqar_small", steps=2):
    """The rows of a small scoreboard."""
    usual = {"--methods": "relu", "--seeds": 1, "--steps": steps, "--device": "cpu", "--out": out}
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    run("scoreboard", "run", task, *BOARD, *(part for pair in (usual | given).items() for part in pair))
    return read_rows(Path((usual | given)["--out"]))


@COMMANDS.of("scoreboard run.task", "scoreboard run.settings", "scoreboard run.steps", "scoreboard run.out")
def test_a_scoreboard_uses_its_task_and_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (row,) = board(tmp_path / "a.csv", steps=3)
    assert (row["task"], row["steps"]) == ("mqar_small", "3")
    settings = json.loads(row["settings"])
    assert settings["training"]["batch_size"] == 8
    assert settings["data"]["test_samples"] == 5
    # without a number of steps those of the recipe, without a file one by the name of the task
    run("scoreboard", "run", "mqar_small", *BOARD, "steps=2", "--methods", "relu", "--seeds", 1, "--device", "cpu")
    (row,) = read_rows(tmp_path / "runs" / "scoreboard_mqar_small.csv")
    assert row["steps"] == "2"


@COMMANDS.of("scoreboard run.methods", "scoreboard run.seeds", "scoreboard run.learning_rates", "scoreboard run.every_rate")
def test_a_scoreboard_trains_every_method_with_every_rate_and_seed(tmp_path):
    asked = ("--methods", "relu, split", "--seeds", 2, "--learning-rates", "1e-3,2e-3")
    # the second seed at one rate of each method, and then at the other too
    assert len(board(tmp_path / "a.csv", *asked, steps=1)) == 6
    flags = ("--steps", 1, "--device", "cpu", "--out", tmp_path / "a.csv", "--every-rate")
    run("scoreboard", "run", "mqar_small", *BOARD, *asked, *flags)
    rows = read_rows(tmp_path / "a.csv")
    found = sorted((row["method"], row["learning_rate"], row["seed"]) for row in rows)
    assert found == [(method, rate, seed) for method in ("relu", "split") for rate in ("0.001", "0.002") for seed in "01"]
    # other weights and another order for another seed, larger steps with a larger rate
    assert len({row["dev"] + row["test"] for row in rows}) > 1
    (row,) = board(tmp_path / "b.csv", steps=1)
    assert float(row["learning_rate"]) == RECIPES["mqar_small"]().training.learning_rate


# seen to in test_scoreboard_rows.py
COMMANDS.of("scoreboard run.jobs", "scoreboard run.smoke")


@COMMANDS.of("scoreboard run.device")
def test_a_scoreboard_without_its_device_raises(tmp_path, no_gpu):
    run("scoreboard", "run", "mqar_small", *BOARD, "--device", "cuda", "--out", tmp_path / "a.csv", fails="needs a CUDA device")


@COMMANDS.of("scoreboard run.minutes")
def test_a_scoreboard_stops_after_its_minutes_and_resumes(tmp_path):
    assert board(tmp_path / "a.csv", "--minutes", 1e-9) == []
    assert len(board(tmp_path / "a.csv", "--minutes", 0)) == 1


@COMMANDS.of("scoreboard run.data_folder", "scoreboard run.workers")
def test_a_scoreboard_keeps_its_data_and_makes_it_with_workers(tmp_path, monkeypatch):
    made, write = [], scoreboard.write
    monkeypatch.setattr(scoreboard, "write", lambda *a, workers, **k: made.append(workers) or write(*a, **k))
    board(tmp_path / "a.csv", "--data-folder", tmp_path / "data")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["test", "train", "val"]
    board(tmp_path / "b.csv", "--data-folder", tmp_path / "data")
    assert made == [1, 1, 1]
    board(tmp_path / "c.csv", "--workers", 3)
    assert made == [1, 1, 1, 3, 3, 3]


# ---- tables of pages


@COMMANDS.of("scoreboard page.page", "scoreboard page.folder")
def test_a_page_is_filled_and_a_plot_drawn_from_the_folder(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr("research.scoreboard.tables.fill", lambda *places: done.append(places))
    monkeypatch.setattr("research.scoreboard.tables.read_folder_rows", lambda folder: folder)
    monkeypatch.setattr("research.scoreboard.picture.draw", lambda *places: done.append(places))
    run("scoreboard", "page", tmp_path / "a.md", tmp_path)
    run("scoreboard", "page", tmp_path / "a.png", tmp_path)
    assert done == [(tmp_path / "a.md", tmp_path), (tmp_path, tmp_path / "a.png")]


# ---- the demo


@COMMANDS.of("demo.only_sharpening")
def test_the_demo_may_train_one_seed_and_draw_what_the_networks_do(tmp_path, monkeypatch):
    whole = trained.diagnose_trained
    monkeypatch.setattr(trained, "diagnose_trained", lambda *a, **k: whole(*a, **k, entries=ENTRIES[:2], workers=1))
    shown = run("demo", "--only-sharpening", "--steps", 2, "--out", tmp_path)
    assert f"picture: {tmp_path / 'entropy_vs_norm_trained.png'}" in shown
    assert "linear (ReLU)" in shown
    # a newcomer sees that something happens, on one core too
    assert "pointing: linear (ReLU), seed 0: accuracy" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"entropy_vs_norm_trained.png", "entropy_vs_norm_trained.svg", "runs"}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"pointing_softmax_seed0", "pointing_linear__relu__seed0"}
    log = read_log(tmp_path / "runs" / "pointing_softmax_seed0" / "log.jsonl")
    assert sum(row["kind"] == "step" for row in log) == 2
    run("demo", "--only-sharpening", "--steps", 0, fails="steps must be positive, got 0; leave them out")


@COMMANDS.of("demo.all_methods")
def test_the_demo_option_for_all_methods_adds_the_slow_ones(tmp_path, monkeypatch):
    chosen = []

    class Result:
        def findings(self):
            return []

    monkeypatch.setattr(demo, "run_demo", lambda out, *, entries, **options: chosen.append(entries) or Result())
    monkeypatch.setattr(demo, "write_report", lambda result, path: path)
    monkeypatch.setattr(demo, "demo_table", lambda result: "")
    run("demo", "--out", tmp_path)
    run("demo", "--out", tmp_path, "--all-methods")
    assert [entry.label for entry in chosen[1][len(chosen[0]) :]] == ["1 + ELU", "channel softmax"]
    assert demo.OURS in chosen[0]


@COMMANDS.of("demo.out", "demo.seeds", "demo.steps")
def test_the_demo_makes_the_given_runs_and_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "milliseconds", lambda entries: dict.fromkeys(entries, (1.0, 2.0, 3.0)))
    monkeypatch.setattr(demo, "write_report", lambda result, path: path)
    whole = demo.run_demo
    monkeypatch.setattr(demo, "run_demo", lambda *a, **k: whole(*a, **(k | {"entries": demo.ENTRIES[:1]}), workers=1))
    assert f"report: {tmp_path / 'report.html'}" in run("demo", "--out", tmp_path, "--seeds", 1, "--steps", 2)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"pointing_softmax_seed0", "majority_softmax_seed0"}
    log = read_log(tmp_path / "runs" / "majority_softmax_seed0" / "log.jsonl")
    assert sum(row["kind"] == "step" for row in log) == 2


def test_an_empty_demo_raises(tmp_path):
    run("demo", "--seeds", 0, "--out", tmp_path, fails="seeds must be positive")
    run("demo", "--steps", 0, "--out", tmp_path, fails="steps must be positive, got 0; leave them out for those of the demo")


@pytest.mark.parametrize("only", [(), ("--only-sharpening",)], ids=["report", "picture"])
def test_work_whose_page_could_not_be_written_is_not_begun(only, tmp_path, monkeypatch):
    for long_work in ("demo.run_demo", "demo.trained.diagnose_trained"):
        monkeypatch.setattr(f"research.{long_work}", lambda *_, **__: pytest.fail("work was begun"))
    file = tmp_path / "file"
    file.write_text("")
    run("demo", *only, "--out", file, fails=f"must lie in a folder, got the file {file} in its way; choose another place")


# ---- linearization


@COMMANDS.of(*(name for name in COMMANDS.options if name.startswith("linearization.")))
def test_linearization_runs_the_study_that_is_asked_for(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(linearization_command, "run_linearization", lambda study, **rest: asked.append((study, rest)))
    run("linearization")
    run(
        "linearization",
        *("--size", "toy", "--device", "cpu", "--out", tmp_path / "a.csv", "--part", "recall"),
        *("--part", "decode", "--minutes", 2, "--teacher", tmp_path / "t", "--teacher-minutes", 3, "--method", "linear"),
        *("--teachers", 3),
    )
    (full, usual), (toy, chosen) = asked
    assert full == linearization.LinearizationStudy()
    assert usual == {"device": "cuda", "out": None, "parts": linearization.PARTS, "teacher_folder": None, "teachers": 1}
    assert chosen == {
        **{"device": "cpu", "out": tmp_path / "a.csv"},
        **{"parts": ("recall", "decode"), "teacher_folder": tmp_path / "t", "teachers": 3},
    }
    assert (toy.minutes, toy.recall.teacher.minutes, toy.recall.methods) == (2, 3, ("linear",))
    small = linearization.toy_study()
    assert (toy.prompt, toy.decode, toy.recall.facts) == (small.prompt, small.decode, small.recall.facts)


# ---- names that rich would take for markup


MARKUP = "w[/a] [red]b :cat:  two spaces"


def test_the_demo_names_its_report(tmp_path, monkeypatch):
    class Result:
        def findings(self):
            return ["softmax [/] wins"]

    monkeypatch.setattr(demo, "run_demo", lambda out, **options: Result())
    monkeypatch.setattr(demo, "write_report", lambda result, path: path)
    monkeypatch.setattr(demo, "demo_table", lambda result: "")
    output = run("demo", "--out", tmp_path / MARKUP)
    assert f"report: {tmp_path / MARKUP / 'report.html'}" in output
    assert "softmax [/] wins" in output


def test_sequences_name_their_folder(tmp_path):
    sizes = ("--samples", 3, "--val-samples", 0, "--test-samples", 0, "--options", '{"length": 12}')
    assert f"3 sequences: {tmp_path / MARKUP / 'train'}" in run("sequences", "copying", "--out", tmp_path / MARKUP, *sizes)
    assert MARKUP in run("sequences", MARKUP, "--out", tmp_path, fails="unknown")


def test_the_scoreboard_names_its_methods_and_file(tmp_path):
    (tmp_path / MARKUP).mkdir(parents=True)
    file = tmp_path / MARKUP / "a.csv"
    asked = {"--methods": 'norm_aware {"powers": "mild"}', "--steps": 1, "--seeds": 1, "--device": "cpu", "--out": file}
    shown = run("scoreboard", "run", "mqar_small", *BOARD, *(part for pair in asked.items() for part in pair))
    assert f"results: {file}" in shown


def test_a_scoreboard_table_shows_options_as_they_are(tmp_path):
    row = {"method": 'relu {"a": [1, "[/b]"]}', "learning_rate": "0.1", "seed": "0", "steps": "1", "dev": "0.5", "test": "0.5"}
    row |= {"parameters": "1", "state_size": "0", "chance": "0.1", "shortcuts": "", "settings": json.dumps({"a": {"b": 1}})}
    with (tmp_path / "out").open("w+") as file:
        Console(file=file, width=200).print(scoreboard_table("t", [row]))
        file.seek(0)
        assert 'relu {"a": [1, "[/b]"]}' in file.read()
