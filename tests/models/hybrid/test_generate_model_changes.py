"""Changes of a model whose steps a decoder has taken over: each is noticed, and the logits are those of the changed model."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
from torch import nn

from helpers.converted_models import converted
from helpers.products import FULL
from helpers.steps_of_generate import GREEDY, TAKEN, with_steps
from nalaformer.models.hybrid.attention import converted_attentions
from nalaformer.models.hybrid.stepping import Stepping

pytest_plugins = "helpers.steps_of_generate"
pytestmark = pytest.mark.usefixtures("one_thread")


def test_copied_models_have_decoders_of_their_own():
    model = with_steps(converted(), after=2)
    model.generate(torch.full((1, 9), 7), **GREEDY)
    twin = copy.deepcopy(model)
    assert (twin.stepping.after, twin.stepping.capture, twin.stepping.decoders) == (2, False, [])
    expected = model.generate(torch.full((1, 9), 7), **GREEDY)
    assert torch.equal(twin.generate(torch.full((1, 9), 7), **GREEDY), expected)


@torch.no_grad()
def test_decoders_serve_no_other_model(steps):
    model, tokens = with_steps(converted(), after=0), torch.randint(3, 50, (2, 12))
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1.3)
    other.stepping = model.stepping
    caches = [each(tokens, use_cache=True).past_key_values for each in (model, other)]
    for _ in range(2):
        found = [each(tokens[:, :1], past_key_values=cache).logits for each, cache in zip((model, other), caches, strict=True)]
    model.stepping = other.stepping = None
    again = torch.cat((tokens, tokens[:, :1], tokens[:, :1]), 1)
    for each, logits in zip((model, other), found, strict=True):
        torch.testing.assert_close(logits[:, 0], each(again, use_cache=False).logits[:, -1], rtol=0, atol=1e-4)


def change_in_place(model):
    for parameter in model.parameters():
        parameter.mul_(1.3)


def change_the_maps(model):
    for attention in converted_attentions(model):
        for part in attention.hybrid.parts:
            for parameter in part.map.parameters():
                parameter.add_(torch.randn_like(parameter))


def replace_a_parameter(model):
    model.host.lm_head.weight = nn.Parameter(model.host.lm_head.weight.flip(0).clone())


def replace_the_data(model):
    model.host.model.layers[0].mlp.up_proj.weight.data = -model.host.model.layers[0].mlp.up_proj.weight.data


def replace_a_module(model):
    wider = nn.Linear(32, 50, bias=True)
    model.host.lm_head = wider.eval()


def hook_a_module(model):
    model.host.model.layers[1].register_forward_hook(lambda module, args, output: 0.5 * output)


def set_a_bias(model):
    projection = model.host.model.layers[0].self_attn.original.o_proj
    assert projection.bias is None
    projection.bias = nn.Parameter(torch.randn(projection.out_features))


def replace_a_forward(model):
    # as hooks of accelerate do
    mlp = model.host.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 1


def change_a_class(model):
    class Other(type(model.host.model.norm)):
        def forward(self, x):
            return super().forward(x) + 1

    model.host.model.norm.__class__ = Other


def train_a_part(model):
    model.host.model.layers[1].mlp.train()


def other_settings(model):
    for attention in converted_attentions(model):
        for part in attention.hybrid.parts:
            part.settings = replace(part.settings, merge="released")


# six steps before the change; after it nine in the same text and nine in another
CHANGES = [
    (change_in_place, 1, 6 + 9 + 9),
    (change_the_maps, 1, 6 + 9 + 9),
    (replace_a_parameter, 2, 6 + 6 + 9),
    (replace_the_data, 2, 6 + 6 + 9),
    (replace_a_module, 2, 6 + 6 + 9),
    (other_settings, 2, 6 + 6 + 9),
    (set_a_bias, 2, 6 + 6 + 9),
    (change_a_class, 2, 6 + 6 + 9),
    (hook_a_module, 1, 6),
    (replace_a_forward, 1, 6),
    (train_a_part, 1, 6),
]
# steps that are not recorded notice changes in the same place
CALLED = [case for case in CHANGES if FULL or case[0] in (change_in_place, replace_a_module, hook_a_module)]


@pytest.mark.parametrize(
    ("each_way", "change", "decoders", "taken"),
    [*((True, *case) for case in CHANGES), *((False, *case) for case in CALLED)],
    indirect=["each_way"],
)
@torch.no_grad()
def test_changes_of_the_model_are_followed_between_and_within_texts(each_way, change, decoders, taken, steps):
    # nine steps in each part, one more than a chunk has tokens: a chunk ends in each
    tokens = torch.randint(3, 50, (2, 38))
    logits = []
    for stepping in (None, Stepping(after=3, capture=False)):
        model = converted()
        torch.manual_seed(0)
        model.stepping = stepping
        cache = model(tokens[:, :20], use_cache=True).past_key_values
        before = [model(token, past_key_values=cache).logits for token in tokens[:, 20:29].split(1, 1)]
        change(model)
        after = [model(token, past_key_values=cache).logits for token in tokens[:, 29:].split(1, 1)]
        # nobody has the cache before any more, so its decoder is free
        cache = model(tokens[:, :20], use_cache=True).past_key_values
        after += [model(token, past_key_values=cache).logits for token in tokens[:, 20:29].split(1, 1)]
        logits.append(torch.cat(before + after, 1))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    assert steps == {"made": decoders, "taken": taken}


@pytest.mark.usefixtures("each_way")
@torch.no_grad()
def test_hooks_of_all_modules_are_called_in_every_step(steps):
    model, tokens = with_steps(converted(), after=0), torch.randint(3, 50, (2, 12))
    cache, mlp = model(tokens, use_cache=True).past_key_values, model.host.model.layers[0].mlp
    model(tokens[:, :1], past_key_values=cache)
    calls = []
    for register in (nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook):
        hook = register(lambda module, *_: calls.append(1) if module is mlp else None)
        try:
            for _ in range(3):
                model(tokens[:, :1], past_key_values=cache)
            assert "hooks" in model.stepping.refusal
        finally:
            hook.remove()
    assert len(calls) == 6
    model(tokens[:, :1], past_key_values=cache)
    assert steps == {"made": 2, "taken": 2}


@torch.no_grad()
def test_a_refusal_ends_with_its_reason(steps):
    model, text = with_steps(converted()), torch.full((2, 9), 7)
    train_a_part(model)
    model.generate(text, **GREEDY)
    assert "training mode" in model.stepping.refusal
    model.eval()
    model.generate(text, **GREEDY)
    assert model.stepping.refusal is None
    assert steps == {"made": 1, "taken": TAKEN}


@torch.no_grad()
def test_another_precision_of_products_is_captured_anew(steps):
    model, text = with_steps(converted()), torch.full((2, 9), 7)
    model.generate(text, **GREEDY)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        model.generate(text, **GREEDY)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert steps == {"made": 2, "taken": 2 * TAKEN}


@torch.no_grad()
def test_what_the_kernel_keeps_of_the_maps_follows_them():
    model, tokens = with_steps(converted(), after=0), torch.randint(3, 50, (2, 12))
    maps = [attention.hybrid.parts[0].map for attention in converted_attentions(model)]

    def is_right():
        layers = model.stepping.decoders[0].cache.layers
        return all(torch.equal(layer.query_matrix[0], phi.query_matrix()) for layer, phi in zip(layers, maps, strict=True))

    cache = model(tokens, use_cache=True).past_key_values
    model(tokens[:, :1], past_key_values=cache)
    assert is_right()
    change_the_maps(model)
    model(tokens[:, :1], past_key_values=cache)
    assert is_right()
    # of what leaves no trace at least the next text knows
    for phi in maps:
        phi.query_weight.data.mul_(2)
    assert not is_right()
    cache = model(tokens, use_cache=True).past_key_values
    model(tokens[:, :1], past_key_values=cache)
    assert is_right()


@torch.no_grad()
def test_a_model_that_changes_all_the_time_is_not_captured_all_the_time(steps):
    model, tokens = with_steps(converted(), after=3), torch.randint(3, 50, (2, 40))
    cache = model(tokens[:, :12], use_cache=True).past_key_values
    for token in tokens[:, 12:].split(1, 1):
        replace_a_parameter(model)
        model(token, past_key_values=cache)
    assert steps == {"made": 7, "taken": 7}


def test_adapters_are_left_to_the_model(steps):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = with_steps(converted())
    wrapped = peft.get_peft_model(model, adapter).eval()
    text = torch.full((1, 9), 7)
    first = wrapped.generate(input_ids=text, **GREEDY)
    with wrapped.disable_adapter():
        assert not torch.equal(wrapped.generate(input_ids=text, **GREEDY), first)
    assert steps["made"] == 0
    assert "merge them first" in model.stepping.refusal
    merged = wrapped.merge_and_unload()
    merged.generate(input_ids=text, **GREEDY)
    assert steps["made"] == 1
