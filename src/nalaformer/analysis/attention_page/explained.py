"""Explanations of a classifier's answers, drawn over each image for the page."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .. import explain
from .page import as_address
from .subject import Subject

if TYPE_CHECKING:
    from PIL.Image import Image

# methods of `explain`, and the meaning of their maps
SHOWN = (
    ("rollout", "attention through all layers"),
    ("decision_aware", "what speaks for the answer"),
)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One map over one image."""

    image: str
    """The name of the image."""
    method: str
    meaning: str
    picture: str
    """The image as a data URL."""
    largest: float
    """The share of the largest cell."""
    even: float
    """The share of every cell if all were equal."""

    def figure(self) -> str:
        """Return the explanation as HTML; names come from users and are escaped."""
        words = (
            f"{self.image}, {self.method.replace('_', '-')}: {self.meaning}. Largest cell {100 * self.largest:.2g}%, all alike "
            f"would be {100 * self.even:.2g}%."
        )
        told = html.escape(words)
        image = f'<img alt="{told}" src="{self.picture}">'
        return f'<figure class="plot">{image}<figcaption class="small">{told}</figcaption></figure>'


def explain_answers(subject: Subject, names: Sequence[str], images: Tensor) -> list[Explanation]:
    """Return explanations of a classifier for images [N, 3, H, W] as it takes them; none for a model without classes."""
    if not subject.names_classes:
        return []
    try:
        heats = [explain(subject.model, images, method=method).cpu() for method, _ in SHOWN]
    except ValueError as error:
        subject.notes.append(f"its answer is not explained: {error}")
        return []
    found = []
    for number, (name, pixels) in enumerate(zip(names, images, strict=True)):
        seen = subject.to_image(pixels)
        for (method, meaning), heat in zip(SHOWN, (each[number] for each in heats), strict=True):
            picture, largest, even = as_address(overlay_heat(seen, heat)), heat.max().item(), 1 / heat.numel()
            found.append(Explanation(image=name, method=method, meaning=meaning, picture=picture, largest=largest, even=even))
    return found


def overlay_heat(picture: "Image", heat: Tensor) -> "Image":
    """Draw the map [h, w] in color over the gray image, without smoothing."""
    from matplotlib import colormaps
    from PIL import Image

    shares = (heat / heat.max().clamp(min=1e-30)).to(torch.float32).numpy()
    colors = Image.fromarray((255 * colormaps["inferno"](shares)[..., :3]).astype(np.uint8))
    large = colors.resize(picture.size, Image.Resampling.NEAREST)
    return Image.blend(picture.convert("L").convert("RGB"), large, 0.7)
