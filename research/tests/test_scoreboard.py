"""The scoreboard: the same data for every method, complete files, runs that resume."""

import csv
import json
import os
import signal

import pytest
import torch

from nalaformer.attention import METHODS
from nalaformer.feature_maps import FEATURE_MAPS
from nalaformer.folder_lock import InUse, only_writer
from nalaformer.recipes import changed
from research.fast_training.captured_training import CapturedTraining
from research.recipes import RECIPES
from research.scoreboard import runs as scoreboard
from research.scoreboard.order import Order
from research.scoreboard.report import ADDED, COLUMNS, read_rows, scoreboard_table, standings
from research.scoreboard.runs import Method, parse_methods, run_scoreboard
from research.tests.commands import invoke

pytestmark = pytest.mark.usefixtures("one_thread")
MQAR = {"vocabulary": 32, "mixture": [[16, 2], [24, 3]]}


def recipe(*settings, name="mqar_small", options=MQAR):
    small = ["train_samples=64", "eval_samples=20", "test_samples=22", "batch_size=8", "eval_every=2", "warmup=0"]
    return changed(RECIPES[name](), [*small, f"data_options={json.dumps(options)}", *settings])


def board(out, *, methods="relu, split", seeds=(0,), rates=(1e-3,), steps=4, **options):
    chosen = options.pop("recipe", None) or recipe()
    return run_scoreboard(
        "mqar_small", chosen, methods=parse_methods(methods), seeds=seeds, learning_rates=rates, out=out, steps=steps, **options
    )


def without_time(rows):
    kept = ("method", "learning_rate", "seed", "dev", "test", "groups", "best_step")
    return [{name: row[name] for name in kept} for row in rows]


def test_a_row_says_that_its_task_was_solved_and_in_which_precision(tmp_path, monkeypatch):
    monkeypatch.setattr(scoreboard, "SOLVED", 0.0)
    (row,) = board(tmp_path / "a.csv", methods="relu")
    assert (row["outcome"], row["best_step"], row["loop"]) == ("solved", "2", "eager, float32")


def test_rows_say_what_was_measured_with_what(tmp_path):
    rows = board(tmp_path / "a.csv", methods='softmax, norm_aware {"direction": "cosine"}')
    with (tmp_path / "a.csv").open() as file:
        kept = list(csv.DictReader(file))
    assert kept == rows
    assert set(kept[0]) == set(COLUMNS)
    assert [row["method"] for row in kept] == ["softmax", 'norm_aware {"direction": "cosine"}']
    assert kept[0]["state_size"] == "0"
    assert int(kept[1]["state_size"]) == 2 * 2 * 64 * 32
    assert kept[0]["torch"] == torch.__version__
    assert set(json.loads(kept[0]["groups"])) == {"16 tokens, 2 pairs", "24 tokens, 3 pairs"}
    assert float(kept[0]["chance"]) == 2 / 32


@pytest.mark.parametrize(
    ("row", "options"),
    [("mqar_small", MQAR), ("pointing", {"keys": 8, "probes": 2}), ("copying", {"length": 8, "vocabulary": 6})],
)
def test_every_method_has_rows_for_all_task_kinds(row, options, tmp_path):
    # RALA looks at all queries, and is rejected where tokens see earlier ones alone
    methods = [name for name in METHODS if row == "pointing" or METHODS[name].key_weight == "none"]
    names = ", ".join([*methods, *FEATURE_MAPS.names()])
    rows = board(tmp_path / "a.csv", methods=names, steps=1, recipe=recipe("train_samples=16", name=row, options=options))
    assert [each["method"] for each in rows] == names.split(", ")
    assert {each["outcome"] for each in rows} == {"finished"}
    # only softmax remembers every token
    assert [each["method"] for each in rows if each["state_size"] == "0"] == ["softmax"]


def test_runs_that_are_in_the_file_are_not_repeated(tmp_path, monkeypatch):
    first = board(tmp_path / "a.csv", methods="relu")
    monkeypatch.setattr(scoreboard, "one_run", lambda *_: pytest.fail("was run again"))
    assert board(tmp_path / "a.csv", methods="relu") == first


