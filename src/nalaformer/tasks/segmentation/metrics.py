"""Mean intersection over union, from the confusion matrix of the whole data set."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...data.segmentation import IGNORED, stack_equal
from ..base import SummedMetrics
from .windows import label_pixels, logits_in_windows


class ConfusionMatrix(SummedMetrics):
    """IoU_c = TP_c / (TP_c + FP_c + FN_c) over all pixels of all images, averaged over classes.

    A class that no mask has and no answer names has no IoU: it is left out of the mean, and counted in classes_left_out.
    """

    def __init__(self, classes: int, *, window: int = 0, stride: int = 0, names: Sequence[str] = ()) -> None:
        self.classes, self.window, self.stride, self.names = classes, window, stride, names
        # pixels by label and answer
        self.sums = torch.zeros(classes, classes, dtype=torch.float64)

    def update(self, model: nn.Module, batch: tuple[list[Tensor], list[Tensor]]) -> None:
        images, labels = batch
        for stack, places in stack_equal(images):
            logits = logits_in_windows(model, stack, window=self.window, stride=self.stride)
            for row, place in enumerate(places):
                size = (labels[place].shape[0], labels[place].shape[1])
                self.add(label_pixels(logits[row : row + 1], size)[0], labels[place])

    def add(self, answers: Tensor, labels: Tensor) -> None:
        """Count the pixels of one image, [H, W] each."""
        counted = labels != IGNORED
        pairs = labels[counted].long() * self.classes + answers[counted]
        counts = torch.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)
        self.sums += counts.double().cpu()

    def by_class(self) -> Tensor:
        """IoU of each class, [classes]; NaN where it never occurs."""
        right = self.sums.diag()
        return right / (self.sums.sum(0) + self.sums.sum(1) - right)

    def details(self) -> dict[str, float]:
        """The IoU of each class that occurs, by its name."""
        found = zip(self.names, self.by_class().tolist(), strict=False)
        return {f"iou, {name}": value for name, value in found if not math.isnan(value)}

    def result(self) -> dict[str, float]:
        pixels = self.sums.sum().item()
        if not pixels:
            raise ValueError("mIoU needs at least one labelled pixel, got none in images that could be read")
        each = self.by_class()
        return {
            "miou": each.nanmean().item(),
            "pixel_accuracy": self.sums.trace().item() / pixels,
            "classes_left_out": float(each.isnan().sum()),
            "pixels": pixels,
        }
