"""The rows of the scoreboard: every method runs on each, several at a time, and pages show what the files say."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from research.scoreboard import METHODS_OF_THE_BOARD, ROWS, loaded, make_board, processes, row_names, run_boards, runs
from research.scoreboard.methods import parse_methods, short_name
from research.scoreboard.report import read_rows
from research.scoreboard.tables import BEGIN, END, fill, fill_page, read_folder_rows, section, summary
from research.tests.commands import invoke

pytestmark = pytest.mark.usefixtures("one_thread")
PROJECT = Path(__file__).parents[2]
FREE = [name for name, row in ROWS.items() if not row.file_option]


def tiny(name="copying_256", **changes):
    asked = {"methods": "relu, sign_split", "seeds": 1, "smoke": True} | changes
    return make_board(name, **asked)


def metrics(rows):
    kept = ("task", "method", "learning_rate", "seed", "dev", "test", "best_step")
    return sorted(tuple(row[name] for name in kept) for row in rows)


@pytest.fixture
def in_threads(monkeypatch):
    """Run the jobs without the seconds that a process takes to start."""

    @contextmanager
    def pool(workers, *, context):
        with ThreadPoolExecutor(1) as made:
            yield made

    monkeypatch.setattr(processes, "worker_pool", pool)
    runs.kept_by_process.clear()


# ---- every method on every row


@pytest.mark.parametrize("name", FREE)
def test_every_method_takes_two_steps_on_every_row(name, tmp_path):
    board = tiny(name, methods="all")
    rows = run_boards([board], out=tmp_path / "a.csv")
    assert [row["method"] for row in rows] == [method.label for method in board.methods]
    assert {(row["outcome"], row["steps"]) for row in rows} == {("finished", "2")}
    # delta rules have no weights to look at
    assert {row["method"] for row in rows if not row["effective_rank"]} == {m.label for m in board.methods if "delta" in m.name}
    # rala and mhla look at later tokens and stand in no causal row, the delta rules and decayed methods in no other
    of_tokens = {name for name in METHODS_OF_THE_BOARD if "delta" in name or "forgetting" in name}
    left_out = {"rala_map", "mhla_map"} if board.recipe.model == "recall" else of_tokens
    assert {short_name(row["method"]) for row in rows} == {*METHODS_OF_THE_BOARD} - left_out


def test_smoke_runs_the_smallest_row_form_and_a_row_its_own(tmp_path):
    small, whole = tiny("mqar_80", seeds=3), make_board("mqar_80", methods="relu", seeds=3)
    assert (small.total_steps, len(small.seeds), len(small.learning_rates)) == (2, 1, 1)
    assert (whole.total_steps, len(whole.seeds), len(whole.learning_rates)) == (4000, 3, 2)
    assert small.recipe.task.train_samples < 10 < whole.recipe.task.train_samples
    place = ("--device", "cpu", "--out", tmp_path / "a.csv")
    done = invoke("scoreboard", "run", "copying_256", "--methods", "relu", "--smoke", *place)
    assert done.exit_code == 0, done.output
    (row,) = read_rows(tmp_path / "a.csv")
    assert row["steps"] == "2"


def test_all_means_every_row_and_unknown_rows_raise():
    assert row_names("all") == FREE
    assert row_names("mqar_80, pointing,mqar_80") == ["mqar_80", "pointing"]
    with pytest.raises(ValueError, match="did you mean 'mqar_80'"):
        tiny("mqar_08")
    with pytest.raises(ValueError, match="needs a task"):
        row_names(" ,")


def test_short_names_stand_for_their_methods_and_take_further_options():
    (method,) = parse_methods('nala_mild {"contrast": "learned"}')
    assert method.name == "norm_aware"
    assert method.options == {"powers": "mild", "norm_scale": "head", "contrast": "learned"}
    assert short_name(METHODS_OF_THE_BOARD["mala_map"].label) == "mala_map"
    assert short_name("nobody") == "nobody"


# ---- several runs at a time


def test_parallel_processes_return_the_same_rows(tmp_path):
    boards = [tiny("copying_256"), tiny("majority_256", methods="relu")]
    one = run_boards(boards, out=tmp_path / "one.csv")
    two = run_boards(boards, out=tmp_path / "two.csv", jobs=2)
    assert metrics(one) == metrics(two)
    assert {row["task"] for row in two} == {"copying_256", "majority_256"}


def test_the_command_runs_so_many_jobs_at_a_time(tmp_path, monkeypatch, in_threads):
    asked = []
    whole = processes.finished_in_processes
    monkeypatch.setattr(runs, "finished_in_processes", lambda *a, jobs, **k: asked.append(jobs) or whole(*a, jobs=jobs, **k))
    for jobs in (1, 3):
        command = ["scoreboard", "run", "copying_256,induction_256", "--methods", "relu", "--smoke", "--device", "cpu"]
        done = invoke(*command, "--jobs", jobs, "--out", tmp_path / f"{jobs}.csv")
        assert done.exit_code == 0, done.output
    # the data of both tasks, then the runs
    assert asked == [3, 3]
    assert metrics(read_rows(tmp_path / "1.csv")) == metrics(read_rows(tmp_path / "3.csv"))
    with pytest.raises(ValueError, match="jobs must be the number of runs at a time, at least 1, got 0"):
        run_boards([tiny()], out=tmp_path / "a.csv", jobs=0)


def test_what_takes_longer_than_seconds_is_written_once(tmp_path, monkeypatch, in_threads):
    written, write = [], runs.write
    monkeypatch.setattr(runs, "write", lambda name, *given, **named: written.append(name) or write(name, *given, **named))
    for name in ("mqar_80", "listops"):
        run_boards([tiny(name)], out=tmp_path / "a.csv", jobs=2)
    assert written == ["listops"] * 3


def test_processes_make_shared_data_once(tmp_path, monkeypatch, in_threads):
    made, make = [], loaded.made_data
    monkeypatch.setattr(loaded, "made_data", lambda task, device: made.append(task.config.data) or make(task, device))
    run_boards([tiny("mqar_80"), tiny("cue_grid")], out=tmp_path / "a.csv", jobs=2)
    assert sorted(made) == ["cue_cells", "mqar"]


def test_a_stop_while_data_are_made_begins_no_run(tmp_path, monkeypatch, in_threads):
    whole = processes.finished_in_processes

    def stop(queue, *given, **named):
        return iter(()) if isinstance(queue, loaded.DataToMake) else whole(queue, *given, **named)

    monkeypatch.setattr(runs, "finished_in_processes", stop)
    assert run_boards([tiny("mqar_80"), tiny("cue_grid")], out=tmp_path / "a.csv", jobs=2) == []


def evaluate_each_step(board):
    return replace(board, recipe=replace(board.recipe, training=replace(board.recipe.training, eval_every=1)))


def test_jobs_stop_when_the_time_is_up_and_the_same_call_resumes(tmp_path, in_threads):
    board = evaluate_each_step(tiny(methods="relu, sign_split, elu"))
    whole = run_boards([board], out=tmp_path / "whole.csv")
    said, counts = [], []
    while len(counts) < 10 and (not counts or counts[-1] < 3):
        counts.append(len(run_boards([board], out=tmp_path / "parts.csv", jobs=2, seconds=0.0, say=said.append)))
    # without time each of two jobs begins a run and takes one of its two steps: two calls for two runs, and the third alone
    assert counts == [0, 2, 2, 3]
    assert any("2 runs are put aside and 1 are left" in line for line in said)
    assert metrics(read_rows(tmp_path / "parts.csv")) == metrics(whole)


def test_a_run_that_fails_ends_no_other(tmp_path, monkeypatch, in_threads):
    one_run = runs.one_run

    def fail(run, *given):
        if run.method.name == "relu":
            raise MemoryError("no room")
        return one_run(run, *given)

    monkeypatch.setattr(runs, "one_run", fail)
    with pytest.raises(RuntimeError, match=r"1 of 2 runs failed.*relu.*MemoryError: no room"):
        run_boards([tiny()], out=tmp_path / "a.csv", jobs=2)
    (row,) = read_rows(tmp_path / "a.csv")
    assert row["method"] == "split"


class Slow:
    label = "slow"


class Five:
    """Five slow runs."""

    total = left = 5

    def __len__(self):
        return self.left

    def take(self):
        self.left -= 1
        return Slow()


def test_jobs_end_when_a_stop_is_requested(monkeypatch):
    begun, said, started = time.monotonic(), [], []

    @contextmanager
    def pool(workers, *, context):
        with ThreadPoolExecutor(workers) as made:
            yield made

    def work(run, stop_file):
        started.append(run)
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        while not stop_file.exists() and time.monotonic() - begun < 60:
            time.sleep(0.01)

    monkeypatch.setattr(processes, "worker_pool", pool)
    jobs = {"jobs": 2, "device": "cpu", "until": begun + 1000, "say": said.append}
    assert list(processes.finished_in_processes(Five(), work, **jobs)) == []
    assert said == ["stopped; 2 runs are put aside and 3 are left, and the same command goes on"]


# ---- pages


@pytest.mark.parametrize("page", ["docs/scoreboard.md", "docs/feature-maps.md", "README.md"])
def test_tables_on_pages_match_the_files(page):
    text, rows = (PROJECT / page).read_text(), read_folder_rows(PROJECT / "benchmarks" / "results")
    assert fill_page(text, rows) == text
    # the page does have tables
    assert fill_page(text, []) != text


def test_a_page_may_show_some_methods_on_some_rows(tmp_path):
    rows = run_boards([tiny("mqar_80", methods="softmax, nala_mild")], out=tmp_path / "scoreboard_a.csv")
    page, mark = tmp_path / "page.md", "<!-- scoreboard of mqar_80, majority_256 by nala_mild, deltanet: begin -->"
    page.write_text(f"before\n{mark}\nold\n<!-- scoreboard: end -->\nafter\n")
    fill(page, tmp_path)
    assert page.read_text().splitlines() == [
        *("before", mark, ""),
        *("|  | `mqar_80` | `majority_256` |", "| --- | --- | --- |"),
        f"| `nala_mild` | {float(rows[1]['test']):.3f} (1) | not measured |",
        *("| `deltanet` | not measured | - |", "", "<!-- scoreboard: end -->", "after"),
    ]


def test_the_summary_has_seeds_spread_and_state_beside_the_plain_map():
    def row(method, seed, test, state):
        fixed = {
            "task": "majority_256",
            "learning_rate": "0.1",
            "dev": "0.5",
            "parameters": "1",
            "steps": "4",
            "settings": "{}",
        }
        return fixed | {"method": method, "seed": str(seed), "test": str(test), "state_size": str(state)}

    rows = [row("relu", seed, 0.5 + 0.1 * seed, 64) for seed in range(3)]
    rows += [row("split", seed, 0.25, 128) for seed in range(2)] + [row("softmax", 0, 1.0, 0)]
    lines = summary({"majority_256": rows}).splitlines()
    assert "| relu | 1 | 0.600 ± 0.100 |" in lines
    assert "| sign_split | 2 | 0.250 ± 0.000 (2) |" in lines
    assert "| softmax | grows | 1.000 (1) |" in lines
    assert "| deltanet |  | - |" in lines
    words = [row | {"figure": "perplexity"} for row in rows]
    assert summary({"words": words}).splitlines()[0] == "| method | state | words (perplexity, lower is better) |"


def test_every_row_is_explained_on_the_page():
    page = (PROJECT / "docs" / "scoreboard.md").read_text()
    assert [name for name in [*ROWS, *METHODS_OF_THE_BOARD] if f"`{name}`" not in page] == []


def test_a_page_is_filled_from_the_files_beside_chance_and_machine(tmp_path):
    rows = run_boards([tiny("mqar_80", methods="softmax, nala_mild")], out=tmp_path / "scoreboard_a.csv")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    fill(page, tmp_path)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert f"| nala_mild | {float(rows[1]['test']):.4f} | - | 1 |" in text
    assert "| chance | 0.1250 |" in text
    assert "| parameters | state | norm-entropy | drop | rank |" in text
    assert f"| {float(rows[1]['entropy_drop']) + 0.0:.2f} | {float(rows[1]['effective_rank']):.2f} |" in text
    # missing results are named, and methods without a form for the row are not missed
    assert f"| nala_mild |  | {float(rows[1]['test']):.3f} (1) |" in text
    assert "| relu |  | not measured |" in text
    assert "| rala_map |  | - |" in text
    assert "Rows that have not been measured yet: `pointing_256`," in text
    assert "Not measured yet: relu, elu," in text
    assert "rala_map" not in text.partition("Not measured yet:")[2].partition("\n")[0]
    assert rows[0]["commit"] in text
    assert json.loads(rows[0]["settings"])["data"]["data"] == "mqar"
    # the cost of a model that counts it has a column of its own
    assert "multiply-adds" not in text
    counted = section("mqar_80", [row | {"multiply_adds": "2500000"} for row in rows])
    assert "| norm-entropy | drop | rank | multiply-adds |" in counted
    assert counted.count("| 2.5 M |") == 2
    (tmp_path / "b.md").write_text("none")
    with pytest.raises(ValueError, match="must hold the marks"):
        fill(tmp_path / "b.md", tmp_path)


def test_a_smoke_recipe_is_small_too():
    board = make_board("mqar", methods="relu", seeds=3, smoke=True, settings=["batch_size=3"])
    assert (board.recipe.task.train_samples, board.recipe.training.batch_size, board.total_steps) == (4, 3, 2)
    assert list(board.seeds) == [0]


def test_errors_for_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown method .*'nalla'; did you mean .*'nala'"):
        make_board("pointing_256", methods="nalla", seeds=1)
    with pytest.raises(ValueError, match=r"unknown task .*'pointing_25'; did you mean 'pointing_256'") as error:
        make_board("pointing_25", methods="relu", seeds=1)
    assert "detection" not in str(error.value)
    with pytest.raises(ValueError, match="needs a recipe on sequences, got images"):
        make_board("images", methods="relu", seeds=1, smoke=True)
