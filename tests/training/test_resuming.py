"""What a run comes back to: a damaged checkpoint is neither an end nor a trap, and float16 goes on with its own scale."""

from dataclasses import asdict, fields

import pytest
import torch

from helpers.training_example import Regression, make_trainer, stop_at
from nalaformer.training import Checkpoint, Checkpoints, TrainingConfig, TrainingStopped
from nalaformer.training.log import read_log
from nalaformer.training.settings import refuse_other_settings

pytestmark = pytest.mark.usefixtures("one_thread")


def spoil(checkpoints, step):
    """Flip the last bit of the weights."""
    file = checkpoints.path(step) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def same_checkpoints(a, b, step):
    ours, theirs = (Checkpoints(folder / "checkpoints").load(step) for folder in (a, b))
    assert ours.state == theirs.state
    assert ours.tensors.keys() == theirs.tensors.keys()
    for part, tensors in ours.tensors.items():
        assert tensors.keys() == theirs.tensors[part].keys()
        assert all(torch.equal(value, theirs.tensors[part][name]) for name, value in tensors.items())
    return True


# where and how often, and never what is learned
FREE = {"workers", "device", "compile", "keep", "save_every", "save_minutes", "eval_every", "tensorboard"}
FREE |= {"eval_epochs", "most_corrupt", "on_corrupt"}


@pytest.mark.parametrize("name", [field.name for field in fields(TrainingConfig)])
def test_a_run_goes_on_with_another_setting_only_where_nothing_of_what_is_learned_changes(name, tmp_path):
    settings = asdict(TrainingConfig(steps=5))
    other = {"training": settings | {name: "another"}, "model": "m"}
    if name in FREE:
        refuse_other_settings({"training": settings, "model": "m"}, other, tmp_path)
    else:
        with pytest.raises(ValueError, match=rf"training\.{name} was .* and is now 'another'"):
            refuse_other_settings({"training": settings, "model": "m"}, other, tmp_path)


def test_a_step_that_is_saved_again_has_its_new_content(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for value in (1.0, 2.0):
        checkpoints.save(3, Checkpoint(tensors={"model": {"w": torch.tensor([value])}}, state={"value": value}))
    assert checkpoints.load(3).tensors["model"]["w"].item() == checkpoints.load(3).state["value"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_a_run_that_fell_back_passes_the_damaged_step_and_ends_as_a_whole_one(tmp_path):
    settings = {"eval_every": 0, "steps": 16, "keep": 3}
    make_trainer(tmp_path / "whole", **settings).fit()
    stop_at(make_trainer(tmp_path / "harmed", **settings), 12).fit()
    checkpoints = Checkpoints(tmp_path / "harmed" / "checkpoints")
    assert checkpoints.steps() == [5, 10, 12]
    spoil(checkpoints, 12)
    spoil(checkpoints, 10)
    with pytest.warns(UserWarning, match="trying the checkpoint before it"):
        assert make_trainer(tmp_path / "harmed", **settings).fit().is_finished
    assert checkpoints.steps() == [10, 15, 16]
    for step in (10, 15, 16):
        assert same_checkpoints(tmp_path / "harmed", tmp_path / "whole", step)
    assert read_log(tmp_path / "harmed" / "log.jsonl") == read_log(tmp_path / "whole" / "log.jsonl")


def test_damaged_checkpoints_do_not_push_out_whole_ones(tmp_path):
    """They are newer than what a run that fell back saves next, and only so many are kept."""
    settings = {"eval_every": 0, "steps": 16, "keep": 2}
    stop_at(make_trainer(tmp_path, **settings | {"keep": 3}), 15).fit()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 15):
        spoil(checkpoints, step)
    with pytest.warns(UserWarning, match="trying the checkpoint before it"):
        stop_at(make_trainer(tmp_path, **settings), 7).fit()
    assert checkpoints.newest()[0] == 7
    assert checkpoints.steps() == [5, 7]
    # what was damaged is there for those who want to look
    assert sorted(path.name for path in checkpoints.folder.glob("damaged_*")) == [
        "damaged_step_00000010",
        "damaged_step_00000015",
    ]


class Overflowing(Regression):
    """The first steps overflow in float16, which lowers the scale of the loss."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.seen = steps, 0

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.seen += 1
        factor = 1e30 if self.seen <= self.steps else 1.0
        return type(loss)(total=loss.total * factor, weight=loss.weight, parts=loss.parts)


def test_float16_goes_on_with_the_scale_of_its_loss(tmp_path):
    settings = {"precision": "float16", "steps": 9, "save_every": 0, "eval_every": 0}
    whole = make_trainer(tmp_path / "whole", task=Overflowing(3), **settings)
    whole.fit()
    stop_at(make_trainer(tmp_path / "halves", task=Overflowing(3), **settings), 5).fit()
    again = make_trainer(tmp_path / "halves", task=Overflowing(0), **settings)
    again.fit()
    # three halvings of the first scale, 2^16
    assert whole.scaler.get_scale() == again.scaler.get_scale() == 2.0**13
    assert same_checkpoints(tmp_path / "whole", tmp_path / "halves", 9)


class BrokenGradient(Regression):
    """The loss is finite and its gradient is not, whatever the scale: the root of zero."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        root = (0 * model(batch[0]).float()).square().sum().sqrt()
        return type(loss)(total=loss.total + root, weight=loss.weight)


def test_float16_blames_the_scale_only_while_it_can_fall(tmp_path):
    """It starts at 2^16: after 16 halvings there is nothing left to blame."""
    settings = {"precision": "float16", "steps": 60, "save_every": 0, "eval_every": 0, "bad_steps": 3}
    with pytest.raises(TrainingStopped, match="not finite in 3 steps in a row, up to step 19;"):
        make_trainer(tmp_path, task=BrokenGradient(), **settings).fit()
