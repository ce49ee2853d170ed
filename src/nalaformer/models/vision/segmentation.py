"""Semantic segmentation networks: any timm backbone with a pyramid under the decoders of segmentation_models_pytorch."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...registry import unknown_name
from .features import exempt_from_decay, network_of

# pixels per side of a token of the coarsest features
MULTIPLE = 32
DECODERS = {"semantic_fpn": "FPN", "upernet": "UPerNet"}
AUXILIARY_CHANNELS = 256


class SegmentationNetwork(nn.Module):
    """Segment images of any size, [B, 3, H, W] -> logits [B, classes, H, W]; training adds those of the auxiliary head.

    network: a model of segmentation_models_pytorch; sides are zero-padded to multiples of 32 and cropped back.
    auxiliary_channels: width of the head on the second-coarsest features (3x3 convolution, BatchNorm, ReLU, 1x1); 0: no head.
    """

    def __init__(self, network: nn.Module, *, classes: int, auxiliary_channels: int = 0) -> None:
        super().__init__()
        self.network = network
        self.auxiliary: nn.Module | None = None
        if auxiliary_channels:
            features: int = network.encoder.out_channels[-2]  # type: ignore[union-attr, index, assignment]
            self.auxiliary = nn.Sequential(
                nn.Conv2d(features, auxiliary_channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(auxiliary_channels),
                nn.ReLU(inplace=True),
                nn.Dropout2d(0.1),
                nn.Conv2d(auxiliary_channels, classes, 1),
            )

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, and in training those of the auxiliary head if there is one."""
        height, width = images.shape[-2:]
        padded = F.pad(images, (0, -width % MULTIPLE, 0, -height % MULTIPLE))
        try:
            found = self._logits(padded)
        except ValueError as error:
            if "Expected more than 1 value per channel" not in str(error):
                raise
            # UPerNet pools an image to one token, and a crop of 32 pixels has only one
            raise ValueError(
                f"BatchNorm needs more than one value per channel in training, got {len(images)} image of {height} x {width} "
                "at once; raise batch_size (over ranks x accumulate) or crop, or choose the decoder semantic_fpn"
            ) from error
        return tuple(logits[..., :height, :width] for logits in found)

    def _logits(self, images: Tensor) -> list[Tensor]:
        network: Any = self.network
        features = network.encoder(images)
        found = [network.segmentation_head(network.decoder(features))]
        if self.auxiliary is not None and self.training:
            found.append(F.interpolate(self.auxiliary(features[-2]), images.shape[-2:], mode="bilinear", align_corners=False))
        return found

    @property
    def backbone(self) -> nn.Module:
        """The timm model inside, with the names of its checkpoints."""
        network: Any = self.network
        return network_of(network.encoder.model)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)  # type: ignore[operator]

    def no_weight_decay(self) -> set[str]:
        return exempt_from_decay(self, self.backbone)


def create_segmentation_network(
    name: str, *, classes: int, decoder_channels: int = 256, **backbone_options: Any
) -> SegmentationNetwork:
    """Build the network DECODER:BACKBONE, such as "upernet:nalaformer_t", with random weights.

    Decoders: "semantic_fpn" (Kirillov et al. 2019) and "upernet" (Xiao et al. 2018), the latter with an auxiliary head.
    decoder_channels: of their pyramids; backbone_options: options of timm.create_model, and `attention` for ours.
    """
    decoder, colon, backbone = name.partition(":")
    if not colon:
        raise ValueError(
            f"model must be DECODER:BACKBONE with a decoder of {', '.join(DECODERS)}, got {name!r}; for example "
            f"{'semantic_fpn:' + name!r}"
        )
    if decoder not in DECODERS:
        raise unknown_name("decoder", decoder, DECODERS)
    if decoder_channels < 64 or decoder_channels % 64:
        raise ValueError(f"decoder_channels must be a multiple of 64, got {decoder_channels}")
    smp = import_smp()
    if decoder == "semantic_fpn":
        # its GroupNorms have 32 groups, and a group of one channel cannot be normalized over a single token
        segmentation_channels = max(decoder_channels // 2, 64)
        options: dict[str, Any] = {"decoder_pyramid_channels": decoder_channels, "decoder_dropout": 0.1}
        options |= {"decoder_segmentation_channels": segmentation_channels}
    else:
        options = {"decoder_channels": decoder_channels}
    check_pyramid(backbone)
    network = getattr(smp, DECODERS[decoder])(
        f"tu-{backbone}", encoder_weights=None, classes=classes, **options, **backbone_options
    )
    has_head = decoder == "upernet"
    return SegmentationNetwork(network, classes=classes, auxiliary_channels=AUXILIARY_CHANNELS if has_head else 0)


def check_pyramid(backbone: str) -> None:
    """Check that the backbone has the strides 4, 8, 16 and 32, which the decoders need."""
    import timm
    import torch

    try:
        with torch.device("meta"):
            features: Any = timm.create_model(backbone, features_only=True)
            strides = features.feature_info.reduction()
    # timm raises these if it has no such model, or none with features
    except (RuntimeError, AttributeError) as error:
        raise ValueError(f"the backbone {backbone!r} cannot be created: {error}") from error
    if strides[-4:] != [4, 8, 16, 32]:
        raise ValueError(
            f"a backbone must have features at strides 4, 8, 16 and 32, got {backbone} with {strides}; choose a pyramid such "
            "as nalaformer_t or resnet50"
        )


def import_smp() -> Any:
    try:
        import segmentation_models_pytorch
    except ModuleNotFoundError as error:
        if error.name != "segmentation_models_pytorch":
            raise
        raise ModuleNotFoundError(
            "segmentation needs segmentation_models_pytorch: pip install 'nalaformer[segmentation]'", name=error.name
        ) from error
    return segmentation_models_pytorch
