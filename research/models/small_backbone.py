"""A backbone of the size of the small models."""

from typing import Any

from torch import Tensor, nn

from .attention import plain_method
from .parts import SEQUENCE_MODELS


@SEQUENCE_MODELS.register("small_backbone")
class SmallBackbone(nn.Module):
    """A backbone as users train them, on small grey images [B, height, width]: patches, two stages with convolutions around
    attention, the second at half the resolution. Needs timm.
    """

    def __init__(
        self,
        *,
        answers: str,
        outputs: int,
        length: int,
        vocabulary: int = 0,
        channels: int = 0,
        is_padded: bool = False,
        attention: str = "nalaformer",
        attention_options: dict[str, Any] | None = None,
        embed_dims: tuple[int, ...] = (64, 128),
        depths: tuple[int, ...] = (2, 2),
        num_heads: tuple[int, ...] = (2, 4),
        patch_size: int = 2,
        drop_path_rate: float = 0.1,
    ) -> None:
        super().__init__()
        if answers != "sequence" or not channels:
            raise ValueError(
                f"a backbone names the class of an image, got answers={answers!r} and {vocabulary} tokens; use "
                "sequence_classifier, or data with rows of pixels, such as image_rows"
            )
        # imported where used: timm is an extra
        from nalaformer.models.vision.backbone import Backbone
        from nalaformer.models.vision.config import BackboneConfig

        method, options = plain_method(attention, attention_options or {})
        config = BackboneConfig(
            family="nalaformer",
            embed_dims=tuple(embed_dims),
            depths=tuple(depths),
            num_heads=tuple(num_heads),
            attention=method,
            attention_options=options,
            attention_stages="l" * len(depths),
            stem="patches",
            patch_size=patch_size,
            projection=None,
            final_norm=True,
            img_size=(length, channels),
            drop_path_rate=drop_path_rate,
        )
        self.backbone = Backbone(config, num_classes=outputs, in_chans=1)
        self.image_size = (length, channels)

    @property
    def multiply_adds(self) -> int:
        """Count the multiply-adds of one image, at which models are compared."""
        from nalaformer.models.vision.multiply_adds import count_multiply_adds

        return count_multiply_adds(self.backbone, self.image_size)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, height, width] -> [B, outputs]."""
        return self.backbone(inputs.unsqueeze(1))
