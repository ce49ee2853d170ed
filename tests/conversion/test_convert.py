"""Linear attention in models that others built."""

import pytest
import timm
import torch
from transformers import SiglipTextConfig, SiglipTextModel

import nalaformer
import nalaformer.models.vision  # enters the names into timm
from helpers.vision_hosts import MODELS, SIDES, make, run, timm_swin, timm_vit, transformers_vit
from nalaformer.attention import METHODS, Attention
from nalaformer.conversion import TimmAttention, TimmWindowAttention, TransformersAttention

pytestmark = pytest.mark.usefixtures("one_thread")

LINEAR_METHODS = [name for name, config in METHODS.items() if config.feature_map is not None]


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for name in MODELS for method in (LINEAR_METHODS if name in ("vit", "swin") else ["nalaformer"])],
)
def test_a_converted_model_runs_and_trains(name, method):
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        softmax = run(name, model)
    assert nalaformer.convert(model, method) is model
    logits = run(name, model)
    assert logits.shape == softmax.shape
    assert logits.isfinite().all()
    assert (logits - softmax).abs().max() > 1e-6, "nothing has changed"
    logits.square().sum().backward()
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    assert layers
    weights = [layer.qkvg.weight if layer.config.key_reduction == 1 else layer.kv.weight for layer in layers]
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in weights)
    # what was not attention is as it was
    after = model.state_dict()
    untouched = [key for key in before if "attn." not in key and "attention." not in key]
    assert all(torch.equal(after[key], before[key]) for key in untouched)


@pytest.mark.parametrize("name", MODELS)
def test_the_projections_keep_their_weights(name):
    # with exact attention in our layer the converted model must compute what it did: only then are all weights in place
    model = make(name)
    if "swin" in name:
        # its relative bias has no counterpart
        for key, parameter in model.named_parameters():
            if "relative_position_bias_table" in key:
                torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        expected = run(name, model)
        nalaformer.convert(model, "linear")
        for layer in model.modules():
            if isinstance(layer, Attention):
                layer.map = None
        assert (run(name, model) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["vit", "transformers_vit"])
