"""torchvision's RetinaNet and Mask R-CNN over a feature pyramid on any timm backbone, ours included."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7
from torchvision.ops.poolers import LevelMapper

from ...field_types import check_field_types, check_ranges
from ...registry import unknown_name
from .features import exempt_from_decay, network_of

KINDS = ("retinanet", "mask_rcnn")
# height over width of the anchors, as published for both detectors
RATIOS = (0.5, 1.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """A detector around a backbone. The defaults are the published sizes."""

    kind: str
    """"retinanet" (boxes) or "mask_rcnn" (boxes and masks)."""
    classes: int
    """The number of object classes, without background."""
    channels: int = 256
    """Channels of the pyramid and the heads."""
    smallest_anchor: int = 32
    """Side in pixels of the anchors of the finest level; each level doubles it."""
    head_norm: bool = False
    """GroupNorm in the pyramid and in RetinaNet's heads, which training from scratch needs."""
    head_layers: int = 4
    """RetinaNet: convolutions before scores and offsets, 4 at most; small networks learn faster with one."""
    frozen_statistics: bool = False
    """Keep the initial statistics of the backbone's batch norms: for pre-trained weights and small batches."""
    hidden: int = 1024
    """Mask R-CNN: width of the two layers that classify a region."""
    proposals: int = 1000
    """Mask R-CNN: regions that are classified in evaluation; training draws from twice as many."""
    regions: int = 512
    """Mask R-CNN: regions of an image that a training step samples."""
    detections: int = 100
    """The largest number of objects found in an image."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.kind not in KINDS:
            raise unknown_name("detector", self.kind, KINDS)
        if not 1 <= self.head_layers <= 4:
            raise ValueError(f"head_layers must be 1 to 4, got {self.head_layers}")
        check_ranges(self, positive=("classes", "channels", "smallest_anchor", "hidden", "proposals", "regions", "detections"))
        if self.head_norm and self.channels % 8:
            raise ValueError(f"channels must be a multiple of 8 with head_norm, got {self.channels}")


def build_detector(config: DetectorConfig, backbone: str, options: dict[str, Any]) -> "Detector":
    """Build the detector on a timm backbone; options are the backbone's."""
    levels = 3 if config.kind == "retinanet" else 4
    try:
        # negative: the last ones, however many finer stages a backbone has
        body = timm.create_model(backbone, features_only=True, out_indices=tuple(range(-levels, 0)), **options)
    except (RuntimeError, IndexError, AssertionError) as error:
        raise ValueError(f"the backbone {backbone!r} cannot be created with {levels} levels of features: {error}") from error
    pyramid = Pyramid(body, config)
    network = retinanet(pyramid, config) if config.kind == "retinanet" else mask_rcnn(pyramid, config)
    cfg = getattr(body, "pretrained_cfg", None) or {}
    network.transform = AsGiven(mean=cfg.get("mean", (0.485, 0.456, 0.406)), std=cfg.get("std", (0.229, 0.224, 0.225)))
    return Detector(network, config)


class Detector(nn.Module):
    """Images of any sizes -> losses in training, detections in evaluation.

    images: list of [3, H, W] in 0..1. targets: for each a dictionary of `boxes` [N, 4] (x1, y1, x2, y2), `labels` [N] from 0,
    and for Mask R-CNN `masks` [N, H, W]. Detections: `boxes`, `labels`, `scores`, and for Mask R-CNN `masks` [N, 28, 28],
    probabilities over the box; `paste` puts them into an image.
    """

    def __init__(self, network: nn.Module, config: DetectorConfig) -> None:
        super().__init__()
        self.network, self.config = network, config
        # label 0 is the background in R-CNN, but not in RetinaNet
        self.first_label = 0 if config.kind == "retinanet" else 1
        for head in head_modules(network):
            head.register_forward_hook(in_float32)

    @property
    def backbone(self) -> nn.Module:
        """timm's network inside, without its classifier; its names are those of timm's checkpoints."""
        return network_of(cast(Any, self.network).backbone.body)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        if targets is not None:
            targets = [target | {"labels": target["labels"] + self.first_label} for target in targets]
        result = self.network(images, targets)
        if self.training:
            return {name.removeprefix("loss_"): value for name, value in result.items()}
        for found in result:
            found["labels"] = found["labels"] - self.first_label
            if "masks" in found:
                found["masks"] = found["masks"][:, 0]
        return result

    def train(self, mode: bool = True) -> "Detector":
        super().train(mode)
        if self.config.frozen_statistics:
            for module in self.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if not hasattr(self.backbone, "set_grad_checkpointing"):
            raise ValueError(f"checkpoint_activations needs a backbone that can, got {type(self.backbone).__name__}")
        cast(Any, self.backbone).set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        return exempt_from_decay(self, self.backbone)


class DenseRetinaNet(nn.Module):
    """Normalized images [B, 3, H, W], sides multiples of 32 -> boxes [B, A, 4] and scores [B, A, classes] of every anchor.

    Nothing is chosen among them, so that all sizes are known beforehand.
    """

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.network = cast(Any, detector.network)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        network, count = self.network, images.shape[0]
        features = list(network.backbone(images).values())
        found = network.head(features)
        # the same for every image
        (anchors,) = network.anchor_generator(ImageList(images, [(images.shape[2], images.shape[3])]), features)
        offsets = found["bbox_regression"]
        boxes = network.box_coder.decode_single(offsets.flatten(0, 1), anchors.repeat(count, 1)).unflatten(0, (count, -1))
        return boxes, found["cls_logits"].sigmoid()


