"""Every field of TrainingConfig does what its documentation says: a run with it ends otherwise than one without."""

import os
from contextlib import nullcontext
from dataclasses import fields

import pytest
import torch

from helpers.option_effects import Effects
from helpers.training_example import MeanError, Points, Regression, make_model, make_trainer, stop_at
from nalaformer.data import CorruptImage
from nalaformer.training import (
    Checkpoints,
    TrainingConfig,
    TrainingStopped,
    evaluation,
    plan,
    plan_lines,
    precision,
    ranks,
    trainer,
)
from nalaformer.training.config import PRECISIONS
from nalaformer.training.display import Display
from nalaformer.training.log import read_log

pytestmark = pytest.mark.usefixtures("one_thread", "no_disk")
TRAINING = Effects(field.name for field in fields(TrainingConfig))
QUIET = Display(None, title="", done=0, total=0)


@pytest.fixture
def no_disk(monkeypatch):
    """What is written is looked at here, and not whether it outlives a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_no_setting_is_without_a_test_of_its_effect():
    assert TRAINING.missing() == []


class Watched(Regression):
    """Notes the batches that it learns from, and in which precision."""

    def __init__(self, seconds=0.0, **points):
        super().__init__()
        self.train_data = Points(**points) if points else self.train_data
        self.inputs, self.precisions = [], set()

    def loss(self, model, batch):
        self.inputs.append(batch[0])
        self.precisions.add(precision_of())
        return super().loss(model, batch)

    def metrics(self):
        task = self

        class Noted(MeanError):
            def update(self, model, batch):
                task.precisions.add(precision_of())
                super().update(model, batch)

        return Noted()


def precision_of():
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32


def run(folder, *, task=None, model=None, **settings):
    """A short run: no warm-up, no average, one evaluation, unless told."""
    plain = {"steps": 3, "warmup": 0, "ema": 0.0, "save_every": 0, "eval_every": 0}
    model = model or make_model(norm=False, dropout=0.0)
    trainer = make_trainer(folder, task=task or Watched(), model=model, **(plain | settings))
    trainer.fit()
    return trainer


def rows(trainer, kind="step"):
    return [row for row in read_log(trainer.folder / "log.jsonl") if row["kind"] == kind]


def rates(folder, **settings):
    return [row["learning_rate"] for row in rows(run(folder, **settings))]


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def first_move(folder, **settings):
    """The change of the weights in one step of plain descent, but for Nesterov's momentum, which makes it 1.9 gradients."""
    before = torch.cat([p.detach().flatten() for p in make_model(norm=False, dropout=0.0).parameters()])
    plain = {"steps": 1, "learning_rate": 1.0, "weight_decay": 0.0, "optimizer": "sgd"}
    return weights(run(folder, **(plain | settings))) - before


# ---- duration


@TRAINING.of("epochs")
def test_epochs_are_passes_over_the_data(tmp_path):
    # 60 samples in batches of 12
    task = Watched()
    assert len(rows(run(tmp_path, task=task, steps=0, epochs=2))) == 2 * 5
    assert sum(len(x) for x in task.inputs) == 2 * 60


def test_parts_of_an_epoch_are_rounded_to_whole_steps():
    # five steps an epoch
    totals = [TrainingConfig(epochs=epochs, cooldown=0.3).total_steps(5) for epochs in (1.1, 1.3, 1.5, 1.6)]
    # a half goes to the even number, as everywhere in Python
    assert totals == [8, 8, 10, 10]


@TRAINING.of("steps")
def test_steps_are_steps_of_the_optimiser(tmp_path):
    assert len(rows(run(tmp_path, steps=7))) == 7


@TRAINING.of("cooldown")
def test_a_cooldown_is_added_at_the_lowest_rate(tmp_path):
    plain = {"steps": 4, "learning_rate": 1e-2, "min_learning_rate": 1e-3}
    without, cooled = (rates(tmp_path / str(steps), cooldown=steps, **plain) for steps in (0, 3))
    assert cooled == [*without, 1e-3, 1e-3, 1e-3]


# ---- batches