def test_projections_without_bias_stay_without_one(name):
    model = MODELS[name]()
    for linear in (module for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)):
        if linear.in_features == 32 and linear.out_features in (32, 96):
            linear.bias = None
    with torch.no_grad():
        expected = run(name, model)
        nalaformer.convert(model, "linear")
        for layer in (module for module in model.modules() if isinstance(module, Attention)):
            assert layer.qkvg.bias is None
            # ours has one always
            assert not layer.projection.bias.any()
            layer.map = None
        assert (run(name, model) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_a_new_gate_stays_new_and_a_new_local_mix_starts_as_none(name):
    model = make(name)
    options = {"gate": "silu"} | ({"local_mix": "channels"} if name == "swin" else {})
    first = next(module for module in model.modules() if hasattr(module, "qkv"))
    weight, dim = first.qkv.weight.clone(), first.qkv.in_features
    nalaformer.convert(model, "linear", **options)
    layer = next(module for module in model.modules() if isinstance(module, Attention))
    assert torch.equal(layer.qkvg.weight[: 3 * dim], weight)
    assert layer.qkvg.weight[3 * dim :].std() > 0.01
    if name == "swin":
        assert not any(parameter.any() for parameter in layer.local_mix.parameters())


@pytest.mark.parametrize("method", LINEAR_METHODS)
def test_converted_attention_is_that_of_the_method_with_its_options(method):
    layer = nalaformer.convert(timm_vit(), method, norm=True).blocks[0].attn.attention
    config = METHODS[method]
    assert layer.config.feature_map == config.feature_map
    assert layer.config.map_options == config.map_options
    assert (layer.config.norm, layer.config.gate) == (True, "none")
    # a window is a grid, so there the rest of the method comes along
    layer = next(module for module in nalaformer.convert(timm_swin(), method).modules() if isinstance(module, Attention))
    assert (layer.config.position, layer.config.local_mix) == (config.position, config.local_mix)
    assert layer.config.table_grid == (7, 7)


def test_dropout_of_the_host_goes_on():
    model = nalaformer.convert(timm_vit(proj_drop_rate=0.5), "linear").train()
    layer, x = model.blocks[0].attn, torch.randn(2, 10, 32)
    assert (layer(x) == 0).float().mean() > 0.3
    assert not (layer.eval()(x) == 0).any()


@pytest.mark.parametrize("local_mix", ["none", "channels"])
def test_a_shifted_window_keeps_its_mask(local_mix):
    model = nalaformer.convert(timm_swin(), "linear", local_mix=local_mix)
    for parameter in model.parameters():
        if not parameter.any():
            # the local convolution begins with zeros
            torch.nn.init.normal_(parameter)
    block = model.layers[0].blocks[1]
    assert block.attn_mask is not None
    layer = block.attn
    x = torch.randn(block.attn_mask.shape[0], 49, 16)
    with torch.no_grad():
        before = layer(x, block.attn_mask)
        moved = x.clone()
        # the last window has four parts of 4 and 3 rows and columns: this is the first token of the last part
        token = 4 * 7 + 4
        moved[-1, token] += 10
        change = (layer(moved, block.attn_mask) - before).abs().amax(-1)
        sees = block.attn_mask[-1, :, token] == 0
        assert change[:-1].max() == 0
        assert change[-1][~sees].max() == 0
        assert change[-1][sees].min() > 0
        assert (layer(moved) - layer(x)).abs().amax(-1)[-1].min() > 0, "without the mask all see it"


def test_the_plan_lists_what_would_go_and_changes_nothing():
    model = timm_vit()
    keys = list(model.state_dict())
    plan = nalaformer.plan_conversion(model)
    assert [found.name for found in plan] == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    assert {(found.kind, found.dim, found.num_heads, found.obstacle) for found in plan} == {("Attention", 32, 2, "")}
    assert list(model.state_dict()) == keys


def test_only_chooses_the_layers():
    model = nalaformer.convert(timm_vit(), only=r"blocks\.[12]\.")
    assert [isinstance(block.attn, TimmAttention) for block in model.blocks] == [False, True, True]


def test_what_cannot_go_stays_with_a_reason():
    normalised = timm_vit(qk_norm=True)
    assert {found.obstacle for found in nalaformer.plan_conversion(normalised)} == {
        "normalises queries with weights that linear attention has no place for"
    }
    with pytest.raises(ValueError, match=r"that can be replaced \(blocks\.0\.attn: normalises queries with weights"):
        nalaformer.convert(normalised)
    other = timm.create_model("vit_relpos_small_patch16_224")
    assert {found.obstacle for found in nalaformer.plan_conversion(other)} == {"of a kind that is not known here"}
    with pytest.raises(ValueError, match="found no attention"):
        nalaformer.convert(torch.nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "softmax"}, "name a linear method"),
        ({"attention": "nalaforme"}, "did you mean 'nalaformer'"),
        ({"local_mix": "channels"}, "a ViT tells its attention no grid"),
        ({"window": 7}, "do not set causal, key_reduction or window"),
        ({"directon": "cosine"}, "did you mean 'direction'"),
    ],
)
def test_a_refused_conversion_leaves_the_model_as_it_was(options, message):
    model = timm_vit()
    before = run("vit", model)
    with pytest.raises(ValueError, match=message):
        nalaformer.convert(model, **options)
    assert torch.equal(run("vit", model), before)


