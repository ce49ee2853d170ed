"""`nalaformer export --out step.onnx`: a program of one step, run in onnxruntime from zeros on."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from helpers.language_models import make, text
from helpers.language_recipe import recipe_of
from nalaformer import cli
from nalaformer.models.language import NaLaForCausalLM
from nalaformer.recipes import export_onnx, load_run, make_trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def export(*arguments):
    return CliRunner().invoke(cli.build_app(), ["export", *(str(argument) for argument in arguments)])


def logits_in_onnx_runtime(path, tokens: np.ndarray) -> np.ndarray:
    """Token by token, with nothing but the file: its inputs say what the states look like."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs, outputs = session.get_inputs(), [given.name for given in session.get_outputs()]
    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    states = {
        given.name: np.zeros((len(tokens), *given.shape[1:]), dtype=kinds[given.type])
        for given in inputs
        if given.name.startswith("layers.")
    }
    logits = []
    for place in range(tokens.shape[1]):
        given = {"tokens": tokens[:, place : place + 1], "positions": np.full((len(tokens), 1), place)} | states
        found = session.run(None, {each.name: given[each.name] for each in inputs})
        logits.append(found[0])
        states = {name.removeprefix("after."): state for name, state in zip(outputs[1:], found[1:], strict=True)}
    return np.stack(logits, axis=1)


@pytest.mark.filterwarnings("error:.*The axis name")
@torch.no_grad()
def test_a_folder_of_a_model_becomes_a_program_with_its_logits(tmp_path):
    model, tokens = make("linear+rotary+grouped", dtype=torch.float32, num_hidden_layers=1), text(3, 4)
    model.save_pretrained(tmp_path / "model")
    out = export(tmp_path / "model", "--out", tmp_path / "new" / "step.onnx")
    assert out.exit_code == 0, f"{out.output} {out.exception!r}"
    found = logits_in_onnx_runtime(tmp_path / "new" / "step.onnx", tokens.numpy())
    np.testing.assert_allclose(found, model(tokens).logits.numpy(), rtol=0, atol=1e-4)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step.onnx"]


def test_the_checkpoint_of_a_step_of_a_run_becomes_a_program(tmp_path):
    make_trainer(recipe_of("attention=gated_delta", "learning_rate=0.1", "workers=0"), tmp_path / "run").fit()
    out = export(tmp_path / "run", "--step", 5, "--out", tmp_path / "step.onnx")
    assert out.exit_code == 0, f"{out.output} {out.exception!r}"
    tokens = torch.randint(1, 200, (1, 3))
    found = logits_in_onnx_runtime(tmp_path / "step.onnx", tokens.numpy())
    with torch.no_grad():
        first, last = (load_run(tmp_path / "run", step=step).model(tokens).logits.numpy() for step in (5, 10))
    np.testing.assert_allclose(found, first, rtol=0, atol=1e-3)
    assert np.abs(found - last).max() > 1e-2


def test_what_has_no_step_of_one_size_is_refused(tmp_path):
    make("hybrid", dtype=torch.float32).save_pretrained(tmp_path / "hybrid")
    with pytest.raises(ValueError, match="a step has states of one size, got 1 layers with 'softmax' mixers"):
        export_onnx(tmp_path / "hybrid", tmp_path / "step.onnx", begin=lambda: pytest.fail("was announced"))
    with pytest.raises(ValueError, match="a folder for transformers holds one model, got step 3"):
        export_onnx(tmp_path / "hybrid", tmp_path / "step.onnx", step=3)
    with pytest.raises(ValueError, match="must be the folder of a run, got no checkpoint"):
        export_onnx(tmp_path, tmp_path / "step.onnx")
    refused = export(tmp_path / "hybrid", "--out", tmp_path / "step.onnx", "--tokenizer", tmp_path)
    assert "an ONNX program holds no tokenizer" in str(refused.exception)
    assert not (tmp_path / "step.onnx").exists()


def test_a_model_of_another_library_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="a step of a NaLaForCausalLM can be an ONNX program, got GPT2LMHeadModel"):
        export_onnx(tmp_path / "gpt2", tmp_path / "step.onnx")


def test_an_interrupted_export_leaves_the_old_program(tmp_path, monkeypatch):
    from nalaformer.models.language import onnx_step

    make(dtype=torch.float32).save_pretrained(tmp_path / "model")
    (tmp_path / "step.onnx").write_bytes(b"old")

    def half(model: NaLaForCausalLM, path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(onnx_step, "export_step", half)
    with pytest.raises(KeyboardInterrupt):
        export_onnx(tmp_path / "model", tmp_path / "step.onnx")
    assert (tmp_path / "step.onnx").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "step.onnx"]
