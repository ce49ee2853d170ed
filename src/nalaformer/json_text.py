"""JSON from files that anybody may have written."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """What the text says. ValueError for all else: no JSON, no UTF-8, numbers of thousands of digits, nesting without end."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
