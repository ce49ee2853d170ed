"""Files of weights, read without running code."""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

# under which key training programs keep the weights of a checkpoint: the averaged ones are those that were evaluated
INSIDE = ("ema", "state_dict_ema", "model_ema", "state_dict", "model")
# how training programs keep their settings beside the weights: plain containers, read as such and then left aside
SETTINGS = [Namespace, (OrderedDict, "yacs.config.CfgNode")]
# what distributed training and torch.compile put in front of names
FRONTS = ("module.", "_orig_mod.")


def read(path: str | Path) -> dict[str, Tensor]:
    """The weights in a checkpoint file: safetensors, or a .pth file of which nothing but tensors is read, never code.

    Names lose what distributed training and torch.compile put in front of them.
    """
    found = read_as_stored(Path(path))
    for front in FRONTS:
        found = {name.removeprefix(front): value for name, value in found.items()}
    return found


def read_as_stored(path: Path) -> dict[str, Tensor]:
    """The same by the names of the file."""
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} must be a whole safetensors file, got a damaged one: {error}; fetch it again") from error
    try:
        with torch.serialization.safe_globals(SETTINGS):  # type: ignore[arg-type]
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as weights alone: {reason_of(path, error)}; "
            "a file that holds other objects would run their code, so save its state dict anew where you trust it"
        ) from error
    return weights_in(content, str(path))


def weights_in(content: Any, where: str) -> dict[str, Tensor]:
    """The state dict that a checkpoint is or holds; where: what errors call it."""
    for key in INSIDE:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{where} must hold a state dict, or one under {', '.join(INSIDE)}; got {type(content).__name__}")
    return dict(content)


def reason_of(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        start = file.read(2)
    # a zip archive, or a pickle with its version: what torch.save writes
    if start not in (b"PK", b"\x80\x02"):
        return "it is no file of torch.save"
    return " ".join(str(error).split())[:200]
