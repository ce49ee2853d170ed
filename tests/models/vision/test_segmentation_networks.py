"""Networks that name pixels: any pyramid backbone, any size of image."""

import pytest
import timm
import torch

from nalaformer.models.vision.segmentation import create_segmentation_network, import_smp

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"embed_dims": [8, 8, 16, 16], "depths": [1] * 4, "num_heads": [1] * 4, "mlp_ratios": 1.0, "decoder_channels": 64}


def make(name="semantic_fpn:nalaformer_xt_linear", **options):
    torch.manual_seed(0)
    tiny = TINY if "nalaformer" in name else {"decoder_channels": 64}
    return create_segmentation_network(name, classes=3, **(tiny | options))


@pytest.mark.parametrize("decoder", ["semantic_fpn", "upernet"])
def test_every_pixel_of_an_image_of_any_size_has_logits(decoder):
    model = make(f"{decoder}:nalaformer_xt_linear").eval()
    for size in ((32, 64), (1, 50), (33, 95)):
        (logits,) = model(torch.randn(2, 3, *size))
        assert logits.shape == (2, 3, *size)


def test_an_image_is_filled_up_at_its_right_and_lower_edge_alone():
    model = make().eval()
    image = torch.randn(1, 3, 40, 50)
    whole = torch.zeros(1, 3, 64, 64)
    whole[..., :40, :50] = image
    torch.testing.assert_close(model(image)[0], model.network(whole)[..., :40, :50])


def test_only_upernet_in_training_has_an_auxiliary_head():
    images = torch.randn(2, 3, 33, 40)
    model = make("upernet:nalaformer_xt_linear")
    logits, auxiliary = model(images)
    assert logits.shape == auxiliary.shape
    assert len(model.eval()(images)) == 1
    assert len(make()(images)) == 1


def test_the_auxiliary_head_looks_at_the_stage_before_the_last():
    model = make("upernet:nalaformer_xt_linear")
    auxiliary = model(torch.randn(2, 3, 32, 32))[1]
    auxiliary.sum().backward()
    stages = model.backbone.stages
    assert all(parameter.grad is not None for parameter in stages[2].blocks[0].norm1.parameters())
    assert all(parameter.grad is None for parameter in stages[3].parameters())


def test_the_attention_is_the_one_that_is_named():
    kinds = [sorted({type(module).__name__ for module in make(attention=name).modules()}) for name in ("linear", "nalaformer")]
    assert kinds[0] != kinds[1]


@pytest.mark.parametrize("name", ["resnet10t", "nalaformer_xt_linear"])
def test_the_backbone_has_the_names_of_its_checkpoints(name):
    options = {key: value for key, value in TINY.items() if key != "decoder_channels"} if "nala" in name else {}
    names = set(timm.create_model(name, **options).state_dict())
    inside = set(make(f"semantic_fpn:{name}").backbone.state_dict())
    assert inside <= names
    # the head for classes of images is what is left
    assert all(each.startswith(("head.", "fc.", "projection.")) for each in names - inside)


def test_what_the_backbone_keeps_from_decay_is_kept_from_it():
    model = make("semantic_fpn:nalaformer_xt_linear", positions="every", img_size=32)
    named = model.no_weight_decay()
    assert len(named) >= 4
    assert named <= {name for name, _ in model.named_parameters()}
    assert make("semantic_fpn:resnet10t").no_weight_decay() == set()


def test_activations_computed_again_give_the_same_gradients():
    images = torch.randn(2, 3, 32, 32)
    gradients = []
    for again in (False, True):
        model = make(drop_path_rate=0.0)
        model.set_grad_checkpointing(again)
        torch.manual_seed(1)
        model(images)[0].square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_batch_without_statistics_is_refused_with_what_to_change():
    with pytest.raises(ValueError, match=r"more than one value per channel.*1 image of 70 x 64.*raise batch_size"):
        make("upernet:nalaformer_xt_linear")(torch.randn(1, 3, 70, 64))
    with pytest.raises(ValueError, match=r"1 image of 32 x 30.*or crop"):
        make()(torch.randn(1, 3, 32, 30))
    make()(torch.randn(1, 3, 64, 32))
    make("upernet:nalaformer_xt_linear").eval()(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nalaformer_t", {}, r"DECODER:BACKBONE.*got 'nalaformer_t'; for example 'semantic_fpn:nalaformer_t'"),
        ("upernets:nalaformer_t", {}, "did you mean 'upernet'"),
        ("upernet:nalaformer_tt", {}, "'nalaformer_tt' cannot be created"),
        ("upernet:vit_nala_tiny_patch16", {}, r"strides 4, 8, 16 and 32, got vit_nala_tiny_patch16 with \[16"),
        ("upernet:vit_tiny_patch16_224", {}, "choose a pyramid"),
        ("semantic_fpn:resnet10t", {"decoder_channels": 96}, "multiple of 64, got 96"),
    ],
)
def test_a_network_that_cannot_be_made_is_refused_with_the_rule(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_segmentation_network(name, classes=3, **options)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(ModuleNotFoundError, match=r"nalaformer\[segmentation\]"):
        import_smp()
