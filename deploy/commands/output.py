"""How commands print lists: a table for people, plain columns for pipes, JSON for programs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, TextIO

import typer


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


OutputFormat = Annotated[
    Format, typer.Option("--output", "-o", help="table: for people; json: for programs.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="The same as --output json.")]


def chosen(output: Format, as_json: bool) -> Format:
    """What `--output` and `--json` come to together."""
    return Format.JSON if as_json else output


def silence(stream: TextIO) -> None:
    """Nobody can read it any more: what it still holds must not fail when Python ends."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def say(line: str, *, err: bool = False) -> None:
    """Print a line beside a result that stands whether it can be read or not. Never fails."""
    try:
        typer.echo(line, err=err)
    except OSError:
        silence(sys.stderr if err else sys.stdout)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def print_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str], form: Format = Format.TABLE) -> None:
    """Prints `rows`: as JSON all of them; as a table the `columns`, plain text where no terminal reads it."""
    if form is Format.JSON:
        print_json(list(rows))
        return
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    titles = [column.replace("_", " ").upper() for column in columns]
    if sys.stdout.isatty():
        _print_for_terminal(titles, cells, numeric=_numeric_columns(rows, columns))
        return
    widths = [max(len(line[index]) for line in [titles, *cells]) for index in range(len(columns))]
    for line in [titles, *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _print_for_terminal(titles: list[str], cells: list[list[str]], *, numeric: list[bool]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, right in zip(titles, numeric, strict=True):
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for line in cells:
        table.add_row(*line)
    Console().print(table)


def _numeric_columns(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[bool]:
    return [bool(rows) and all(isinstance(row.get(column), int) for row in rows) for column in columns]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value) or "-"
    return str(value)
