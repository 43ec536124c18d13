"""Histories in which evidence is missing, stale or of another kind than it looks: what may not be proven,
and what may not be called lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap64

from millrace.audit.contract.events import (
    CLOSED,
    HEARTBEAT,
    CountEvent,
    EventLedger,
    StreamEvent,
    StreamFacts,
)
from millrace.audit.reconciliation.reconcile import (
    PRUNED_BEFORE,
    Passage,
    TierReading,
    UnreadRange,
    passage_by_arrivals,
    reconcile_stream,
)
from millrace.audit.reconciliation.tier_reading import arrivals_of
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.scanning.cells import Cell, merge_cells
from tests.cells import again_of, count_repeats, encode_bitmaps
from tests.verdicts import overall_verdict

STREAM, SESSION = "00000000000000ab", "00000000000000cd"
MINUTE_MS, NOW_MS = 60_000, 10_000_000
PLACE = ("ewr", "flights", 0)


def count_event(sequences: Any, *, window: int = 0, report: int = 1, **changes: Any) -> CountEvent:
    fields: dict[str, Any] = {
        "stream": STREAM,
        "session": SESSION,
        "topic": "flights",
        "producer": "AA",
        "window_start_ms": window,
        "window_ms": MINUTE_MS,
        "report": report,
        "count": len(sequences),
        "byte_count": 0,
        "acknowledged": BitMap64(sequences),
        "ambiguous": BitMap64(),
        "failed": BitMap64(),
        "at_ms": 0,
    }
    return CountEvent(**{**fields, **changes})


def count_only(count: int, **changes: Any) -> CountEvent:
    return count_event((), **{"count": count, "sequenced": False, **changes})


def stream_event(state: str, last: int, **changes: Any) -> StreamEvent:
    fields: dict[str, Any] = {
        "state": state,
        "stream": STREAM,
        "session": SESSION,
        "topic": "flights",
        "producer": "AA",
        "host": "",
        "application": "",
        "datacenter": "",
        "window_ms": MINUTE_MS,
        "last_assigned": last,
        "last_settled": last,
        "no_earlier_than_ms": None,
        "lease_ms": MINUTE_MS,
        "at_ms": NOW_MS - 50_000,
    }
    return StreamEvent(**{**fields, **changes})


def told(*events: CountEvent | StreamEvent) -> StreamFacts:
    ledger = EventLedger()
    ledger.learn_all(events)
    return ledger.facts(STREAM)


def cell(tier: str, sequences: Any, *, first: int = 0, window: int = 0, **changes: Any) -> Cell:
    numbers = np.array(sequences, dtype=np.uint64)
    distinct, repeats = count_repeats(numbers)
    ((base, bitmap),) = encode_bitmaps(distinct) or [(0, b"")]
    fields: dict[str, Any] = {
        "tier": tier,
        "cluster": "ewr" if tier == "source" else "agg",
        "topic": "flights",
        "partition": 0,
        "stream": STREAM,
        "producer": "AA",
        "window_start_ms": window,
        "chunk_start": first,
        "count": len(sequences),
        "byte_count": 0,
        "first_offset": first,
        "last_offset": first + len(sequences) - 1,
        "base": base,
        "bitmap": bitmap,
        "again": again_of(repeats),
        "unsequenced_count": int((numbers == 0).sum()),
    }
    return Cell(**{**fields, **changes})


def tiers(passage: Passage | None = None, source_unread: Any = ()) -> list[TierReading]:
    passed = {PLACE: passage or Passage(1000)}
    return [
        TierReading("source", unread=source_unread),
        TierReading("aggregate", upstream="source", passed=passed),
    ]


def audit(facts: StreamFacts, *cells: Cell, readings: Any = None) -> list[WindowVerdict]:
    return reconcile_stream(
        facts,
        merge_cells(cells),
        readings or tiers(),
        window_ms=MINUTE_MS,
        grace_ms=30_000,
        now_ms=NOW_MS,
    )


def test_a_lost_report_of_a_producer_that_beats_more_often_than_the_grace_is_never_proven():
    """Records 3 and 4 were acknowledged and lost, and so was the report that told of them."""
    facts = told(
        count_event([1, 2]),
        stream_event(HEARTBEAT, 4, at_ms=NOW_MS - 1000, no_earlier_than_ms=NOW_MS - 2000),
    )
    rows = audit(facts, cell("source", [1, 2]), cell("aggregate", [1, 2]))
    assert rows[0].state is WindowState.SETTLED
    assert rows[-1].unknown == ((3, 4),)
    assert overall_verdict(rows) is Verdict.UNKNOWN


@pytest.mark.parametrize("arrived", [3, 2, 0])
def test_unnumbered_records_without_any_report_prove_nothing(arrived):
    """A count-only producer whose reports were all lost; the mirror may have lost some of its records."""
    facts = told(stream_event(CLOSED, 0))
    rows = audit(facts, cell("source", [0] * 3), cell("aggregate", [0] * arrived))
    assert overall_verdict(rows) is Verdict.UNKNOWN


def test_unnumbered_records_in_a_stream_of_numbers_prove_nothing():
    facts = told(count_event([1]), stream_event(CLOSED, 1))
    rows = audit(facts, cell("source", [1, 0, 0]), cell("aggregate", [1]))
    assert rows[0].verdict is Verdict.UNKNOWN and rows[0].reasons


def test_one_report_without_numbers_does_not_turn_sets_into_counts():
    """A loss and a duplicate, which would cancel if the stream were judged by its counts."""
    facts = told(
        count_event([1, 2]),
        count_only(0, window=MINUTE_MS),
        stream_event(CLOSED, 2),
    )
    rows = audit(facts, cell("source", [1, 2]), cell("aggregate", [1, 1]))
    assert rows[0].verdict is Verdict.LOSS and rows[0].missing == {("source", "aggregate"): ((2, 2),)}
    assert overall_verdict(rows) is Verdict.LOSS


def test_a_count_only_window_that_no_report_tells_of_is_no_duplicate():
    facts = told(count_only(3), stream_event(CLOSED, 0))
    seen = [cell(tier, [0] * 3) for tier in ("source", "aggregate")]
    late = [cell(tier, [0] * 2, first=3, window=MINUTE_MS) for tier in ("source", "aggregate")]
    rows = audit(facts, *seen, *late)
    assert [row.verdict for row in rows] == [Verdict.COUNT_MATCH, Verdict.UNKNOWN]


def test_counts_that_the_source_no_longer_holds_are_no_duplicates_downstream():
    facts = told(count_only(3), stream_event(CLOSED, 0))
    expired = [UnreadRange(PLACE, 0, 2, "expired")]
    rows = audit(
        facts,
        cell("source", [0], first=2),
        cell("aggregate", [0] * 3),
        readings=tiers(source_unread=expired),
    )
    assert rows[0].verdict is Verdict.UNKNOWN and not rows[0].extra_copies


def test_arrival_of_one_copy_does_not_prove_that_its_other_copy_was_passed():
    """Sequence 1 stands at offset 0 and again at 9; the mirror has come to offset 1."""
    source = [cell("source", [1]), cell("source", [2, 3], first=1), cell("source", [1], first=9)]
    passed = passage_by_arrivals(source, {(STREAM, 0): BitMap64([1])})
    rows = audit(
        told(count_event([1, 2, 3]), stream_event(CLOSED, 3)),
        *source,
        cell("aggregate", [1]),
        readings=tiers(passed.get(PLACE, Passage(0))),
    )
    assert not rows[0].missing and rows[0].in_flight


def test_arrival_of_a_cell_with_repeats_proves_only_where_it_begins():
    source = [cell("source", [1, 2, 1])]
    assert passage_by_arrivals(source, {(STREAM, 0): BitMap64([1, 2])}) == {PLACE: Passage(0)}


def test_a_record_that_came_with_the_number_of_a_later_one_does_not_prove_that_the_later_one_was_passed():
    """Record 1 arrived as 20. The mirror has not come to 20, nor to 2 before it."""
    source = [
        cell("source", [1]),
        cell("source", [2], first=1),
        cell("source", [20], first=2, window=MINUTE_MS),
    ]
    late = [cell("aggregate", [20], window=0)]
    passed = passage_by_arrivals(source, arrivals_of(late))
    assert passed == {}
    facts = told(
        count_event([1, 2]), count_event([20], window=MINUTE_MS), stream_event(CLOSED, 20, last_settled=0)
    )
    rows = audit(facts, *source, *late, readings=tiers(passed.get(PLACE, Passage(0))))
    assert not any(row.missing for row in rows)


def test_a_number_that_stands_in_two_windows_of_a_tier_proves_neither_of_them():
    """A record of the second window arrived with the number of one of the first."""
    facts = told(count_event([1, 2]), count_event([3], window=MINUTE_MS), stream_event(CLOSED, 3))
    source = [cell("source", [1, 2]), cell("source", [3], first=2, window=MINUTE_MS)]
    changed = [cell("aggregate", [1, 2]), cell("aggregate", [2], first=2, window=MINUTE_MS)]
    assert [row.verdict for row in audit(facts, *source, *changed)] == [Verdict.UNKNOWN, Verdict.LOSS]


@pytest.mark.parametrize("arrived", [{MINUTE_MS: [1, 2]}, {0: [1], MINUTE_MS: [1, 2]}])
def test_a_number_in_another_window_than_its_report_proves_neither_though_the_source_expired(arrived):
    """The first window's record was lost, and one of the second came with its number: of what the source had
    nothing is left to compare with."""
    facts = told(count_event([1]), count_event([2], window=MINUTE_MS), stream_event(CLOSED, 2))
    there = [cell("aggregate", members, window=window) for window, members in arrived.items()]
    rows = audit(facts, *there)
    assert [row.verdict <= Verdict.COUNT_MATCH for row in rows] == [False, False]
    moved = "tier aggregate has records of this window in another one: their time was changed"
    assert moved in rows[0].reasons or len(arrived) > 1


def test_windows_that_have_numbers_in_common_are_named_together():
    """As short a stretch as can be, and whoever has none in common with another is in none."""
    windows = [[1], [2], [3], [4], [5], [6], [7]]
    reports = [count_event(each, window=number * MINUTE_MS) for number, each in enumerate(windows)]
    moved = [[1, 2], [2], [3], [4, 6], [5], [6], [7, 5]]
    there = [
        cell(tier, each, first=10 * number, window=number * MINUTE_MS)
        for tier, filed in (("source", windows), ("aggregate", moved))
        for number, each in enumerate(filed)
    ]
    rows = audit(told(*reports, stream_event(CLOSED, 7)), *there)
    around, further = (0, MINUTE_MS, 2), (3 * MINUTE_MS, 6 * MINUTE_MS, 4)
    assert [row.shared for row in rows] == [around, around, None, further, further, further, further]


def test_a_late_record_with_the_number_of_a_pruned_window_proves_nothing_and_is_missing_nowhere():
    """It may be a copy of one that had arrived; whether it was nobody can know any more."""
    facts = told(count_event([4], window=MINUTE_MS), stream_event(CLOSED, 4))
    facts.accounted = BitMap64([1, 2, 3])
    for here in ("source", "aggregate"):
        own = [cell(tier, [4], first=9, window=MINUTE_MS) for tier in ("source", "aggregate")]
        assert overall_verdict(audit(facts, *own)) is Verdict.PROVEN
        (row,) = audit(facts, *own, cell(here, [2], window=MINUTE_MS))
        assert (row.verdict, row.reasons) == (Verdict.UNKNOWN, (PRUNED_BEFORE,))
        assert (row.missing, row.unreported, row.unknown, row.shared) == ({}, (), (), None)


def test_a_producer_clock_a_little_ahead_does_not_turn_an_unread_part_into_a_loss():
    facts = told(count_event([1]), stream_event(CLOSED, 1, at_ms=NOW_MS + 5000))
    expired = [UnreadRange(PLACE, 0, 9, "expired", until_ms=NOW_MS)]
    rows = audit(facts, readings=tiers(source_unread=expired))
    assert rows[0].verdict is Verdict.UNKNOWN and not rows[0].missing


def test_a_late_first_word_does_not_say_when_a_stream_began():
    """Its opening was lost, or compacted away; its records may lie in what expired before."""
    facts = told(count_event([1]), stream_event(HEARTBEAT, 1), stream_event(CLOSED, 1))
    expired = [UnreadRange(PLACE, 0, 9, "expired", until_ms=NOW_MS - 500_000)]
    rows = audit(facts, readings=tiers(source_unread=expired))
    assert rows[0].verdict is Verdict.UNKNOWN and not rows[0].missing


def test_an_opening_that_is_told_late_does_not_deny_what_was_sent_before_it():
    facts = told(count_event([1]), stream_event("opened", 1), stream_event(CLOSED, 1))
    expired = [UnreadRange(PLACE, 0, 9, "expired", until_ms=NOW_MS - 500_000)]
    rows = audit(facts, readings=tiers(source_unread=expired))
    assert rows[0].verdict is Verdict.UNKNOWN and not rows[0].missing


def test_a_stream_that_goes_on_after_its_end_is_two_producers():
    """A copy of a running machine: one closes, the other goes on; its end settles nothing."""
    closed = stream_event(CLOSED, 2, at_ms=NOW_MS - 500_000)
    beat = stream_event(HEARTBEAT, 2, at_ms=NOW_MS - 1000)
    for events in ((closed, beat), (beat, closed)):
        rows = audit(told(count_event([1, 2]), *events), cell("source", [1, 2]), cell("aggregate", [1, 2]))
        assert overall_verdict(rows) is Verdict.UNKNOWN


def test_an_end_told_twice_is_one_end():
    """The closing of a dead session is sent anew by the next start."""
    ends = [stream_event(CLOSED, 2, at_ms=NOW_MS - 500_000), stream_event(CLOSED, 2, at_ms=NOW_MS - 1000)]
    rows = audit(told(count_event([1, 2]), *ends), cell("source", [1, 2]), cell("aggregate", [1, 2]))
    assert overall_verdict(rows) is Verdict.PROVEN


def test_a_report_that_takes_back_what_an_older_one_acknowledged_proves_nothing():
    """Reports are cumulative; 2 was acknowledged by word of the first, and is nowhere."""
    older = count_event([1, 2], report=1)
    newer = count_event([1], report=2, ambiguous=BitMap64([2]))
    for events in ((older, newer), (newer, older)):
        rows = audit(told(*events, stream_event(CLOSED, 2)), cell("source", [1]), cell("aggregate", [1]))
        assert overall_verdict(rows) is not Verdict.PROVEN


def test_a_record_that_was_reported_as_never_sent_and_is_there_proves_nothing():
    facts = told(count_event([1], failed=BitMap64([2])), stream_event(CLOSED, 2))
    rows = audit(facts, cell("source", [1, 2]), cell("aggregate", [1, 2]))
    assert (rows[0].verdict, rows[0].unreported) == (Verdict.UNKNOWN, ((2, 2),))


def test_one_number_acknowledged_in_two_windows_is_two_records():
    """One of them is lost, and the other one has its number: the sets alone would not show it."""
    facts = told(count_event([1]), count_event([1], window=MINUTE_MS), stream_event(CLOSED, 1))
    seen = [cell(tier, [1], window=MINUTE_MS) for tier in ("source", "aggregate")]
    rows = audit(facts, *seen)
    assert {row.verdict for row in rows} == {Verdict.UNKNOWN}


@pytest.mark.parametrize(
    ("above", "source", "aggregate", "checked"),
    [
        (7, 7, 7, "compared"),
        (None, 7, 7, "not compared"),
        (7, 7, None, "not compared"),
        (7, 7, 8, "differs"),
        (None, None, None, ""),
    ],
)
def test_a_row_says_whether_its_contents_were_compared(above, source, aggregate, checked):
    facts = told(count_event([1], digest=above), stream_event(CLOSED, 1))
    rows = audit(facts, cell("source", [1], digest=source), cell("aggregate", [1], digest=aggregate))
    assert rows[0].content_checked == checked
    assert rows[0].verdict is (Verdict.LOSS if checked == "differs" else Verdict.PROVEN)


def test_contents_of_two_aggregates_are_each_compared_with_the_source():
    """The second one must not be compared with the first, which may lack records that it has."""
    facts = told(count_event([1], digest=7), stream_event(CLOSED, 1))
    readings = [*tiers(), TierReading("other", upstream="source", passed={PLACE: Passage(1000)})]
    cells = [cell("source", [1], digest=7), cell("aggregate", [], count=0, bitmap=b"", digest=0)]
    rows = audit(facts, *cells, cell("other", [1], digest=8, cluster="other"), readings=readings)
    assert "content differs between source and other" in rows[0].reasons


def test_a_lost_report_of_a_producer_that_only_counts_is_no_duplicate():
    """Its newest report was lost: the older one tells of fewer records than there are."""
    facts = told(count_only(3), stream_event(CLOSED, 5))
    rows = audit(facts, *(cell(tier, [0] * 5) for tier in ("source", "aggregate")))
    assert not rows[0].extra_copies
    assert [row.verdict for row in rows] == [Verdict.UNKNOWN, Verdict.UNKNOWN]


def test_what_lies_behind_an_open_transaction_may_be_of_any_time():
    """A producer's clock is ahead: its opening seems later than what the transaction hides."""
    opened = stream_event("opened", 0, at_ms=NOW_MS + 20_000)
    facts = told(count_event([1], window=NOW_MS // MINUTE_MS * MINUTE_MS), opened, stream_event(CLOSED, 1))
    hidden = [UnreadRange(PLACE, 0, 9, "a transaction is open", until_ms=1 << 48)]
    rows = audit(facts, readings=tiers(source_unread=hidden))
    assert rows[0].verdict is Verdict.UNKNOWN and not rows[0].missing


def test_a_clock_that_is_ahead_of_now_does_not_tell_when_a_stream_opened():
    start_ms = (NOW_MS + 900_000) // MINUTE_MS * MINUTE_MS
    opened = stream_event("opened", 0, at_ms=start_ms)
    facts = told(count_event([1], window=start_ms), opened, stream_event(CLOSED, 1, at_ms=start_ms))
    expired = [UnreadRange(PLACE, 0, 9, "expired", until_ms=NOW_MS)]
    rows = audit(facts, readings=tiers(source_unread=expired))
    assert rows[0].verdict is Verdict.UNKNOWN and not rows[0].missing


def test_a_deleted_topics_arrivals_do_not_pass_the_new_one():
    cells = [cell("source", [1], first=500, topic_id="old"), cell("source", [2], topic_id="new")]
    assert passage_by_arrivals(cells, {(STREAM, 0): BitMap64([1])}) == {}
