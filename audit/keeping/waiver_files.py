"""The files of waivers, of windows and of what could not be trusted: made only if absent, never changed.

A row of waivers is `waivers/<stem>.<n><ending>`, n from 1 on. Its number alone tells which one is the newest:
each is given on the clock of whoever gives it, and one that was ahead would outlast all that come after it.

Called by `waivers` and `untrusted_waivers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.audit.keeping.state import StateDamaged, StateFolder, guard_fits, guarded, guarded_body

FOLDER = "waivers"


def give(state: StateFolder, stem: str, ending: str, kind: str, body: dict[str, Any]) -> None:
    """Keep one as the newest of its row: behind the last that is there, also where one before it is gone."""
    content = guarded(kind, body)
    numbers = (
        _number(entry.name, ending)
        for entry in state.files.entries(FOLDER)
        if entry.name.startswith(f"{stem}.")
    )
    number = max(numbers, default=0) + 1
    while not state.files.create(f"{FOLDER}/{stem}.{number}{ending}", content):
        number += 1


def read(state: StateFolder, ending: str, kind: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number in its row, file, body) of each, in no order. Raises StateDamaged."""
    for entry in state.files.entries(FOLDER):
        if entry.name.startswith(".") or not entry.name.endswith(ending):
            continue
        name = f"{FOLDER}/{entry.name}"
        content = state.files.read(name)
        body = guarded_body(content, kind)
        if body is None or not guard_fits(content, kind):
            raise StateDamaged(f"{state.where}/{name} is damaged; remove it and waive again")
        yield _number(entry.name, ending), name, body


def _number(name: str, ending: str) -> int:
    """0 for a name that is not of such a row."""
    number = name.removesuffix(ending).rpartition(".")[2]
    return int(number) if number.isascii() and number.isdigit() else 0
