"""The report folder: summary.json, reconciliation.parquet (a row for each stream and window), index.html,
producers.parquet (a row for each producer and window), metrics.prom. Called by `job`.

Of a large audit most windows are at rest (`runs.resting`): their rows are in files beside these, written
once: `reconciliation-<run>.parquet` and `producers-<run>.parquet` of each run with which windows came to
rest.

After a run that failed, `last_failure.json` beside them, a banner on the page and metrics.prom tell of it
(`failure`); the rest stays what the last good run found, and the next good run takes all of that away.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.audit.reconciliation.row_keys import WINDOW
from millrace.audit.reconciliation.row_parts import Rows, View, parts_of
from millrace.audit.reconciliation.spans import SPAN_SCHEMA, outside
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA
from millrace.audit.report import failure
from millrace.audit.report.html import render
from millrace.audit.report.metrics import failed_text, metrics_text
from millrace.audit.report.plain import by_producer
from millrace.audit.report.resting_sums import RestingSums

TOLD_OF_FAILURE = ("metrics.prom", failure.FILE_NAME, "index.html")
"""What `note_failure` changes."""

_AT_REST = re.compile(r"(reconciliation|producers)-[0-9]+-[0-9a-f]+\.parquet")


@dataclass(frozen=True, slots=True)
class RowsAtRest:
    """Rows of windows at rest, as the report has them: `sums` of those that are not among the run's rows,
    `leaving` the windows of those that are (SPAN_SCHEMA), `files` {run with which they came to rest: rows} of
    both."""

    sums: Sequence[RestingSums] = ()
    leaving: pa.Table = field(default_factory=SPAN_SCHEMA.empty_table)
    files: Mapping[str, Rows] = field(default_factory=dict)

    def names(self) -> list[str]:
        """The files that the report has for them."""
        return [f"{kind}-{run}.parquet" for kind in _ROWS for run in sorted(self.files)]

    def told(self) -> dict[str, Any]:
        """As it stands in the summary."""
        names = [name for name in self.names() if name.startswith("reconciliation-")]
        return {"rows_at_rest": names} if names else {}

    def stale(self, there: Collection[str]) -> list[str]:
        """Those of the report's files that are of windows which are not at rest any more."""
        named = set(self.names())
        return [name for name in sorted(there) if _AT_REST.fullmatch(name) and name not in named]


def write_report(
    folder: Path,
    summary: Mapping[str, Any],
    rows: Rows,
    at_rest: RowsAtRest | None = None,
    there: Collection[str] = (),
) -> None:
    """Each file is replaced whole, the summary last: who sees a new summary sees the rest of it too. Files of
    rows `at_rest` that are `there` are as they were."""
    at_rest = at_rest or RowsAtRest()
    living: Rows = rows
    if at_rest.leaving.num_rows:
        living = View(rows, functools.partial(outside, spans=at_rest.leaving), WINDOW)
    for run, theirs in at_rest.files.items():
        for kind, made_of in _ROWS.items():
            name = f"{kind}-{run}.parquet"
            if name not in there:
                _replace(folder / name, functools.partial(_write_parts, rows=theirs, made_of=made_of))
    for kind, made_of in _ROWS.items():
        _replace(folder / f"{kind}.parquet", functools.partial(_write_parts, rows=living, made_of=made_of))
    page = render(summary, rows, at_rest.sums)
    _replace(folder / "index.html", lambda path: _write(path, page, "xmlcharrefreplace"))
    _replace(folder / "metrics.prom", lambda path: _write(path, metrics_text(summary), "replace"))
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    # Half of a surrogate pair, which UTF-8 has no bytes for, becomes the JSON escape that means it.
    _replace(folder / "summary.json", lambda path: _write(path, text, "backslashreplace"))
    (folder / failure.FILE_NAME).unlink(missing_ok=True)


def read_told(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of the folder; {} when it is not there or is none."""
    try:
        told = json.loads((folder / name).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def note_failure(folder: Path, at_ms: int, sentence: str) -> None:
    """Let metrics.prom, last_failure.json and the page say that a run failed; all figures stay those of the
    last good run. Never raises: the failure itself is what the operator must hear of."""
    for name, told, unwritable in (
        ("metrics.prom", lambda before: failed_text(before, at_ms), "replace"),
        (failure.FILE_NAME, lambda before: failure.document(sentence, at_ms), "replace"),
        ("index.html", lambda before: failure.page_with(before, sentence, at_ms), "xmlcharrefreplace"),
    ):
        with contextlib.suppress(OSError, ValueError):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / name
            text = told(path.read_text("utf-8") if path.exists() else "")
            _replace(path, functools.partial(_write, text=text, unwritable=unwritable))


def _as_it_is(rows: pa.Table) -> pa.Table:
    return rows


_ROWS: Mapping[str, Callable[[pa.Table], pa.Table]] = {
    "reconciliation": _as_it_is,
    "producers": by_producer,
}
"""{what a file of rows is called: what it has of them}"""


def _write_parts(path: Path, rows: Rows, made_of: Callable[[pa.Table], pa.Table]) -> None:
    """A Parquet file of what is made of each part of the rows."""
    schema = made_of(VERDICT_SCHEMA.empty_table()).schema
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for part in parts_of(rows, VERDICT_SCHEMA.names):
            writer.write_table(made_of(part))


def _write(path: Path, text: str, unwritable: str) -> None:
    path.write_text(text, "utf-8", errors=unwritable)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
