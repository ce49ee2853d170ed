"""An optimiser's state as tensors by name and plain values, without pickle."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

PLAIN = (bool, int, float, str, type(None))


def pack(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors under "<parameter>/<entry>", and everything else as JSON can hold it."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    state = optimizer.state_dict()
    for parameter, entries in state["state"].items():
        for name, entry in entries.items():
            if isinstance(entry, Tensor):
                tensors[f"{parameter}/{name}"] = entry
            else:
                values.setdefault(str(parameter), {})[name] = plain(entry, f"{type(optimizer).__name__} state {name!r}")
    groups = [
        {name: plain(value, f"group option {name!r}") for name, value in group.items()} for group in state["param_groups"]
    ]
    return tensors, {"values": values, "groups": groups}


def unpack(optimizer: Optimizer, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Put packed state back; moments follow the device of their parameter."""
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        parameter, name = key.split("/", 1)
        state.setdefault(int(parameter), {})[name] = tensor
    for parameter, entries in values["values"].items():
        state.setdefault(int(parameter), {}).update(entries)
    # tuples come back from JSON as lists, and some optimisers unpack betas only as written
    groups = [{k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in g.items()} for g in values["groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def plain(value: Any, what: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(part, what) for part in value]
    if isinstance(value, PLAIN):
        return value
    raise ValueError(
        f"a checkpoint holds tensors and plain values, got {what} of {type(value).__name__}; choose another optimizer"
    )
