"""Whole models against data computed with the authors' published code, and their files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import nalaformer

GOLDEN = Path(__file__).parent / "golden"
MODELS = {
    "nalaformer_hybrid": "nalaformer",
    "nalaformer_linear": "nalaformer",
    "pola_pvt_model": "polaformer",
    "flatten_pvt_model": "flatten",
}


def golden(name):
    """Published weights, the configuration in our terms, and input, output, cotangent and gradient."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        meta = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
    weights = {key.split(".", 1)[1]: value for key, value in tensors.items() if key.startswith(("weight.", "buffer."))}
    config = {key: tuple(json.loads(meta[key])) for key in ("embed_dims", "depths", "num_heads", "mlp_ratios")}
    if "flags" in meta:
        # "stages 1,3,4" have a scale
        scaled = [int(stage) for stage in meta["layer_scale"].removeprefix("stages ").split(",")]
        config["layer_scale"] = tuple(1.0 if stage in scaled else None for stage in (1, 2, 3, 4))
        config |= {"attention_stages": meta["flags"], "projection": int(meta["projection"])}
    else:
        config["attention_stages"] = meta["attn_type"].lower().replace("s", "v")
        config["key_reduction"] = tuple(int(digit) for digit in meta["la_sr_ratios"])
        config["softmax_key_reduction"] = tuple(json.loads(meta["sr_ratios"]))
        config["img_size"] = int(meta["img_size"])
    return weights, config, tensors


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


@pytest.mark.parametrize("key", [None, "model", "state_dict", "model_ema"])
@pytest.mark.parametrize("name", MODELS)
def test_a_published_file_loads_by_path_and_through_timm(name, key, tmp_path):
    timm = pytest.importorskip("timm")
    weights, config, tensors = golden(name)
    path = tmp_path / "published.pth"
    torch.save(weights if key is None else {key: weights, "epoch": 3}, path)
    by_path = nalaformer.published.load(path, MODELS[name], **config)
    variant = {"polaformer": "polaformer_pvt_t", "flatten": "flatten_pvt_t"}.get(MODELS[name], "nalaformer_t")
    by_timm = timm.create_model(variant, checkpoint_path=str(path), num_classes=10, **config).eval()
    with torch.no_grad():
        assert relative_error(by_path(tensors["input"]), tensors["output"]) < 2e-6
        assert torch.equal(by_timm(tensors["input"]), by_path(tensors["input"]))


def test_our_own_names_load_untranslated():
    weights, config, tensors = golden("nalaformer_hybrid")
    model = nalaformer.published.load(weights, "nalaformer", **config)
    again = nalaformer.models.build("nalaformer_t", num_classes=10, **config).eval()
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
