"""Small models that train on data on the device: batches, evaluations, resumed runs."""

from functools import partial

import numpy as np
import pytest
import torch

from nalaformer.training import TrainingConfig
from research.fast_training.captured_training import CapturedTraining
from research.fast_training.data_on_device import load_to_device, make_plan
from research.models import RecallModel
from research.sequences import IGNORE, METRICS, SEQUENCES

pytestmark = pytest.mark.usefixtures("one_thread")
MQAR = {"vocabulary": 32, "mixture": [[16, 2], [24, 3]]}


def test_buckets_hold_every_sample_once_cut_to_its_length():
    data = SEQUENCES["mqar"](split="train", samples=31, **MQAR)
    buckets = load_to_device(data, "cpu")
    assert [tuple(bucket.inputs.shape) for bucket in buckets] == [(16, 16), (15, 24)]
    arrays = data.batch(range(31))
    inputs, at, targets, group = buckets[1].batch(torch.tensor([2]))
    # the third of the second kind is sample 5
    assert torch.equal(inputs[0], torch.from_numpy(arrays["inputs"][5, :24].astype(np.int64)))
    assert group.tolist() == [1]
    for place, target in zip(at[0].tolist(), targets[0].tolist(), strict=True):
        assert arrays["targets"][5, place] == target
    assert (arrays["targets"][5] != IGNORE).sum() == len(at[0]) == 3


def test_samples_that_ask_less_are_filled_with_nothing():
    data = SEQUENCES["needles"](split="val", samples=20, length=64, needles=4, names=8, values=8, words=8)
    (bucket,) = load_to_device(data, "cpu", only_answers=True)
    arrays = data.batch(range(20))
    assert (bucket.targets != IGNORE).sum() == arrays["answers"].sum()
    (language,) = load_to_device(data, "cpu")
    assert language.at is None
    assert language.targets.shape == (20, 64)


def test_a_planned_epoch_has_every_sample_once():
    data = SEQUENCES["mqar"](split="train", samples=48, **MQAR)
    buckets = load_to_device(data, "cpu")
    plan = make_plan(buckets, steps=9, batch_size=8, seed=0)
    assert sorted(plan.bucket_of[:6].tolist()) == [0, 0, 0, 1, 1, 1]
    for rows in plan.rows:
        assert sorted(rows[:3].flatten().tolist()) == list(range(24))
    assert plan.before(6) == [3, 3]
    other = make_plan(buckets, steps=9, batch_size=8, seed=1)
    assert not torch.equal(plan.rows[0], other.rows[0])
    with pytest.raises(ValueError, match="hold a batch of 100"):
        make_plan(buckets, steps=9, batch_size=100, seed=0)


class WithStatistics(RecallModel):
    """A batch norm at the end: evaluations depend on its statistics, which no gradient moves."""

    def __init__(self, **options):
        super().__init__(**options)
        self.statistics = torch.nn.BatchNorm1d(options["outputs"])

    def forward(self, inputs, at=None):
        logits = super().forward(inputs, at)
        return self.statistics(logits.flatten(0, -2)).view(logits.shape)


def make_training(steps=6, seed=0, solved_at=float("inf"), figure=METRICS["accuracy"], model=RecallModel, **settings):
    data = SEQUENCES["mqar"](split="train", samples=64, **MQAR)
    torch.manual_seed(3)
    model = model(attention="split", dim=16, dropout=0.1, **vars(data.facts))
    config = TrainingConfig(**({"steps": steps, "batch_size": 8, "learning_rate": 1e-2, "eval_every": 2} | settings))
    buckets = load_to_device(data, "cpu")
    given = {"solved_at": solved_at, "figure": figure}
    return CapturedTraining(model, config, train=buckets, dev=buckets, groups=2, steps=steps, seed=seed, **given)


def test_a_run_learns_its_few_samples():
    training = make_training(steps=150, eval_every=50, learning_rate=2e-2)
    assert training.run()
    assert training.progress.best_dev > 0.9


def test_a_run_ends_when_its_task_is_solved(tmp_path):
    training = make_training(solved_at=0.0)
    assert training.run()
    assert (training.progress.step, training.progress.is_solved) == (2, True)
    training.save(tmp_path / "run.safetensors")
    again = make_training(solved_at=0.0)
    again.resume(tmp_path / "run.safetensors")
    assert again.run()
    assert again.progress.step == 2
    whole = make_training()
    assert whole.run()
    assert (whole.progress.step, whole.progress.is_solved) == (6, False)


def test_a_resumed_run_ends_bit_equal(tmp_path):
    whole, halves = make_training(), make_training()
    assert whole.run()
    assert not halves.run(until=0.0)
    assert halves.progress.step == 2
    halves.save(tmp_path / "run.safetensors")
    again = make_training()
    again.resume(tmp_path / "run.safetensors")
    assert again.progress.step == 2
    assert again.run()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters, again.parameters, strict=True))
    assert (again.progress.best_dev, again.progress.best_step) == (whole.progress.best_dev, whole.progress.best_step)


