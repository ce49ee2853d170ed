"""The demo: its two tasks, its sentences, its page."""

import html
import math
import statistics
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from nalaformer.recipes import build_model
from nalaformer.training import Trainer
from research.demo import (
    ENTRIES,
    MORE_ENTRIES,
    OURS,
    TASKS,
    cost,
    demo_recipe,
    demo_table,
    pictures,
    run_demo,
    study,
    write_report,
)
from research.demo.cost import milliseconds, network
from research.demo.diagnose import FACTORS
from research.demo.intervals import difference_interval, mean_interval
from research.demo.pictures import looks
from research.demo.trained import diagnose_trained
from research.sequence_task import Sequences

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = [entry.label for entry in ENTRIES]
CHOSEN = tuple(entry for entry in ENTRIES if entry.label in ("softmax", "linear (ReLU)", "NaLaFormer", OURS.label))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "milliseconds", lambda entries: dict.fromkeys(entries, (1.0, 20.0, 300.0)))
        return run_demo(tmp_path_factory.mktemp("demo"), seeds=2, steps=4, entries=CHOSEN, workers=1)


def with_scores(result, **scores):
    """The result as if each method had these accuracies at both tasks."""
    found = tuple(
        replace(finding, accuracies={task.name: scores[finding.entry.attention] for task in TASKS}) for finding in result.found
    )
    return replace(result, found=found)


def test_the_table_shows_every_method_at_both_tasks(result):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(demo_table(result))
    text = console.export_text()
    for finding in result.found:
        assert finding.entry.label in text
        for task in TASKS:
            assert len(finding.accuracies[task.name]) == 2
            assert f"{statistics.mean(finding.accuracies[task.name]):.2f} ± " in text
    assert "chance 0.125 and 0.125" in text


def test_seeds_give_other_networks(result):
    assert all(len(set(finding.curves["pointing"])) == 2 for finding in result.found)


@pytest.mark.slow
def test_parallel_runs_equal_sequential_ones(result, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "milliseconds", lambda entries: dict.fromkeys(entries, (1.0, 1.0, 1.0)))
    together = run_demo(tmp_path, seeds=2, steps=4, entries=CHOSEN[:1], workers=2)
    assert together.found[0].curves == result.found[0].curves


def test_the_page_is_self_contained_and_writes_its_plots_as_files(result, tmp_path):
    page = write_report(result, tmp_path / "new" / "report.html")
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,iVBOR") == 5
    assert not any(link in text for link in ("http:", "https:", 'src="/', "<script"))
    assert all(finding.entry.label in text for finding in result.found)
    pictures = {path.name for path in page.parent.iterdir()} - {"report.html"}
    assert {name.rsplit(".", 1)[1] for name in pictures} == {"png", "svg"}
    assert len(pictures) == 10


def test_trained_queries_come_from_the_demo_and_nothing_trains_twice(result, tmp_path, monkeypatch):
    diagnosed = diagnose_trained(tmp_path, entries=CHOSEN[:2], steps=4, workers=1)
    monkeypatch.setattr(Trainer, "_step", lambda *_: pytest.fail("a run was repeated"))
    assert diagnose_trained(tmp_path, entries=CHOSEN[:2], steps=4, workers=1).keys() == diagnosed.keys()
    for finding, (accuracy, found) in zip(result.found, diagnosed.values(), strict=False):
        assert accuracy == finding.accuracies["pointing"][0]
        assert found.grown == finding.diagnosis.grown


def test_every_plotted_method_has_its_own_look():
    every = [*LABELS, *(entry.label for entry in MORE_ENTRIES)]
    for part in ("color", "marker"):
        assert len({look[part] for look in looks(every).values()}) == len(every)


def test_the_page_recommends_our_map_only_where_results_support_it(result, tmp_path, monkeypatch):
    # plots take seconds
    monkeypatch.setattr(pictures, "PICTURES", dict.fromkeys(pictures.PICTURES, lambda result: None))
    monkeypatch.setattr(pictures, "write_plot", lambda figure, folder, name: b"")
    scores = {"softmax": (0.93, 0.96), "linear": (0.78, 0.781), "channel_softmax": (0.94, 0.941)}
    for nalaformer, is_recommended in (((0.86, 0.861), True), ((0.98, 0.981), False)):
        found = with_scores(result, **scores, nalaformer=nalaformer)
        text = write_report(found, tmp_path / "report.html").read_text(encoding="utf-8")
        assert text.count('<tr class="ours"><td>channel softmax + contrast (ours)</td>') == 1
        assert ('<p class="advice">' in text) == found.ours_is_recommended == is_recommended
        # each sentence once, the recommendation too
        assert [html.unescape(text).count(line) for line in found.findings()] == [1] * len(found.findings())


# ---- what it says


