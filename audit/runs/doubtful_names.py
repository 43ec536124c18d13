"""Streams whose record headers name another producer than their reports do, from the rows that say so. Pure.

Called by `untrusted`. Which names do not agree is found where a stream's cells and events come together
(`reconciliation`); the rows carry the sentence among their reasons.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.contract.producer_names import NO_NAME, ONE_STREAM, is_doubt
from millrace.audit.reconciliation.row_parts import Rows, parts_of


def doubtful_names(rows: Rows) -> Iterator[tuple[str, str, str]]:
    """(reason, stream, topic), each once, in order."""
    found = {
        (reason, row["stream"], row["topic"])
        for part in parts_of(rows, ["detail", "stream", "topic"])
        for row in part.filter(_may_doubt(part["detail"])).to_pylist()
        for reason in json.loads(row["detail"])["reasons"]
        if is_doubt(reason)
    }
    yield from sorted(found)


def _may_doubt(details: pa.ChunkedArray) -> pa.ChunkedArray:
    told = pc.or_(pc.match_substring(details, ONE_STREAM), pc.match_substring(details, NO_NAME))
    return pc.fill_null(told, False)
