"""The logits of an image at once or in sliding windows, and the labels that follow from them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# classes that are resized at once: a photograph of 12 megapixels with 150 of them would take 7 GB
CLASSES_AT_ONCE = 16


def logits_in_windows(model: nn.Module, images: Tensor, *, window: int = 0, stride: int = 0) -> Tensor:
    """Images [B, 3, H, W] -> logits [B, classes, H, W], the mean over the windows that see a pixel.

    window: side of the windows, the last of a row or column moved back to end with the image; 0: the whole image.
    stride: pixels between windows; 0: two thirds of a window.
    """
    height, width = images.shape[-2:]
    if not window:
        return model(images)[0].float()
    stride = stride or max(1, 2 * window // 3)
    total, counts = None, images.new_zeros(height, width)
    for top in starts(height, window, stride):
        for left in starts(width, window, stride):
            place = (..., slice(top, top + window), slice(left, left + window))
            logits = model(images[place])[0].float()
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], height, width)
            total[place] += logits
            counts[place] += 1
    assert total is not None
    return total / counts


def starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin along a side of that length."""
    last = max(length - window, 0)
    return [*range(0, last, stride), last]


def label_pixels(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Logits [B, classes, H, W] -> the likeliest label [B, *size], after resizing the logits."""
    best: Tensor | None = None
    labels = torch.zeros(len(logits), *size, dtype=torch.long, device=logits.device)
    for first in range(0, logits.shape[1], CLASSES_AT_ONCE):
        some = logits[:, first : first + CLASSES_AT_ONCE]
        if some.shape[-2:] != size:
            some = F.interpolate(some, size, mode="bilinear", align_corners=False)
        value, label = some.max(dim=1)
        if best is None:
            best, labels = value, label
            continue
        is_better = value > best
        best, labels = torch.where(is_better, value, best), torch.where(is_better, label + first, labels)
    return labels
