"""What an audit has laid to rest: the tables of each run's files, what they said, and when it was made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.contract.events import EventLedger
from millrace.audit.keeping.state import Resting
from millrace.audit.reconciliation.row_keys import WINDOW, keys_of
from millrace.audit.reconciliation.settled import lines_of, rows_of
from millrace.audit.reconciliation.spans import are_in, inside
from millrace.audit.reconciliation.verdicts import WindowVerdict
from millrace.audit.runs import resting
from millrace.audit.runs.at_rest import Asleep


def made_of(numbered: pa.Table) -> dict[tuple[str, str, int | None, str], int | None]:
    rows = rows_of(numbered).select(["topic", "stream", "window_start_ms", "producer", "settled_ms"])
    return {tuple(row.values())[:4]: row["settled_ms"] for row in rows.to_pylist()}  # type: ignore[misc]


@dataclass
class Shelf:
    """`told` are each run's rows that came to rest with it, and when they were made; `sums` their tallies."""

    sums: dict[str, Any] = field(default_factory=dict)
    told: dict[str, list[tuple[WindowVerdict, int | None]]] = field(default_factory=dict)
    _tables: dict[str, pa.Table] = field(default_factory=dict)

    def read_table(self, name: str, wanted: pc.Expression | None = None) -> pa.Table:
        """As the state's, for `resting`."""
        table = self._tables[name]
        return table if wanted is None else table.filter(wanted)

    def cells_of(self, asleep: Iterable[Asleep]) -> list[pa.Table]:
        return [self._tables[name] for each in asleep for name in each.files.cells]

    def lines_of(self, asleep: Iterable[Asleep]) -> list[pa.Table]:
        return [lines_of(self._tables[name]) for each in asleep for name in each.files.rows]

    def put(
        self,
        run: int,
        at_ms: int,
        laid: Any,
        ledger: EventLedger,
        cells: pa.Table,
        numbered: pa.Table,
        rows: Sequence[WindowVerdict],
    ) -> Asleep:
        """Takes what `resting.lay` has laid, whose reports leave the ledger for `laid.left`."""
        name = f"{run:08d}"
        files = Resting(at_ms, f"verdicts/{name}", (f"{name}/rows",), (f"{name}/cells",))
        self._tables[files.facts] = resting.lay_reports(laid.left, ledger)
        self._tables[files.cells[0]] = cells
        self._tables[files.spans] = laid.spans
        self._tables[files.rows[0]] = inside(numbered, laid.spans)
        self.sums[files.name] = json.loads(json.dumps(laid.sums.told["tally"]))
        made = made_of(numbered)
        windows = keys_of([(row.topic, row.window_start_ms) for row in rows], WINDOW)
        self.told[files.name] = [
            (row, made[row.topic, row.stream, row.window_start_ms, row.producer])
            for row, rests in zip(rows, are_in(windows, laid.spans).to_pylist(), strict=True)
            if rests
        ]
        return Asleep(files, laid.spans)