def test_a_lead_is_claimed_only_where_the_interval_lies_on_one_side(result):
    scores = {"softmax": (1.0, 1.0), "channel_softmax": (0.1, 0.1)}
    clear = with_scores(result, **scores, nalaformer=(0.85, 0.851), linear=(0.78, 0.781)).findings()
    assert any("NaLaFormer (0.85) leads linear (ReLU) (0.78) by 0.0" in line for line in clear)
    spread = with_scores(result, **scores, nalaformer=(0.6, 0.9), linear=(0.55, 0.8)).findings()
    assert any("2 seeds show no difference between NaLaFormer (0.75) and linear (ReLU)" in line for line in spread)
    behind = with_scores(result, **scores, nalaformer=(0.7, 0.701), linear=(0.78, 0.781)).findings()
    assert any("linear (ReLU) (0.78) leads NaLaFormer (0.70) by 0.0" in line for line in behind)


def test_a_method_that_loses_at_the_flat_task_is_named(result):
    even = with_scores(result, softmax=(0.9, 0.91), nalaformer=(0.9, 0.91), linear=(0.9, 0.92), channel_softmax=(0.9, 0.91))
    assert any("no other is behind it" in line for line in even.findings())
    scores = {"softmax": (0.9, 0.901), "linear": (0.9, 0.92), "channel_softmax": (0.9, 0.91)}
    losing = with_scores(result, **scores, nalaformer=(0.5, 0.501))
    assert any("behind it by more than the seeds' spread: NaLaFormer (-0.40)" in line for line in losing.findings())


def test_one_seed_claims_no_lead(result):
    alone = with_scores(result, softmax=(1.0,), nalaformer=(0.1,), linear=(0.1,), channel_softmax=(0.9,))
    assert not any("leads" in line or "recommend" in line for line in alone.findings())
    assert not alone.ours_is_recommended


def test_intervals_hold_the_mean_and_the_difference_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(4000, 2, 3, generator=generator, dtype=torch.float64) * torch.tensor([[1.0], [4.0]])
    held_means = statistics.mean(abs(mean_interval(a.tolist()).middle) <= mean_interval(a.tolist()).half for a, _ in draws)
    held = [difference_interval(a.tolist(), b.tolist()) for a, b in draws]
    assert held_means == pytest.approx(0.95, abs=0.015)
    # Welch's interval with the freedom rounded down errs to the safe side
    assert 0.945 <= statistics.mean(abs(each.middle) <= each.half for each in held) <= 0.985
    assert mean_interval([0.5]).half == difference_interval([0.5], [0.1]).half == math.inf


# ---- what it looks at


def test_a_longer_query_sharpens_softmax_and_leaves_a_homogeneous_map_as_it_is(result):
    by_label = {finding.entry.label: finding.diagnosis for finding in result.found}
    assert by_label["softmax"].sharpening > 0.01
    flat = by_label["linear (ReLU)"].grown
    # the epsilon of the denominator is all that a factor of the query meets
    assert max(flat) - min(flat) < 1e-3
    assert len(flat) == len(FACTORS)


def test_weights_by_nearness_match_the_keys(result):
    for finding in result.found:
        weights = finding.diagnosis.by_nearness
        assert weights.shape == (16, 32)
        assert weights.min() >= 0
        # probes see the other probes too
        assert (weights.sum(-1) < 1).all()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("entry", [*ENTRIES, *MORE_ENTRIES], ids=lambda entry: entry.label)
def test_only_the_feature_map_differs_between_methods(entry, task):
    recipe = demo_recipe(task, entry, seed=0)
    facts = Sequences(recipe.task).facts()
    model = build_model(recipe, facts)
    names = {name for name, _ in model.named_parameters() if ".map." not in name}
    # offset and slope in both layers, of the map of our own alone
    contrasts = {name for name in names if ".contrast." in name}
    assert len(contrasts) == (4 if entry == OURS else 0)
    names -= contrasts
    softmax = build_model(demo_recipe(task, ENTRIES[0], seed=0), facts)
    assert names == {name for name, _ in softmax.named_parameters()}


def test_the_timed_network_is_the_demo_network_with_more_tokens():
    assert network(CHOSEN[0], 100).positions.shape[0] == 100
    times = milliseconds(CHOSEN[:2], tokens=(64, 128), rounds=1)
    assert all(len(each) == 2 and min(each) > 0 for each in times.values())


def test_what_other_programs_take_does_not_reach_the_times(monkeypatch):
    class Interrupted(torch.nn.Module):
        """Module that sleeps, as if another program had the core for a while in every round."""

        def forward(self, x):
            time.sleep(0.3)
            return x @ x.mT

    monkeypatch.setattr(cost, "network", lambda entry, length: Interrupted())
    assert milliseconds(CHOSEN[:1], tokens=(32,))[CHOSEN[0]][0] < 100


def test_the_shortest_round_counts(monkeypatch):
    clock = iter([0.0, 9.0, 10.0, 10.002, 20.0, 20.003])
    monkeypatch.setattr("research.demo.cost.time.thread_time", lambda: next(clock))
    assert milliseconds(CHOSEN[:1], tokens=(32,), rounds=3)[CHOSEN[0]][0] == pytest.approx(2.0)


def test_one_thread_computes_while_times_are_taken_and_as_many_as_before_after(monkeypatch):
    threads = []
    monkeypatch.setattr(cost, "network", lambda entry, length: lambda x: threads.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    milliseconds(CHOSEN[:1], tokens=(32,), rounds=1)
    assert (threads, torch.get_num_threads()) == ([1], 2)
