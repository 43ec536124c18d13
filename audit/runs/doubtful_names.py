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


def doubtful_names(rows: pa.Table) -> Iterator[tuple[str, str, str]]:
    """(reason, stream, topic), each once, in order."""
    details = rows["detail"]
    told = pc.or_(pc.match_substring(details, ONE_STREAM), pc.match_substring(details, NO_NAME))
    found = {
        (reason, row["stream"], row["topic"])
        for row in rows.filter(pc.fill_null(told, False)).select(["detail", "stream", "topic"]).to_pylist()
        for reason in json.loads(row["detail"])["reasons"]
        if is_doubt(reason)
    }
    yield from sorted(found)
