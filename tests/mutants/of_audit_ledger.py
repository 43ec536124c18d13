"""The audit's rules by which events merge, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REPORTS = "tests/unit/audit/test_window_reports.py"
FAST = f"{REPORTS}::test_no_rule_is_passed_over_for_being_fast"
HOSTILE = "tests/unit/audit/test_hostile_events.py"
LEDGER = "audit/contract/event_ledger.py"
WINDOWS = "audit/contract/window_reports.py"

OF_AUDIT_LEDGER = (
    Mutant(
        name="event-read-last-wins",
        promise="Of two cumulative events the newer one counts, in whatever order they are read.",
        file=LEDGER,
        rule="            self.windows[event.window_start_ms] = newer\n",
        instead="            self.windows[event.window_start_ms] = event\n",
        red=("tests/unit/audit/test_events.py::test_the_newest_report_wins_in_any_order_of_reading",),
    ),
    Mutant(
        name="gap-by-its-tellers-clock",
        promise="Of a gap told twice the farthest end counts: a slow clock makes no loss of the rest.",
        file=LEDGER,
        rule="key=lambda gap: (gap.to_offset, gap.at_ms, gap.cause)",
        instead="key=lambda gap: (gap.at_ms, gap.to_offset, gap.cause)",
        red=(f"{HOSTILE}::test_of_a_gap_told_again_the_farthest_end_counts_whatever_clock_it_was_told_by",),
    ),
    Mutant(
        name="gaps-open-end-closed",
        promise="A gap that was told as open stays so: nobody knows how far the log that is gone went.",
        file=LEDGER,
        rule="has_open_end = known.has_open_end or event.has_open_end",
        instead="has_open_end = farthest.has_open_end",
        red=(f"{HOSTILE}::test_of_a_gap_told_again_the_farthest_end_counts_whatever_clock_it_was_told_by",),
    ),
    Mutant(
        name="numbered-beside-only-counted",
        promise="A stream that only counted, and then numbers, is never proven, however fast it is read.",
        file=LEDGER,
        rule="self._numbered and self.windows.take(told)",
        instead="self.windows.take(told)",
        red=(f"{FAST}[only counted before]",),
    ),
    Mutant(
        name="another-producers-report-taken",
        promise="Two producers with one stream id are never proven, however fast their reports are read.",
        file=WINDOWS,
        rule="told.said_by != self._text or ",
        instead="",
        red=(f"{FAST}[another session]", f"{FAST}[another producer]", f"{FAST}[another topic]"),
    ),
    Mutant(
        name="known-window-known-report",
        promise="Of a window that is known, only the very report that is known may be passed over.",
        file=WINDOWS,
        rule="at is not None and self._row_at(at) == told.row",
        instead="at is not None",
        red=(f"{FAST}[a newer report]", f"{FAST}[two reports of one number]"),
    ),
    Mutant(
        name="count-believed-beside-its-set",
        promise="A report whose count is not that of its sequences is not believed, however fast it is read.",
        file=WINDOWS,
        rule="        or last - first + 1 != count\n",
        instead="",
        red=(f"{FAST}[a count that the set is not]",),
    ),
    Mutant(
        name="event-under-anothers-key",
        promise="A report under another's key is not believed: compaction may have taken one for it.",
        file=WINDOWS,
        rule='if key != b"count/%b/%b" % (stream, start):',
        instead='if not key.startswith(b"count/"):',
        red=(f"{FAST}[another's key]", f"{FAST}[another window's key]"),
    ),
    Mutant(
        name="holes-filled-in-columns",
        promise="A report is held as one run of sequences only where it is one.",
        file=WINDOWS,
        rule="            and acknowledged.max() - acknowledged.min() + 1 == event.count\n",
        instead="",
        red=(f"{REPORTS}::test_what_columns_do_not_say_stays_as_it_is",),
    ),
)
