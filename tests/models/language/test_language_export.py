"""Language models inside of torch.compile, torch.export and ONNX: one program serves every length."""

import pytest
import torch
from torch import nn

from helpers.language_models import LAYOUTS, make, text
from nalaformer.models.language import NaLaCache
from nalaformer.models.language.onnx_step import LanguageStep, export_step

pytestmark = pytest.mark.usefixtures("one_thread")


def slow_but(*quick: str) -> list:
    """Return every layout; the quick ones stand for all in the ordinary run."""
    return [pytest.param(layout, marks=() if layout in quick else pytest.mark.slow) for layout in LAYOUTS]


# tests/recipes/test_onnx_export.py has two of them in the ordinary run, through the command
RECURRENT = [given for given in slow_but() if given.values[0] not in ("softmax", "hybrid")]


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False).logits


@pytest.mark.parametrize("layout", slow_but("hybrid"))
@torch.no_grad()
def test_an_exported_model_serves_other_lengths(layout):
    model = Logits(make(layout)).eval()
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=2, max=4096)}
    program = torch.export.export(model, (text(2, 9),), dynamic_shapes=(sizes,)).module()
    for tokens in (text(3, 5), text(1, 150)):
        # room: positions of exported programs are float32
        torch.testing.assert_close(program(tokens), model(tokens), rtol=0, atol=1e-3)


# in the ordinary run test_language_kernels.py compiles one step for several lengths, and the next test one with softmax
@pytest.mark.parametrize("layout", slow_but())
@torch.no_grad()
def test_one_graph_compiles_for_a_second_length(layout):
    torch._dynamo.reset()
    model = Logits(make(layout)).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for tokens in (text(2, 9), text(2, 13)):
        torch.testing.assert_close(compiled(tokens), model(tokens), rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", slow_but("softmax"))
@torch.no_grad()
def test_a_compiled_model_makes_a_cache_that_goes_on(layout):
    torch._dynamo.reset()
    model, tokens = make(layout), text(2, 9)
    cache = torch.compile(model, fullgraph=True, backend="eager")(tokens[:, :6]).past_key_values
    found = model(tokens[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(tokens).logits[:, 6:], rtol=0, atol=1e-9)
    assert cache.kind == NaLaCache(model.config).kind


@pytest.mark.parametrize("layout", RECURRENT)
@torch.no_grad()
def test_steps_in_onnx_runtime_give_the_logits_of_the_whole_text(layout, tmp_path):
    import onnxruntime

    model, tokens = make(layout, dtype=torch.float32, num_hidden_layers=1), text(3, 5)
    names = export_step(model, tmp_path / "step.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"])
    states = {name: state.numpy() for name, state in LanguageStep(model).first_states(3).items()}
    logits = []
    for place in range(5):
        given = {"tokens": tokens[:, place : place + 1].numpy(), "positions": torch.full((3, 1), place).numpy()}
        out, *after = session.run(None, {name: value for name, value in (given | states).items() if name in inputs_of(session)})
        logits.append(torch.from_numpy(out))
        states = dict(zip(names, after, strict=True))
    torch.testing.assert_close(torch.stack(logits, dim=1), model(tokens).logits, rtol=0, atol=1e-4)


def inputs_of(session) -> set[str]:
    """A program without rotary positions may have dropped its input for them."""
    return {given.name for given in session.get_inputs()}


def test_a_step_of_growing_keys_is_refused():
    with pytest.raises(ValueError, match=r"a step has states of one size, got 1 layers with 'softmax' mixers"):
        LanguageStep(make("hybrid"))
