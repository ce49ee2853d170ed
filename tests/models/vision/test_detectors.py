"""Detectors around backbones: any backbone, any sizes of images, every option by its effect."""

import copy
from dataclasses import fields

import pytest
import torch
from torch import nn

from helpers.option_effects import Effects
from nalaformer.models.vision.detectors import DetectorConfig, build_detector, paste

pytestmark = pytest.mark.usefixtures("one_thread")
EFFECTS = Effects(field.name for field in fields(DetectorConfig))
BACKBONE = {
    "embed_dims": [16, 16, 24, 32],
    "depths": [1] * 4,
    "num_heads": [1, 1, 1, 2],
    "mlp_ratios": 1,
    "drop_path_rate": 0.0,
}
SMALL = {"channels": 16, "smallest_anchor": 12, "hidden": 16, "proposals": 20, "regions": 16, "detections": 10}
KINDS = ("retinanet", "mask_rcnn")
# sides that no stride divides
IMAGES = [torch.rand(3, 70, 45, generator=torch.Generator().manual_seed(0)), torch.rand(3, 41, 66)]


def make(kind="retinanet", *, name="nalaformer_xt", backbone=BACKBONE, **options):
    torch.manual_seed(0)
    return build_detector(DetectorConfig(kind=kind, **({"classes": 3} | SMALL | options)), name, backbone)