@TRAINING.of("batch_size")
def test_a_step_sees_as_many_samples(tmp_path):
    task = Watched()
    run(tmp_path, task=task, batch_size=20)
    assert [len(x) for x in task.inputs] == [20, 20, 20]


def test_a_batch_that_is_left_open_fits_the_data(tmp_path):
    chosen = {
        samples: TrainingConfig(steps=1, batch_size=0).fitted_to(samples).batch_size for samples in (1, 3, 16, 60, 127, 128)
    }
    assert chosen == {1: 2, 3: 2, 16: 4, 60: 8, 127: 16, 128: 32}
    assert TrainingConfig(steps=1, batch_size=5).fitted_to(1000).batch_size == 5
    task = Watched()
    trainer = run(tmp_path, task=task, batch_size=0)
    assert [len(x) for x in task.inputs] == [8, 8, 8]
    # what was chosen is what the folder holds
    assert trainer.settings["training"]["batch_size"] == 8


@TRAINING.of("accumulate")
def test_a_batch_is_cut_into_parts(tmp_path):
    whole, parts = Watched(), Watched()
    run(tmp_path / "whole", task=whole)
    run(tmp_path / "parts", task=parts, accumulate=3)
    assert [len(x) for x in parts.inputs] == [4] * 9
    assert torch.equal(torch.cat(parts.inputs), torch.cat(whole.inputs))


@TRAINING.of("repeats")
def test_each_sample_comes_that_often_in_a_row(tmp_path):
    task = Watched()
    run(tmp_path, task=task, repeats=3, steps=1)
    (x,) = task.inputs
    # the noise that stands for augmentation is small, samples are far from each other
    distance = torch.cdist(x, x)
    assert ((distance < 0.2) == torch.block_diag(*[torch.ones(3, 3)] * 4).bool()).all()
    assert distance[0, 1] > 0


@TRAINING.of("workers")
def test_workers_read_for_training_and_evaluation(tmp_path, monkeypatch):
    # the loaders are looked at and not started: processes take seconds to come
    trainer = run(tmp_path)
    assert trainer._batches().num_workers == 0
    object.__setattr__(trainer.config, "workers", 2)
    assert trainer._batches().num_workers == 2
    asked = []
    in_order = evaluation.batches_in_order
    monkeypatch.setattr(
        evaluation, "batches_in_order", lambda data, workers, **rest: asked.append(workers) or in_order(data, **rest)
    )
    trainer._evaluate(None, QUIET)
    assert asked == [2]


@TRAINING.of("seed")
def test_a_seed_gives_an_order_of_its_own_and_dropout_of_its_own(tmp_path):
    seen = {}
    for name, settings in {"0": {}, "again": {}, "1": {"seed": 1}}.items():
        task = Watched()
        trainer = run(tmp_path / name, task=task, model=make_model(norm=False, dropout=0.5), **settings)
        seen[name] = task.inputs, [row["loss"] for row in rows(trainer)]
    assert seen["0"][1] == seen["again"][1]
    assert not set(seen["0"][0][0][:, 0].tolist()) & set(seen["1"][0][0][:, 0].tolist())
    # all samples in one batch: their order changes nothing, and dropout does
    losses = {
        (seed, part): rows(
            run(tmp_path / f"{seed} {part}", batch_size=60, steps=1, seed=seed, model=make_model(norm=False, dropout=part))
        )[0]["loss"]
        for seed in (0, 1)
        for part in (0.0, 0.5)
    }
    assert abs(losses[0, 0.0] - losses[1, 0.0]) < 0.1 * abs(losses[0, 0.5] - losses[1, 0.5])


