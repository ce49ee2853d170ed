"""The Inception network of FID: the one of 2015 that was published with TensorFlow, from its well-known port to torch."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...published import read

FILE = "pt_inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
"""The checksum of that file, also known as weights-inception-2015-12-05-6726825d.pth. Only its distance is called FID."""
CLASSES = 1008
SIDE = 299


class Inception(nn.Module):
    """uint8 [B, 3, H, W] -> features [B, 2048], as the published graph: its resizing, its range, its pooling."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import Inception3

        self.network: Any = Inception3(num_classes=CLASSES, aux_logits=False, init_weights=False)
        average = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
        for block in self.network.children():
            if hasattr(block, "branch_pool"):
                pool_by(block, average)
        # only its last block takes the maximum
        pool_by(self.network.Mixed_7c, partial(F.max_pool2d, kernel_size=3, stride=1, padding=1))

    def load(self, weights: dict[str, Tensor], source: str | Path) -> None:
        """The weights in the names of the port, each of them."""
        wanted = {name: value.shape for name, value in self.network.state_dict().items() if not is_counter(name)}
        given = {name: value.shape for name, value in weights.items() if not is_counter(name)}
        odd = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
        if odd:
            raise ValueError(
                f"an extractor file must hold the weights of {FILE}, got {source}, which differs in {len(odd)} tensors: "
                f"{', '.join(odd[:3])}; name that file, or the run of a classifier of this library"
            )
        self.network.load_state_dict(weights, strict=False)

    def forward(self, images: Tensor) -> Tensor:
        network, x = self.network, (resize(images.float(), SIDE) - 128) / 128
        for name, layer in network.named_children():
            if name == "dropout":
                return x.flatten(1)
            x = layer(x)
        raise AssertionError("torchvision's Inception3 has no dropout before its classifier")


def is_counter(name: str) -> bool:
    """Whether it counts the batches of training; old files have none."""
    return name.endswith("num_batches_tracked")


def pool_by(block: Any, pool: Callable[[Tensor], Tensor]) -> None:
    """Give a block's last branch another pooling than torchvision's, whose averages count the border as zeros."""

    def forward(x: Tensor) -> Tensor:
        *branches, _ = branches_of(x)
        return torch.cat([*branches, block.branch_pool(pool(x))], dim=1)

    branches_of = block._forward
    block.forward = forward


def resize(images: Tensor, side: int) -> Tensor:
    """[B, C, H, W] -> [B, C, side, side], bilinear as TensorFlow 1 does it: pixel i lies at i * length / side."""
    for dim in (2, 3):
        length = images.shape[dim]
        places = torch.arange(side, device=images.device, dtype=torch.float32) * (length / side)
        before = places.floor().long().clamp(max=length - 1)
        after = (before + 1).clamp(max=length - 1)
        weight = (places - before).view(-1, *(1,) * (3 - dim))
        images = images.index_select(dim, before) * (1 - weight) + images.index_select(dim, after) * weight
    return images


def load_inception(path: str | Path) -> tuple[Inception, bool]:
    """The network with the weights of a file, and whether the file is the one that FID is defined by."""
    model = Inception()
    model.load(dict(read(path)), path)
    with Path(path).open("rb") as file:
        is_published = hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return model.eval().requires_grad_(False), is_published