@pytest.mark.parametrize("setting", ["batch_size=4", "test_samples=12", "eval_samples=10", "clip_norm=0.1", "beta2=0.9"])
def test_other_settings_are_another_run_and_another_row(tmp_path, setting):
    rates = (1e-3, 2e-3)
    board(tmp_path / "a.csv", methods="relu", rates=rates, steps=2)
    rows = board(tmp_path / "a.csv", methods="relu", rates=rates, steps=2, recipe=recipe(setting))
    assert len(rows) == 4
    found = standings(rows)
    # two rates of the same settings are one standing, two settings are two
    assert [standing.seeds for standing in found] == [1, 1]
    assert setting in {standing.settings for standing in found}
    assert any(setting in cell for cell in scoreboard_table("mqar", rows).columns[0].cells)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"methods": "relu, sofmax"}, "unknown method.*did you mean 'softmax'"),
        ({"methods": 'relu, norm_aware {"powr": 1}'}, "powr"),
        ({"steps": -1}, "steps must be positive"),
        ({"seeds": ()}, "got no seeds"),
        ({"rates": ()}, "got no learning_rates"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(tmp_path, monkeypatch, wrong, message):
    monkeypatch.setattr(scoreboard, "one_run", lambda *_: pytest.fail("was trained"))
    monkeypatch.setattr(scoreboard, "prepare_task", lambda *_: pytest.fail("data was made"))
    with pytest.raises(ValueError, match=message):
        board(tmp_path / "a.csv", **wrong)


def test_the_same_runs_give_the_same_results(tmp_path):
    assert without_time(board(tmp_path / "a.csv")) == without_time(board(tmp_path / "b.csv"))


def test_a_time_limit_stops_cleanly_and_the_same_call_resumes(tmp_path):
    whole = board(tmp_path / "whole.csv", seeds=(0, 1))
    said = []
    # no time at all: a call does one block of steps, and each of the four runs has two
    for call in range(8):
        rows = board(tmp_path / "parts.csv", seeds=(0, 1), seconds=0.0, say=said.append)
        assert len(rows) == (call + 1) // 2
    assert sum("put aside" in line for line in said) == 4
    assert without_time(rows) == without_time(whole)
    assert not list(tmp_path.glob(".parts_aside/*"))


def test_ctrl_c_saves_the_run_in_progress_and_the_same_call_resumes(tmp_path, monkeypatch):
    whole = board(tmp_path / "whole.csv")
    evaluate, looks = CapturedTraining.evaluate, []

    def interrupt_fourth(self, buckets):
        looks.append(self.progress.step)
        if len(looks) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, buckets)

    monkeypatch.setattr(CapturedTraining, "evaluate", interrupt_fourth)
    # a run looks at dev twice and at test once: the second run is interrupted amid its steps
    with pytest.raises(KeyboardInterrupt):
        board(tmp_path / "parts.csv")
    assert len(read_rows(tmp_path / "parts.csv")) == 1
    assert len(list(tmp_path.glob(".parts_aside/*"))) == 1
    assert without_time(board(tmp_path / "parts.csv")) == without_time(whole)
    # one look at dev and one at test were left
    assert len(looks) == 6


def test_a_damaged_run_that_was_put_aside_is_made_anew(tmp_path):
    whole = board(tmp_path / "whole.csv", methods="relu")
    board(tmp_path / "parts.csv", methods="relu", seconds=0.0)
    (aside,) = tmp_path.glob(".parts_aside/*")
    aside.write_bytes(aside.read_bytes()[:100])
    said = []
    assert without_time(board(tmp_path / "parts.csv", methods="relu", say=said.append)) == without_time(whole)
    assert any("cannot be read and is made anew" in line for line in said)


