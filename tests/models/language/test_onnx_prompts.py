"""Whole prompts in ONNX: one program of a model with `linear` or `forgetting` mixers serves every length."""

import pytest
import torch
from torch import nn

from helpers.language_models import make, text

pytestmark = pytest.mark.usefixtures("one_thread")


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["linear", "linear+rotary+grouped", "linear+polarity", "forgetting"])
@torch.no_grad()
def test_prompts_of_other_lengths_have_their_logits_in_onnx_runtime(layout, tmp_path):
    import onnxruntime

    model = Logits(make(layout, dtype=torch.float32, num_hidden_layers=1)).eval()
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=4096)}
    program = torch.onnx.export(
        model, (text(2, 9),), dynamo=True, verbose=False, input_names=["tokens"], dynamic_shapes=(sizes,)
    )
    program.save(tmp_path / "prompt.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "prompt.onnx", providers=["CPUExecutionProvider"])
    for tokens in (text(3, 5), text(1, 150)):
        (found,) = session.run(None, {"tokens": tokens.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(tokens), rtol=0, atol=1e-4)
