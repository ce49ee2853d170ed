"""Transfer and fine-tuning: what learns, how a run goes on, and what is left of the model."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import load_file

from helpers.converted_models import SMALL, make_model, short_run
from helpers.places import TESTS
from helpers.recall_teacher import RecallData, trained_teacher
from nalaformer.attention.hybrid import hybrid_settings
from nalaformer.linearize import LinearizeConfig, TokenWindows, linearize, validate, write_report
from nalaformer.linearize.fingerprint import model_fingerprint
from nalaformer.linearize.transfer import AttentionTransfer
from nalaformer.models.hybrid.model import HybridForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def windows():
    return TokenWindows(torch.randint(3, 50, (24 * 40,)), length=40)


@pytest.mark.parametrize("layers_at_once", [0, 1])
def test_transfer_learns_maps_and_gates_and_nothing_else(windows, tmp_path, layers_at_once):
    original = make_model()
    before = {name: value.clone() for name, value in original.state_dict().items()}
    config = LinearizeConfig(
        attention=replace(SMALL, max_salient=0, salient_per_chunk=1),
        transfer=short_run(steps=25),
        finetune=None,
        layers_at_once=layers_at_once,
    )
    result = linearize(original, windows, windows, folder=tmp_path, config=config)
    after = result.model.host.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name.replace("self_attn.", "self_attn.original.")], value), name
    assert result.transfer_errors.keys() == {"layer_0", "layer_1"}
    fresh = HybridForCausalLM.convert(make_model(), config.attention)
    start = validate(fresh, windows).divergence
    assert result.validations["transfer"].divergence < start
    figures = json.loads((tmp_path / "linearize.json").read_text())
    assert figures["transfer_errors"] == result.transfer_errors


def test_the_same_call_again_goes_on_where_it_was(windows, tmp_path):
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=6, save_every=3, keep=5), finetune=None)
    whole = linearize(make_model(), windows, windows, folder=tmp_path / "whole", config=config)
    # as if the run had been killed after its first checkpoint
    other = make_model()
    # what was drawn before does not matter
    torch.manual_seed(7)
    linearize(other, windows, windows, folder=tmp_path / "killed", config=config)
    for step in (4, 5, 6):
        folder = tmp_path / "killed" / "transfer" / "checkpoints" / f"step_{step:08d}"
        if folder.exists():
            folder.rename(tmp_path / f"gone_{step}")
    again = linearize(make_model(), windows, windows, folder=tmp_path / "killed", config=config)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_another_model_and_other_data_are_refused_in_a_used_folder(windows, tmp_path):
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=1), finetune=None)
    linearize(make_model(), windows, windows, folder=tmp_path, config=config)
    other = make_model()
    with torch.no_grad():
        # the smallest change: one bit of one weight
        other.model.layers[1].mlp.up_proj.weight.view(torch.int32)[3, 5] ^= 1
    with pytest.raises(ValueError, match=r"made from something else: model was 'LlamaForCausalLM .*choose another folder"):
        linearize(other, windows, windows, folder=tmp_path, config=config)
    changed = TokenWindows(windows.windows.flatten().flip(0), length=40)
    with pytest.raises(ValueError, match="made from something else: train_data was"):
        linearize(make_model(), changed, windows, folder=tmp_path, config=config)
    with pytest.raises(ValueError, match="made from something else: eval_data was"):
        linearize(make_model(), windows, changed, folder=tmp_path, config=config)
    linearize(make_model(), windows, windows, folder=tmp_path, config=config)


def test_an_adapter_is_not_taken_for_one_of_other_maps(windows, tmp_path):
    pytest.importorskip("peft")
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=1), finetune=short_run(steps=1))
    linearize(make_model(), windows, windows, folder=tmp_path, config=config)
    shutil.rmtree(tmp_path / "transfer")
    with pytest.raises(ValueError, match="made from something else: maps was"):
        linearize(make_model(), windows, windows, folder=tmp_path, config=replace(config, transfer=short_run(steps=2)))


def test_values_that_change_places_change_the_fingerprint():
    model = torch.nn.Linear(6, 2)
    before = model_fingerprint(model)
    with torch.no_grad():
        model.weight.copy_(model.weight.flip(1))
    assert model_fingerprint(model) != before
    assert model_fingerprint(model.to(torch.bfloat16)) != before


def test_a_stage_is_saved_when_it_is_interrupted_and_goes_on(windows, tmp_path, monkeypatch):
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=4), finetune=None)
    whole = linearize(make_model(), windows, windows, folder=tmp_path / "whole", config=config)
    loss, seen = AttentionTransfer.loss, []

    def interrupted(self, model, batch):
        seen.append(batch)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(self, model, batch)

    monkeypatch.setattr(AttentionTransfer, "loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        linearize(make_model(), windows, windows, folder=tmp_path / "halves", config=config)
    halves = linearize(make_model(), windows, windows, folder=tmp_path / "halves", config=config)
    assert len(seen) == 4
    for name, value in whole.model.state_dict().items():
        assert torch.equal(halves.model.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("peft", "stage 2 needs peft"),
        ("windows", "an epoch must hold a whole batch"),
        ("eval", "validation needs at least one"),
    ],
)
def test_what_a_later_stage_needs_is_asked_for_before_the_first(windows, tmp_path, monkeypatch, what, message):
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=1), finetune=short_run(steps=1))
    train, held_out = windows, windows
    if what == "peft":
        monkeypatch.setitem(sys.modules, "peft", None)
    elif what == "windows":
        config = replace(config, finetune=short_run(steps=1, batch_size=25))
    else:
        held_out = []
    with pytest.raises((ValueError, ModuleNotFoundError), match=message):
        linearize(make_model(), train, held_out, folder=tmp_path / "out", config=config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("short", ["train", "eval"])
def test_windows_in_which_nothing_can_be_learned_or_measured_are_refused(short, windows, tmp_path):
    config = LinearizeConfig(attention=SMALL, transfer=short_run(steps=1), finetune=None)
    data = {"train": windows, "eval": windows, short: TokenWindows(windows.windows.flatten(), length=2 * SMALL.chunk_size)}
    with pytest.raises(ValueError, match=r"2 x chunk_size = 16 tokens, got 16; .*nothing could be learned"):
        linearize(make_model(), data["train"], data["eval"], folder=tmp_path / "out", config=config)
    assert not (tmp_path / "out").exists()
    # without an exact window there is something to learn in texts of any length
    linear = replace(config, attention=hybrid_settings("linear", chunk_size=8))
    linearize(make_model(), data["train"], data["eval"], folder=tmp_path / "linear", config=linear)


def test_finetuning_lowers_the_loss_and_merges_to_the_same_logits(windows, tmp_path):
    pytest.importorskip("peft")
    config = LinearizeConfig(
        attention=SMALL, transfer=None, finetune=short_run(steps=15, learning_rate=5e-3), merge_adapter=False
    )
    kept = linearize(make_model(), windows, windows, folder=tmp_path, config=config)
    assert kept.validations["finetune"].loss < kept.validations["conversion"].loss
    merged = linearize(make_model(), windows, windows, folder=tmp_path, config=replace(config, merge_adapter=True))
    tokens = windows[0][None]
    with torch.no_grad():
        torch.testing.assert_close(merged.model(tokens).logits, kept.model(tokens).logits, rtol=1e-3, atol=1e-3)
    assert type(merged.model) is HybridForCausalLM
    names = [name for name, parameter in kept.model.named_parameters() if "lora_A" in name]
    assert len(names) == 2 * 5
    assert sum("gate" in name for name in names) == 2


def test_a_learned_selection_needs_the_stage_in_which_it_is_learned(windows, tmp_path):
    learned = replace(SMALL, selection="learned")
    with pytest.raises(ValueError, match=r"learned in the transfer.*'key_norm'"):
        linearize(make_model(), windows, windows, folder=tmp_path, config=LinearizeConfig(attention=learned, transfer=None))
    assert LinearizeConfig().attention.selection == "learned"
    # nobody is chosen, so nothing is to be learned
    nobody = LinearizeConfig(attention=replace(learned, salient_per_chunk=0), transfer=None, finetune=None)
    result = linearize(make_model(), windows, windows, folder=tmp_path, config=nobody)
    assert not any("scorer" in name for name in result.model.state_dict())


def test_report_shows_every_stage_and_layer(windows, tmp_path):
    result = linearize(
        make_model(),
        windows,
        windows,
        folder=tmp_path,
        config=LinearizeConfig(attention=SMALL, transfer=short_run(steps=2), finetune=None),
    )
    page = write_report(result, tmp_path)
    text = (tmp_path / "report.md").read_text()
    for word in ("teacher (softmax)", "after conversion", "after transfer", "perplexity", "| 1 |"):
        assert word in text
    assert "transfer.png" in page.read_text()
    assert (tmp_path / "transfer.png").stat().st_size > 1000


def test_validation_of_a_model_against_itself_is_no_distance(windows):
    exact = HybridForCausalLM.convert(make_model(), hybrid_settings("softmax", chunk_size=8))
    found = validate(exact, windows)
    assert found.divergence == pytest.approx(0, abs=1e-6)
    assert found.agreement == 1
    assert found.loss == pytest.approx(found.teacher_loss, rel=1e-5)


@pytest.fixture(scope="module")
def teacher():
    torch.set_num_threads(1)
    return trained_teacher()


def recovery(teacher, folder, *, steps, method="still", **changes):
    changes = {"chunk_size": 16} | ({"salient_per_chunk": 4} if method == "still" else {}) | changes
    config = LinearizeConfig(
        attention=hybrid_settings(method, **changes),
        transfer=short_run(steps=steps, batch_size=16) if steps else None,
        finetune=None,
    )
    model = copy.deepcopy(teacher)
    result = linearize(model, RecallData(256, seed=1), RecallData(64, seed=2), folder=folder, config=config)
    last = list(result.validations.values())[-1]
    assert last.teacher_accuracy > 0.95
    return last.accuracy / last.teacher_accuracy


def test_a_recalling_model_keeps_its_ability_and_pure_linear_does_not(teacher, tmp_path):
    assert recovery(teacher, tmp_path / "still", steps=0) > 0.9
    assert recovery(teacher, tmp_path / "linear", steps=8, method="linear") < 0.5
    assert recovery(teacher, tmp_path / "window", steps=0, method="window") < 0.5


def test_the_selection_rule_decides(teacher, tmp_path):
    by_norm = recovery(teacher, tmp_path / "norm", steps=0)
    assert by_norm > recovery(teacher, tmp_path / "self", steps=0, selection="self_saliency") + 0.3
    assert by_norm > recovery(teacher, tmp_path / "random", steps=0, selection="random") + 0.3


def test_a_learned_rule_finds_the_facts(teacher, tmp_path):
    assert recovery(teacher, tmp_path, steps=20, selection="learned") > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "shard"])
def test_processes_that_share_the_weights_learn_the_same(kind, tmp_path):
    script = TESTS / "helpers" / "linearize_on_ranks.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    alone = [sys.executable, str(script), str(tmp_path / "alone"), "whole"]
    together = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path / "two"),
        kind,
    ]
    for command in (alone, [sys.executable, *together]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("alone", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5, msg=name)
