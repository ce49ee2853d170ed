"""Where a model comes from: settings are read from files too, and no file may make timm read another or ask the network."""

import re
from collections.abc import Mapping
from typing import Any

from ..field_types import check_side

# as timm lists its models: without the source before a colon, and without a path
LISTED = re.compile(r"[\w.-]+")
# what timm.create_model takes beside a model's own options: where weights are, and what they belong to
SOURCES = ("checkpoint_path", "cache_dir", "pretrained_cfg", "pretrained_cfg_overlay")


def check_model_source(kind: str, name: str, options: Mapping[str, Any]) -> None:
    """Refuse a name or an option of a task's model by which timm would read a file or ask the network.

    `pretrained` alone may stand there: it asks for the weights that timm itself names.
    """
    # of language: a size, or a local folder of which no code is run
    if kind == "language":
        return
    # of segmentation: DECODER:BACKBONE
    listed = name.split(":", 1)[-1] if kind == "segmentation" else name
    if not LISTED.fullmatch(listed):
        raise ValueError(
            f"a model must be named as timm lists it, got {listed!r}; name its architecture, and a file of weights with "
            "initial_weights="
        )
    for option in options:
        if option in SOURCES or option.startswith("pretrained_"):
            raise ValueError(
                f"model_options must not say where weights are read from, got {option}; name a file of weights with "
                "initial_weights=, of which nothing but tensors is read"
            )
    check_side("img_size", options.get("img_size"))
