"""A folder holds one run: which settings may differ when it goes on, and which may not."""

from pathlib import Path
from typing import Any

# may change between the parts of a run: none of them changes what is learned
FREE_SETTINGS = (
    "workers",
    "device",
    "compile",
    "keep",
    "save_every",
    "save_minutes",
    "eval_every",
    "eval_epochs",
    "tensorboard",
    "most_corrupt",
    "on_corrupt",
)


def refuse_other_settings(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    """A folder holds one run: going on with other settings would be neither the old run nor the new one."""
    before, now = flat(old), flat(new)
    changed = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    changed = [name for name in changed if name.rsplit(".", 1)[-1] not in FREE_SETTINGS]
    if changed:
        name = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise ValueError(
            f"{folder} holds a run with other settings: {name} was {before.get(name)!r} and is now {now.get(name)!r}{more}; "
            "choose another folder, or the old settings to go on"
        )


def refuse_other_origin(old: dict[str, Any] | None, new: dict[str, Any], folder: Path) -> None:
    """What settings do not say: the model and the data themselves. Folders of older versions hold nothing about them."""
    for name, value in new.items():
        if old is not None and name in old and old[name] != value:
            raise ValueError(
                f"{folder} holds a run that was made from something else: {name} was {old[name]!r} and is now {value!r}; "
                "choose another folder"
            )


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; tuples as JSON has them."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = list(value) if isinstance(value, tuple) else value
    return result
