"""A scoreboard's runs follow the settings of their recipe, and reject those that they cannot follow."""

import json
from dataclasses import fields

import pytest
import torch

from helpers.option_effects import Effects
from nalaformer.recipes import changed
from nalaformer.training import TrainingConfig
from research.fast_training.captured_training import CapturedTraining
from research.fast_training.data_on_device import load_to_device
from research.models import RecallModel
from research.recipes import RECIPES
from research.scoreboard import runs as scoreboard
from research.scoreboard.runs import Method, Run, prepare_task
from research.sequence_task import Sequences
from research.sequences import SEQUENCES
from research.tests.commands import invoke

pytestmark = pytest.mark.usefixtures("one_thread")
SPRINT = Effects(field.name for field in fields(TrainingConfig))
DATA = {"vocabulary": 32, "mixture": [[16, 2]]}
SMALL = (
    *("train_samples=32", "eval_samples=6", "test_samples=5", "batch_size=8", "warmup=0"),
    *(f"data_options={json.dumps(DATA)}", 'model_options={"dim": 16}'),
)


def test_every_setting_has_an_effect_test():
    assert SPRINT.missing() == []


def make_training(steps=3, **settings):
    data = SEQUENCES["mqar"](split="train", samples=32, **DATA)
    torch.manual_seed(3)
    model = RecallModel(attention="split", dim=16, **vars(data.facts))
    usual = {"steps": steps, "batch_size": 8, "learning_rate": 1e-2, "eval_every": 1, "weight_decay": 0.0}
    buckets = load_to_device(data, "cpu")
    return CapturedTraining(
        model, TrainingConfig(**(usual | settings)), train=buckets, dev=buckets, groups=1, steps=steps, seed=0
    )


def train_one_step(**settings):
    """The weights before and after one step, by name."""
    training = make_training(steps=1, **settings)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.run()
    return before, training


@SPRINT.of("beta2")
def test_the_second_moment_decays_by_beta2():
    (_, small), (_, large) = (train_one_step(beta2=beta2) for beta2 in (0.9, 0.99))
    for ours, theirs in zip(small.parameters, large.parameters, strict=True):
        one, other = (s.optimizer.state[p]["exp_avg_sq"] for s, p in ((small, ours), (large, theirs)))
        torch.testing.assert_close(one, 10 * other, rtol=1e-4, atol=0)


@SPRINT.of("epsilon", "learning_rate")
def test_steps_are_as_large_as_rate_and_epsilon_say():
    def largest(**settings):
        before, training = train_one_step(**settings)
        return max((value - before[name]).abs().max().item() for name, value in training.model.state_dict().items())

    # Adam's first step is the learning rate times g / (|g| + epsilon)
    assert largest() == pytest.approx(1e-2, rel=1e-2)
    assert largest(learning_rate=1e-3) == pytest.approx(1e-3, rel=1e-2)
    assert 0 < largest(epsilon=1e3) < 1e-4


@SPRINT.of("weight_decay")
def test_matrices_decay_and_vectors_do_not():
    (before, decayed), (_, plain) = train_one_step(weight_decay=5.0), train_one_step()
    for name, value in decayed.model.state_dict().items():
        expected = plain.model.state_dict()[name] - (0.05 * before[name] if value.dim() > 1 else 0)
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


@SPRINT.of("clip_norm", "clip_value")
def test_gradients_are_clipped():
    _, free = train_one_step()
    for settings, bound in (({"clip_norm": 1e-3}, 1e-3), ({"clip_value": 1e-5}, None)):
        _, training = train_one_step(**settings)
        # Adam's first moment after one step is a tenth of the gradient
        gradients = torch.cat([10 * training.optimizer.state[p]["exp_avg"].flatten() for p in training.parameters])
        if bound is None:
            assert gradients.abs().max() == pytest.approx(1e-5, rel=1e-3)
        else:
            assert gradients.norm() == pytest.approx(bound, rel=1e-2)
    assert torch.cat([10 * free.optimizer.state[p]["exp_avg"].flatten() for p in free.parameters]).norm() > 1e-2


