"""Options are tested by their effect. A table notes which tests see to which option, and names those that none sees to."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])


class Effects:
    """The options of one thing: fields of a config, arguments of a function, switches of a command."""

    def __init__(self, options: Iterable[str]) -> None:
        self.options = list(options)
        self.seen_to: set[str] = set()

    def of(self, *names: str) -> Callable[[Test], Test]:
        """Decorates a test that changes these options and looks at what changes with them."""
        unknown = set(names) - set(self.options)
        assert not unknown, f"no such option: {unknown}"
        self.seen_to.update(names)
        return lambda test: test

    def missing(self) -> list[str]:
        """Options without such a test; a new option is one of them until somebody writes it."""
        return [name for name in self.options if name not in self.seen_to]


def options_of_command(*path: str, build: Callable[[], Any] | None = None) -> list[str]:
    """Return the names of the arguments and options of a command, as its function has them.

    build: makes another command line than that of the library.
    """
    import typer

    from nalaformer.cli import build_app

    command: Any = typer.main.get_command((build or build_app)())
    for name in path:
        command = command.commands[name]
    return [parameter.name for parameter in command.params if parameter.name != "help"]
