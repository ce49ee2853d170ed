"""Our layers against data computed with the authors' published code."""

import pytest
import torch
from safetensors import safe_open

import nalaformer
from helpers.places import GOLDEN
from nalaformer.attention import build

PVT = {"key_reduction": 2, "table_grid": (4, 4), "value_upsampling": "flat"}
LAYERS = {
    "nala_attention": ("nalaformer", {}),
    "polapp_attention": ("polaformerpp", {}),
    "pola_pvt_attention_sr1": ("polaformer", {"table_grid": (8, 8)}),
    "pola_pvt_attention_sr2": ("polaformer", PVT),
    "pola_swin_attention": ("polaformer", {"table_grid": (7, 7)}),
    "flatten_pvt_attention_sr1": ("flatten", {"table_grid": (8, 8)}),
    "flatten_pvt_attention_sr2": ("flatten", PVT),
    "rala_attention": ("rala", {}),
    "mala_attention": ("mala", {}),
}


def load(name):
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118, not a dict


def part(tensors, prefix):
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def relative_error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.fixture(params=["reference", "chunked"])
def backend(request):
    with nalaformer.use_backend(request.param):
        yield


@pytest.mark.parametrize("name", LAYERS)
def test_layer_matches_the_published_code(name, backend):
    family, options = LAYERS[name]
    tensors, meta = load(name)
    layer = build(family, dim=int(meta["dim"]), num_heads=int(meta["num_heads"]), **options)
    layer.load_state_dict(nalaformer.published.translate(part(tensors, "weight."), family))

    x = tensors["input"].requires_grad_()
    if meta["layout"] == "B C H W":
        out = layer(x.flatten(2).transpose(1, 2), x.shape[2:]).transpose(1, 2).reshape(x.shape)
    else:
        side = round(x.shape[1] ** 0.5)
        out = layer(x, (side, side))
    out.backward(tensors["cotangent"])

    # a contrast magnifies what float32 rounds away, in their data too; 2e-5 and 1e-4 are what the data allow
    bar = 1e-5 if name == "mala_attention" else 2e-6
    assert relative_error(out, tensors["output"]) < bar
    gradients = part(tensors, "grad.")
    assert relative_error(x.grad, gradients.pop("input")) < bar
    translated = nalaformer.published.translate(gradients, family)
    assert translated.keys() == dict(layer.named_parameters()).keys()
    for key, parameter in layer.named_parameters():
        assert relative_error(parameter.grad, translated[key]) < bar, key


@pytest.mark.parametrize("direction", ["split", "cosine"])
def test_norm_aware_core_matches_the_published_code_in_float64(direction, backend):
    tensors, _ = load("nala_core")
    tensors = {key: value.transpose(1, 2) for key, value in tensors.items()}  # to [B, N, H, D]
    q, k, v = (tensors[name].contiguous().requires_grad_() for name in "qkv")
    feature_map = nalaformer.feature_map("norm_aware", num_heads=q.shape[2], head_dim=q.shape[3], direction=direction)

    out = nalaformer.linear_attention(q, k, v, feature_map=feature_map)
    gradients = torch.autograd.grad(out, (q, k, v), tensors["cotangent"])

    for features, name in ((feature_map.query(q), "phi_q"), (feature_map.key(k), "phi_k")):
        published = tensors[f"{direction}.{name}"]
        if direction == "cosine":
            # our features are turned by 45 degrees, where none is negative; products are the same
            cos, sin = published.chunk(2, dim=-1)
            published = torch.cat((cos + sin, cos - sin), dim=-1) / 2**0.5
        assert relative_error(features, published) < 1e-12
    assert relative_error(out, tensors[f"{direction}.out"]) < 1e-12
    for name, gradient in zip("qkv", gradients, strict=True):
        assert relative_error(gradient, tensors[f"{direction}.grad_{name}"]) < 1e-12


def test_rotary_angles_match_the_published_tables():
    for name, width in (("nala_attention", 16), ("polapp_attention", 32)):
        tensors, meta = load(name)
        rotary = nalaformer.Rotary.grid(int(meta["height"]), int(meta["width"]), width)
        cos, sin = rotary.cos_sin(torch.float32)
        assert relative_error(cos.repeat_interleave(2, dim=-1), tensors["rope.cos"]) < 1e-6
        assert relative_error(sin.repeat_interleave(2, dim=-1), tensors["rope.sin"]) < 1e-6


def test_translation_finds_layers_inside_a_model():
    tensors, _ = load("pola_pvt_attention_sr2")
    inside = {f"block1.0.attn.{key}": value for key, value in part(tensors, "weight.").items()}
    alone = nalaformer.published.translate(part(tensors, "weight."), "polaformer")
    translated = nalaformer.published.translate(inside, "polaformer")
    assert translated.keys() == {f"block1.0.attn.{key}" for key in alone}
    assert all(torch.equal(translated[f"block1.0.attn.{key}"], value) for key, value in alone.items())


def test_unknown_family_names_the_nearest():
    with pytest.raises(ValueError, match=r"'polaformr'.*did you mean 'polaformer'"):
        nalaformer.published.translate({}, "polaformr")