@SPRINT.of("schedule", "warmup", "warmup_learning_rate", "min_learning_rate")
def test_rates_follow_the_schedule():
    rates = make_training(
        steps=8, schedule="linear", warmup=4, warmup_learning_rate=0.0, min_learning_rate=0.0, learning_rate=1.0
    )
    assert rates.host_rates == pytest.approx([0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25])
    used = []
    step = rates.optimizer.step
    rates.optimizer.step = lambda: used.append(rates.optimizer.param_groups[0]["lr"]) or step()
    rates.run()
    assert used == pytest.approx(rates.host_rates)


@SPRINT.of("decay_at")
def test_rates_drop_at_the_scheduled_steps():
    rates = make_training(steps=4, schedule="steps", decay_at=(1, 3), warmup=0, learning_rate=1.0, min_learning_rate=0.0)
    assert rates.host_rates == pytest.approx([1.0, 0.1, 0.1, 0.01])


@SPRINT.of("precision")
def test_forward_runs_in_the_precision():
    seen = []
    for precision in ("float32", "bfloat16"):
        training = make_training(steps=1, precision=precision)
        training.model.layers[0].layer.gate.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
        training.run()
    assert list(dict.fromkeys(seen)) == [torch.float32, torch.bfloat16]


@SPRINT.of("batch_size", "eval_every", "steps")
def test_a_step_sees_a_batch_and_every_block_is_evaluated():
    training, sizes, said = make_training(steps=5, batch_size=4, eval_every=2), [], []
    training.model.embedding.register_forward_hook(lambda module, given, _: sizes.append((module.training, len(given[0]))))
    training.run(say=said.append)
    assert [size for training, size in sizes if training] == [4] * 5
    assert [line.split()[1] for line in said] == ["2/5", "4/5", "5/5"]


def test_slow_steps_are_told_between_evaluations(monkeypatch):
    said = []
    monkeypatch.setattr("research.fast_training.captured_training.SECONDS_BETWEEN_LINES", -1.0)
    make_training(steps=3, eval_every=2).run(say=said.append)
    assert [line.split()[1] for line in said] == ["1/3", "2/3", "2/3", "3/3", "3/3"]


# ---- what a run is made of


def make_recipe(*settings):
    return changed(RECIPES["mqar_small"](), [*SMALL, *settings])


def make_run(*settings, rate=1e-3, seed=0, steps=10):
    return Run(
        task="t", recipe=make_recipe(*settings), method=Method(name="relu", options={}), rate=rate, seed=seed, steps=steps
    )


@SPRINT.of("epochs", "cooldown")
def test_warmup_and_rates_keep_their_proportions():
    settings = ["steps=100", "warmup=20", "learning_rate=1e-2", "min_learning_rate=1e-3", "warmup_learning_rate=1e-4"]
    training = make_run(*settings, rate=2e-2, steps=10).training
    assert (training.steps, training.warmup, training.learning_rate) == (10, 2, 2e-2)
    assert (training.min_learning_rate, training.warmup_learning_rate) == pytest.approx((2e-3, 2e-4))
    # 32 samples in batches of 8: a recipe of 10 epochs has 40 steps, half an epoch of warm-up has two of them
    epochs = make_run("steps=0", "epochs=10", "warmup=0.5", "cooldown=10", steps=40).training
    assert (epochs.epochs, epochs.cooldown, epochs.steps) == (0, 0, 40)
    # with its cool-down the recipe has 80 steps
    assert epochs.warmup == 1


