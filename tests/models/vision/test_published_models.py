"""Whole models against data computed with the authors' published code, and their files."""

import re
import sys
import types
from argparse import Namespace
from itertools import product
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import nalaformer
from helpers.golden_models import golden
from helpers.products import FULL
from nalaformer import cli
from nalaformer.recipes.initial_weights import load_weights
from nalaformer.tasks import Classification

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = {
    "nalaformer_hybrid": "nalaformer",
    "nalaformer_linear": "nalaformer",
    "pola_pvt_model": "polaformer",
    "flatten_pvt_model": "flatten",
    "rala_hybrid": "rala",
    "rala_linear": "rala",
    "mala_hybrid": "mala",
    "mala_linear": "mala",
}
VARIANT_OF = {
    "nalaformer": "nalaformer_t",
    "polaformer": "polaformer_pvt_t",
    "flatten": "flatten_pvt_t",
    "rala": "ravlt_t",
    "mala": "mavit_t",
}


def relative_error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_input_gradients_match_the_published_code(name):
    weights, config, tensors = golden(name)
    model = nalaformer.published.load(weights, MODELS[name], **config)
    image = tensors["input"].requires_grad_()
    logits = model(image)
    logits.backward(tensors["cotangent"])
    # two correct float32 implementations: 2e-5 and 1e-4 are what the data allow; ours stays well inside
    assert relative_error(logits, tensors["output"]) < 2e-6
    assert relative_error(image.grad, tensors["grad.input"]) < 1e-5


KEYS = (None, "model", "state_dict", "model_ema")


# the key is looked for before the model is known
@pytest.mark.parametrize(("name", "key"), list(product(MODELS, KEYS) if FULL else zip(MODELS, 2 * KEYS, strict=True)))
def test_a_published_file_loads_by_path_and_through_timm(name, key, tmp_path):
    weights, config, tensors = golden(name)
    path = tmp_path / "published.pth"
    torch.save(weights if key is None else {key: weights, "epoch": 3}, path)
    by_path = nalaformer.published.load(path, MODELS[name], **config)
    variant = VARIANT_OF[MODELS[name]]
    by_timm = timm.create_model(variant, checkpoint_path=str(path), num_classes=10, **config).eval()
    with torch.no_grad():
        assert relative_error(by_path(tensors["input"]), tensors["output"]) < 2e-6
        assert torch.equal(by_timm(tensors["input"]), by_path(tensors["input"]))


@pytest.mark.parametrize("name", MODELS)
def test_a_published_file_is_one_to_start_from(name, tmp_path):
    weights, config, tensors = golden(name)
    path = tmp_path / "published.pth"
    torch.save({"model": weights, "epoch": 3}, path)
    variant = VARIANT_OF[MODELS[name]]
    model = timm.create_model(variant, num_classes=3, **config).eval()
    told = load_weights(model, Classification, path)
    assert "2 of another shape and left out: head.fc.weight, head.fc.bias" in told
    assert "not in the file" not in told
    theirs = nalaformer.published.load(path, MODELS[name], **config)
    with torch.no_grad():
        assert torch.equal(model.forward_features(tensors["input"]), theirs.forward_features(tensors["input"]))


def test_our_own_names_load_untranslated():
    weights, config, tensors = golden("nalaformer_hybrid")
    model = nalaformer.published.load(weights, "nalaformer", **config)
    again = nalaformer.models.vision.build("nalaformer_t", num_classes=10, **config).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(tensors["input"]), model(tensors["input"]))


def test_weights_of_another_size_are_refused():
    weights, config, _ = golden("nalaformer_hybrid")
    with pytest.raises(RuntimeError, match="size mismatch"):
        nalaformer.published.load(weights, "nalaformer", **config | {"embed_dims": (16, 32, 48, 128)})
    missing = {name: value for name, value in weights.items() if "layers.2.blocks.1" not in name}
    with pytest.raises(RuntimeError, match=r"Missing key.*stages\.2\.blocks\.1"):
        nalaformer.published.load(missing, "nalaformer", **config)


