"""`key=value` on the command line, for every field of a frozen dataclass and those inside it."""

import ast
import inspect
import textwrap
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args

from ..json_text import parse_json
from ..registry import unknown_name

T = TypeVar("T")


def changed(config: T, assignments: list[str]) -> T:
    """The same description with some fields changed: changed(recipe, ["steps=100", "augmentation.flip=0"]).

    A field of a part may be named by itself or by its path; a value is read as its field's type. Of two values of one field
    the last counts.
    """
    texts: dict[tuple[str, ...], str] = {}
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        if not sign:
            raise ValueError(f"settings are given as key=value, got {assignment!r}")
        texts[find(config, key)] = text
    return cast(T, _with(config, texts)) if texts else config


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key of a description, for people."""

    key: str
    value: object
    meaning: str
    """The words under its field."""


def settings_of(config: Any) -> list[Setting]:
    """Every key with its value and meaning."""
    found = []
    for path in keys(config):
        owner = config
        for name in path[:-1]:
            owner = getattr(owner, name)
        meaning = field_docs(type(owner)).get(path[-1], "")
        found.append(Setting(key=path[-1], value=getattr(owner, path[-1]), meaning=meaning))
    return found


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass and of those that it extends, which Python does not keep."""
    inherited = [field_docs(base) for base in kind.__bases__ if is_dataclass(base)]
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {name: meaning for each in inherited for name, meaning in each.items()}
    for line, after in zip(body.body, body.body[1:], strict=False):
        named = isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[line.target.id] = str(after.value.value)  # type: ignore[attr-defined]
    return docs


def keys(config: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every field that holds a value."""
    found = []
    for part in fields(config):
        value = getattr(config, part.name)
        path = (*prefix, part.name)
        found.extend(keys(value, path) if is_dataclass(value) else [path])
    return found


def find(config: Any, key: str) -> tuple[str, ...]:
    """The field's full path; the end of a path is enough."""
    wanted = tuple(key.split("."))
    paths = keys(config)
    matching = [path for path in paths if path[-len(wanted) :] == wanted]
    if len(matching) == 1:
        return matching[0]
    if matching:
        names = ", ".join(".".join(path) for path in matching)
        raise ValueError(f"the key {key!r} must name one setting, got several: {names}")
    if len(wanted) > 1:
        raise unknown_name("key", key, [".".join(path) for path in paths])
    count = Counter(path[-1] for path in paths)
    # an end that several paths have names none of them
    known = [path[-1] if count[path[-1]] == 1 else ".".join(path) for path in paths]
    raise unknown_name("key", key, known, compared=lambda name: name.rpartition(".")[2])


def _with(config: Any, texts: dict[tuple[str, ...], str]) -> Any:
    """The config with a text for each path; all at once, for some values are valid only together (steps=0 epochs=3)."""
    kinds = {part.name: part.type for part in fields(config)}
    changes = {}
    for name in dict.fromkeys(path[0] for path in texts):
        inside = {path[1:]: text for path, text in texts.items() if path[0] == name}
        old = getattr(config, name)
        changes[name] = read_as(kinds[name], inside[()], old, name) if () in inside else _with(old, inside)
    # some know what else has to change
    return config.with_changes(changes) if hasattr(config, "with_changes") else replace(config, **changes)


def read_as(kind: Any, text: str, old: object, name: str) -> Any:
    """The text as a value of a field of this type, which may be none."""
    if not isinstance(kind, UnionType) or NoneType not in get_args(kind):
        # by the field and not by its value: a recipe may write a whole number for a float
        return parsed(text, float(old) if kind is float else old, name)  # type: ignore[arg-type]
    if text.lower() == "none":
        return None
    like = get_args(kind)[0]() if old is None else old
    try:
        return parsed(text, like, name)
    except ValueError as error:
        raise ValueError(str(error).replace(", got", " or none, got", 1)) from error


def parsed(text: str, like: object, name: str) -> Any:
    """The text as a value of the same type as `like`."""
    if isinstance(like, str):
        return text
    if isinstance(like, bool):
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise ValueError(f"{name} must be true or false, got {text!r}")
        return words[text.lower()]
    try:
        if isinstance(like, dict):
            value = parse_json(text)
            if not isinstance(value, dict):
                raise ValueError("no object")
            return value
        if isinstance(like, tuple):
            return tuple(number(part) for part in text.split(",") if part.strip())
        return type(like)(text)  # type: ignore[call-arg]
    except ValueError as error:
        kinds: dict[type, str] = {dict: 'a JSON object such as {"cells": 6}', tuple: "numbers with commas between them"}
        kind = kinds.get(type(like), f"a number ({type(like).__name__})")
        raise ValueError(f"{name} must be {kind}, got {text!r}") from error


def number(text: str) -> int | float:
    """A whole number where it is written as one."""
    try:
        return int(text)
    except ValueError:
        return float(text)