def targets(labels=(2,)):
    objects = [
        {
            "boxes": torch.tensor([[5.0, 8.0, 30.0, 40.0]] * len(labels)).reshape(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "masks": torch.zeros(len(labels), *image.shape[1:], dtype=torch.uint8),
        }
        for image in IMAGES
    ]
    for each in objects:
        each["masks"][:, 8:40, 5:30] = 1
    return objects


def test_no_option_is_without_a_test_of_its_effect():
    assert EFFECTS.missing() == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nalaformer_xt", BACKBONE),
        ("nalaformer_xt", BACKBONE | {"attention": "softmax"}),
        ("vit_nala_tiny_patch16", {"embed_dims": [16] * 4, "depths": [1] * 4, "num_heads": 2}),
        # five stages, of which the first is not used; batch norm; channels last
        ("test_resnet", {}),
        ("test_vit", {"dynamic_img_size": True}),
        (
            "swin_tiny_patch4_window7_224",
            {"embed_dim": 8, "num_heads": (1, 1, 1, 1), "depths": (1,) * 4, "strict_img_size": False},
        ),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_of_any_backbone_learns_from_images_of_any_size(kind, name, options):
    detector = make(kind, name=name, backbone=options)
    losses = detector(IMAGES, targets())
    sum(losses.values()).backward()
    assert [name for name, parameter in detector.named_parameters() if parameter.grad is None] == []
    detector.eval()
    for found, image in zip(detector(IMAGES), IMAGES, strict=True):
        assert (found["boxes"] <= torch.tensor([image.shape[2], image.shape[1]] * 2)).all()
        assert ((found["labels"] >= 0) & (found["labels"] < 3)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_images_without_objects_are_learned_from(kind):
    detector = make(kind)
    losses = detector(IMAGES, targets(labels=()))
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    # ranks must agree on which parameters have gradients
    assert all(parameter.grad is not None for parameter in detector.parameters())


def test_an_image_keeps_its_size_and_is_padded_to_whole_cells():
    detector = make()
    seen = []
    detector.network.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    detector.eval()(IMAGES[:1])
    assert seen[0].shape == (1, 3, 96, 64)
    assert (seen[0][..., 70:, :] == 0).all()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(seen[0][0, :, 10, 20], (IMAGES[0][:, 10, 20] - mean) / std)


def test_regions_are_pooled_by_the_strides_of_the_backbone():
    """torchvision would guess them from the first batch, and a stride of 32 wrongly from an image of 41 x 66."""
    detector = make("mask_rcnn").eval()
    detector([IMAGES[1]])
    assert detector.network.roi_heads.box_roi_pool.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32]


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_keep_their_precision_under_autocast(kind):
    detector = make(kind)
    with torch.autocast("cpu", torch.bfloat16):
        losses = detector(IMAGES, targets())
        assert {loss.dtype for loss in losses.values()} == {torch.float32}
        (found, _) = detector.eval()(IMAGES)
    assert found["boxes"].dtype == torch.float32


def test_a_copy_is_independent():
    """The moving average of the weights is one."""
    detector = make("mask_rcnn").eval()
    twin = copy.deepcopy(detector)
    before = detector(IMAGES[:1])[0]["scores"]
    with torch.no_grad():
        for parameter in detector.parameters():
            parameter.zero_()
    assert torch.equal(twin(IMAGES[:1])[0]["scores"], before)


def test_weight_decay_spares_what_the_backbone_names():
    exempt = make(backbone=BACKBONE | {"positions": "first"}).no_weight_decay()
    names = dict(make(backbone=BACKBONE | {"positions": "first"}).named_parameters())
    assert exempt
    assert exempt <= names.keys()


def test_activations_can_be_computed_again():
    detector = make()
    detector.set_grad_checkpointing()
    assert all(stage.grad_checkpointing for stage in detector.backbone.stages)


def test_the_backbone_has_the_names_of_its_own_weights():
    import timm

    alone = timm.create_model("nalaformer_xt", **BACKBONE)
    missing, unexpected = make().backbone.load_state_dict(alone.state_dict(), strict=False)
    assert missing == []
    assert {name.split(".")[0] for name in unexpected} <= {"head", "projection"}


def test_a_mask_is_pasted_into_its_box():
    mask = torch.ones(1, 28, 28)
    pasted = paste(mask, torch.tensor([[10.0, 5.0, 30.0, 25.0]]), (40, 50))
    assert pasted.shape == (1, 40, 50)
    assert pasted.dtype == torch.bool
    assert pasted[0, 6:24, 11:29].all()
    assert pasted.sum() <= 22 * 22
    assert paste(mask[:0], torch.zeros(0, 4), (4, 5)).shape == (0, 4, 5)


def test_an_unknown_backbone_is_refused_by_name():
    with pytest.raises(ValueError, match="no_such_backbone"):
        make(name="no_such_backbone", backbone={})


# ---- options


@EFFECTS.of("kind", "classes")
def test_kind_and_classes_shape_the_answers():
    assert make("retinanet")(IMAGES, targets()).keys() == {"classification", "bbox_regression"}
    assert make("mask_rcnn")(IMAGES, targets()).keys() == {"classifier", "box_reg", "mask", "objectness", "rpn_box_reg"}
    assert make("retinanet", classes=5).network.head.classification_head.num_classes == 5
    # and background
    assert make("mask_rcnn", classes=5).network.roi_heads.box_predictor.cls_score.out_features == 6
    with pytest.raises(ValueError, match="retinanett"):
        make("retinanett")


@EFFECTS.of("channels")
def test_the_pyramid_has_so_many_channels():
    for channels in (16, 24):
        levels = make(channels=channels).network.backbone(torch.rand(1, 3, 64, 64))
        assert {level.shape[1] for level in levels.values()} == {channels}


@EFFECTS.of("smallest_anchor")
def test_the_finest_anchors_have_this_side():
    for kind in KINDS:
        network = make(kind, smallest_anchor=20).network
        generator = network.anchor_generator if kind == "retinanet" else network.rpn.anchor_generator
        assert [sides[0] for sides in generator.sizes] == [20, 40, 80, 160, 320]


@EFFECTS.of("head_norm")
def test_heads_are_normalised_if_asked():
    for kind in KINDS:
        plain, normed = (
            sum(isinstance(module, nn.GroupNorm) for module in make(kind, head_norm=head_norm).modules())
            for head_norm in (False, True)
        )
        assert plain == 0 < normed
    with pytest.raises(ValueError, match="multiple of 8"):
        make(head_norm=True, channels=12)


@EFFECTS.of("head_layers")
def test_the_heads_have_so_many_convolutions():
    for layers in (1, 3):
        head = make(head_layers=layers).network.head
        for part in (head.classification_head, head.regression_head):
            # and the one that answers
            assert sum(isinstance(module, nn.Conv2d) for module in part.modules()) == layers + 1
    with pytest.raises(ValueError, match="head_layers must be 1 to 4, got 5"):
        make(head_layers=5)


@EFFECTS.of("frozen_statistics")
def test_statistics_of_the_backbone_stay_if_asked():
    for frozen in (False, True):
        detector = make(frozen_statistics=frozen).train()
        before = {name: value.clone() for name, value in detector.named_buffers() if "running" in name}
        detector(IMAGES, targets())
        same = [torch.equal(value, before[name]) for name, value in detector.named_buffers() if name in before]
        assert same
        assert all(same) is frozen


@EFFECTS.of("hidden", "proposals", "regions")
def test_the_second_look_has_its_sizes():
    network = make("mask_rcnn", hidden=24, proposals=7, regions=5).network
    assert network.roi_heads.box_head.fc7.out_features == 24
    seen = []
    network.roi_heads.box_head.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    network([IMAGES[0]], [targets(labels=(1,))[0] | {"labels": torch.tensor([1])}])
    network.eval()([IMAGES[0]])
    assert seen[0] <= 5
    # of each level, so the first level's alone
    assert seen[1] <= 7


@EFFECTS.of("detections")
def test_so_many_objects_are_found_at_most():
    for most in (3, 6):
        detector = make("mask_rcnn", detections=most).eval()
        detector.network.roi_heads.score_thresh = 0.0
        assert len(detector(IMAGES[:1])[0]["scores"]) == most


@pytest.mark.parametrize("name", ["classes", "channels", "smallest_anchor", "hidden", "proposals", "regions", "detections"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        DetectorConfig(**{"kind": "retinanet", "classes": 1} | {name: 0})