def test_settings_beside_the_weights_are_left_aside(tmp_path):
    # DeiT's program keeps argparse's namespace, Swin's a node of yacs, which need not be installed here
    class CfgNode(dict):
        def __init__(self, values):
            super().__init__(values)
            self.__dict__["__immutable__"] = True

    CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"
    yacs = types.ModuleType("yacs.config")
    yacs.CfgNode = CfgNode
    path = tmp_path / "published.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
        patch.setitem(sys.modules, "yacs.config", yacs)
        config = CfgNode({"MODEL": CfgNode({"NAME": "flatten"}), "BASE": [""]})
        torch.save({"model": {"weight": torch.ones(2)}, "config": config, "args": Namespace(lr=1e-3), "epoch": 3}, path)
    assert nalaformer.published.read(path).keys() == {"weight"}


def test_averaged_weights_are_preferred_to_those_of_the_last_step(tmp_path):
    path = tmp_path / "both.pth"
    plain, averaged = {"weight": torch.zeros(2)}, {"weight": torch.ones(2)}
    for key in ("state_dict_ema", "model_ema"):
        torch.save({"model": plain, "state_dict": plain, key: averaged}, path)
        assert nalaformer.published.read(path)["weight"].tolist() == [1, 1]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_training_puts_in_front_of_names_is_left_out(prefix, tmp_path):
    weights = {f"{prefix}head.weight": torch.zeros(2)}
    torch.save({"model": weights}, tmp_path / "wrapped.pth")
    save_file(weights, tmp_path / "wrapped.safetensors")
    assert nalaformer.published.read(tmp_path / "wrapped.pth").keys() == {"head.weight"}
    assert nalaformer.published.read(tmp_path / "wrapped.safetensors").keys() == {"head.weight"}


@torch.no_grad()
def test_a_published_backbone_behind_other_names_loads_everywhere(tmp_path):
    weights, config, tensors = golden("mala_hybrid")
    path = tmp_path / "published.pth"
    torch.save({f"model_ema.module.{name}": value for name, value in weights.items()}, path)
    by_timm = timm.create_model("mavit_t", checkpoint_path=str(path), num_classes=10, **config).eval()
    started = timm.create_model("mavit_t", num_classes=10, **config).eval()
    load_weights(started, Classification, path)
    for model in (nalaformer.published.load(path, "mala", **config), by_timm, started):
        assert relative_error(model(tensors["input"]), tensors["output"]) < 2e-6


