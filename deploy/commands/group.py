"""How every group of commands is made, and with it the form of every `--help`.

Plain text, filled to the width of the terminal: Typer's own form, of `rich`, keeps the line breaks that a
docstring has in the source, cuts the names of options where the columns are narrow, calls a switch `<bool>`
and takes `[default: now]` for markup.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

_NO_LIMIT = 10_000


class _Group(TyperGroup):
    """Shows the first sentence of each command whole, over as many lines as it needs."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(_NO_LIMIT))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def command_group(text: str, **settings: Any) -> typer.Typer:
    """A group of commands that `text` describes; `settings` are Typer's."""
    return typer.Typer(help=text, cls=_Group, no_args_is_help=True, rich_markup_mode=None, **settings)