def test_the_best_weights_are_those_that_are_tested():
    training = make_training()
    training.run()
    kept = [best.clone() for best in training.best]
    with torch.no_grad():
        for parameter in training.parameters:
            parameter.zero_()
    assert training.test(training.dev)["all"] == pytest.approx(training.progress.best_dev)
    assert all(torch.equal(a, b) for a, b in zip(kept, training.parameters, strict=True))


def test_the_best_weights_are_tested_with_their_own_statistics():
    training = make_training(model=WithStatistics)
    training.run()
    with torch.no_grad():
        training.model.statistics.running_mean.normal_()
    assert training.test(training.dev)["all"] == pytest.approx(training.progress.best_dev)


def test_statistics_in_a_resumed_run_are_bit_equal(tmp_path):
    whole, halves, again = (make_training(model=WithStatistics) for _ in range(3))
    whole.run()
    halves.run(until=0.0)
    halves.save(tmp_path / "run.safetensors")
    again.resume(tmp_path / "run.safetensors")
    again.run()
    assert int(again.model.statistics.num_batches_tracked) == 6
    assert all(torch.equal(a, b) for a, b in zip(whole.model.buffers(), again.model.buffers(), strict=True))
    assert again.progress.best_dev == whole.progress.best_dev


def test_a_run_that_diverges_ends_and_says_so():
    training = make_training()
    with torch.no_grad():
        training.parameters[0].fill_(float("nan"))
    assert training.run()
    assert training.progress.is_diverged
    assert training.progress.step == 2


@pytest.mark.parametrize("clip", [{"clip_value": 1e-4}, {"clip_norm": 1e-4}])
def test_clipping_bounds_a_gradient_descent_step(clip):
    training = make_training(weight_decay=0.0, **clip)
    training.optimizer = torch.optim.SGD(training.parameters, lr=1.0)
    training.host_rates = [1.0] * 6
    before = [p.detach().clone() for p in training.parameters]
    training._prepare()
    training.graphs[0]()
    moved = max((p - old).abs().max().item() for p, old in zip(training.parameters, before, strict=True))
    assert 0 < moved <= 1e-4 * (1 + 1e-3)


def test_what_a_capture_needs_leaves_no_trace(monkeypatch):
    def run_and_restore(call, *, restore, device):
        before = [tensor.clone() for tensor in restore]
        call()
        for tensor, old in zip(restore, before, strict=True):
            tensor.copy_(old)
        return call

    monkeypatch.setattr("research.fast_training.captured_training.captured", run_and_restore)
    for is_new in (True, False):
        training = make_training()
        if not is_new:
            # a resumed run: its moments and counters are not zero
            assert not training.run(until=0.0)
        before = [p.detach().clone() for p in training.parameters]
        moments = {p: {name: value.clone() for name, value in s.items()} for p, s in training.optimizer.state.items()}
        counters = [int(counter) for counter in (training.done, *training.cursors)]
        loss = float(training.loss_sum)
        assert len(training._capture([partial(training._step, number) for number in (0, 1)])) == 2
        assert all(torch.equal(a, b) for a, b in zip(before, training.parameters, strict=True))
        assert len(training.optimizer.state) == len(training.parameters)
        for parameter, state in training.optimizer.state.items():
            for name, value in state.items():
                assert torch.equal(value, moments[parameter][name] if not is_new else torch.zeros_like(value))
        step = 0 if is_new else 2
        assert (
            [int(counter) for counter in (training.done, *training.cursors)] == counters == [step, *training.plan.before(step)]
        )
        assert float(training.loss_sum) == loss
        assert all(p.grad is None for p in training.parameters)


@pytest.mark.parametrize("figure", ["perplexity", "accuracy"])
def test_the_weights_that_are_kept_are_those_whose_figure_is_best(figure, monkeypatch):
    looks = iter([3.0, 1.0, 2.0])
    training = make_training(figure=METRICS[figure])
    monkeypatch.setattr(training, "evaluate", lambda buckets: {"all": next(looks), "groups": []})
    assert training.run()
    assert training.progress.best_step == {"perplexity": 4, "accuracy": 2}[figure]


def test_perplexity_is_the_exponential_mean_loss_and_ends_no_run(monkeypatch):
    training = make_training(figure=METRICS["perplexity"], solved_at=0.0)
    # all tokens alike
    torch.nn.init.zeros_(training.model.embedding.weight)
    assert training.evaluate(training.dev)["all"] == pytest.approx(32)
    assert training.run()
    assert training.progress.step == 6
