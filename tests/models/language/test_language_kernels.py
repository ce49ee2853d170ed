"""Whole language models on the kernels, in Triton's interpreter: the numbers of plain torch, and one graph for every length."""

from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import nalaformer
from helpers.language_models import make, text
from helpers.products import FULL
from nalaformer.ops.backend import INTERPRETING

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("one_thread")]

DEVICE = "cpu" if INTERPRETING else "cuda"
ONE_BLOCK = {"num_hidden_layers": 1, "dtype": torch.float32}


def gradients_of_a_step(model, tokens, **inputs):
    model.zero_grad()
    loss = model(tokens, labels=tokens, **inputs).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    # rate and bias of a decay have gradients that nearly cancel over the tokens: they count beside that of its projection
    decay = [gradients.pop(name).flatten() for name in list(gradients) if name.endswith(("a_proj.weight", "A_log", "dt_bias"))]
    return [loss.detach(), *gradients.values(), *([torch.cat(decay)] if decay else [])]


@pytest.mark.parametrize(
    ("layout", "packed"),
    # rows and packed rows take the same kernels
    [("linear", False), *product(["linear", "forgetting", "delta"], [True]), *product(["forgetting", "delta"], [False] * FULL)],
)
def test_a_training_step_on_kernels_has_the_gradients_of_plain_torch(layout, packed):
    model, tokens = make(layout, **ONE_BLOCK).to(DEVICE).train(), text(1, 13).to(DEVICE)
    places = {"position_ids": torch.cat((torch.arange(5), torch.arange(8)))[None].to(DEVICE)} if packed else {}
    with nalaformer.use_backend("triton"):
        found = gradients_of_a_step(model, tokens, **places)
    expected = gradients_of_a_step(model.double(), tokens, **places)
    for ours, exact in zip(found, expected, strict=True):
        assert (ours.double() - exact).norm() <= 2e-5 * exact.norm()


def test_autocast_on_kernels_is_near_full_precision(monkeypatch):
    if INTERPRETING:
        from helpers.bfloat16_in_the_interpreter import teach_bfloat16

        teach_bfloat16(monkeypatch)
    model, tokens = make(**ONE_BLOCK).to(DEVICE).train(), text(1, 13).to(DEVICE)
    with nalaformer.use_backend("triton"), torch.autocast(DEVICE, torch.bfloat16):
        found = gradients_of_a_step(model, tokens)
    assert {x.dtype for x in found} == {torch.float32}
    expected = gradients_of_a_step(model.double(), tokens)
    # activations of eight bits through a block
    for ours, exact in zip(found, expected, strict=True):
        assert (ours.double() - exact).norm() <= 0.1 * exact.norm()


def test_decoding_on_kernels_goes_on_as_the_whole_does():
    model, tokens = make(**ONE_BLOCK).to(DEVICE), text(2, 9).to(DEVICE)
    with torch.no_grad():
        expected = model.double()(tokens).logits
        model.float()
        with nalaformer.use_backend("triton"):
            out = model(tokens[:, :6], use_cache=True)
            parts = [out.logits, *(model(t, past_key_values=out.past_key_values).logits for t in tokens[:, 6:].split(1, 1))]
    assert (torch.cat(parts, 1).double() - expected).norm() < 2e-5 * expected.norm()


def test_a_compiled_training_step_serves_every_number_of_tokens():
    model = make(**ONE_BLOCK).to(DEVICE).train()
    counter = CompileCounterWithBackend("eager")
    torch.compiler.reset()

    def step(tokens):
        return model(tokens, labels=tokens).loss

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    with nalaformer.use_backend("triton"):
        for length in (9, 17, 28):
            tokens = text(1, length).to(DEVICE)
            loss = compiled(tokens)
            loss.backward()
            torch.testing.assert_close(loss, step(tokens), rtol=1e-5, atol=0)
    # with one number, then with any
    assert counter.frame_count == 2