@SPRINT.of("seed")
def test_weights_and_order_follow_the_run_seed(tmp_path, monkeypatch):
    started = []

    class Noted(CapturedTraining):
        def __init__(self, model, *given, **named):
            super().__init__(model, *given, **named)
            started.append((model.embedding.weight.detach().clone(), self.plan.rows[0]))

    monkeypatch.setattr(scoreboard, "CapturedTraining", Noted)
    for seeds in ([0, 1], [0]):
        method = [Method(name="relu", options={})]
        settings = {"methods": method, "seeds": seeds, "learning_rates": [1e-3], "steps": 1}
        scoreboard.run_scoreboard("t", make_recipe(), out=tmp_path / f"{len(seeds)}.csv", **settings)
    zero, one, again = started
    assert all(torch.equal(a, b) for a, b in zip(zero, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(zero, one, strict=True))


def test_a_run_learns_from_train_is_chosen_on_dev_and_tested_on_test(tmp_path, monkeypatch):
    used = {}

    class Noted(CapturedTraining):
        def __init__(self, model, config, *, train, dev, **named):
            super().__init__(model, config, train=train, dev=dev, **named)
            used.update(train=train, dev=dev)

        def test(self, buckets):
            used["test"] = buckets
            return super().test(buckets)

    monkeypatch.setattr(scoreboard, "CapturedTraining", Noted)
    settings = {"methods": [Method(name="relu", options={})], "seeds": [0], "learning_rates": [1e-3], "steps": 1}
    scoreboard.run_scoreboard("t", make_recipe(), out=tmp_path / "a.csv", **settings)
    task = Sequences(make_recipe().task)
    for name, data in (("train", task.train_data), ("dev", task.eval_data), ("test", task.test_data)):
        (bucket,) = used[name]
        assert torch.equal(bucket.inputs.long(), torch.from_numpy(data.batch(range(len(data)))["inputs"]).long())


def test_stored_data_has_the_options_for_its_split(tmp_path):
    longer = {"mixture": [[24, 3]]}
    config = make_recipe(f"eval_options={json.dumps(longer)}").task
    with prepare_task(config, tmp_path, 1, lambda line: None) as task:
        lengths = [data.facts.length for data in (task.train_data, task.eval_data, task.test_data)]
    assert lengths == [16, 24, 24]


NOT_FOLLOWED = {"optimizer": "sgd", "ema": "0.9", "accumulate": "2", "repeats": "2", "precision": "float16", "seed": "3"}
NOT_FOLLOWED |= {"eval_epochs": "0.5", "batch_size": "0"}


@SPRINT.of(*(name for name in NOT_FOLLOWED if name not in ("precision", "seed", "batch_size")))
@pytest.mark.parametrize(("name", "value"), [*NOT_FOLLOWED.items(), ("attention", "softmax"), ("initial_weights", "torch")])
def test_settings_that_a_scoreboard_does_not_follow_raise(tmp_path, name, value):
    settings = [*SMALL, f"{name}={value}"]
    arguments = ["scoreboard", "run", "mqar_small", *settings, "--steps", 1, "--methods", "relu", "--seeds", 1]
    refused = invoke(*arguments, "--device", "cpu", "--out", tmp_path / "a.csv")
    assert isinstance(refused.exception, ValueError)
    assert f"{name}={value}" in str(refused.exception)
    assert not (tmp_path / "a.csv").exists()


@SPRINT.of("save_minutes")
def test_a_run_is_saved_on_the_way_by_time(tmp_path):
    aside = tmp_path / "run.safetensors"
    assert make_training(save_minutes=1e-9).run(aside=aside)
    again = make_training()
    again.resume(aside)
    assert again.progress.step == 3
    assert make_training(save_minutes=0).run(aside=tmp_path / "never.safetensors")
    assert not (tmp_path / "never.safetensors").exists()


# settings of the trainer's process, files and patience: a scoreboard has its own options for them, or none
SPRINT.of(
    *("device", "workers", "compile", "checkpoint_activations", "save_every", "keep", "tensorboard"),
    *("bad_steps", "on_corrupt", "most_corrupt"),
)
