"""What lies at rest, as files of the state (`state.Resting`). Called by `next_commit`, `job` and `status`."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa

from millrace.audit.keeping.state import Resting, StateDamaged, StateFolder, guard_fits, guarded, guarded_body
from millrace.audit.report.resting_sums import RestingSums
from millrace.audit.runs.resting import Laid

_KIND = "sums"


def write(state: StateFolder, files: Resting, reports: pa.Table, laid: Laid) -> None:
    """All but the rows and cells, which executors write. `reports` are `resting.LEFT_SCHEMA`."""
    state.write_table(files.facts, reports)
    state.write_table(files.spans, laid.spans)
    state.write_table(files.squares, laid.sums.squares)
    state.write_table(files.producers, laid.sums.producers)
    state.files.write(files.sums, guarded(_KIND, json.loads(json.dumps(laid.sums.told))))


def read_sums(state: StateFolder, resting: Sequence[Resting]) -> list[RestingSums]:
    """What the report needs. Raises StateDamaged."""
    return [
        RestingSums(_told(state, each.sums), state.read_table(each.producers), state.read_table(each.squares))
        for each in resting
    ]


def _told(state: StateFolder, name: str) -> dict[str, object]:
    path = f"{state.where}/{name}"
    try:
        content = state.files.read(name)
    except OSError as problem:
        raise StateDamaged(f"{path} cannot be read ({problem}); {state.way_back(name)}") from problem
    body = guarded_body(content, _KIND)
    if body is None or not guard_fits(content, _KIND):
        raise StateDamaged(f"{path} is damaged (its CRC does not fit); {state.way_back(name)}")
    return body