class Hostile:
    """Its unpickling would touch a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_file_with_code_is_refused_and_the_code_does_not_run(tmp_path):
    touched = tmp_path / "touched"
    path = tmp_path / "hostile.pth"
    torch.save({"model": {"weight": torch.zeros(1)}, "args": Hostile(touched)}, path)
    with pytest.raises(ValueError, match="cannot be read as weights alone"):
        nalaformer.published.read(path)
    assert not touched.exists()


def test_a_file_without_weights_says_what_it_must_hold(tmp_path):
    path = tmp_path / "numbers.pth"
    torch.save([1, 2, 3], path)
    with pytest.raises(ValueError, match=r"must hold a state dict.*got list"):
        nalaformer.published.read(path)
    with pytest.raises(FileNotFoundError):
        nalaformer.published.read(tmp_path / "missing.pth")


@pytest.mark.parametrize("size", [(224, 224), (224, 448)], ids=str)
def test_swin_with_softmax_everywhere_is_timms_swin(size):
    # timm's implementation is an oracle of its own for windows, shifts, biases, merging and the published names; at these
    # sizes windows divide every grid (elsewhere timm lets tokens see the padding, and we do not)
    sizes = {"depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8)}
    theirs = (
        timm.create_model("swin_tiny_patch4_window7_224", img_size=size, embed_dim=8, num_classes=10, **sizes).double().eval()
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    published = {}
    for name, value in theirs.state_dict().items():
        # timm begins a stage with its downsampling, the published code ends the stage before with it
        stage = re.match(r"layers\.(\d)\.downsample\.", name)
        name = name.replace(f"layers.{stage[1]}.", f"layers.{int(stage[1]) - 1}.") if stage else name
        published[name.replace("head.fc.", "head.")] = value
    ours = nalaformer.published.load(
        published, "flatten", attention="softmax", embed_dims=(8, 16, 32, 64), dtype=torch.float64, **sizes
    )
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    theirs_in, ours_in = images.clone().requires_grad_(), images.clone().requires_grad_()
    expected, found = theirs(theirs_in), ours(ours_in)
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    found.backward(cotangent)
    assert relative_error(found, expected) < 1e-10
    assert relative_error(ours_in.grad, theirs_in.grad) < 1e-10


# --- the command --------------------------------------------------------------------------------------------------------


def nalaformer_command(*arguments):
    return CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])


def test_the_command_writes_a_file_that_timm_loads(tmp_path):
    weights, config, tensors = golden("nalaformer_hybrid")
    source, out = tmp_path / "published.pth", tmp_path / "new" / "ours.safetensors"
    torch.save({"model": {f"module.{name}": value for name, value in weights.items()}}, source)
    result = nalaformer_command("convert", source, "--family", "nalaformer", "--out", out)
    assert result.exit_code == 0, result.output
    assert str(out) in result.output
    assert [path.name for path in out.parent.iterdir()] == ["ours.safetensors"]
    model = timm.create_model("nalaformer_t", checkpoint_path=str(out), num_classes=10, **config).eval()
    with torch.no_grad():
        assert relative_error(model(tensors["input"]), tensors["output"]) < 2e-6


def test_the_command_refuses_weights_that_do_not_fit(tmp_path):
    weights, _, _ = golden("pola_pvt_model")
    source, out = tmp_path / "published.pth", tmp_path / "ours.safetensors"
    torch.save(weights, source)
    result = nalaformer_command("convert", source, "--family", "polaformer", "--out", out, "--model", "polaformer_pvt_t")
    assert isinstance(result.exception, ValueError)
    assert "does not fit polaformer_pvt_t" in str(result.exception)
    assert not out.exists()


ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ({"a": torch.zeros(1)}, ("--family", "flatten", "--out", "x.safetensors"), "holds no published backbone"),
        ({"a": torch.zeros(1)}, ("--family", "flatten", "--out", "x.pth"), "out must end in .safetensors"),
        (
            {"patch_embed.proj.0.weight": ONE, "head.weight": ONE},
            ("--family", "mala", "--out", "x.safetensors"),
            "have the shapes",
        ),
        ({"patch_embed": torch.zeros(1)}, ("--family", "flaten", "--out", "x.safetensors"), "did you mean 'flatten'"),
    ],
)
def test_a_wrong_conversion_says_the_rule(tmp_path, monkeypatch, content, arguments, message):
    monkeypatch.chdir(tmp_path)
    torch.save(content, "published.pth")
    result = nalaformer_command("convert", "published.pth", *arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["published.pth"]


def test_weights_that_fit_a_named_backbone_pass_the_check(tmp_path):
    # full-size weights are heavy: those of the smallest backbone, all zeros, under the published names
    ours = nalaformer.models.vision.build("nalaformer_xt", device="meta").state_dict()
    published = {}
    for name, value in ours.items():
        published |= to_published(name, torch.zeros(value.shape), "nalaformer_xt")
    source, out = tmp_path / "published.pth", tmp_path / "ours.safetensors"
    torch.save(published, source)
    names = nalaformer.published.convert_file(source, out, "nalaformer", model="nalaformer_xt")
    assert sorted(names) == sorted(ours)


SMALL = {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2), "img_size": 64}


@pytest.mark.parametrize(
    "name",
    [
        "nalaformer_t",
        "polaformerpp_b0",
        "polaformer_pvt_t",
        "flatten_pvt_t",
        "polaformer_swin_t",
        "flatten_swin_t",
        "ravlt_t",
        "mavit_t",
    ],
)
def test_every_published_name_finds_its_place(name):
    # no published model of every kind is at hand: our weights under the names that the authors' code gives them
    ours = timm.create_model(name, num_classes=5, **SMALL).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    published = {}
    for key, value in ours.state_dict().items():
        published |= to_published(key, value, name)
    assert published.keys().isdisjoint(ours.state_dict().keys() - {"norm.weight", "norm.bias"})
    # what their state dicts hold besides
    extra = {"layers.0.RoPE.angle", "layers.0.RoPE_linear.angle", "layers.2.blocks.1.attn_mask"}
    published |= {key: torch.zeros(3) for key in extra if "pvt" not in name}
    family = {"ravlt": "rala", "mavit": "mala"}.get(name.split("_")[0], name.split("_")[0])
    again = nalaformer.published.load(published, family, **SMALL)
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(again(image), ours(image))


def to_published(name, value, model):
    """One of our tensors under the names that the authors' code gives it, written down a second time on purpose."""
    if "pvt" in model:
        frame = (
            (r"^stem\.0\.", "patch_embed1.proj."),
            (r"^stem\.1\.", "patch_embed1.norm."),
            (r"^stages\.(\d)\.downsampling\.reduction\.", lambda m: f"patch_embed{int(m[1]) + 1}.proj."),
            (r"^stages\.(\d)\.downsampling\.norm\.", lambda m: f"patch_embed{int(m[1]) + 1}.norm."),
            (r"^stages\.(\d)\.positions\.table", lambda m: f"pos_embed{int(m[1]) + 1}"),
            (r"^stages\.(\d)\.blocks\.", lambda m: f"block{int(m[1]) + 1}."),
        )
    else:
        stem = ((r"^stem\.0\.", "patch_embed.proj."), (r"^stem\.1\.", "patch_embed.norm."))
        frame = (
            *(stem if "swin" in model else ((r"^stem\.", "patch_embed.proj."),)),
            (r"^stages\.(\d)\.downsampling", lambda m: f"layers.{int(m[1]) - 1}.downsample"),
            (r"^stages\.", "layers."),
        )
    by_convolutions = model.startswith(("ravlt", "mavit"))
    plus = model.startswith("polaformerpp") or by_convolutions
    for pattern, published in (
        *frame,
        (r"^projection\.0\.", "proj."),
        (r"^projection\.1\.", "norm."),
        (r"^head\.fc\.", "head."),
        (r"\.local1\.", ".pos." if plus else ".cpe1."),
        (r"\.local2\.", ".cpe2."),
        (r"\.(norm[12])\.", r".\1." if "pvt" in model or "swin" in model else r".\1.norm."),
        (r"\.attention\.norm\.", ".attn.ln."),
        (r"\.attention\.local_mix\.conv\.", ".attn.dwc." if "pvt" in model or "swin" in model else ".attn.lepe."),
        (r"\.attention\.projection\.", ".attn.out_proj." if model.startswith("nalaformer") else ".attn.proj."),
        (r"\.attention\.relative_bias\.bias", ".attn.relative_position_bias_table"),
        (r"\.attention\.table\.table", ".attn.positional_encoding"),
        (r"\.attention\.map\.same", ".attn.s1"),
        (r"\.attention\.map\.opposite", ".attn.s2"),
        (r"\.attention\.map\.", ".attn."),
        (r"\.attention\.", ".attn."),
        (r"\.feed_forward\.local\.", ".ffn.dwconv."),
        (r"\.feed_forward\.", ".mlp." if "pvt" in model or "swin" in model else ".ffn."),
        (r"\.scale([12])\.gamma", r".gamma_\1"),
    ):
        name = re.sub(pattern, published, name)
    last = name.split(".")[-1]
    if last.startswith("gamma_"):
        value = value[None, :, None, None]
    elif last in ("s1", "s2", "power"):
        value = value[None, :, None]
    elif last == "scale":
        value = value.flatten()[None, None]
    elif by_convolutions and re.search(r"\.(qkvg|proj|fc[12])\.weight$", name) and "patch_embed" not in name:
        return {name.replace("qkvg", "qkvo"): value[:, :, None, None]}
    elif by_convolutions and ".qkvg." in name:
        return {name.replace("qkvg", "qkvo"): value}
    elif name == "proj.weight" and not by_convolutions:
        value = value.flatten(1)
    elif name == "head.weight" and "pvt" not in model and "swin" not in model:
        value = value[:, :, None, None]
    elif ".attn.qkvg." in name:
        return in_parts(name, value, model)
    return {name: value}


def in_parts(name, value, model):
    """The one projection of ours, as each family divides it: q, k, v and, where there is one, the gate."""
    if "pvt" in model:
        channels = value.shape[0] // (4 if model.startswith("polaformer") else 3)
        q, k, v, *gate = value.split(channels)
        query = "qg" if gate else "q"
        return {
            name.replace("qkvg", query): torch.cat((q, *gate)),
            name.replace("qkvg", "kv"): torch.cat((k, v)),
        }
    is_softmax = name.startswith(("layers.2.", "layers.3."))
    if model.startswith("polaformerpp") and is_softmax:
        return {name.replace("qkvg", "qkvo"): value}
    if "swin" in model and (is_softmax or model.startswith("flatten")):
        return {name.replace("qkvg", "qkv"): value}
    return {name: value}
