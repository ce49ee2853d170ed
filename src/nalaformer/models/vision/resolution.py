"""The stem and downsampling layers, for any height and width."""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from .config import BackboneConfig


def make_stem(config: BackboneConfig, in_chans: int) -> nn.Sequential:
    """Build the stem, [B, in_chans, H, W] -> [B, C, ceil(H / stride), ceil(W / stride)]."""
    dim = config.embed_dims[0]
    if config.stem == "patches":
        norm = [ChannelNorm(dim, eps=1e-5)] if config.stem_norm else []
        return nn.Sequential(PatchConv(in_chans, dim, config.patch_size), *norm)
    half = dim // 2
    layers: list[nn.Module] = []
    for channels_in, channels_out, stride in ((in_chans, half, 2), (half, half, 1), (half, half, 1), (half, dim, 2)):
        layers += [nn.Conv2d(channels_in, channels_out, 3, stride, 1), nn.BatchNorm2d(channels_out), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def make_downsampling(kind: str, dim_in: int, dim_out: int) -> nn.Module:
    """Build a downsampling layer, [B, C, H, W] -> [B, C', ceil(H / 2), ceil(W / 2)]; "none" keeps both."""
    if kind == "convolution":
        return nn.Sequential(
            OrderedDict(reduction=nn.Conv2d(dim_in, dim_out, 3, stride=2, padding=1), norm=nn.BatchNorm2d(dim_out))
        )
    if kind == "patches":
        return nn.Sequential(OrderedDict(reduction=PatchConv(dim_in, dim_out, 2), norm=ChannelNorm(dim_out, eps=1e-5)))
    if kind == "merging":
        return PatchMerging(dim_in, dim_out)
    if dim_in != dim_out:
        raise ValueError(f'downsampling="none" keeps the channels, got stages of {dim_in} and {dim_out} channels')
    return nn.Identity()


class PatchConv(nn.Conv2d):
    """A convolution whose stride is its kernel size; an image that does not divide is zero-padded at its end."""

    def __init__(self, channels_in: int, channels_out: int, size: int) -> None:
        super().__init__(channels_in, channels_out, size, stride=size)

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(pad_to_multiple(image, self.kernel_size[0]))


class PatchMerging(nn.Module):
    """Swin's downsampling: concatenate the channels of four neighbors, LayerNorm, linear."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim_in)
        self.reduction = nn.Linear(4 * dim_in, dim_out, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        cells = pad_to_multiple(image, 2).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # [B, C, H/2, 2, W/2, 2]
        # column by column inside a cell, the published order of the weights' inputs
        neighbors = cells.permute(0, 2, 4, 5, 3, 1).flatten(3)  # [B, H/2, W/2, 4C]
        return self.reduction(self.norm(neighbors)).permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image [B, C, H, W]."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def pad_to_multiple(image: Tensor, size: int) -> Tensor:
    """Pad with zeros below and to the right, up to multiples of `size`."""
    return F.pad(image, (0, -image.shape[3] % size, 0, -image.shape[2] % size))
