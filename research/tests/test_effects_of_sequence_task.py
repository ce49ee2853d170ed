"""Every field of the task on sequences does what its documentation says, and its recipes learn from the data of their names."""

import json
from dataclasses import asdict, fields, replace

import pytest
import torch

from helpers.option_effects import Effects
from nalaformer.recipes import changed
from research.recipes import RECIPES
from research.sequence_task import Sequences, SequencesConfig
from research.sequences import IGNORE, write

pytestmark = pytest.mark.usefixtures("one_thread")
SEQUENCES = Effects(field.name for field in fields(SequencesConfig))
DATA_OF_RECIPES = {
    **{f"lra_{name}": name for name in ("listops", "listops_sky", "pathfinder", "pathx", "text", "retrieval", "image")},
    **{"listops_small": "listops", "pathfinder_small": "pathfinder", "mqar": "mqar", "mqar_small": "mqar"},
    **{name: name for name in ("copying", "induction", "needles", "variables", "pointing", "pointing_control", "majority")},
    **{name: name for name in ("softmax_teacher", "cue_cells")},
}


def test_every_setting_has_an_effect_test():
    assert SEQUENCES.missing() == []


def test_a_recipe_trains_on_the_data_it_is_named_for():
    found = {name: RECIPES[name]().task for name in RECIPES.names()}
    assert {name: task.data for name, task in found.items() if isinstance(task, SequencesConfig)} == DATA_OF_RECIPES


def test_defaults_are_those_behind_measured_results():
    """Recipes leave these out: another default changes every run of theirs."""
    usual = {"data_options": {}, "eval_options": {}, "data_seed": 0}
    usual |= {"train_samples": 100_000, "eval_samples": 2_000, "test_samples": 20_000}
    assert asdict(SequencesConfig(data="d")) == usual | {"data": "d"}


def test_a_command_line_key_changes_only_its_setting():
    before = asdict(RECIPES["mqar_small"]().task)
    others = {"data": "copying", "data_options": {"a": 1}, "eval_options": {"a": 1}, "data_seed": 3}
    others |= {"train_samples": 7, "eval_samples": 7, "test_samples": 7}
    for name, value in others.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        for key in (name, f"task.{name}"):
            assert asdict(changed(RECIPES["mqar_small"](), [f"{key}={text}"]).task) == before | {name: value}


@pytest.mark.parametrize(
    "wrong", [{"data": 7}, {"data_options": [1]}, {"data_seed": 2.5}, {"test_samples": 2.5}, {"data_seed": -1}]
)
def test_the_error_names_a_setting_with_the_wrong_type_or_sign(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{name}\b.* {value!r}".replace("[", r"\[")):
        SequencesConfig(**({"data": "mqar"} | wrong))


def test_the_error_for_a_misspelled_model_option_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"unknown option of .*: 'dpth'; did you mean 'depth'"):
        Sequences.create_model("sequence_classifier", {"dpth": 3}, {})


def sequences(**settings):
    config = SequencesConfig(
        data="copying", data_options={"length": 12}, train_samples=9, eval_samples=6, test_samples=4, data_seed=0
    )
    return Sequences(replace(config, **settings))


def splits(task):
    return task.train_data, task.eval_data, task.test_data


@SEQUENCES.of("data")
def test_sequences_are_generated_or_read_from_a_folder(tmp_path):
    assert {data.stream_name for data in splits(sequences(data="induction"))} == {"induction"}
    assert [data.split for data in splits(sequences())] == ["train", "val", "test"]
    for split, samples in (("train", 5), ("val", 3), ("test", 2)):
        write("copying", tmp_path, split=split, samples=samples, seed=7, options={"length": 12})
    stored = splits(sequences(data=str(tmp_path)))
    assert [len(data) for data in stored] == [5, 3, 2]
    for data, made in zip(stored, splits(sequences(data_seed=7)), strict=True):
        assert torch.equal(data[1]["inputs"], made[1]["inputs"])


@SEQUENCES.of("data_options")
def test_options_reach_every_split():
    assert [data.facts.length for data in splits(sequences(data_options={"length": 20}))] == [20, 20, 20]


@SEQUENCES.of("eval_options")
def test_evaluation_options_reach_only_val_and_test(tmp_path):
    task = sequences(eval_options={"length": 30})
    assert [data.facts.length for data in splits(task)] == [12, 30, 30]
    assert task.facts()["length"] == 30
    # a folder is checked in the same splits
    for split, length in (("train", 12), ("val", 30), ("test", 12)):
        write("copying", tmp_path, split=split, samples=9, options={"length": length})
    stored = sequences(data=str(tmp_path), eval_options={"length": 30})
    assert (stored.train_data.facts.length, stored.eval_data.facts.length) == (12, 30)
    with pytest.raises(ValueError, match="length is 12 there"):
        stored.test_data  # noqa: B018
    # metrics have the groups of evaluation
    recall = sequences(data="mqar", data_options={"mixture": [[16, 2]]}, eval_options={"mixture": [[24, 3]]})
    assert recall.metrics().groups == ("24 tokens, 3 pairs",)


@SEQUENCES.of("data_seed")
def test_a_seed_gives_other_sequences_in_every_split():
    for zero, one in zip(splits(sequences()), splits(sequences(data_seed=1)), strict=True):
        assert not torch.equal(zero[0]["inputs"], one[0]["inputs"])


@SEQUENCES.of("train_samples", "eval_samples", "test_samples")
def test_every_split_has_its_own_sample_count(tmp_path):
    assert [len(data) for data in splits(sequences())] == [9, 6, 4]
    for split in ("train", "val", "test"):
        write("copying", tmp_path, split=split, samples=9, options={"length": 12})
    assert [len(data) for data in splits(sequences(data=str(tmp_path)))] == [9, 6, 4]


def test_the_sequence_loss_is_the_mean_over_asked_places():
    task = sequences()
    batch = {name: torch.stack([task.train_data[i][name] for i in range(5)]) for name in task.train_data[0]}
    model = task.create_model("recall", {"dim": 16, "attention": "linear"}, task.facts())
    loss = task.loss(model, batch)
    logits, asked = model(batch["inputs"]), batch["targets"] != IGNORE
    expected = -logits.log_softmax(-1)[asked].gather(1, batch["targets"][asked][:, None]).mean()
    assert loss.weight == asked.sum().item() == 5 * 6
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_language_is_judged_at_its_answers_alone():
    options = {"length": 64, "needles": 3, "names": 8, "values": 8, "words": 8}
    task = sequences(data="needles", data_options=options)
    batch = {name: torch.stack([task.eval_data[i][name] for i in range(6)]) for name in task.eval_data[0]}
    metrics = task.metrics()
    metrics.update(task.create_model("recall", {"dim": 16, "attention": "linear"}, task.facts()), batch)
    assert (batch["targets"] != IGNORE).all()
    assert metrics.result()["answers"] == batch["answers"].sum().item() < batch["targets"].numel() / 2
