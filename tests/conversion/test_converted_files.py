"""A converted model that was saved comes back as it was, and the original refuses to load it as its own."""

import copy

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file

import nalaformer
import nalaformer.models.vision  # enters the names into timm
from helpers.vision_hosts import MODELS, make, run, timm_vit, transformers_vit

pytestmark = pytest.mark.usefixtures("one_thread")


def converted(name, method="nalaformer", **options):
    model = make(name)
    nalaformer.convert(model, method, **options)
    with torch.no_grad():
        # parameters of the maps away from their start
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_saved_model_comes_back_with_its_logits(name, tmp_path):
    model = converted(name, "polaformer")
    torch.save(model.state_dict(), tmp_path / "model.pth")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for source in (model.state_dict(), tmp_path / "model.pth", tmp_path / "model.safetensors"):
        back = nalaformer.load_converted(MODELS[name](), source)
        assert torch.equal(run(name, back), run(name, model))


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("transformers")])
@torch.no_grad()
def test_what_save_pretrained_wrote_comes_back_and_the_original_class_refuses_it(name, tmp_path):
    model = converted(name)
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    back = nalaformer.load_converted(type(model)(config).eval(), tmp_path)
    assert torch.equal(run(name, back), run(name, model))
    for loads in (type(model), transformers.AutoModelForImageClassification):
        with pytest.raises(RuntimeError, match=r"(?s)mismatch"):
            loads.from_pretrained(tmp_path)


def test_a_part_converted_inside_of_a_saved_model_is_refused_by_the_original_too(tmp_path):
    model = transformers_vit()
    nalaformer.convert(model.vit)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)mismatch"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["vit", "swin"])
def test_a_state_dict_is_refused_by_the_original(name, strict):
    with pytest.raises(RuntimeError, match=r"size mismatch"):
        MODELS[name]().load_state_dict(converted(name).state_dict(), strict=strict)


def test_only_the_layers_that_were_converted_come_back_so():
    model = converted("vit", only=r"blocks\.[12]\.")
    back = nalaformer.load_converted(timm_vit(), model.state_dict())
    assert [type(block.attn) for block in back.blocks] == [type(block.attn) for block in model.blocks]
    with torch.no_grad():
        assert torch.equal(run("vit", back), run("vit", model))


def test_our_own_stages_come_back_and_do_not_load_as_softmax():
    sizes = {"embed_dims": (16,) * 4, "depths": (1,) * 4, "num_heads": 1, "projection": 16, "num_classes": 5}
    model = timm.create_model("nalaformer_xt", **sizes).eval()
    # a map without parameters: the names are those of the softmax stage
    nalaformer.convert(model, "linear")
    plain = timm.create_model("nalaformer_xt", **sizes).eval()
    with pytest.raises(RuntimeError, match=r"Unexpected key"):
        plain.load_state_dict(model.state_dict())
    back, image = nalaformer.load_converted(plain, model.state_dict()), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(back(image), model(image))
    assert [stage.blocks[0].attention.config for stage in back.stages] == [
        stage.blocks[0].attention.config for stage in model.stages
    ]


def test_weights_of_another_map_or_of_the_original_say_what_to_do():
    first, second = nalaformer.convert(timm_vit(), "linear"), nalaformer.convert(timm_vit(), "linear", feature_map="elu")
    with pytest.raises(ValueError, match=r"converted otherwise, with {'feature_map': 'relu'}.*load_converted"):
        second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"load the weights of the original model first"):
        first.load_state_dict(timm_vit().state_dict())
    with pytest.raises(ValueError, match=r"must hold layers that nalaformer.convert made"):
        nalaformer.load_converted(timm_vit(), timm_vit().state_dict())
    broken = first.state_dict() | {"blocks.0.attn.qkv.weight": torch.zeros(9)}
    with pytest.raises(ValueError, match=r"must hold the record of a converted layer"):
        nalaformer.load_converted(timm_vit(), broken)
    plain, missing = timm_vit(), {key: value for key, value in first.state_dict().items() if key != "norm.weight"}
    with pytest.raises(ValueError, match=r"got none for norm\.weight in"):
        nalaformer.load_converted(plain, missing)


def test_a_record_survives_low_precision_and_averages_over_steps(tmp_path):
    model = nalaformer.convert(timm_vit(), "nalaformer", direction="cosine")
    average = timm.utils.ModelEmaV2(model, decay=0.999)
    for _ in range(30):
        average.update(model)
    for changed in (average.module, copy.deepcopy(model).to(torch.bfloat16)):
        back = nalaformer.load_converted(timm_vit(), changed.state_dict())
        assert back.blocks[0].attn.attention.config == model.blocks[0].attn.attention.config
    # a whole model, pickled
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(run("vit", again), run("vit", model))
