"""A group of commands one of which runs when none is named: `nalaformer eval RUN` beside `nalaformer eval language ...`."""

from typing import Any

from typer.core import TyperGroup

DEFAULT = "run"


class DefaultCommandGroup(TyperGroup):
    """Arguments that begin with no command of the group are those of its command "run"."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        asks_for_help = args and args[0] in self.get_help_option_names(ctx)
        if args and args[0] not in self.commands and not asks_for_help:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)
