"""Runs that stop, are killed or meet damaged files: they go on to the same bits, from a checkpoint that is whole."""

import errno
import json
import multiprocessing
import random
import time

import pytest
import torch

from helpers.processes import start
from helpers.training_example import Regression, make_model, make_trainer, run, same_bits, stop_at
from nalaformer.training import Checkpoint, Checkpoints, DamagedCheckpoint, checkpoint
from nalaformer.training.log import read_log

pytestmark = pytest.mark.usefixtures("one_thread")


def wait_for_step(folder, step, process):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.is_alive():
        rows = read_log(folder / "log.jsonl")
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.01)
    pytest.fail(f"step {step} was not reached, exit code {process.exitcode}")


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    whole.fit()
    for step in (7, 13):
        process = start(run, tmp_path / "killed", 0.05)
        wait_for_step(tmp_path / "killed", step, process)
        process.kill()
        process.join()
    # a killed process may leave half a line and half a checkpoint
    with (tmp_path / "killed" / "log.jsonl").open("a") as file:
        file.write('{"kind": "st')
    (tmp_path / "killed" / "checkpoints" / ".writing_step_00000015_1").mkdir()
    start(run, tmp_path / "killed", 0.0).join()
    assert (tmp_path / "killed" / "outcome").read_text() == "finished"

    assert read_log(tmp_path / "killed" / "log.jsonl") == read_log(tmp_path / "whole" / "log.jsonl")
    ours, theirs = (Checkpoints(tmp_path / name / "checkpoints").load(24) for name in ("whole", "killed"))
    for part in ("model", "ema", "optimizer"):
        assert same_bits(ours.tensors[part], theirs.tensors[part])
    assert ours.state == theirs.state
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*"))


def test_sigterm_saves_and_ends_well(tmp_path):
    process = start(run, tmp_path, 0.05)
    wait_for_step(tmp_path, 6, process)
    process.terminate()
    process.join(60)
    assert process.exitcode == 0
    last = read_log(tmp_path / "log.jsonl")[-1]["step"]
    assert (tmp_path / "outcome").read_text() == f"stopped at {last}"
    assert Checkpoints(tmp_path / "checkpoints").steps()[-1] == last < 24


def test_a_finished_run_is_not_run_again(tmp_path):
    first = make_trainer(tmp_path).fit()
    log = (tmp_path / "log.jsonl").read_bytes()
    again = make_trainer(tmp_path, task=Regression(bad=range(60))).fit()
    assert again == first
    assert (tmp_path / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb", "lion", "nadamw"])
def test_every_kind_of_optimiser_resumes_to_the_same_bits(tmp_path, optimizer):
    whole, halves = make_model(), make_model()
    make_trainer(tmp_path / "whole", model=whole, optimizer=optimizer).fit()
    stopped = make_trainer(tmp_path / "halves", model=make_model(), optimizer=optimizer)
    stopped.task.seconds = 0.0
    stop_at(stopped, 11)
    assert stopped.fit().step == 11
    # another process would come with another random state
    torch.rand(7)
    make_trainer(tmp_path / "halves", model=halves, optimizer=optimizer).fit()
    assert same_bits(whole.state_dict(), halves.state_dict())


@pytest.mark.parametrize("changed", [{"learning_rate": 1e-3}, {"steps": 25}, {"seed": 1}])
def test_a_folder_with_other_settings_is_refused(tmp_path, changed):
    stopped = make_trainer(tmp_path)
    stop_at(stopped, 6)
    stopped.fit()
    with pytest.raises(ValueError, match=rf"other settings: training\.{next(iter(changed))} was .* choose another folder"):
        make_trainer(tmp_path, **changed).fit()


def test_where_data_is_read_and_how_often_is_saved_may_change(tmp_path):
    stopped = make_trainer(tmp_path)
    stop_at(stopped, 6)
    stopped.fit()
    assert make_trainer(tmp_path, keep=1, save_every=3).fit().is_finished


def small(step=1):
    return Checkpoint(tensors={"model": {"w": torch.arange(6.0) + step}}, state={"step": step})


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 10):
        checkpoints.save(step, small(step))
    file = checkpoints.path(10) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="sha256"):
        checkpoints.load(10)
    with pytest.warns(UserWarning, match="step_00000010"):
        step, found = checkpoints.newest()
    assert step == 2
    assert found.tensors["model"]["w"].tolist() == (torch.arange(6.0) + 2).tolist()


@pytest.mark.parametrize("harm", ["no manifest", "no file", "manifest is a list", "manifest cut", "points outside"])
def test_every_kind_of_damage_is_found(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(1, small())
    manifest = folder / "manifest.json"
    if harm == "no manifest":
        manifest.unlink()
    elif harm == "no file":
        (folder / "state.json").unlink()
    elif harm == "manifest is a list":
        manifest.write_text("[]")
    elif harm == "manifest cut":
        manifest.write_text(manifest.read_text()[:20])
    else:
        manifest.write_text(json.dumps({"sha256": {"../secret": "0"}}))
    with pytest.raises(DamagedCheckpoint):
        checkpoints.load(1)
    with pytest.warns(UserWarning, match="step_00000001"):
        assert checkpoints.newest() is None


def save_for_ever(folder):
    checkpoints = Checkpoints(folder)
    for step in range(1, 100_000):
        checkpoints.save(step, small(step))
        checkpoints.prune(keep=2)


def test_a_process_killed_while_saving_leaves_a_whole_checkpoint(tmp_path):
    context = multiprocessing.get_context("fork")
    for attempt in range(25):
        process = context.Process(target=save_for_ever, args=(tmp_path / str(attempt),))
        process.start()
        checkpoints = Checkpoints(tmp_path / str(attempt))
        # a slow disk takes longer for each of them: counted, not timed
        while max(checkpoints.steps(), default=0) < 1 + attempt % 4:
            time.sleep(0.001)
        time.sleep(random.Random(attempt).uniform(0, 0.04))
        process.kill()
        process.join()
        for step in checkpoints.steps():
            assert checkpoints.load(step).state["step"] == step
        checkpoints.clean()
        assert all(path.name.startswith("step_") for path in checkpoints.folder.iterdir())


def test_a_full_disk_is_a_clear_error_and_the_old_checkpoint_stays(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small(1))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match=r"step 2 could not be written .*No space left.*earlier ones are untouched"):
        checkpoints.save(2, small(2))
    assert checkpoints.newest()[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_the_newest_is_chosen_by_step_and_not_by_time(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (100_000_000, 20, 3):
        checkpoints.save(step, small(step))
    assert checkpoints.newest()[0] == 100_000_000


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 7):
        checkpoints.save(step, small(step))
    checkpoints.prune(keep=2, also=3)
    assert checkpoints.steps() == [3, 5, 6]


def test_a_run_holds_no_pickle(tmp_path):
    make_trainer(tmp_path).fit()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".jsonl", ".json", ".safetensors"}
