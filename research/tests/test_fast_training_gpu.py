"""Training in CUDA graphs, on a GPU. Run with TRITON_INTERPRET=0."""

import pytest
import torch

from nalaformer.ops.graphs import NotCapturable
from nalaformer.training import TrainingConfig
from research.fast_training.captured_training import CapturedTraining
from research.fast_training.data_on_device import load_to_device
from research.models import RecallModel, SequenceClassifier
from research.recall.teacher import Lesson, TeacherConfig, train_teacher
from research.sequences import SEQUENCES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("attention", ["softmax", "relu", "nalaformer", "polaformer"])
@pytest.mark.parametrize("name", ["listops", "mqar"])
def test_a_captured_training_run_is_the_eager_one(name, attention, monkeypatch):
    options = {
        "listops": {"shortest": 12, "longest": 64, "max_depth": 4},
        "mqar": {"vocabulary": 64, "mixture": [[32, 4], [48, 6]]},
    }
    data = SEQUENCES[name](split="train", samples=64, **options[name])
    model_kind = SequenceClassifier if name == "listops" else RecallModel

    def train_model():
        torch.manual_seed(0)
        model = model_kind(attention=attention, dim=32, dropout=0.0, **vars(data.facts))
        # a large epsilon: Adam would blow the rounding of a gradient that is zero up to a whole step
        config = TrainingConfig(
            steps=6, batch_size=8, learning_rate=1e-2, epsilon=1e-3, eval_every=3, clip_value=1.0, clip_norm=1.0
        )
        buckets = load_to_device(data, "cuda")
        training = CapturedTraining(model, config, train=buckets, dev=buckets, groups=len(data.groups), steps=6, seed=0)
        assert training.run()
        return training

    captured = train_model()
    assert captured.how == "CUDA graph"

    def fail(*_):
        raise NotCapturable("no capture")

    monkeypatch.setattr(CapturedTraining, "_capture", fail)
    with pytest.warns(UserWarning, match="wait for Python instead: no capture"):
        eager = train_model()
    assert eager.how == "eager"
    # steps of up to 1e-2: one that was lost or done twice would show
    for one, other in zip(captured.parameters, eager.parameters, strict=True):
        assert torch.allclose(one, other, atol=2e-4)


def test_recall_teacher_lessons_are_captured_and_learned():
    lesson = Lesson(lengths=(64, 96), facts=8, steps=200, tokens=6144)
    config = TeacherConfig(width=128, heads=4, words=16, names=32, values=16, families=("multi_key",), lessons=(lesson,))
    lines: list[str] = []
    train_teacher(config, device="cuda", say=lines.append)
    # eager steps would be right too, and wait for the host in each of them
    assert "(CUDA graph)" in lines[-1]
    assert float(lines[-1].split()[-1]) > 0.9
