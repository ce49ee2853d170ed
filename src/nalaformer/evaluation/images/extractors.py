"""Networks by whose features images are compared."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .inception import FILE, load_inception

if TYPE_CHECKING:
    from PIL.Image import Image

Observed = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """A network with a name, which every figure that comes of it bears."""

    name: str
    observe: Callable[[Tensor], Observed]
    """uint8 [B, 3, H, W] -> features [B, F], and of a classifier also logits [B, classes]."""
    class_names: tuple[str, ...] = ()
    """The classes of a classifier, in the order of its logits."""
    is_fid: bool = False
    """Whether it is the network by which FID and KID are defined."""

    @torch.no_grad()
    def run(self, images: Tensor, *, batch_size: int = 64, advance: Callable[[int], object] | None = None) -> Observed:
        """Features of all images, float32 on the CPU, and logits where it has some."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        features, logits = [], []
        for part in images.split(batch_size):
            found, of_classes = self.observe(part)
            features.append(found.float().cpu())
            if of_classes is not None:
                logits.append(of_classes.float().cpu())
            if advance is not None:
                advance(len(part))
        return torch.cat(features), torch.cat(logits) if logits else None


def inception_extractor(path: str | Path, *, device: str | torch.device = "cpu") -> Extractor:
    """The Inception of a file; only with the published file are its distances FID and KID."""
    if not Path(path).is_file():
        raise ValueError(
            f"an extractor must be a file of weights or the folder of a classifier's run, got {path}, which is none; give the "
            f"path of {FILE}, or train a classifier with `nalaformer train images`"
        )
    model, is_published = load_inception(path)
    model.to(device)
    name = FILE if is_published else Path(path).name
    return Extractor(name=name, observe=lambda images: (model(images.to(device)), None), is_fid=is_published)


def classifier_extractor(
    model: nn.Module, prepare: "Callable[[Image], Tensor]", *, class_names: list[str], name: str
) -> Extractor:
    """A classifier of timm's kind, such as a run's: its features are what its last layer sees.

    prepare: from an RGB image to its input [3, h, w]; a run's task has it.
    """
    from PIL import Image

    network: Any = model.eval()
    device = next(network.parameters()).device

    def observe(images: Tensor) -> Observed:
        pixels = images.permute(0, 2, 3, 1).cpu().numpy()
        batch = torch.stack([prepare(Image.fromarray(each)) for each in pixels]).to(device)
        features = network.forward_head(network.forward_features(batch), pre_logits=True)
        return features, network.get_classifier()(features)

    return Extractor(name=name, observe=observe, class_names=tuple(class_names))