class Drawing(Watched):
    """Notes the random number that dropout would draw first."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def loss(self, model, batch):
        self.drawn.append(torch.rand(()).item())
        return super().loss(model, batch)


def test_every_step_part_and_rank_has_dropout_of_its_own(tmp_path, monkeypatch):
    drawn = []
    for rank in (0, 1):
        place = ranks.Ranks(rank=rank, count=1, device=torch.device("cpu"))
        monkeypatch.setattr(trainer, "started", lambda device, place=place: nullcontext(place))
        task = Drawing()
        make_trainer(tmp_path / str(rank), task=task, steps=3, accumulate=2).fit()
        drawn += task.drawn
    assert len(drawn) == len(set(drawn)) == 2 * 3 * 2


# ---- optimiser


@TRAINING.of("optimizer")
def test_the_optimiser_is_the_one_that_is_named(tmp_path):
    assert type(run(tmp_path / "a", optimizer="lion", steps=1).optimizer).__name__ == "Lion"
    assert type(run(tmp_path / "b", optimizer="sgd", steps=1).optimizer).__name__ == "SGD"


@pytest.mark.parametrize("name", ["AdamW", "ADAM"])
def test_options_of_adam_reach_it_however_its_name_is_written(tmp_path, name):
    optimizer = run(tmp_path, optimizer=name, beta2=0.5, epsilon=0.1, steps=1).optimizer
    assert {(group["betas"][1], group["eps"]) for group in optimizer.param_groups} == {(0.5, 0.1)}


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("rate", [0.0, 1e-7])
def test_no_step_has_more_than_the_highest_rate(tmp_path, schedule, rate):
    found = rates(tmp_path, steps=8, warmup=2, cooldown=2, schedule=schedule, learning_rate=rate)
    assert max(found) == pytest.approx(rate, abs=0, rel=1e-9)


@TRAINING.of("learning_rate")
def test_a_larger_rate_makes_larger_steps(tmp_path):
    small, large = (first_move(tmp_path / str(rate), learning_rate=rate) for rate in (0.25, 1.0))
    torch.testing.assert_close(large, 4 * small, rtol=1e-4, atol=1e-6)


class Indifferent(Watched):
    """A loss whose gradient is zero: what still moves is moved by decay."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return type(loss)(total=loss.total * 0, weight=loss.weight)


@TRAINING.of("weight_decay")
def test_weights_shrink_and_biases_do_not(tmp_path):
    before = make_model(norm=False, dropout=0.0).state_dict()
    trainer = run(tmp_path, task=Indifferent(), steps=1, learning_rate=0.1, weight_decay=0.5)
    for name, value in trainer.model.state_dict().items():
        factor = 0.95 if value.dim() > 1 else 1.0
        torch.testing.assert_close(value, factor * before[name])


@TRAINING.of("beta2")
def test_the_second_moment_forgets_by_beta2(tmp_path):
    small, large = (
        run(tmp_path / str(beta2), steps=1, beta2=beta2).checkpoints.load(1).tensors["optimizer"] for beta2 in (0.9, 0.99)
    )
    # (1 - beta2) g^2 after one step
    moments = [name for name in small if name.endswith("exp_avg_sq")]
    assert moments
    for name in moments:
        torch.testing.assert_close(small[name], 10 * large[name], rtol=1e-4, atol=0)


@TRAINING.of("epsilon")
def test_a_large_epsilon_makes_small_steps(tmp_path):
    # Adam's first step is the learning rate times g / (|g| + epsilon)
    plain = {"optimizer": "adamw", "learning_rate": 1e-2}
    assert first_move(tmp_path / "small", **plain).abs().max() == pytest.approx(1e-2, rel=1e-3)
    assert 0 < first_move(tmp_path / "large", epsilon=1e3, **plain).abs().max() < 1e-4


@TRAINING.of("schedule")
def test_a_linear_schedule_falls_straight_and_a_cosine_late(tmp_path):
    plain = {"steps": 8, "learning_rate": 1.0, "min_learning_rate": 0.0}
    straight, round_ = (rates(tmp_path / name, schedule=name, **plain) for name in ("linear", "cosine"))
    assert straight == pytest.approx([1 - step / 8 for step in range(8)])
    assert round_[1] > straight[1]
    assert round_[7] < straight[7]
    assert round_[4] == pytest.approx(0.5)