def test_two_scoreboards_do_not_write_one_file(tmp_path):
    with only_writer(tmp_path / "a.csv", beside=True), pytest.raises(InUse, match=r"a\.csv is written by process"):
        board(tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()


def test_stored_data_is_made_once_and_other_data_raises(tmp_path):
    said = []
    made = board(tmp_path / "a.csv", methods="relu", data_folder=tmp_path / "data", say=said.append)
    again = board(tmp_path / "b.csv", methods="relu", data_folder=tmp_path / "data", say=said.append)
    assert sum("made" in line for line in said) == 3
    plain = board(tmp_path / "c.csv", methods="relu")
    assert without_time(made) == without_time(again) == without_time(plain)
    with pytest.raises(ValueError, match="must hold 64 samples"):
        board(tmp_path / "d.csv", recipe=recipe("data_seed=1"), data_folder=tmp_path / "data")


def test_the_best_rate_is_chosen_on_dev_and_never_on_test():
    def row(rate, seed, dev, test):
        figures = {"dev": str(dev), "test": str(test), "parameters": "1", "state_size": "0", "steps": "4", "settings": "{}"}
        return {"task": "t", "method": "relu", "learning_rate": rate, "seed": str(seed)} | figures

    rows = [row("0.1", 0, 0.5, 0.9), row("0.1", 1, 0.5, 0.9), row("0.2", 0, 0.6, 0.2), row("0.2", 1, 0.6, 0.4)]
    (standing,) = standings(rows)
    assert standing.learning_rate == "0.2"
    assert standing.test == pytest.approx(0.3)
    assert standing.spread == pytest.approx(0.1 * 2**0.5)
    assert standing.standard_error == pytest.approx(0.1)


def test_where_lower_is_better_the_lowest_dev_chooses_and_the_lowest_test_leads():
    def row(method, rate, seed, dev, test):
        known = {"parameters": "1", "state_size": "0", "steps": "4", "settings": "{}", "figure": "perplexity"}
        figures = {"dev": str(dev), "test": str(test)} | known
        return {"task": "t", "method": method, "learning_rate": rate, "seed": str(seed)} | figures

    rows = [row("relu", "0.1", 0, 50, 51), row("relu", "0.2", 0, 40, 41), row("elu", "0.1", 0, 30, 31)]
    assert [(each.method, each.learning_rate, each.test) for each in standings(rows)] == [
        ("elu", "0.1", 31),
        ("relu", "0.2", 41),
    ]
    made = scoreboard.Board(
        title="t", recipe=recipe(), methods=parse_methods("relu"), seeds=(0, 1), learning_rates=(1e-3, 2e-3), steps=1
    )
    found = []
    order = Order([made], found)
    for dev in (50, 40):
        found.append(order.take().key | {"dev": str(dev), "figure": "perplexity"})
    assert order.take().rate == 2e-3


def test_old_files_without_a_metric_are_read_as_accuracy_and_resume(tmp_path):
    rows = board(tmp_path / "a.csv", methods="relu")
    assert rows[0]["figure"] == "accuracy"
    old = [name for name in COLUMNS if name not in ADDED]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, old, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    assert read_rows(tmp_path / "a.csv") == [row | dict.fromkeys(ADDED, "") for row in rows]
    assert [row["method"] for row in board(tmp_path / "a.csv")] == ["relu", "split"]
    assert standings(read_rows(tmp_path / "a.csv"))[0].seeds == 1


def seed_rows(rate, devs):
    figures = {"test": "0.5", "parameters": "1", "state_size": "0", "steps": "4", "settings": "{}"}
    return [
        {"task": "t", "method": "relu", "learning_rate": rate, "seed": str(seed), "dev": str(dev)} | figures
        for seed, dev in enumerate(devs)
    ]


def test_rates_are_compared_on_their_common_seeds():
    # the first seed chose 0.1; that its second seed was unlucky makes 0.2, which had no second, no better
    (standing,) = standings([*seed_rows("0.1", [0.8, 0.1]), *seed_rows("0.2", [0.7])])
    assert (standing.learning_rate, standing.seeds) == ("0.1", 2)
    (standing,) = standings([*seed_rows("0.1", [0.8, 0.1]), *seed_rows("0.2", [0.7, 0.7])])
    assert (standing.learning_rate, standing.seeds) == ("0.2", 2)
    # both have solved it: the one that is known better
    for rates in (("0.1", "0.2"), ("0.2", "0.1")):
        many, one = (seed_rows(rate, devs) for rate, devs in zip(rates, ([1.0, 0.9], [1.0]), strict=True))
        for rows in ([*many, *one], [*one, *many]):
            assert (standings(rows)[0].learning_rate, standings(rows)[0].seeds) == (rates[0], 2)


def test_a_seed_that_was_trained_twice_counts_once():
    first, second = ([row | {"test": test} for row in seed_rows("0.1", [0.5])] for test in ("0.2", "0.4"))
    other = [row | {"seed": "1", "test": "0.5"} for row in seed_rows("0.1", [0.7])]
    (standing,) = standings([*first, *other, *second])
    assert (standing.seeds, standing.test, standing.dev) == (2, pytest.approx(0.4), pytest.approx(0.6))
    assert standing.spread == pytest.approx(0.1 * 2**0.5)
    # duplicate rows do not make a rate better known
    (standing,) = standings([*seed_rows("0.2", [0.5, 0.5]), *seed_rows("0.1", [0.5]) * 3])
    assert standing.learning_rate == "0.2"


def test_later_seeds_are_trained_at_the_rate_that_was_best_with_the_first(tmp_path, monkeypatch):
    one_run = scoreboard.one_run

    def with_dev(run, *given):
        # each method has another best rate
        return one_run(run, *given) | {"dev": str(run.rate if run.method.name == "relu" else -run.rate)}

    monkeypatch.setattr(scoreboard, "one_run", with_dev)
    rows = board(tmp_path / "a.csv", seeds=(0, 1, 2), rates=(1e-3, 2e-3), steps=1)
    tried = [(row["seed"], row["method"], row["learning_rate"]) for row in rows]
    assert tried[:4] == [("0", method, rate) for rate in ("0.001", "0.002") for method in ("relu", "split")]
    assert tried[4:] == [(seed, *chosen) for seed in "12" for chosen in (("relu", "0.002"), ("split", "0.001"))]
    monkeypatch.setattr(scoreboard, "one_run", lambda *_: pytest.fail("was run again"))
    assert board(tmp_path / "a.csv", seeds=(0, 1, 2), rates=(1e-3, 2e-3), steps=1) == rows


def test_a_method_waits_for_all_rates_at_its_first_seed_and_drops_failed_ones():
    made = scoreboard.Board(
        title="t", recipe=recipe(), methods=parse_methods("relu"), seeds=(0, 1), learning_rates=(1e-3, 2e-3), steps=1
    )
    rows = []
    order = Order([made], rows)
    assert (order.total, len(order)) == (3, 3)
    first, second = order.take(), order.take()
    assert order.take() is None
    rows.append(first.key | {"dev": "0.5"})
    assert order.take() is None
    assert len(order) == 1
    order.mark_failed(second)
    last = order.take()
    assert (last.seed, last.rate) == (1, 1e-3)
    assert len(order) == 0
    # nothing to choose from
    order = Order([made], [])
    for _ in range(2):
        order.mark_failed(order.take())
    assert order.take() is None
    assert len(order) == 0


def drain(order, rows, best):
    """Every run that an order gives, each ended at once; the best rate has the best dev."""
    taken = []
    while (run := order.take()) is not None:
        taken.append((run.method.name, run.rate, run.seed))
        rows.append(run.key | {"dev": "0.9" if run.rate == best else "0.5"})
    return taken


def test_a_rate_that_comes_later_and_wins_gets_the_other_seeds_too():
    def make_with_rates(*rates):
        return scoreboard.Board(
            title="t", recipe=recipe(), methods=parse_methods("relu"), seeds=(0, 1), learning_rates=rates, steps=1
        )

    rows = []
    assert drain(Order([make_with_rates(1e-3, 2e-3)], rows), rows, 1e-3)[-1] == ("relu", 1e-3, 1)
    assert drain(Order([make_with_rates(1e-3, 2e-3)], rows), rows, 1e-3) == []
    # dev of the older runs was 0.9 and 0.5: the new rate must beat both
    rows[:] = [row | {"dev": "0.5"} for row in rows]
    assert drain(Order([make_with_rates(1e-3, 2e-3, 4e-3)], rows), rows, 4e-3) == [("relu", 4e-3, 0), ("relu", 4e-3, 1)]


def test_a_method_that_waits_keeps_its_place():
    made = scoreboard.Board(
        title="t", recipe=recipe(), methods=parse_methods("relu, split"), seeds=(0, 1, 2), learning_rates=(1e-3, 2e-3), steps=1
    )
    rows = []
    order = Order([made], rows)
    firsts = [order.take() for _ in range(4)]
    rows += [run.key | {"dev": "0.5"} for run in firsts if run.method.name == "split"]
    later = order.take()
    assert (later.method.name, later.seed) == ("split", 1)
    rows += [run.key | {"dev": "0.5"} for run in firsts if run.method.name == "relu"]
    assert [(run.method.name, run.seed) for run in (order.take(), order.take())] == [("relu", 1), ("relu", 2)]


def test_every_rate_is_trained_with_every_seed_where_asked_for(tmp_path):
    rows = board(tmp_path / "a.csv", methods="relu", seeds=(0, 1), rates=(1e-3, 2e-3), steps=1, every_rate=True)
    assert [(row["seed"], row["learning_rate"]) for row in rows] == [(s, r) for s in "01" for r in ("0.001", "0.002")]


def test_a_foreign_file_is_not_overwritten(tmp_path):
    (tmp_path / "a.csv").write_text("name,value\nx,1\n")
    with pytest.raises(ValueError, match="scoreboard's file"):
        board(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "name,value\nx,1\n"


def test_methods_are_read_with_their_options():
    assert parse_methods('softmax,norm_aware {"a": [1, 2], "b": "x"} , split') == [
        Method(name="softmax", options={}),
        Method(name="norm_aware", options={"a": [1, 2], "b": "x"}),
        Method(name="split", options={}),
    ]
    for wrong in ("", "softmax,,relu", "relu {1: 2}", 'relu {"a": 1} split'):
        with pytest.raises(ValueError, match=r"methods|options of relu"):
            parse_methods(wrong)


# ---- as a user meets it


def test_the_command_prints_a_table_with_chance(tmp_path):
    settings = ["train_samples=64", "eval_samples=20", "test_samples=20", "batch_size=8", f"data_options={json.dumps(MQAR)}"]
    asked = ("--methods", "softmax, relu", "--seeds", 2, "--learning-rates", "1e-3,3e-3", "--steps", 2)
    result = invoke("scoreboard", "run", "mqar_small", *settings, *asked, "--out", tmp_path / "a.csv", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "chance" in result.output
    assert "softmax" in result.output
    with (tmp_path / "a.csv").open() as file:
        # two methods have two rates with the first seed and one with the second
        assert len(list(csv.DictReader(file))) == 6


def test_the_table_names_shortcuts(tmp_path):
    options = {"shortest": 12, "longest": 64, "max_depth": 4}
    rows = board(tmp_path / "a.csv", methods="relu", recipe=recipe(name="listops_small", options=options), steps=2)
    rows[0]["shortcuts"] = json.dumps({"root operator": 0.36})
    table = scoreboard_table("listops", rows)
    assert "shortcut: root operator" in list(table.columns[0].cells)


def test_what_is_written_is_what_recipes_read(tmp_path):
    result = invoke(
        *("sequences", "copying", "--out", tmp_path / "d", "--samples", 20, "--val-samples", 10, "--test-samples", 0),
        *("--options", '{"length": 12}'),
    )
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["train", "val"]
    settings = ["steps=2", "warmup=0", "batch_size=4", "eval_every=0", "save_every=0", "device=cpu"]
    result = invoke("train", "copying", f"data={tmp_path / 'd'}", *settings, "--out", tmp_path / "other")
    assert "length is 12 there" in str(result.exception)
    assert not (tmp_path / "other").exists()
    settings.append('data_options={"length": 12, "vocabulary": 64}')
    for command in (("train",), ("scoreboard", "run")):
        result = invoke(*command, "induction", f"data={tmp_path / 'd'}", *settings, "--out", tmp_path / "other")
        assert "induction learns from induction" in str(result.exception)
    result = invoke("train", "copying", f"data={tmp_path / 'd'}", *settings, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    result = invoke("eval", tmp_path / "run", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "accuracy" in result.output
    assert "chance" in result.output


def test_an_image_scoreboard_raises():
    result = invoke("scoreboard", "run", "count_grid")
    assert isinstance(result.exception, ValueError)
    assert "recipe on sequences" in str(result.exception)


def test_deeply_nested_method_options_raise():
    with pytest.raises(ValueError, match=r"options of relu"):
        parse_methods("relu " + '{"a":' * 200_000)
