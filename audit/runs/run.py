"""One run's working values: what it goes on from, and what it has found.

Made and handed from step to step by `job`; read by `next_commit`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pyarrow as pa

from millrace.audit.config import AuditConfig
from millrace.audit.keeping.state import Commit, StateFolder, UnreadNote
from millrace.audit.keeping.waivers import Standing, Target, waived_targets
from millrace.audit.reconciliation.row_parts import Rows
from millrace.audit.reconciliation.settled import SETTLED_SCHEMA
from millrace.audit.reconciliation.spans import SPAN_SCHEMA
from millrace.audit.report.resting_sums import RestingSums
from millrace.audit.runs.at_rest import Asleep, AtRest
from millrace.audit.runs.backfill import TimeRange
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.copied_headers import Foreign
from millrace.audit.runs.fact_rows import PrunedWindows
from millrace.audit.runs.untrusted import Doubts
from millrace.audit.spark.task_plan import OffsetRange


@dataclass(slots=True)
class Run:
    """One run's working values, handed from step to step. `pruned` is what is left of pruned windows by
    stream, `pruned_lines` and `spans` what earlier runs left of them by window, `late` counts what came for
    them (`late_again` what of it the next run reads again), `foreign` what lies in another topic than its
    stream's, `row_files` have this run's rows, `owed` are the roster's lines, `only` is the backfill's range,
    `since_ms` the verdict's horizon, `told` the watermarks that were told last, `at_rest` what is not judged
    though its evidence is kept; what of it the report tells is in `resting`, with its `sums`."""

    config: AuditConfig
    state: StateFolder
    before: Commit
    captured: Capture
    now_ms: int
    number: int
    name: str
    ranges: list[OffsetRange]
    unread: list[UnreadNote]
    facts: pa.Table
    pruned: dict[str, PrunedWindows] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    late_again: dict[str, int] = field(default_factory=dict)
    pruned_lines: pa.Table = field(default_factory=SETTLED_SCHEMA.empty_table)
    spans: pa.Table = field(default_factory=SPAN_SCHEMA.empty_table)
    foreign: Foreign = field(default_factory=dict)
    row_files: list[str] = field(default_factory=list)
    owed: pa.Table = field(default_factory=SETTLED_SCHEMA.empty_table)
    only: TimeRange | None = None
    since_ms: int | None = None
    told: dict[str, int] = field(default_factory=dict)
    at_rest: AtRest = field(default_factory=AtRest)
    resting: list[Asleep] = field(default_factory=list)
    sums: list[RestingSums] = field(default_factory=list)

    @property
    def kept(self) -> Commit:
        """The state whose cells and offsets this run goes on from; with the cells of what woke."""
        if self.only is not None:
            return Commit()
        woken = [name for each in self.at_rest.woke for name in each.files.cells]
        return replace(self.before, cells=[*self.before.cells, *woken]) if woken else self.before


@dataclass(slots=True)
class Findings:
    """What a run has found: `rows` of the report (`deciding` the verdict, or `older` than its horizon),
    `numbered` those and the lines that the state keeps, waivers and watermarks."""

    rows: Rows
    deciding: Rows
    older: Rows
    numbered: Rows
    waivers: list[Standing]
    watermarks: dict[str, int | None]
    doubts: Doubts = field(default_factory=Doubts)

    @property
    def waived(self) -> set[Target]:
        return waived_targets(self.waivers)