@TRAINING.of("decay_at")
def test_the_rate_falls_to_a_tenth_at_each_time(tmp_path):
    plain = {"learning_rate": 1.0, "schedule": "steps", "steps": 8}
    seen = rates(tmp_path / "steps", decay_at=(3, 6), **plain)
    assert seen == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01])
    # a warm-up is part of the duration and moves nothing
    warm = rates(tmp_path / "warm", decay_at=(3, 6), warmup=2, warmup_learning_rate=0.0, **plain)
    assert warm == pytest.approx([0, 0.5, *seen[2:]])
    for wrong in ((), (6, 3)):
        with pytest.raises(ValueError, match="decay_at"):
            TrainingConfig(steps=8, schedule="steps", decay_at=wrong)


@TRAINING.of("warmup")
def test_the_rate_rises_in_even_steps_in_the_unit_of_the_duration(tmp_path):
    plain = {"learning_rate": 1.0, "schedule": "linear", "min_learning_rate": 0.0, "warmup_learning_rate": 0.0}
    warmed = rates(tmp_path / "steps", steps=8, warmup=4, **plain)
    assert warmed == pytest.approx([0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25])
    # one epoch of five steps
    warmed = rates(tmp_path / "epochs", steps=0, epochs=2, warmup=1, **plain)
    assert warmed == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4, 0.2])


@TRAINING.of("warmup_learning_rate")
def test_the_warmup_starts_at_its_rate(tmp_path):
    warmed = rates(tmp_path, learning_rate=1.0, warmup=4, warmup_learning_rate=0.2, steps=5)
    assert warmed[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])


@TRAINING.of("min_learning_rate")
def test_the_rate_ends_at_its_lowest(tmp_path):
    low, high = (
        rates(tmp_path / str(least), steps=5, learning_rate=1.0, min_learning_rate=least, cooldown=1) for least in (0.0, 0.5)
    )
    assert low[-1] == 0
    assert high[-1] == 0.5
    assert min(high) == 0.5


@TRAINING.of("clip_norm")
def test_the_gradient_of_all_parameters_together_is_bounded(tmp_path):
    assert first_move(tmp_path / "free").norm() > 0.1
    assert first_move(tmp_path / "clipped", clip_norm=1e-3).norm() == pytest.approx(1.9e-3, rel=1e-2)


@TRAINING.of("clip_value")
def test_each_entry_of_the_gradient_is_bounded(tmp_path):
    assert first_move(tmp_path / "free").abs().max() > 0.1
    clipped = first_move(tmp_path / "clipped", clip_value=1e-4)
    assert clipped.abs().max() == pytest.approx(1.9e-4, rel=1e-2)
    # each by itself: the norm of all is more than the bound
    assert clipped.norm() > 5e-4


@TRAINING.of("ema")
def test_the_average_moves_by_one_minus_its_decay_and_is_evaluated(tmp_path):
    trainer = run(tmp_path, steps=4, ema=0.75, save_every=1, keep=9)
    before, after = (Checkpoints(tmp_path / "checkpoints").load(step).tensors for step in (3, 4))
    for name, value in after["ema"].items():
        torch.testing.assert_close(value, 0.75 * before["ema"][name] + 0.25 * after["model"][name])
    assert not torch.equal(after["ema"]["0.weight"], after["model"]["0.weight"])
    trainer.model.load_state_dict(after["ema"])
    averaged = evaluation.evaluate(trainer.model, trainer.task.eval_data, MeanError(), batch_size=12)
    assert rows(trainer, "eval")[-1]["negative_error"] == pytest.approx(averaged["negative_error"], rel=1e-6)


