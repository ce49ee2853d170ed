"""Settings of segmentation: for training, and for prediction."""

from dataclasses import dataclass

from ...field_types import check_field_types, check_ranges

SCENES = "scenes"


@dataclass(frozen=True, kw_only=True)
class SegmentationConfig:
    """Which images and masks, how they are learned, and how they are evaluated."""

    data: str
    """A folder in the layout of ADE20K, of Cityscapes or the plain one (images/train, masks/train, ...), or "scenes"."""
    binary: bool = False
    """Masks of the plain layout have two classes: 0 is background, any other id (255 too) is the object."""
    generated_folder: str = "runs/data"
    """Where generated scenes are written, once; they are read like any other data."""
    holdout: float = 0.0
    """Share of the images that is held out for evaluation where the folder has no val split; 0: it must have one."""
    data_seed: int = 0
    """Seed of generated scenes, and of which images are held out."""
    train_samples: int = 600
    """Generated scenes to learn from."""
    eval_samples: int = 100
    """Generated scenes of the eval split."""
    short_side: int = 0
    """Pixels of an image's short side before it is scaled at random or evaluated; 0: as the file has it."""
    crop: int = 512
    """Side of the crops to learn from, in pixels."""
    smallest_scale: float = 0.5
    """Least random scale of a training image."""
    largest_scale: float = 2.0
    """Largest random scale of a training image."""
    most_of_one_class: float = 0.75
    """A crop in which one class has a larger part of the labelled pixels is drawn again, up to ten times; 1: never."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    color_jitter: float = 0.0
    """Strength of random brightness, contrast, saturation, and a fourth of it of hue; 0: none."""
    auxiliary_weight: float = 0.4
    """The factor of the auxiliary head's loss; the decoder's has 1. Models without such a head have no such loss."""
    window: int = 0
    """Side of the windows that evaluation slides over an image, logits averaged where they overlap; 0: the whole image."""
    window_stride: int = 0
    """Pixels between windows; 0: two thirds of a window."""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_ranges(
            self,
            positive=("train_samples", "eval_samples", "crop"),
            not_negative=("data_seed", "short_side", "color_jitter", "auxiliary_weight", "window", "window_stride"),
            shares=("flip",),
            sides=("short_side", "crop", "window"),
            below_one=("holdout",),
        )
        if not 0 < self.smallest_scale <= self.largest_scale:
            raise ValueError(
                f"smallest_scale must be above 0 and at most largest_scale, got {self.smallest_scale} and {self.largest_scale}"
            )
        if not 0 < self.most_of_one_class <= 1:
            raise ValueError(f"most_of_one_class must be above 0 and at most 1, got {self.most_of_one_class}")
        check_stride(self.window, self.window_stride)


@dataclass(frozen=True, kw_only=True)
class SegmentationAnswers:
    """What may be chosen when a model names pixels."""

    window: int = -1
    """Side of sliding windows in pixels; 0: the whole image; -1: as the run evaluates."""
    window_stride: int = 0
    """Pixels between windows; 0: two thirds of a window."""
    opacity: float = 0.6
    """How opaque the colours of the classes lie over the image."""
    legend: bool = True
    """Names of the classes beside the picture."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.window < -1 or self.window_stride < 0:
            raise ValueError(
                f"window must be at least -1 and window_stride at least 0, got {self.window} and {self.window_stride}"
            )
        check_ranges(self, shares=("opacity",))
        check_stride(self.window, self.window_stride)


def check_stride(window: int, stride: int) -> None:
    if 0 < window < stride:
        raise ValueError(f"window_stride must be at most window, or pixels are left out, got {stride} and {window}")
