"""Tables of checks by option. The tests run over the options that there are, so that a new one without a check fails."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest


class Effects:
    """One check for each option: it changes the option and looks at what comes of it. Its arguments are fixtures."""

    def __init__(self, of_what: str) -> None:
        self.of_what = of_what
        self.checks: dict[str, Callable[..., None]] = {}

    def of(self, *options: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Enter a check under the names of these options."""

        def enter(check: Callable[..., None]) -> Callable[..., None]:
            again = set(options) & set(self.checks)
            assert not again, f"{self.of_what} has two checks of {again}"
            self.checks |= dict.fromkeys(options, check)
            return check

        return enter

    def show(self, option: str, request: pytest.FixtureRequest, **given: Any) -> None:
        """Run the check of an option; of what is given it gets the arguments that it names."""
        if option not in self.checks:
            pytest.fail(f"{self.of_what} has no check of the effect of {option!r}; write one")
        check = self.checks[option]
        wanted = inspect.signature(check).parameters
        check(**{name: given[name] if name in given else request.getfixturevalue(name) for name in wanted})

    def refuse_strangers(self, options: set[str]) -> None:
        """A check of an option that is no more shows nothing."""
        assert set(self.checks) <= options