class Tied(torch.nn.Module):
    """Two layers with one matrix, which has two names in the state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()))


def test_the_average_of_tied_weights_moves_once_a_step(tmp_path):
    run(tmp_path, model=Tied(), steps=4, ema=0.75, save_every=1, keep=9)
    before, after = (Checkpoints(tmp_path / "checkpoints").load(step).tensors for step in (3, 4))
    for name, value in after["ema"].items():
        torch.testing.assert_close(value, 0.75 * before["ema"][name] + 0.25 * after["model"][name])
    assert torch.equal(after["ema"]["first.weight"], after["ema"]["second.weight"])


# ---- how it is computed


@TRAINING.of("precision")
def test_forward_and_loss_run_in_the_precision_and_so_does_evaluation(tmp_path):
    low = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}
    known = low | {"fp32": torch.float32, "float32": torch.float32}
    assert known.keys() == PRECISIONS.keys()
    for name, dtype in known.items():
        task = Watched()
        trainer = run(tmp_path / name, task=task, precision=name, steps=1)
        assert task.precisions == {dtype}
        assert trainer.scaler.is_enabled() == (dtype == torch.float16)
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_the_device_chooses_an_automatic_precision(tmp_path, monkeypatch):
    task = Watched()
    run(tmp_path, task=task, precision="auto", steps=1)
    assert task.precisions == {torch.float32}
    for has_units, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has_units: has)
        assert precision.precision_on(torch.device("cuda"), "auto") == dtype
        assert precision.precision_on(torch.device("cuda"), "float16") == torch.float16


@pytest.mark.parametrize(
    ("facts", "name", "is_slow"),
    [
        ("flags : fpu avx2 avx512f", "bf16", True),
        ("flags : fpu avx512f avx512_bf16", "bf16", False),
        ("Features : fp asimd bf16", "bf16", False),
        ("flags : fpu avx2", "fp32", False),
        ("flags : fpu avx2", "auto", False),
    ],
)
def test_bfloat16_on_a_cpu_without_units_for_it_names_the_remedy(tmp_path, monkeypatch, facts, name, is_slow):
    monkeypatch.setattr(precision, "CPU_FACTS", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(facts)
    trainer = run(tmp_path / "run", precision=name, steps=1)
    assert [note["text"] for note in rows(trainer, "note") if "set precision=auto" in note["text"]] != [] or not is_slow
    assert any("set precision=auto" in line for line in plan_lines(trainer)) == is_slow


@TRAINING.of("compile")
def test_the_model_that_runs_is_the_compiled_one(tmp_path, monkeypatch):
    class Compiled(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inner, self.calls = model, 0

        def forward(self, x):
            self.calls += 1
            return self.inner(x)

    monkeypatch.setattr(torch, "compile", Compiled)
    assert run(tmp_path / "on", compile=True).forward.calls == 3
    assert isinstance(run(tmp_path / "off").forward, torch.nn.Sequential)


@TRAINING.of("checkpoint_activations")
def test_a_model_is_asked_to_compute_activations_again(tmp_path):
    for again in (False, True):
        model, asked = make_model(norm=False), []
        model.set_grad_checkpointing = asked.append
        run(tmp_path / str(again), model=model, checkpoint_activations=again)
        assert asked == [True] * again


@TRAINING.of("device")
def test_the_device_is_looked_for_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # each process of several takes the GPU of its number
    assert [str(ranks.find_device(name, 3)) for name in ("auto", "cuda", "cpu")] == ["cuda:3", "cuda:3", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ranks.find_device("auto").type == "cpu"
    asked = []
    find = ranks.find_device
    monkeypatch.setattr(ranks, "find_device", lambda device, local: asked.append(device) or find(device, local))
    object.__setattr__((trainer := make_trainer(tmp_path, steps=1)).config, "device", "auto")
    trainer.fit()
    assert asked == ["auto"]


# ---- what is kept


@TRAINING.of("eval_every")
def test_evaluations_come_after_so_many_steps_and_at_the_end(tmp_path):
    assert [row["step"] for row in rows(run(tmp_path / "a", steps=7, eval_every=3), "eval")] == [3, 6, 7]
    assert [row["step"] for row in rows(run(tmp_path / "b", steps=7), "eval")] == [7]


@TRAINING.of("eval_epochs")
def test_evaluations_come_after_so_many_epochs_too(tmp_path):
    # five steps an epoch
    for number, (settings, steps) in enumerate(
        (({"eval_epochs": 1}, [5, 10, 12]), ({"eval_epochs": 0.4, "eval_every": 7}, [2, 4, 6, 7, 8, 10, 12]))
    ):
        assert [row["step"] for row in rows(run(tmp_path / str(number), steps=12, **settings), "eval")] == steps


class GettingWorse(Watched):
    """The first evaluation is the best."""

    def metrics(self):
        task, metrics = self, MeanError()
        metrics.result = lambda: {"negative_steps": -float(len(task.inputs))}
        return metrics


def saved(trainer):
    return Checkpoints(trainer.folder / "checkpoints").steps()


@TRAINING.of("save_every")
def test_checkpoints_come_after_so_many_steps_at_the_best_and_at_the_end(tmp_path):
    plain = {"task": GettingWorse(), "steps": 8, "eval_every": 2, "keep": 9}
    assert saved(run(tmp_path / "never", **plain)) == [2, 8]
    assert saved(run(tmp_path / "often", save_every=3, **plain | {"task": GettingWorse()})) == [2, 3, 6, 8]


@TRAINING.of("save_minutes")
def test_checkpoints_also_come_by_time(tmp_path):
    assert saved(run(tmp_path / "never", save_minutes=0, keep=9)) == [3]
    assert saved(run(tmp_path / "always", save_minutes=1e-9, keep=9)) == [1, 2, 3]


@TRAINING.of("keep")
def test_the_newest_checkpoints_stay_and_the_best(tmp_path):
    for keep, kept in ((1, [2, 8]), (2, [2, 6, 8]), (3, [2, 4, 6, 8])):
        trainer = run(tmp_path / str(keep), task=GettingWorse(), steps=8, eval_every=2, save_every=2, keep=keep)
        assert saved(trainer) == kept


@TRAINING.of("tensorboard")
def test_tensorboard_gets_a_folder_when_asked(tmp_path):
    assert not (run(tmp_path / "a").folder / "tensorboard").exists()
    assert list((run(tmp_path / "b", tensorboard=True).folder / "tensorboard").iterdir())


# ---- what is borne


@TRAINING.of("bad_steps")
def test_a_run_stops_after_so_many_bad_steps_in_a_row(tmp_path):
    for most in (2, 4):
        with pytest.raises(TrainingStopped, match=f"in {most} steps in a row, up to step {most};"):
            run(tmp_path / str(most), task=Regression(bad=range(60)), steps=9, bad_steps=most)


class Corrupt(Points):
    """Every tenth sample cannot be read."""

    def __getitem__(self, index):
        if index % 10 == 0:
            raise CorruptImage(f"{index}.png", "made so")
        return super().__getitem__(index)


def corrupt():
    task = Watched()
    task.train_data = Corrupt()
    return task


@TRAINING.of("on_corrupt")
def test_a_file_that_cannot_be_read_is_skipped_or_stops_the_run(tmp_path):
    run(tmp_path / "skip", task=corrupt(), steps=5)
    assert len((tmp_path / "skip" / "rejected.txt").read_text().splitlines()) == 6
    with pytest.raises(TrainingStopped, match="on_corrupt=skip"):
        run(tmp_path / "stop", task=corrupt(), steps=5, on_corrupt="stop")


@TRAINING.of("most_corrupt")
def test_so_many_files_may_be_skipped(tmp_path):
    run(tmp_path / "six", task=corrupt(), steps=5, most_corrupt=6)
    with pytest.raises(TrainingStopped, match="more than 5 images"):
        run(tmp_path / "five", task=corrupt(), steps=5, most_corrupt=5)


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"on_corrupt": "stop"}, "on_corrupt=skip"), ({"most_corrupt": 3}, "more than 3 images .* and remove that list")],
)
def test_a_run_that_files_have_stopped_stops_again_until_they_are_mended(tmp_path, setting, message):
    """What an earlier part of the run has listed is no pass for the next one: six files of 64 cannot be read."""
    for _ in range(8):
        with pytest.raises(TrainingStopped, match=message):
            run(tmp_path, task=corrupt(), steps=5, **setting)
    run(tmp_path, steps=5, **setting)


def test_a_plan_counts_what_the_run_has_left_out_before(tmp_path):
    task = corrupt()
    task.eval_data = Corrupt(20)
    stop_at(make_trainer(tmp_path, task=task, eval_every=0, save_every=0, most_corrupt=7), 2).fit()
    (tmp_path / "rejected.txt").write_text("gone.png cannot be used: made so\n")
    for trained in (corrupt, Watched):
        assert plan_lines(make_trainer(tmp_path, task=trained(), eval_every=0, save_every=0, most_corrupt=7))
    assert plan_lines(make_trainer(tmp_path, eval_every=0, save_every=0, most_corrupt=0))
    with pytest.raises(ValueError, match=r"got 7 that cannot .* \(and remove .*rejected.txt, which lists 1 of before\)"):
        plan_lines(make_trainer(tmp_path, task=corrupt(), eval_every=0, save_every=0, most_corrupt=6))


def test_a_plan_tries_some_samples_and_refuses_what_the_run_would(tmp_path, monkeypatch):
    def tried(**settings):
        return [
            line
            for line in plan_lines(make_trainer(tmp_path, task=corrupt(), **settings))
            if "left out" in line or "tried" in line
        ]

    first, *named = tried()
    assert first == "tried: all to learn from and all to evaluate on; 6 of these cannot be used"
    assert sorted(line.split()[2] for line in named) == ["0.png", "10.png", "20.png", "30.png", "40.png", "50.png"]
    with pytest.raises(ValueError, match="at most 5 samples may be left out, got 6"):
        tried(most_corrupt=5)
    monkeypatch.setattr(plan, "MOST_NAMED", 2)
    assert tried()[-1] == "left out: 4 more"
    # bounded by number and by time
    monkeypatch.setattr(plan, "MOST_TRIED", 7)
    assert tried()[0].startswith("tried: 7 to learn from and 7 to evaluate on")
    monkeypatch.setattr(plan, "SECONDS_OF_TRYING", 0.0)
    assert tried()[0].startswith("tried: 1 to learn from and 1 to evaluate on")


def test_a_plan_counts_a_file_of_many_samples_once(tmp_path):
    class Crops(Corrupt):
        def __getitem__(self, index):
            return super().__getitem__(index // 8)

    task = Watched()
    task.train_data = Crops()
    # 64 samples of eight files, of which the first cannot be read
    lines = plan_lines(make_trainer(tmp_path, task=task, most_corrupt=1))
    named = [line for line in lines if "left out" in line or "tried" in line]
    assert named[0] == "tried: all to learn from and all to evaluate on; 8 of these cannot be used"
    assert [line.split()[2] for line in named[1:]] == ["0.png"]


@pytest.mark.parametrize("which", ["train_data", "eval_data"])
def test_files_that_other_ranks_cannot_read_count_too(tmp_path, monkeypatch, which):
    """All ranks stop in one step: one that goes on alone waits for the others without end."""
    task = Watched()
    setattr(task, which, Corrupt(20))
    others = ["other.png is no image", "another.png is no image"]

    def gather(self, value):
        return [value, others] if isinstance(value, list) and value else [value]

    monkeypatch.setattr(ranks.Ranks, "gather", gather)
    run(tmp_path / "four", task=task, steps=3, most_corrupt=4)
    assert set(others) < set((tmp_path / "four" / "rejected.txt").read_text().splitlines())
    with pytest.raises(TrainingStopped, match="more than 3 images"):
        run(tmp_path / "three", task=task, steps=3, most_corrupt=3)


def test_evaluation_is_in_eval_mode_and_leaves_the_mode_as_it_was():
    class Noting(MeanError):
        def update(self, model, batch):
            modes.append(model.training)
            super().update(model, batch)

    for mode in (True, False):
        model, modes = make_model(dropout=0.5).train(mode), []
        evaluation.evaluate(model, Points(20), Noting(), batch_size=10)
        assert modes == [False, False]
        assert model.training is mode


def test_files_of_evaluation_that_cannot_be_read_are_left_out_and_named(tmp_path):
    task = Watched()
    task.eval_data = Corrupt(20)
    trainer = run(tmp_path, task=task)
    lines = (tmp_path / "rejected.txt").read_text().splitlines()
    assert [line.split(" ")[0] for line in lines] == ["0.png", "10.png"]
    named = []
    evaluation.evaluate(trainer.model, task.eval_data, MeanError(), batch_size=6, rejected=named.append)
    assert named == lines
