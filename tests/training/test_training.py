"""What must never happen to a run: weights lost, steps that differ after a kill, NaN that spreads."""

import errno
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch

from helpers.places import TESTS
from helpers.training_example import Regression, make_model, make_trainer, stop_at
from nalaformer.data import batches_from
from nalaformer.tasks import SummedMetrics
from nalaformer.training import Checkpoint, Checkpoints, DamagedCheckpoint, TrainingConfig, TrainingStopped, checkpoint
from nalaformer.training.log import read_log

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLE = TESTS / "helpers" / "training_example.py"


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def start(folder, seconds=0.0):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_step(folder, step, process):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        rows = read_log(folder / "log.jsonl")
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.01)
    pytest.fail(f"step {step} was not reached: {process.communicate()[1]}")


# ---- resume


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    whole.fit()
    for step in (7, 13):
        process = start(tmp_path / "killed", seconds=0.05)
        wait_for_step(tmp_path / "killed", step, process)
        process.kill()
        process.wait()
    # a killed process may leave half a line and half a checkpoint
    with (tmp_path / "killed" / "log.jsonl").open("a") as file:
        file.write('{"kind": "st')
    (tmp_path / "killed" / "checkpoints" / ".writing_step_00000015_1").mkdir()
    process = start(tmp_path / "killed")
    assert process.communicate()[0] == "finished\n"

    assert read_log(tmp_path / "killed" / "log.jsonl") == read_log(tmp_path / "whole" / "log.jsonl")
    ours, theirs = (Checkpoints(tmp_path / name / "checkpoints").load(24) for name in ("whole", "killed"))
    for part in ("model", "ema", "optimizer"):
        assert same_bits(ours.tensors[part], theirs.tensors[part])
    assert ours.state == theirs.state
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*"))


