"""A JSON parser for untrusted files."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the parsed JSON. Every failure is a ValueError: no JSON, no UTF-8, numbers too long, nesting too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
