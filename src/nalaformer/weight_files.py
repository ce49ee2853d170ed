"""Weight files, read without running code."""

import logging
import math
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

# keys under which training programs keep the weights of a checkpoint, the averaged weights first, since those were evaluated
INSIDE = ("ema", "state_dict_ema", "model_ema", "state_dict", "model")
# classes in which training programs keep their settings beside the weights; they are read as plain containers and ignored
SETTINGS = [Namespace, (OrderedDict, "yacs.config.CfgNode")]
# prefixes that distributed training and torch.compile add to names
FRONTS = ("module.", "_orig_mod.")
# the number of tensors that an error lists
MOST_NAMES = 5


def read(path: str | Path) -> dict[str, Tensor]:
    """Return the weights in a checkpoint: a safetensors file, or a .pth file, of which only tensors are read and no code runs.

    Prefixes of distributed training and torch.compile are removed from the names.
    """
    found = read_as_stored(Path(path))
    for front in FRONTS:
        found = {name.removeprefix(front): value for name, value in found.items()}
    return found


def read_as_stored(path: Path) -> dict[str, Tensor]:
    """Return the weights under the names in the file."""
    found = _read_tensors(path)
    check_finite(found, path)
    return found


def _read_tensors(path: Path) -> dict[str, Tensor]:
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
            f"{path} cannot be read as weights alone: {explain_read_error(path, error)}; "
            "a file that holds other objects would run their code, so save its state dict anew where you trust it"
        ) from error
    return weights_in(content, str(path))


def weights_in(content: Any, where: str) -> dict[str, Tensor]:
    """Return the state dict that a checkpoint is or holds; where: its name in errors."""
    for key in INSIDE:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{where} must hold a state dict, or one under {', '.join(INSIDE)}; got {type(content).__name__}")
    return dict(content)


def explain_read_error(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        start = file.read(2)
    # torch.save writes a zip archive, or a pickle with its version
    if start not in (b"PK", b"\x80\x02"):
        return "it is no file of torch.save"
    return " ".join(str(error).split())[:200]


def check_finite(tensors: Mapping[str, Tensor], where: str | PathLike[str]) -> None:
    """Reject weights with NaN or infinity, in one pass and without a copy."""
    for name, tensor in tensors.items():
        # whole numbers are finite, and torch has no minimum for one-byte types
        if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point() or tensor.element_size() == 1:
            continue
        if not all(math.isfinite(end) for end in torch.stack(torch.aminmax(tensor.detach())).tolist()):
            raise ValueError(
                f"weights must be finite, got NaN or infinity in {name} of {where}; fetch or make the weights again"
            )


def check_names(missing: Iterable[str], unexpected: Iterable[str], where: str | PathLike[str]) -> None:
    """Reject weights that lack tensors of their model, which would stay random, or have tensors that it does not know."""
    lacks, has = sorted(missing), sorted(unexpected)
    if lacks or has:
        found = [f"none for {_some(lacks)}"] * bool(lacks) + [f"others: {_some(has)}"] * bool(has)
        raise ValueError(
            f"the weights must be those of this model, got {' and '.join(found)} in {where}; fetch or save the whole model "
            "again"
        )


def load_all(model: nn.Module, tensors: Mapping[str, Tensor], where: str | PathLike[str]) -> None:
    """Load weights that must match the model's tensors one to one; tied weights may have been saved once."""
    check_finite(tensors, where)
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        words = " ".join(str(error).split())[:300]
        raise ValueError(f"the weights of {where} must have the shapes of this model: {words}") from error
    places = model.state_dict(keep_vars=True)
    loaded = {id(value) for name, value in places.items() if name in tensors}
    check_names([name for name in missing if id(places.get(name)) not in loaded], unexpected, where)


@contextmanager
def without_warnings(logger: str) -> Iterator[None]:
    """Silence a library's warnings about weights that do not fit; `check_names` raises an error for them."""
    told = logging.getLogger(logger)
    before = told.disabled
    # not the level: transformers reads it, and logs more at higher ones
    told.disabled = True
    try:
        yield
    finally:
        told.disabled = before


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