def test_sigterm_saves_and_ends_well(tmp_path):
    process = start(tmp_path, seconds=0.05)
    wait_for_step(tmp_path, 6, process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    last = read_log(tmp_path / "log.jsonl")[-1]["step"]
    assert output == f"stopped at {last}\n"
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


# ---- checkpoints


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


# ---- numbers that are not finite


class BadStep(Regression):
    """The loss is NaN in the steps listed, after the forward pass has moved the statistics."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.trainer = steps, None

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if self.trainer.progress.step in self.steps:
            return type(loss)(total=loss.total * float("nan"), weight=loss.weight, parts=loss.parts)
        return loss


def run_with_bad_steps(folder, bad, **settings):
    task, model = BadStep(bad), make_model()
    task.trainer = make_trainer(folder, task=task, model=model, **settings)
    return task.trainer, model


def test_a_step_that_is_not_finite_changes_nothing(tmp_path):
    trainer, model = run_with_bad_steps(tmp_path / "a", {3, 4})
    stop_at(trainer, 3)
    trainer.fit()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = Checkpoints(tmp_path / "a" / "checkpoints").load(3).tensors["optimizer"]
    trainer, model = run_with_bad_steps(tmp_path / "a", {3, 4})
    stop_at(trainer, 5)
    outcome = trainer.fit()
    assert outcome.skipped_steps == 2
    assert same_bits(model.state_dict(), before)
    assert same_bits(Checkpoints(tmp_path / "a" / "checkpoints").load(5).tensors["optimizer"], moments)
    rows = {row["step"]: row for row in read_log(tmp_path / "a" / "log.jsonl")}
    assert rows[4]["loss"] is None
    assert rows[4]["skipped"] is True
    assert "skipped" not in rows[3]


def test_a_loss_that_stays_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    trainer, _ = run_with_bad_steps(tmp_path, range(12, 100), bad_steps=4)
    with pytest.raises(TrainingStopped, match=r"4 steps in a row, up to step 16; .*step_00000015; lower learning_rate"):
        trainer.fit()
    saved = Checkpoints(tmp_path / "checkpoints").newest()[1]
    assert all(tensor.isfinite().all() for tensor in saved.tensors["model"].values())


def test_bad_steps_apart_do_not_stop_a_run(tmp_path):
    trainer, _ = run_with_bad_steps(tmp_path, {2, 3, 6, 7, 10}, bad_steps=3)
    outcome = trainer.fit()
    assert outcome.is_finished
    assert outcome.skipped_steps == 5


# ---- what is minimised


@pytest.mark.parametrize("accumulate", [2, 3, 4])
def test_accumulation_changes_nothing_but_rounding(tmp_path, accumulate):
    """The samples have different weights, so a mean of means would be off."""
    whole, parts = make_model(norm=False, dropout=0), make_model(norm=False, dropout=0)
    make_trainer(tmp_path / "a", model=whole, optimizer="sgd").fit()
    make_trainer(tmp_path / "b", model=parts, optimizer="sgd", accumulate=accumulate).fit()
    for ours, theirs in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    ours, theirs = (read_log(tmp_path / name / "log.jsonl") for name in "ab")
    assert [row["loss"] for row in ours if row["kind"] == "step"] == pytest.approx(
        [row["loss"] for row in theirs if row["kind"] == "step"], rel=1e-5
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_gradient_is_that_of_the_mean_over_all_units(tmp_path, accumulate):
    model = make_model(norm=False, dropout=0)
    trainer = make_trainer(tmp_path, model=model, accumulate=accumulate, steps=1, warmup=0)
    (batch,) = batches_from(0, trainer.task.train_data, seed=0, batch_size=12, last_step=1)
    x, target, units = batch.content
    expected = (units * (model(x)[:, 0] - target) ** 2).sum() / units.sum()
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    trainer.fit()
    row = read_log(tmp_path / "log.jsonl")[0]
    assert row["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert row["gradient_norm"] == pytest.approx(torch.cat([g.flatten() for g in gradients]).norm().item(), rel=1e-4)


RANKS = """
import sys, torch
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from helpers.training_example import make_model, make_trainer
make_trainer({folder!r}, model=make_model(norm=False, dropout=0), optimizer="sgd", accumulate=2, steps=8).fit()
"""


def test_two_ranks_learn_what_one_learns(tmp_path):
    model = make_model(norm=False, dropout=0)
    outcome = make_trainer(tmp_path / "one", model=model, optimizer="sgd", steps=8).fit()
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(tests=str(TESTS), folder=str(tmp_path / "two")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = Checkpoints(tmp_path / "two" / "checkpoints").load(8)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved.tensors["model"][name], value, rtol=2e-5, atol=1e-6)
    assert saved.state["progress"]["metrics"]["negative_error"] == pytest.approx(outcome.metrics["negative_error"], rel=1e-4)
    for name in ("loss", "gradient_norm"):
        ours, theirs = (
            [row[name] for row in read_log(tmp_path / folder / "log.jsonl") if row["kind"] == "step"]
            for folder in ("one", "two")
        )
        assert theirs == pytest.approx(ours, rel=1e-4)


def test_gradients_are_clipped_to_their_norm(tmp_path):
    trainer = make_trainer(tmp_path, clip_norm=1e-3, optimizer="sgd", weight_decay=0.0)
    stop_at(trainer, 1)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    norms = []
    finish = trainer._finish_gradients

    def spy(weight):
        norm = finish(weight)
        norms.append(torch.cat([p.grad.flatten() for p in trainer.parameters]).norm().item())
        return norm

    trainer._finish_gradients = spy
    trainer.fit()
    assert read_log(tmp_path / "log.jsonl")[0]["gradient_norm"] > 1e-2
    assert norms[0] == pytest.approx(1e-3, rel=1e-3)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_the_rate_warms_up_falls_as_a_cosine_and_rests(tmp_path):
    make_trainer(tmp_path, steps=20, warmup=4, cooldown=3, warmup_learning_rate=1e-4, min_learning_rate=1e-5).fit()
    rates = [row["learning_rate"] for row in read_log(tmp_path / "log.jsonl") if row["kind"] == "step"]
    assert len(rates) == 23
    assert rates[:5] == pytest.approx([1e-4, 2.575e-3, 5.05e-3, 7.525e-3, rates[4]])
    assert rates[4] == max(rates) > 0.9e-2
    assert all(a > b for a, b in pairwise(rates[4:21]))
    assert rates[20:] == [1e-5] * 3


def test_durations_in_epochs_become_steps(tmp_path):
    trainer = make_trainer(tmp_path, steps=0, epochs=3, cooldown=1, batch_size=12)
    assert trainer.total_steps == 4 * 5


# ---- precision and memory


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_learns_and_its_weights_stay_float32(tmp_path, precision):
    model = make_model()
    outcome = make_trainer(tmp_path, model=model, precision=precision, ema=0.0, eval_every=1).fit()
    errors = [row["negative_error"] for row in read_log(tmp_path / "log.jsonl") if row["kind"] == "eval"]
    assert errors[-1] > errors[0]
    assert outcome.skipped_steps == 0
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_optimiser_steps_outside_autocast(tmp_path):
    trainer = make_trainer(tmp_path, precision="bfloat16", steps=2)
    seen = []
    prepare = trainer._prepare

    def prepare_and_watch():
        prepare()
        trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))

    trainer._prepare = prepare_and_watch
    trainer.fit()
    assert seen == [False, False]


def test_a_float16_overflow_lowers_the_scale_and_is_no_bad_step(tmp_path):
    class Huge(Regression):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return type(loss)(total=loss.total * 1e30, weight=loss.weight, parts=loss.parts)

    trainer = make_trainer(tmp_path, task=Huge(), precision="float16", steps=3)
    outcome = trainer.fit()
    assert outcome.is_finished
    assert outcome.skipped_steps == 0
    assert trainer.scaler.get_scale() < 65536


def test_the_average_is_what_is_evaluated_and_saved(tmp_path):
    trainer = make_trainer(tmp_path, ema=0.5)
    trainer.fit()
    saved = Checkpoints(tmp_path / "checkpoints").load(24).tensors
    assert not same_bits(saved["ema"], saved["model"])
    assert same_bits(saved["ema"], trainer.evaluated_model.state_dict())


def test_activation_checkpointing_learns_the_same(tmp_path):
    import timm

    class Images(Regression):
        def __init__(self):
            super().__init__()
            self.pixels = torch.randn(1, 3, 32, 32)

        def loss(self, model, batch):
            return super().loss(lambda x: model(self.pixels * x[:, :1, None, None]), batch)

        def metrics(self):
            metrics = MeanOfNothing()
            return metrics

    class MeanOfNothing(SummedMetrics):
        sums = torch.zeros(1)

        def update(self, model, batch):
            pass

        def result(self):
            return {"none": 0.0}

    weights = []
    for name, again in (("a", False), ("b", True)):
        torch.manual_seed(0)
        options = {"embed_dims": (8,) * 4, "depths": (1,) * 4, "num_heads": (1,) * 4, "mlp_ratios": 1, "patch_size": 16}
        model = timm.create_model("vit_nala_tiny_patch16", num_classes=1, **options)
        make_trainer(tmp_path / name, task=Images(), model=model, steps=3, checkpoint_activations=again).fit()
        weights.append(model.state_dict())
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-5, atol=1e-6)


def test_activation_checkpointing_is_refused_by_models_that_cannot(tmp_path):
    with pytest.raises(ValueError, match="set_grad_checkpointing"):
        make_trainer(tmp_path, checkpoint_activations=True).fit()


def test_a_compiled_model_learns_the_same(tmp_path, monkeypatch):
    plain, compiled = make_model(dropout=0), make_model(dropout=0)
    # the eager backend traces as the default one does, without a compiler's half minute
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_with(model, backend="eager"))
    make_trainer(tmp_path / "a", model=plain, steps=4).fit()
    make_trainer(tmp_path / "b", model=compiled, steps=4, compile=True).fit()
    for ours, theirs in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    names = Checkpoints(tmp_path / "b" / "checkpoints").load(4).tensors["model"]
    assert names.keys() == plain.state_dict().keys()


# ---- logs and settings


def test_tensorboard_gets_the_figures_of_the_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_trainer(tmp_path, tensorboard=True).fit()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rows = [row for row in read_log(tmp_path / "log.jsonl") if row["kind"] == "step"]
    assert [event.value for event in events.Scalars("step/loss")] == pytest.approx([row["loss"] for row in rows], rel=1e-6)
    assert "eval/negative_error" in events.Tags()["scalars"]


def test_without_tensorboard_the_error_says_what_brings_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"nalaformer\[tensorboard\]"):
        make_trainer(tmp_path, tensorboard=True).fit()


def test_every_step_is_logged_once_with_its_parts(tmp_path):
    make_trainer(tmp_path).fit()
    rows = read_log(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, 25))
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [8, 16, 24]
    assert {"loss", "largest_unit", "gradient_norm", "learning_rate"} < rows[0].keys()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_loss_rate_and_time_left(tmp_path, terminal, monkeypatch):
    import io

    from rich.console import Console

    from nalaformer.training import display

    monkeypatch.setattr(display, "SECONDS_BETWEEN_LINES", 0.0)
    written = io.StringIO()
    trainer = make_trainer(tmp_path)
    trainer.console = Console(file=written, force_terminal=terminal, width=120)
    trainer.fit()
    text = written.getvalue()
    assert all(word in text for word in ("loss", "samples/s", "left", "24/24", "negative_error"))


@pytest.mark.parametrize(("warmup", "is_named"), [(100.0, True), (2.0, False)])
def test_a_warm_up_longer_than_the_run_is_named(tmp_path, warmup, is_named):
    import io

    from rich.console import Console

    written = io.StringIO()
    trainer = make_trainer(tmp_path, warmup=warmup)
    trainer.console = Console(file=written, width=300)
    trainer.fit()
    assert ("set warmup" in written.getvalue()) == is_named


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 5, "epochs": 1}, "epochs or by steps"),
        ({}, "epochs or by steps"),
        ({"steps": 5, "batch_size": -1}, "batch_size must not be negative"),
        ({"steps": 5, "learning_rate": -1.0}, "learning_rate must not be negative"),
        ({"steps": 5, "ema": 1.0}, "ema"),
        ({"steps": 5, "precision": "float61"}, "'float16'"),
        ({"steps": 5, "on_corrupt": "ignore"}, "on_corrupt"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**settings)


def test_a_device_that_is_not_there_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    object.__setattr__(trainer.config, "device", "no such thing")
    with pytest.raises(ValueError, match="device must be"):
        trainer.fit()


# ---- what protocols ask for


def first_move(folder, **settings):
    """The largest change of a weight in the first step."""
    model = make_model(norm=False, dropout=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    plain = {"steps": 1, "warmup": 0, "ema": 0.0, "learning_rate": 1.0, "weight_decay": 0.0}
    make_trainer(folder, model=model, **(plain | settings)).fit()
    return max((p.detach() - old).abs().max().item() for p, old in zip(model.parameters(), before, strict=True))


def test_gradients_are_clipped_by_value(tmp_path):
    # Nesterov's momentum of 0.9 makes the first step 1.9 times the gradient
    assert first_move(tmp_path / "free", optimizer="sgd") > 0.1
    # room: the clip is met exactly; the rest is for the last digit
    assert 0 < first_move(tmp_path / "clipped", optimizer="sgd", clip_value=1e-4) <= 1.9e-4 * (1 + 1e-3)


def test_epsilon_reaches_the_optimiser(tmp_path):
    # Adam's first step is the learning rate times g / (|g| + epsilon)
    assert first_move(tmp_path / "small", learning_rate=1e-2) == pytest.approx(1e-2, rel=1e-3)
    assert first_move(tmp_path / "large", learning_rate=1e-2, epsilon=1e3) < 1e-4
