"""The commands of the studies, run in this process."""

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from nalaformer.cli import build_app
from research.demo.__main__ import build_app as build_demo
from research.linearization.__main__ import build_app as build_linearization
from research.scoreboard.__main__ import build_app as build_scoreboard
from research.sequences.__main__ import build_app as build_sequences

STUDIES = {
    "demo": build_demo,
    "linearization": build_linearization,
    "scoreboard": build_scoreboard,
    "sequences": build_sequences,
}


def invoke(name: str, *arguments: Any) -> Result:
    """Return the result of `python -m research.NAME ARGUMENTS`, or of `python -m research NAME ARGUMENTS`: train, eval."""
    words = [str(argument) for argument in arguments]
    if name in STUDIES:
        return CliRunner().invoke(STUDIES[name](), words)
    return CliRunner().invoke(build_app(), [name, *words])
