"""Every trap of the audit's design as a test, and for every test the rule whose removal it must notice.

A trap is a small scene (`trap_scenes`). `TRAPS` has for each its breakage: what takes the rule out.
`test_trap` runs the scene as it is; `test_trap_is_noticed_when_the_rule_is_gone` runs it with the rule taken
out, and it must fail.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.audit.clients.journal import FilePlace
from millrace.audit.contract.event_ledger import StreamFacts
from millrace.audit.keeping import state_files
from millrace.audit.reconciliation import content_check, reconcile, roster, stream_case, watermark
from millrace.audit.reconciliation.tier_reading import TierReading
from millrace.audit.reconciliation.verdict_rows import Reconciler
from millrace.audit.reconciliation.verdicts import Fold
from millrace.audit.runs import reading_plan, reconciling
from millrace.audit.scanning import cells as cells_module
from millrace.audit.scanning import range_reader
from millrace.audit.scanning.repeats import Repeats
from tests.unit.audit.trap_breakages import (
    accountable_to_the_last_seen,
    expected_of_acknowledged,
    low_half_only,
    missing_the_ambiguous,
    never_hidden,
    never_resume,
    no_doubts,
    no_extra_copies,
    nothing,
    only_seen,
    overwrite,
    passages_of_any_topic,
    passed_anywhere,
    resume_anywhere,
    rewriting,
    scanning,
    settled_by_promise,
    settled_by_time,
)
from tests.unit.audit.trap_scene import Scene
from tests.unit.audit.trap_scenes import (
    aborted,
    ambiguous_and_not_written,
    ambiguous_and_written,
    ambiguous_and_written_then_lost,
    ambiguous_with_unknown_content,
    back_dated,
    clock_far_ahead,
    clocks_apart,
    closed_and_never_back,
    compaction,
    control_records,
    copy_with_other_content,
    dies_unreported,
    empty_window,
    events_lost,
    gap_within_a_range,
    journal_copied,
    log_append_time,
    merged_topics,
    mirror_lags,
    mirror_replays,
    never_reported,
    nothing_at_all,
    one_number_two_windows,
    other_content,
    other_producer_in_the_headers,
    out_of_order,
    partition_added,
    rerun_after_failure,
    retention,
    retried_batch,
    stream_of_months,
    tail_lost,
    tombstones,
    topic_recreated,
    total_loss,
    two_jobs,
    two_processes,
    unclean_election,
)

Breakage = Callable[[pytest.MonkeyPatch], None]


def replacing(place: Any, name: str, by: Any) -> Breakage:
    return lambda patch: patch.setattr(place, name, by)


# (line of the design's list, its scene, what takes its rule out)
TRAPS: list[tuple[str, Callable[[Scene], None], Breakage]] = [
    ("producer dies with unreported counts", dies_unreported,
     replacing(reconcile, "_file_unreported", nothing)),
    ("tail of a stream lost", tail_lost, replacing(reconcile, "_accountable", accountable_to_the_last_seen)),
    ("retried batch", retried_batch, replacing(Repeats, "add_digit", nothing)),
    ("ambiguous, not written", ambiguous_and_not_written, missing_the_ambiguous),
    ("ambiguous, written", ambiguous_and_written,
     rewriting(stream_case.StreamCase.__init__,
               " | union(report.ambiguous for report in told)", "")),
    ("ambiguous, written and lost later", ambiguous_and_written_then_lost,
     replacing(stream_case.StreamCase, "expected", expected_of_acknowledged)),
    ("mirror replays", mirror_replays, replacing(reconcile, "_extra_copies", no_extra_copies)),
    ("mirror lags", mirror_lags, replacing(TierReading, "has_passed", lambda tier, cell: True)),
    ("compaction", compaction, replacing(range_reader, "hole_within", nothing)),
    ("tombstones", tombstones,
     scanning("if p < 0 or value_size > end - p:", "if p < 0 or not 0 <= value_size <= end - p:")),
    ("retention passes the auditor", retention, replacing(reading_plan, "resume", resume_anywhere)),
    ("aborted transactions", aborted, replacing(range_reader.AbortedTransactions, "hides", never_hidden)),
    ("control records", control_records, replacing(range_reader, "CONTROL_BIT", 0)),
    ("unclean election", unclean_election, replacing(reading_plan, "resume", resume_anywhere)),
    ("topic re-created", topic_recreated, lambda patch: (
        patch.setattr(reading_plan, "passages", passages_of_any_topic),
        patch.setattr(reconciling, "passages", passages_of_any_topic))[0]),
    ("topics merged by a rename", merged_topics,
     rewriting(Reconciler._given, "cells = cells.of_topic(topic)", "pass")),
    ("partitions added", partition_added,
     rewriting(reading_plan.plan_ranges, "elif is_source and pin.cluster in mirrored:", "elif False:")),
    ("LogAppendTime on one hop", log_append_time,
     scanning("if sequence < 0:  #", "created_ms = append_ms if append_ms >= 0 else created_ms\n"
              "            if sequence < 0:  #")),
    ("back-dated creation times", back_dated, replacing(stream_case.StreamCase, "settled", settled_by_time)),
    ("clock behind", clocks_apart, replacing(watermark, "_least_promise", nothing)),
    ("clock far ahead", clock_far_ahead, replacing(stream_case.StreamCase, "settled", settled_by_promise)),
    ("two processes with one stream", two_processes, replacing(StreamFacts, "conflict", nothing)),
    ("a journal copied", journal_copied, replacing(FilePlace, "is_copied_to", lambda *_: False)),
    ("another producer's name in a header", other_producer_in_the_headers,
     replacing(stream_case, "name_doubts", no_doubts)),
    ("one number in two windows", one_number_two_windows, replacing(reconcile, "_file_moved", nothing)),
    ("same sequence, other content", other_content, replacing(reconcile, "check_content", nothing)),
    ("a copy with other content", copy_with_other_content,
     replacing(content_check, "_known_copies", lambda *_: {})),
    ("contents that no digest tells", ambiguous_with_unknown_content,
     rewriting(content_check._compare, "row.undecided or case.stream.sequenced", "row.undecided")),
    ("out of order across partitions", out_of_order, replacing(TierReading, "has_passed", passed_anywhere)),
    ("empty window, no report", empty_window, replacing(stream_case.StreamCase, "window_starts", only_seen)),
    ("a producer that never reported", never_reported,
     rewriting(roster.roster_rows, "in sorted(roster.items())",
               "in sorted(each for each in roster.items() if each[0] in known)")),
    ("a producer that closed and never came back", closed_and_never_back,
     rewriting(roster.roster_rows, "start_ms, end_ms in ordered", "start_ms, end_ms in ()")),
    ("more than 2^32 records", stream_of_months, replacing(cells_module, "decode_bitmap", low_half_only)),
    ("rerun after a failed job", rerun_after_failure, replacing(reading_plan, "resume", never_resume)),
    ("two jobs at once", two_jobs, replacing(state_files.LocalFiles, "create", overwrite)),
    ("the events topic loses records", events_lost, replacing(reconcile, "complement_ranges", lambda *_: ())),
    ("gap within a range", gap_within_a_range,
     replacing(reading_plan, "_cut_at", lambda whole, bounds: [whole])),
    ("total loss", total_loss, replacing(stream_case.StreamCase, "window_starts", only_seen)),
    ("nothing at all", nothing_at_all, rewriting(Fold.verdict, "not self.settled", "False")),
]  # fmt: skip
SCENES: dict[Any, dict[str, Any]] = {
    merged_topics: {"topics": {"flights": "all", "hotels": "all"}},
    out_of_order: {"foreign": True},
    other_content: {"content": True},
    copy_with_other_content: {"content": True},
    ambiguous_with_unknown_content: {"content": True},
}
NAMES = [name for name, _, _ in TRAPS]


def play(scene: Callable[[Scene], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scene(Scene(Path(folder), **SCENES.get(scene, {})))


@pytest.mark.parametrize(("name", "scene", "breakage"), TRAPS, ids=NAMES)
def test_trap(name, scene, breakage):
    play(scene)


@pytest.mark.parametrize(("name", "scene", "breakage"), TRAPS, ids=NAMES)
def test_trap_is_noticed_when_the_rule_is_gone(name, scene, breakage, monkeypatch):
    breakage(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        play(scene)


@pytest.mark.parametrize("scene", [tombstones, log_append_time])
def test_the_interpreted_kernel_counts_as_the_compiled_one(scene, monkeypatch):
    """Or its breakages would be noticed for nothing."""
    scanning("if sequence < 0:", "if sequence < 0:")(monkeypatch)
    play(scene)
