"""Trainer: what is minimised, in which precision, and what a run logs and refuses."""

import re
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from helpers.processes import run_on_ranks
from helpers.training_example import Regression, learn_on_ranks, make_model, make_trainer, same_bits, stop_at
from nalaformer.data import batches_from
from nalaformer.tasks import SummedMetrics
from nalaformer.training import Checkpoints, TrainingConfig, TrainingStopped, evaluation
from nalaformer.training.log import read_log

pytestmark = pytest.mark.usefixtures("one_thread")

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


CORRUPT = (3, 4, 11, 30, 41)


@pytest.fixture(scope="module")
def learned_on_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(learn_on_ranks, folder, CORRUPT)
    return folder


def test_two_ranks_learn_what_one_learns(tmp_path, learned_on_ranks):
    model, one, two = make_model(norm=False, dropout=0), tmp_path / "one", learned_on_ranks / "plain"
    outcome = make_trainer(one, task=Regression(corrupt=CORRUPT), model=model, optimizer="sgd", steps=8).fit()
    saved = Checkpoints(two / "checkpoints").load(8)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved.tensors["model"][name], value, rtol=2e-5, atol=1e-6)
    # files that either of them has met, each once
    met_by_one, met_by_two = ((folder / "rejected.txt").read_text().splitlines() for folder in (one, two))
    assert len(met_by_one) == len(CORRUPT)
    assert sorted(met_by_two) == sorted(met_by_one)
    assert saved.state["progress"]["metrics"]["negative_error"] == pytest.approx(outcome.metrics["negative_error"], rel=1e-4)
    for name in ("loss", "gradient_norm"):
        ours, theirs = ([row[name] for row in read_log(folder / "log.jsonl") if row["kind"] == "step"] for folder in (one, two))
        assert theirs == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_two_ranks_with_batch_norm_report_the_figures_of_what_is_saved(learned_on_ranks, ema):
    """Each rank has statistics of its own batches, and only those of the first are saved."""
    saved = Checkpoints(learned_on_ranks / f"ema_{ema}" / "checkpoints").load(8)
    model, task = make_model(norm=True, dropout=0), Regression()
    model.load_state_dict(saved.tensors["ema" if ema else "model"])
    alone = evaluation.evaluate(model, task.eval_data, task.metrics(), batch_size=20)
    assert saved.state["progress"]["metrics"]["negative_error"] == pytest.approx(alone["negative_error"], rel=1e-5)


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


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda loss: loss.total, "got Tensor"), (lambda loss: replace(loss, total=loss.total.expand(3)), "(3,)")],
)
def test_a_task_whose_loss_is_none_is_told_what_it_must_return(tmp_path, change, said):
    class Own(Regression):
        def loss(self, model, batch):
            return change(super().loss(model, batch))

    with pytest.raises(TypeError, match=rf"must return Loss\(total=a scalar.*{re.escape(said)}"):
        make_trainer(tmp_path, task=Own()).fit()


def test_a_task_without_figures_is_told_so(tmp_path):
    class Own(Regression):
        def metrics(self):
            metrics = super().metrics()
            metrics.result = dict
            return metrics

    with pytest.raises(ValueError, match="must give a figure"):
        make_trainer(tmp_path, task=Own()).fit()


def test_the_average_is_what_is_evaluated_and_saved(tmp_path):
    trainer = make_trainer(tmp_path, ema=0.5)
    trainer.fit()
    saved = Checkpoints(tmp_path / "checkpoints").load(24).tensors
    assert not same_bits(saved["ema"], saved["model"])
    assert same_bits(saved["ema"], trainer.evaluated_model.state_dict())


def test_activation_checkpointing_learns_the_same(tmp_path):
    import timm

    import nalaformer.models.vision  # noqa: F401  (enters the names into timm)

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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adafactorbv", "group option 'momentum_dtype' of dtype"),
        ("adahessian", "no more than gradients"),
    ],
)
def test_an_optimiser_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path, name, message):
    with pytest.raises(ValueError, match=f"{message}.*choose another"):
        make_trainer(tmp_path, optimizer=name)


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
