"""Training steps as CUDA graphs: what a run does where they cannot be captured, and in which numbers steps compute."""

import pytest
import torch

from nalaformer.ops.graphs import NotCapturable
from nalaformer.training import TrainingConfig
from research.fast_training.captured_training import CapturedTraining
from research.fast_training.data_on_device import load_to_device
from research.fast_training.low_copies import LowCopies
from research.models import RecallModel
from research.sequences import SEQUENCES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def failing_training(monkeypatch):
    """A run that takes itself to be on a GPU, where capturing its steps fails."""

    def make(failure):
        data = SEQUENCES["mqar"](split="train", samples=8, vocabulary=32, mixture=[[16, 2]])
        model = RecallModel(attention="relu", dim=8, **vars(data.facts))
        buckets = load_to_device(data, "cpu")
        config = TrainingConfig(steps=1, batch_size=8, learning_rate=1e-3)
        training = CapturedTraining(model, config, train=buckets, dev=buckets, groups=1, steps=1, seed=0)
        training.on_gpu = True

        def fail(*_, **__):
            raise failure

        monkeypatch.setattr("research.fast_training.captured_training.captured", fail)
        return training

    return make


@pytest.mark.parametrize("failure", [NotCapturable("waits for the host"), torch.OutOfMemoryError("CUDA out of memory")])
def test_steps_that_cannot_be_captured_are_told_and_taken_one_by_one(failing_training, failure):
    training = failing_training(failure)
    with pytest.warns(UserWarning, match=f"wait for Python instead: {failure}"):
        training._prepare()
    assert training.how == "eager"
    assert len(training.graphs) == 1


@pytest.mark.parametrize("failure", [RuntimeError("CUDA error: an illegal memory access"), ValueError("no such option")])
def test_a_step_that_fails_by_itself_stops_the_run(failing_training, failure):
    with pytest.raises(type(failure), match=str(failure)):
        failing_training(failure)._prepare()


@pytest.mark.parametrize("attention", ["softmax", "hedgehog", "gated_delta"])
def test_steps_with_low_precision_copies_equal_autocast(attention):
    """To the bit: copies round as casts do."""
    data = SEQUENCES["mqar"](split="train", samples=8, vocabulary=32, mixture=[[16, 2]])
    buckets = load_to_device(data, "cpu")
    config = TrainingConfig(steps=3, batch_size=8, learning_rate=1e-2, precision="bfloat16", clip_norm=1.0)

    def train_model(has_copies):
        torch.manual_seed(0)
        model = RecallModel(attention=attention, dim=8, mlp_ratio=1.0, **vars(data.facts))
        training = CapturedTraining(model, config, train=buckets, dev=buckets, groups=1, steps=3, seed=0)
        assert {name.rpartition(".")[0] for name in training.low.copies} >= {"layers.0.layer.gate", "layers.2.layer.2"}
        if not has_copies:
            training.low.copies.clear()
        training.run()
        return dict(model.named_parameters())

    ours, plain = train_model(True), train_model(False)
    for name, parameter in ours.items():
        assert torch.equal(parameter, plain[name]), name


def test_steps_are_compiled_where_the_config_says_so(monkeypatch):
    """Compile training steps only: evaluations have batches of other sizes, each of which would compile again."""
    calls = []

    def count_compiles(function):
        def call(*inputs, **named):
            calls.append(torch.is_grad_enabled())
            return function(*inputs, **named)

        return call

    monkeypatch.setattr(torch, "compile", count_compiles)
    data = SEQUENCES["mqar"](split="train", samples=8, vocabulary=32, mixture=[[16, 2]])
    buckets = load_to_device(data, "cpu")
    for is_compiled in (False, True):
        config = TrainingConfig(steps=3, batch_size=8, learning_rate=1e-2, eval_every=1, compile=is_compiled)
        model = RecallModel(attention="relu", dim=8, **vars(data.facts))
        training = CapturedTraining(model, config, train=buckets, dev=buckets, groups=1, steps=3, seed=0)
        training.run()
        assert calls == [True] * (3 if is_compiled else 0)
        assert training.how == ("compiled" if is_compiled else "eager")


def test_a_run_in_float32_makes_no_copies():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert not LowCopies(model, torch.float32).copies
    assert list(LowCopies(model, torch.bfloat16).copies) == ["0.weight", "0.bias"]