class Pyramid(nn.Module):
    """A feature pyramid: images -> features of all levels with the same channels, {"0": [B, C, H / s, W / s], ...}."""

    def __init__(self, body: nn.Module, config: DetectorConfig) -> None:
        super().__init__()
        self.body, self.out_channels = body, config.channels
        features = cast(Any, body)
        self.strides: list[int] = features.feature_info.reduction()
        # Swin and similar networks return channels last
        self.is_channels_last = str(getattr(features, "output_fmt", "NCHW")).endswith("NHWC")
        last = LastLevelP6P7(config.channels, config.channels) if config.kind == "retinanet" else LastLevelMaxPool()
        self.fpn = FeaturePyramidNetwork(
            features.feature_info.channels(), config.channels, extra_blocks=last, norm_layer=norm_layer(config)
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.body(images)
        if self.is_channels_last:
            features = [level.permute(0, 3, 1, 2).contiguous() for level in features]
        return cast(dict[str, Tensor], self.fpn(OrderedDict((str(i), level) for i, level in enumerate(features))))


class AsGiven(GeneralizedRCNNTransform):
    """Normalize and pad images into a batch, without resizing them: the data decides their size."""

    def __init__(self, *, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(0, 0, list(mean), list(std))

    def resize(self, image: Tensor, target: Any = None) -> Any:
        return image, target

    def postprocess(self, result: Any, image_shapes: Any, original_image_sizes: Any) -> Any:
        # masks stay small until the caller pastes the needed ones
        return result


def retinanet(pyramid: Pyramid, config: DetectorConfig) -> nn.Module:
    sides = [config.smallest_anchor * 2**level for level in range(5)]
    anchors = AnchorGenerator(
        tuple((side, int(side * 2 ** (1 / 3)), int(side * 2 ** (2 / 3))) for side in sides), (RATIOS,) * len(sides)
    )
    head = RetinaNetHead(config.channels, anchors.num_anchors_per_location()[0], config.classes, norm_layer=norm_layer(config))
    for part in (head.classification_head, head.regression_head):
        part.conv = part.conv[: config.head_layers]
    return RetinaNet(pyramid, config.classes, anchor_generator=anchors, head=head, detections_per_img=config.detections)


def mask_rcnn(pyramid: Pyramid, config: DetectorConfig) -> nn.Module:
    channels, classes = config.channels, config.classes + 1
    sides = [config.smallest_anchor * 2**level for level in range(5)]
    return MaskRCNN(
        pyramid,
        rpn_anchor_generator=AnchorGenerator(tuple((side,) for side in sides), (RATIOS,) * len(sides)),
        rpn_pre_nms_top_n_train=2 * config.proposals,
        rpn_post_nms_top_n_train=2 * config.proposals,
        rpn_pre_nms_top_n_test=config.proposals,
        rpn_post_nms_top_n_test=config.proposals,
        box_roi_pool=region_pooling(pyramid, config, 7),
        box_head=TwoMLPHead(channels * 7**2, config.hidden),
        box_predictor=FastRCNNPredictor(config.hidden, classes),
        box_batch_size_per_image=config.regions,
        box_detections_per_img=config.detections,
        mask_roi_pool=region_pooling(pyramid, config, 14),
        mask_head=MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, classes),
    )


def region_pooling(pyramid: Pyramid, config: DetectorConfig, side: int) -> MultiScaleRoIAlign:
    """Return a pooling of regions to squares of features; the level follows from a region's size as for anchors."""
    pool = MultiScaleRoIAlign([str(level) for level in range(len(pyramid.strides))], side, sampling_ratio=2)
    # torchvision would infer the scales from the first batch, and wrongly from images of few pixels
    pool.scales = [1 / stride for stride in pyramid.strides]
    finest, coarsest = (stride.bit_length() - 1 for stride in (pyramid.strides[0], pyramid.strides[-1]))
    # published: 224 pixels belong to the third level if anchors begin at 32
    pool.map_levels = LevelMapper(finest, coarsest, canonical_scale=7 * config.smallest_anchor, canonical_level=finest + 2)
    return pool


def norm_layer(config: DetectorConfig) -> Any:
    return partial(nn.GroupNorm, 8) if config.head_norm else None


def head_modules(network: Any) -> list[nn.Module]:
    """Return the modules that compute scores, box offsets, and masks."""
    if isinstance(network, RetinaNet):
        return [network.head.classification_head, network.head.regression_head]
    return [network.rpn.head, network.roi_heads.box_predictor, network.roi_heads.mask_predictor]


def in_float32(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Cast outputs to float32: boxes have the dtype of their offsets, and bfloat16 cannot separate pixels of large images."""
    if isinstance(outputs, Tensor):
        return outputs.float()
    return type(outputs)(in_float32(module, inputs, part) for part in outputs)


def paste(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Paste masks [N, 28, 28] in 0..1 into their boxes, as a boolean image [N, H, W]."""
    pieces = [
        # 8 at once, since a hundred float images would be large
        paste_masks_in_image(masks[start : start + 8, None], boxes[start : start + 8], size)[:, 0] > 0.5
        for start in range(0, len(masks), 8)
    ]
    return torch.cat(pieces) if pieces else torch.zeros((0, *size), dtype=torch.bool, device=masks.device)
