"""How many processes read data on a machine of few cores."""

import dataclasses
import os

import pytest

from nalaformer.data.loading import workers_here
from nalaformer.recipes import RECIPES, changed, make_trainer
from nalaformer.training.plan import plan_lines

pytestmark = pytest.mark.usefixtures("one_thread")


def cores(monkeypatch, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)


@pytest.mark.parametrize(("asked", "count", "expected"), [(0, 4, 0), (3, 4, 3), (12, 4, 4), (12, 1, 2)])
def test_no_more_processes_read_data_than_there_are_cores(asked, count, expected, monkeypatch):
    cores(monkeypatch, count)
    assert workers_here(asked) == expected


def test_a_run_says_that_it_has_fewer_workers_than_were_asked_for(tmp_path, monkeypatch):
    recipe = changed(RECIPES["cue_grid"](), ["steps=1", "warmup=0", "batch_size=2", "workers=12", "device=cpu"])
    trainer = make_trainer(recipe, tmp_path)
    cores(monkeypatch, 3)
    assert "note: 3 processes read data instead of 12, as many as this machine has cores for" in plan_lines(trainer)
    trainer.config = dataclasses.replace(trainer.config, workers=3)
    assert not any("processes read data" in line for line in plan_lines(trainer))
