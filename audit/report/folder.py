"""The report folder: summary.json, reconciliation.parquet, index.html, metrics.prom. Called by `job`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.audit.metrics import metrics_text
from millrace.audit.report.html import render


def write_report(folder: Path, summary: Mapping[str, Any], rows: pa.Table) -> None:
    """Each file is replaced whole, the summary last: who sees a new summary sees the rest of it too."""
    _replace(folder / "reconciliation.parquet", lambda path: pq.write_table(rows, path, compression="zstd"))
    _replace(folder / "index.html", lambda path: path.write_text(render(summary, rows), "utf-8"))
    _replace(folder / "metrics.prom", lambda path: path.write_text(metrics_text(summary), "utf-8"))
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    _replace(folder / "summary.json", lambda path: path.write_text(text, "utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
