"""Records that somebody copied into another audited topic with their identity headers. Pure.

A stream belongs to the topic that its events name. What carries its identity and lies in another one was
written there by a consumer that copies headers: it is no record of the stream, and proves nothing of the
other topic either, as little as a record without an identity. So it is counted, told as a note, and changes
no verdict. A worker finds it (`Reconciler.own_cells`), the driver sums it up; called by `spark_cells` and
`job`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow.compute as pc

from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.verdict_rows import counting_row
from millrace.audit.report.text import visible

FOREIGN = "FOREIGN"
"""The state of a row that counts them; such rows never leave the job."""

Foreign = Mapping[tuple[str, str], int]
"""{(topic, tier): records}"""


def foreign_rows(stream: str, counts: Foreign) -> list[dict[str, Any]]:
    """The rows that carry a stream's counts from a worker to the driver."""
    return [counting_row(FOREIGN, topic, stream, {tier: n}) for (topic, tier), n in counts.items()]


def foreign_counts(rows: Rows) -> Foreign:
    """What rows in state FOREIGN count."""
    counts: Counter[tuple[str, str]] = Counter()
    for part in parts_of(rows, ["state", "topic", "consumed"]):
        for row in part.filter(pc.equal(part["state"], FOREIGN)).to_pylist():
            for tier, count in row["consumed"]:
                counts[row["topic"], tier] += count
    return dict(sorted(counts.items()))


def foreign_notes(counts: Foreign) -> Iterator[str]:
    """A sentence for each topic and tier."""
    for (topic, tier), count in counts.items():
        number = f"{count:,} {'record' if count == 1 else 'records'}"
        yield (
            f"{number} of topic {visible(topic)} in {visible(tier)} came with the identity of a stream of "
            "another topic, copied by whoever wrote them: they are not audited"
        )