def test_masks_of_keys_are_honoured_and_others_refused():
    layer = nalaformer.convert(timm_vit()).blocks[0].attn
    x = torch.randn(2, 10, 32)
    mask = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    mask[..., 7:] = False
    assert (layer(x, attn_mask=mask)[:, :7] - layer(x[:, :7])).abs().max() < 1e-5
    with pytest.raises(ValueError, match="only mask a key for all queries"):
        layer(x, attn_mask=torch.ones(2, 1, 10, 10, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="is_causal=True"):
        layer(x, is_causal=True)


def test_masks_that_are_added_to_scores_hide_where_they_are_negative():
    layer = nalaformer.convert(transformers_vit()).vit.layers[0].attention
    x, mask = torch.randn(2, 10, 32), torch.zeros(2, 1, 1, 10)
    mask[..., 7:] = -torch.inf
    assert (layer(x, mask)[0][:, :7] - layer(x[:, :7])[0]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "mask", [torch.full((2, 1, 1, 10), 0.5), torch.full((2, 1, 1, 10), -2.0), torch.ones(2, 1, 1, 10).long()]
)
def test_biases_of_keys_are_refused_and_hide_nothing(mask):
    layer = nalaformer.convert(timm_vit()).blocks[0].attn
    with pytest.raises(ValueError, match="does not support a key bias"):
        layer(torch.randn(2, 10, 32), attn_mask=mask)


@pytest.mark.parametrize("attend", ["sdpa", "eager"])
def test_a_converted_text_encoder_does_not_see_padding(attend):
    """transformers writes the padding of texts once for each query, [batch, 1, tokens, tokens]."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = SiglipTextConfig(vocab_size=50, max_position_embeddings=12, eos_token_id=49, **sizes)
    config._attn_implementation = attend
    model = nalaformer.convert(SiglipTextModel(config).eval())
    tokens, mask = torch.randint(0, 50, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[0, 7:] = 0
    padded = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    for row, length in enumerate((7, 12)):
        alone = model(input_ids=tokens[row : row + 1, :length]).last_hidden_state
        torch.testing.assert_close(padded[row, :length], alone[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["transformers_vit", "transformers_segformer", "transformers_swin"])
def test_attention_weights_of_a_converted_model_are_refused(name):
    model = make(name)
    model.set_attn_implementation("eager")
    images = torch.zeros(1, 3, SIDES.get(name, 32), SIDES.get(name, 32))
    nalaformer.convert(model)
    with pytest.raises(ValueError, match=r"computes no weights, got output_attentions=True; omit it"):
        model(images, output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="computes no weights"):
        model(images)
    assert model(images, output_attentions=False)[0].isfinite().all()


def test_our_layers_turn_their_features_as_the_method_does():
    options = {"embed_dims": (16,) * 4, "depths": (1,) * 4, "num_heads": (1,) * 4, "projection": 32}
    model = timm.create_model("nalaformer_t", **options)
    assert model.stages[3].blocks[0].attention.config.rotary_over == "head"
    nalaformer.convert(model, "polaformerpp")
    assert model.stages[3].blocks[0].attention.config.rotary_over == "features"


def test_our_softmax_stages_become_linear_and_keep_every_part():
    model = timm.create_model(
        "nalaformer_t", embed_dims=(16, 16, 32, 32), depths=(1,) * 4, num_heads=(1, 1, 2, 2), projection=32
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plan = nalaformer.plan_conversion(model)
    assert [found.obstacle for found in plan] == ["is linear already"] * 2 + [""] * 2
    nalaformer.convert(model, "nalaformer", direction="cosine")
    assert [stage.blocks[0].attention.map is not None for stage in model.stages] == [True] * 4
    assert model.stages[3].blocks[0].attention.map.direction == "cosine"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if key in before)
    assert model(torch.randn(2, 3, 50, 70)).isfinite().all()


def test_type_device_and_mode_are_kept():
    model = nalaformer.convert(timm_vit().to(torch.bfloat16), "polaformer")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(module.training for module in model.modules())
    on_meta = nalaformer.convert(timm_vit().to("meta"))
    assert {parameter.device.type for parameter in on_meta.parameters()} == {"meta"}


def test_each_kind_of_model_gets_its_kind_of_layer():
    kinds = {"vit": TimmAttention, "swin": TimmWindowAttention, "transformers_vit": TransformersAttention}
    for name, kind in kinds.items():
        model = nalaformer.convert(MODELS[name]())
        assert any(type(module) is kind for module in model.modules())
