"""What is at rest, as a run has it. Made and changed by `resting`, which has the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.keeping.state import Commit, Resting
from millrace.audit.keeping.verdict_files import Tables, resting_spans
from millrace.audit.reconciliation.spans import SPAN_SCHEMA
from millrace.audit.runs.fact_rows import PrunedWindows


@dataclass(frozen=True, slots=True)
class Asleep:
    """What came to rest with one fold, with its windows (SPAN_SCHEMA)."""

    files: Resting
    spans: pa.Table

    @property
    def end_ms(self) -> int:
        """Where the last window ends."""
        return int(pc.max(self.spans["end_ms"]).as_py())


@dataclass(slots=True)
class AtRest:
    """All that is at rest, as a run has it: `left` by stream, and what `woke` in this run."""

    asleep: list[Asleep] = field(default_factory=list)
    left: dict[str, PrunedWindows] = field(default_factory=dict)
    woke: list[Asleep] = field(default_factory=list)

    @property
    def spans(self) -> pa.Table:
        """All windows at rest (SPAN_SCHEMA)."""
        return pa.concat_tables([SPAN_SCHEMA.empty_table(), *(each.spans for each in self.asleep)])

    @property
    def start_ms(self) -> int | None:
        """Where the first of them begins."""
        first_ms: int | None = pc.min(self.spans["start_ms"]).as_py()
        return first_ms


def restored(before: Commit, state: Tables, left: dict[str, PrunedWindows]) -> AtRest:
    """What a commit has at rest; `left` is what its facts say of that. Raises StateDamaged."""
    return AtRest([Asleep(each, resting_spans(state, [each])) for each in before.resting], left)


def as_pruned(pruned: Mapping[str, PrunedWindows], at_rest: AtRest) -> dict[str, PrunedWindows]:
    """What is left of all windows that are not judged, by stream."""
    found = {stream: each.copy() for stream, each in pruned.items()} if at_rest.left else dict(pruned)
    for stream, windows in at_rest.left.items():
        found.setdefault(stream, PrunedWindows(windows.window_ms)).add_all(windows)
    return found
