"""What the audit makes of gaps that mirrors told: its own capture, plan, scan and reconciliation of real
clusters, as a run does it. Only Spark is left out, which shares that out among processes (`tests/spark`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.config import AuditConfig, parse_config
from millrace.audit.contract.events import EventLedger
from millrace.audit.keeping.state import Commit, UnreadNote
from millrace.audit.reconciliation.reconcile import Gap
from millrace.audit.runs.capture import Capture, capture
from millrace.audit.runs.fact_rows import facts_table
from millrace.audit.runs.reading_plan import known_gaps, plan_ranges
from millrace.audit.runs.reconciling import reconciler_of
from millrace.audit.scanning.cell_notes import unread_of
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.spark.read_options import CHUNK_OFFSETS, parse_options
from millrace.audit.spark.task_plan import ranges_option
from millrace.audit.spark.task_reader import read_task
from tests.cluster.audited_topics import WINDOW_MS, facts_of
from tests.pairs import Pair


@dataclass
class Fate:
    """Sequences of one stream that its aggregate lacks, of all windows, by what became of them."""

    missing: set[int] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    explained: dict[str, set[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """What one run saw: of the clusters, and of every record."""

    config: AuditConfig
    captured: Capture
    cells: pa.Table
    unread: list[UnreadNote]

    @property
    def gaps(self) -> list[Gap]:
        """Those that the run knows of before the aggregate."""
        (aggregate,) = self.config.aggregates()
        return known_gaps(self.captured, self.config, aggregate)

    def fate(self, topic: str, *, with_gaps: bool = True) -> Fate:
        """Of the topic's one stream; `with_gaps` False: as if the mirrors had told of none."""
        notes = self.cells.filter(pc.is_valid(self.cells["note"]))
        unread = [*self.unread, *unread_of(notes, self.captured.vanished_ms)]
        reconciler = reconciler_of(self.config, self.captured, unread, self.captured.taken_ms)
        if not with_gaps:
            reconciler = replace(reconciler, gaps={})
        stream = facts_of(self.captured.ledger, topic).stream
        facts = facts_table(self.captured.ledger, self.captured.origins)
        own = [each.filter(pc.equal(each["stream"], stream)) for each in (self.cells, facts)]
        found = Fate(explained=defaultdict(set))
        for row, _ in reconciler.verdicts(own[0], own[1].to_pylist()):
            found.missing |= _numbers(row.missing.values())
            found.in_flight |= _numbers(row.in_flight.values())
            found.unknown |= _numbers([row.unknown])
            for cause, ranges in row.explained.items():
                found.explained[cause] |= _numbers([ranges])
        return replace(found, explained=dict(found.explained))

    def beside(self, earlier: Look, *gone: tuple[str, int]) -> Look:
        """As if the audit had kept what it read of these source partitions (topic, number) earlier. No run
        keeps what lies beyond the mirrors' positions: of what is gone by the next, that says unknown."""
        (source,) = self.config.sources()

        def logs(row: Mapping[str, Any]) -> tuple[str, int, str]:
            return row["topic"], row["partition"], row["topic_id"]

        kept = [
            row
            for row in earlier.cells.to_pylist()
            if row["cluster"] == source and (row["topic"], row["partition"]) in gone
        ]
        read_before = {logs(row) for row in kept}
        rows = [
            row for row in self.cells.to_pylist() if row["cluster"] != source or logs(row) not in read_before
        ]
        return replace(self, cells=pa.Table.from_pylist([*rows, *kept], CELL_SCHEMA))


def _numbers(ranges: Iterable[Iterable[tuple[int, int]]]) -> set[int]:
    return {number for each in ranges for first, last in each for number in range(first, last + 1)}


async def look(pair: Pair, topics: Mapping[str, str], *, chunk_offsets: int = CHUNK_OFFSETS) -> Look:
    """`topics` {audited topic: its name in the target}; `chunk_offsets` that a cell may span."""
    source, target = pair.source, pair.target
    config = parse_config(
        {
            "clusters": {
                source.name: {"bootstrap": [source.bootstrap], "tier": "source"},
                target.name: {"bootstrap": [target.bootstrap], "tier": "aggregate", "topics": dict(topics)},
            },
            "topics": list(topics),
            "window": f"{WINDOW_MS}ms",
            "grace": "0s",
        }
    )
    captured = await capture(config, EventLedger(), lambda: time.time_ns() // 1_000_000)
    ranges, unread = plan_ranges(captured, config, Commit())
    options = parse_options(
        {
            "ranges": ranges_option(ranges),
            "bootstraps": json.dumps({each.name: [each.bootstrap] for each in (source, target)}),
            "window": f"{WINDOW_MS}ms",
            "chunk_offsets": str(chunk_offsets),
        }
    )
    read = [each for each in ranges if each.size]
    batches = await asyncio.to_thread(lambda: list(read_task(read, options)))
    return Look(config, captured, pa.Table.from_batches(batches, CELL_SCHEMA).combine_chunks(), unread)
