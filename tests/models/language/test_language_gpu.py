"""Language models on a GPU: kernels of half precision, steps in a graph, whole models. Run with TRITON_INTERPRET=0."""

import copy

import pytest
import torch
from torch import Tensor

import nalaformer
from helpers.delta_inputs import GATES, inputs
from helpers.language_models import GREEDY, each_layout, make, padded_prompts, text
from nalaformer import delta_rule, delta_step_
from nalaformer.models.language import NaLaCache

pytestmark = pytest.mark.gpu


@GATES
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_kernels_of_the_delta_rule_are_the_recurrence(gated, packed):
    tensors, decay = inputs(300, gated=gated, batch=1, heads=4, features=128, values=64, dtype=torch.bfloat16)
    tensors, fade = [x.cuda() for x in tensors], None if decay is None else decay.float().cuda()
    bounds = torch.tensor([0, 70, 71, 300]) if packed else None
    start = torch.randn(3 if packed else 1, 4, 128, 64, device="cuda")
    upstream = torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16)

    def outcome(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (*tensors, *(() if fade is None else (fade,)))]
        first = [x[0] for x in leaves] if packed else leaves
        state = start.to(torch.float64 if dtype == torch.float64 else torch.float32)
        with nalaformer.use_backend(backend):
            out, after = delta_rule(*first[:4], log_decay=first[4] if gated else None, state=state, cu_seqlens=bounds)
        out = out[None] if packed else out
        return [out, after, *torch.autograd.grad((out * upstream.to(dtype)).sum(), leaves)]

    # bf16 carries 8 bits and chunks multiply them a few times
    for ours, exact in zip(outcome(torch.bfloat16, "auto"), outcome(torch.float64, "chunked"), strict=True):
        assert (ours.double() - exact).norm() / exact.norm() < 2e-2


@GATES
def test_steps_on_a_gpu_go_on_in_a_graph(gated):
    tensors, decay = inputs(5, gated=gated, heads=4, features=128, values=64, dtype=torch.bfloat16)
    tensors, fade = [x.cuda() for x in tensors], None if decay is None else decay.float().cuda()
    exact = [x.double() for x in tensors]
    whole, last = delta_rule(*exact, log_decay=None if fade is None else fade.double())
    state = torch.zeros(2, 4, 128, 64, device="cuda")
    buffers = [x[:, :1].clone() for x in tensors]
    fading = None if fade is None else fade[:, :1].clone()
    delta_step_(state.clone(), *buffers, log_decay=fading)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = delta_step_(state, *buffers, log_decay=fading)
    for t in range(5):
        for buffer, x in zip(buffers, tensors, strict=True):
            buffer.copy_(x[:, t : t + 1])
        if fading is not None:
            fading.copy_(fade[:, t : t + 1])
        graph.replay()
        assert (out.double() - whole[:, t : t + 1]).norm() / whole[:, t : t + 1].norm() < 1e-2
    assert (state.double() - last).norm() / last.norm() < 1e-2


@each_layout
def test_half_precision_on_a_gpu_generates_near_float64(layout):
    """Logits, token by token after a cached prompt, on the kernels; tokens themselves may tie in half precision."""
    exact, tokens = make(layout, hidden_size=128, num_key_value_heads=None), text(2, 140)
    model = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    with torch.no_grad():
        expected = exact(tokens).logits
        cache = NaLaCache(model.config)
        parts = [model(tokens[:, :130].cuda(), past_key_values=cache).logits]
        parts += [model(token.cuda(), past_key_values=cache).logits for token in tokens[:, 130:].split(1, dim=1)]
    found = torch.cat(parts, dim=1).cpu().double()
    # as on a CPU: weights of 8 bits through two blocks
    assert (found - expected).norm() / expected.norm() < 0.05
    assert (found[:, 130:] - expected[:, 130:]).norm() / expected[:, 130:].norm() < 0.05


@each_layout
def test_half_precision_on_a_gpu_trains_near_float64(layout):
    exact, tokens = make(layout, hidden_size=128, num_key_value_heads=None).train(), text(2, 140)
    model = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    losses = [each(given, labels=given).loss for each, given in ((exact, tokens), (model, tokens.cuda()))]
    for loss in losses:
        loss.backward()
    assert abs(losses[1].item() / losses[0].item() - 1) < 0.01
    for name, error in errors_of_gradients(model, exact).items():
        # weights and activations of 8 bits through two blocks, forward and backward
        assert error < 0.15, name


def errors_of_gradients(model, exact):
    """Relative to their norms.

    The parameters of a decay are judged together: of A_log and dt_bias each number is a sum over all tokens that nearly
    cancels. Rounding the weights alone, in plain torch, costs up to 0.4 of it.
    """
    pairs = {}
    for (name, ours), right in zip(model.named_parameters(), exact.parameters(), strict=True):
        mixer, _, own = name.rpartition(".mixer.")
        key = f"{mixer}: decay" if own in ("A_log", "dt_bias", "a_proj.weight") else name
        pairs.setdefault(key, []).append((ours.grad.cpu().double().flatten(), right.grad.flatten()))
    found = {}
    for name, parts in pairs.items():
        ours, right = (torch.cat(each) for each in zip(*parts, strict=True))
        found[name] = ((ours - right).norm() / right.norm()).item()
    return found


@each_layout
def test_padding_and_cuts_on_a_gpu_change_no_token(layout):
    model = make(layout, dtype=torch.float32).cuda()
    prompts = {name: x.cuda() for name, x in padded_prompts().items()}
    expected = model.generate(**prompts, **GREEDY, use_cache=False)
    assert torch.equal(model.generate(**prompts, **GREEDY), expected)


@each_layout
@torch.no_grad()
def test_one_graph_on_a_gpu_compiles_for_other_lengths(layout):
    """The kernels in a graph of torch.compile, whose lengths are symbols from the second on."""
    torch.compiler.reset()
    exact = make(layout, hidden_size=128, num_key_value_heads=None)
    model = copy.deepcopy(exact).to("cuda", torch.float32)
    compiled = torch.compile(model, fullgraph=True)
    for length in (40, 72, 300):
        tokens = text(2, length)
        expected, found = exact(tokens).logits, compiled(tokens.cuda(), use_cache=False).logits.cpu().double()
        # products in TF32 (11 bits) through two blocks
        assert (found - expected).norm() / expected.norm() < 0.01


@each_layout
@torch.no_grad()
def test_an_exported_model_on_a_gpu_serves_other_lengths(layout):
    model = make(layout, hidden_size=128, num_key_value_heads=None).to("cuda", torch.float32)
    sizes = {"input_ids": {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=2, max=4096)}}
    given = {"use_cache": False}
    shapes = sizes | dict.fromkeys(given)
    program = torch.export.export(model, (text(2, 40).cuda(),), given, dynamic_shapes=shapes, strict=False).module()
    for tokens in (text(3, 5).cuda(), text(1, 300).cuda()):
        expected, found = model(tokens, **given).logits, program(tokens, **given).logits
        # the program may run plain torch where the model runs kernels, whose products are TF32
        assert (found - expected).norm() / expected.norm() < 0.01
