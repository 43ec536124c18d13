"""The report folder: summary.json, reconciliation.parquet (a row for each stream and window), index.html,
producers.parquet (a row for each producer and window), metrics.prom. Called by `job`.

After a run that failed, `last_failure.json` beside them, a banner on the page and metrics.prom tell of it
(`failure`); the rest stays what the last good run found, and the next good run takes all of that away.
"""

from __future__ import annotations

import contextlib
import functools
import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA
from millrace.audit.report import failure
from millrace.audit.report.html import render
from millrace.audit.report.metrics import failed_text, metrics_text
from millrace.audit.report.plain import by_producer

TOLD_OF_FAILURE = ("metrics.prom", failure.FILE_NAME, "index.html")
"""What `note_failure` changes."""


def write_report(folder: Path, summary: Mapping[str, Any], rows: Rows) -> None:
    """Each file is replaced whole, the summary last: who sees a new summary sees the rest of it too."""
    _replace(folder / "reconciliation.parquet", lambda path: _write_parts(path, rows, _as_it_is))
    _replace(folder / "producers.parquet", lambda path: _write_parts(path, rows, by_producer))
    _replace(folder / "index.html", lambda path: _write(path, render(summary, rows), "xmlcharrefreplace"))
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
