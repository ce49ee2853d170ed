"""Linear attention in transformers of diffusers."""

import diffusers
import pytest
import torch

import nalaformer
from nalaformer.attention import METHODS, Attention
from nalaformer.conversion import DiffusersAttention

pytestmark = pytest.mark.usefixtures("one_thread")

LINEAR_METHODS = [name for name, config in METHODS.items() if config.feature_map is not None]
SIZE = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}


def dit():
    return diffusers.DiTTransformer2DModel(**SIZE, in_channels=3, num_embeds_ada_norm=5)


def pixart():
    return diffusers.PixArtTransformer2DModel(**SIZE, in_channels=3, caption_channels=8, cross_attention_dim=16)


def make(kind):
    torch.manual_seed(0)
    model = kind().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def run(model, height=8, width=8):
    images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([3, 711])
    if isinstance(model, diffusers.PixArtTransformer2DModel):
        texts = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
        sizes = {"resolution": None, "aspect_ratio": None}
        return model(images, timestep=times, encoder_hidden_states=texts, added_cond_kwargs=sizes).sample
    return model(images, timestep=times, class_labels=torch.tensor([1, 4])).sample


@pytest.mark.parametrize("method", LINEAR_METHODS)
def test_a_converted_dit_runs_and_trains(method):
    model = make(dit)
    with torch.no_grad():
        softmax = run(model)
    assert nalaformer.convert(model, method) is model
    output = run(model)
    assert (output - softmax).abs().max() > 1e-6, "nothing has changed"
    output.square().sum().backward()
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    assert len(layers) == 2
    assert all(layer.qkvg.weight.grad.isfinite().all() and layer.qkvg.weight.grad.any() for layer in layers)


@pytest.mark.parametrize("kind", [dit, pixart])
def test_the_projections_of_diffusers_keep_their_weights(kind):
    # with exact attention in our layer the converted model must compute what it did
    model = make(kind)
    with torch.no_grad():
        expected = run(model)
        nalaformer.convert(model, "linear")
        for layer in model.modules():
            if isinstance(layer, Attention):
                layer.map = None
        assert (run(model) - expected).abs().max() < 1e-5


def test_attention_to_text_stays_and_says_why():
    plan = {each.name.split(".", 2)[2]: each for each in nalaformer.plan_conversion(make(pixart)) if ".0." in each.name}
    assert plan["attn1"].obstacle == ""
    assert (plan["attn1"].dim, plan["attn1"].num_heads) == (16, 2)
    assert "attends to a text or another input" in plan["attn2"].obstacle
    model = nalaformer.convert(make(pixart))
    assert [type(getattr(model.transformer_blocks[0], name)).__name__ for name in ("attn1", "attn2")] == [
        "DiffusersAttention",
        "Attention",
    ]
    # rectangles work where the model's own code takes them
    assert run(model, 8, 12).shape[2:] == (8, 12)


def attention(**options):
    from diffusers.models.attention_processor import Attention as Theirs

    return torch.nn.ModuleDict({"layer": Theirs(query_dim=16, heads=2, dim_head=8, **options)})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"qk_norm": "rms_norm"}, "normalises queries and keys"),
        ({"added_kv_proj_dim": 16}, "attends to image and text together"),
        ({"residual_connection": True}, "adds it to its output"),
        ({"rescale_output_factor": 2.0}, "divides its output by 2"),
        ({"kv_heads": 1}, "fewer heads of keys than of queries"),
        ({"out_dim": 8}, "as many inside as outside"),
    ],
)
def test_attention_of_diffusers_that_cannot_be_replaced_says_why(options, reason):
    (found,) = nalaformer.plan_conversion(attention(**options))
    assert reason in found.obstacle


def test_a_processor_that_computes_something_else_stays():
    model = make(dit)
    from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0

    model.transformer_blocks[1].attn1.set_processor(SanaLinearAttnProcessor2_0())
    obstacles = [found.obstacle for found in nalaformer.plan_conversion(model)]
    assert obstacles[0] == ""
    assert "computes what its SanaLinearAttnProcessor2_0 says" in obstacles[1]


def test_transformers_of_another_kind_are_listed():
    size = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "in_channels": 4}
    flux = diffusers.FluxTransformer2DModel(**size, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8])
    assert [found.obstacle for found in nalaformer.plan_conversion(flux)] == ["of a kind that is not known here"] * 2


def test_a_mask_hides_keys_and_another_input_is_refused():
    torch.manual_seed(0)
    model = nalaformer.convert(make(dit), "linear")
    layer = model.transformer_blocks[0].attn1
    assert isinstance(layer, DiffusersAttention)
    tokens, mask = torch.randn(2, 6, 16), torch.zeros(2, 1, 6)
    mask[:, :, 4:] = -10000.0
    hidden = layer(tokens, attention_mask=mask)
    changed = tokens.clone()
    changed[:, 4:] = 7.0
    torch.testing.assert_close(layer(changed, attention_mask=mask)[:, :4], hidden[:, :4])
    with pytest.raises(ValueError, match="got encoder_hidden_states"):
        layer(tokens, encoder_hidden_states=tokens)
