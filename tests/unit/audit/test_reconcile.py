"""The traps, one by one: what a careless audit would call proven, or would raise an alarm for."""

from __future__ import annotations

import tracemalloc
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from pyroaring import BitMap, BitMap64

from millrace.audit.contract.events import CLOSED, HEARTBEAT, OPENED, CountEvent, StreamEvent, StreamFacts
from millrace.audit.reconciliation.reconcile import (
    Gap,
    Passage,
    TierReading,
    UnreadRange,
    passage_by_arrivals,
    reconcile_stream,
)
from millrace.audit.reconciliation.roster import roster_rows
from millrace.audit.reconciliation.verdicts import PRODUCED, Verdict, WindowState
from millrace.audit.scanning.cells import BASE_STEP, Cell, merge_cells
from tests.cells import again_of, count_repeats, encode_bitmaps
from tests.verdicts import overall_verdict

STREAM, SESSION = "00000000000000ab", "00000000000000cd"
MINUTE_MS = 60_000
NOW_MS = 10_000_000
PLACE = ("ewr", "flights", 0)
BETWEEN = ("source", "aggregate")


def facts(windows, *, state=CLOSED, last=None, settled=None, **changes) -> StreamFacts:
    """A stream that acknowledged {window start: sequences}; further reports' fields by `reports`."""
    reports = changes.pop("reports", {})
    count_only = changes.pop("count_only", False)
    stream = StreamFacts(STREAM)
    for start_ms, sequences in windows.items():
        fields = {
            "stream": STREAM,
            "session": SESSION,
            "topic": "flights",
            "producer": "AA",
            "window_start_ms": start_ms,
            "window_ms": MINUTE_MS,
            "report": 1,
            "count": sequences if count_only else len(sequences),
            "byte_count": 0,
            "acknowledged": BitMap64() if count_only else BitMap64(sequences),
            "ambiguous": BitMap64(),
            "failed": BitMap64(),
            "sequenced": not count_only,
            "at_ms": 0,
        }
        stream.learn_count(CountEvent(**{**fields, **reports.get(start_ms, {})}))
    if state is not None:
        known = [max(s) for s in windows.values() if not count_only and s]
        last = max(known, default=0) if last is None else last
        fields = {
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
            "last_settled": last if settled is None else settled,
            "no_earlier_than_ms": None,
            "lease_ms": MINUTE_MS,
            "at_ms": NOW_MS - 50_000,
        }
        stream.learn_stream(StreamEvent(**{**fields, **changes}))
    return stream


def cells(tier, sequences, *, window=0, chunk=(0, None), **changes) -> list[Cell]:
    """The cells of records at offsets chunk[0].. in one window."""
    numbers = np.array(sequences, dtype=np.uint64)
    distinct, repeats = count_repeats(numbers)
    first = chunk[0]
    fields = {
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
        "last_offset": first + len(sequences) - 1 if chunk[1] is None else chunk[1],
        "unsequenced_count": int((numbers == 0).sum()),
    }
    pairs = encode_bitmaps(distinct) or [(0, b"")]
    return [
        Cell(
            **{
                **fields,
                "base": base,
                "bitmap": bitmap,
                "again": again_of(repeats, base),
                "count": len(sequences) if number == 0 else 0,
                **changes,
            }
        )
        for number, (base, bitmap) in enumerate(pairs)
    ]


def tiers(position=1000, *, gaps=(), source_unread=(), aggregate_unread=(), topic_id=""):
    return [
        TierReading("source", unread=source_unread),
        TierReading(
            "aggregate",
            upstream="source",
            passed={PLACE: Passage(position, topic_id)},
            gaps=gaps,
            unread=aggregate_unread,
        ),
    ]


def audit(stream, source, aggregate, readings=None, **changes):
    settings = {"window_ms": MINUTE_MS, "grace_ms": 30_000, "now_ms": NOW_MS, **changes}
    return reconcile_stream(stream, merge_cells([*source, *aggregate]), readings or tiers(), **settings)


def test_all_seen_is_proven_with_its_figures():
    (row,) = audit(facts({0: [1, 2, 3]}), cells("source", [1, 2, 3]), cells("aggregate", [3, 1, 2]))
    assert (row.verdict, row.state) == (Verdict.PROVEN, WindowState.SETTLED)
    assert row.published == 3
    assert row.consumed == row.seen == {"source": 3, "aggregate": 3}


def test_a_total_loss_is_a_loss_and_never_an_empty_proof():
    (row,) = audit(facts({0: [1, 2, 3]}), [], [])
    assert row.verdict is Verdict.LOSS
    assert row.missing == {(PRODUCED, "source"): ((1, 3),)}


def test_nothing_known_at_all_is_unknown():
    assert overall_verdict([]) is Verdict.UNKNOWN


def test_a_loss_and_a_duplicate_do_not_cancel():
    (row,) = audit(facts({0: [1, 2, 3]}), cells("source", [1, 2, 3]), cells("aggregate", [1, 3, 3]))
    assert row.verdict is Verdict.LOSS
    assert row.consumed["aggregate"] == row.published
    assert row.missing == {BETWEEN: ((2, 2),)}
    assert row.duplicates == {"aggregate": ((3, 3),)}


def test_a_duplicate_of_the_source_is_named_once_and_only_there():
    (row,) = audit(facts({0: [1, 2]}), cells("source", [1, 2, 2]), cells("aggregate", [1, 2, 2]))
    assert row.verdict is Verdict.DUPLICATE
    assert (row.duplicates, row.extra_copies) == ({"source": ((2, 2),)}, {"source": 1})


def test_a_further_copy_made_by_the_mirror_is_named_at_the_aggregate():
    (row,) = audit(facts({0: [1, 2]}), cells("source", [1, 2, 2]), cells("aggregate", [1, 2, 2, 2]))
    assert row.extra_copies == {"source": 1, "aggregate": 1}


def test_one_sequence_in_two_windows_is_a_duplicate():
    seen = cells("aggregate", [1], window=0) + cells("aggregate", [1], window=MINUTE_MS, chunk=(1, None))
    rows = audit(facts({0: [1]}), cells("source", [1]), seen)
    assert overall_verdict(rows) is Verdict.DUPLICATE


@pytest.mark.parametrize(
    ("position", "verdict"), [(0, Verdict.UNKNOWN), (2, Verdict.UNKNOWN), (3, Verdict.LOSS)]
)
def test_what_the_mirror_has_not_passed_is_in_flight_not_lost(position, verdict):
    (row,) = audit(
        facts({0: [1, 2, 3]}), cells("source", [1, 2, 3]), cells("aggregate", [1]), tiers(position)
    )
    assert row.verdict is verdict
    assert (BETWEEN in row.in_flight) == (position < 3)


def test_a_chunk_cut_at_the_position_tells_loss_from_lag():
    source = cells("source", [1, 2]) + cells("source", [3], chunk=(2, None))
    (row,) = audit(facts({0: [1, 2, 3]}), source, cells("aggregate", [1]), tiers(2))
    assert (row.missing, row.in_flight) == ({BETWEEN: ((2, 2),)}, {BETWEEN: ((3, 3),)})


def test_a_duplicate_with_one_copy_still_to_come_is_not_lost():
    source = cells("source", [1, 2]) + cells("source", [2], chunk=(2, None))
    (row,) = audit(facts({0: [1, 2]}), source, cells("aggregate", [1]), tiers(2))
    assert (row.missing, row.in_flight) == ({}, {BETWEEN: ((2, 2),)})


def test_a_gap_explains_what_lies_within_it():
    source = cells("source", [1]) + cells("source", [2, 3], chunk=(1, None))
    gap = Gap(PLACE, 1, 3, "too_large")
    (row,) = audit(facts({0: [1, 2, 3]}), source, cells("aggregate", [1]), tiers(gaps=[gap]))
    assert (row.verdict, row.explained, row.missing) == (Verdict.UNKNOWN, {"too_large": ((2, 3),)}, {})


def test_what_arrived_is_proven_also_where_a_gap_names_it():
    """Refused once, tried again and taken; or refused to a worker whose successor had carried it."""
    source = cells("source", [1]) + cells("source", [2, 3], chunk=(1, None))
    gap = Gap(PLACE, 1, 3, "too_large")
    (row,) = audit(facts({0: [1, 2, 3]}), source, cells("aggregate", [1, 2, 3]), tiers(gaps=[gap]))
    assert (row.verdict, row.explained, row.extra_copies) == (Verdict.PROVEN, {}, {})
    (row,) = audit(facts({0: [1, 2, 3]}), source, cells("aggregate", [1, 2, 2, 3]), tiers(gaps=[gap]))
    assert row.verdict is Verdict.DUPLICATE


def test_a_gap_over_part_of_a_chunk_leaves_it_unknown():
    gap = Gap(PLACE, 1, 2, "too_large")
    source = cells("source", [1, 2, 3])
    (row,) = audit(facts({0: [1, 2, 3]}), source, cells("aggregate", [1]), tiers(gaps=[gap]))
    assert (row.verdict, row.unknown, row.missing) == (Verdict.UNKNOWN, ((2, 3),), {})


def test_an_open_gap_explains_what_came_behind_it_in_its_own_topic_and_in_no_other():
    stream, arrived = facts({0: [1, 2, 3, 4]}), cells("aggregate", [1, 2])
    closed = Gap(PLACE, 2, 3, "recreated", "old")
    known = replace(closed, has_open_end=True)

    def found(gap, *, at, topic_id="old"):
        carried = cells("source", [1, 2], topic_id="old")
        missing = cells("source", [3, 4], chunk=(at, None), topic_id=topic_id)
        (row,) = audit(stream, carried + missing, arrived, tiers(gaps=[gap], topic_id="new"))
        return row.verdict, row.explained, row.missing

    explained = (Verdict.UNKNOWN, {"recreated": ((3, 4),)}, {})
    lost = (Verdict.LOSS, {}, {BETWEEN: ((3, 4),)})
    assert found(known, at=2) == found(known, at=7) == explained
    # Nothing was known of but that it was another topic.
    assert found(replace(known, to_offset=2), at=2) == found(replace(known, to_offset=2), at=7) == explained
    assert found(closed, at=7) == lost
    # The new topic has such offsets too, and what is missing of it is lost; so where no id tells them apart.
    assert found(known, at=7, topic_id="new") == lost
    nameless = replace(known, topic_id="")
    assert found(nameless, at=7) == found(nameless, at=7, topic_id="new") == lost


def test_the_gap_of_another_partition_explains_nothing():
    gap = Gap(("ewr", "flights", 1), 0, 10, "too_large")
    (row,) = audit(facts({0: [1, 2]}), cells("source", [1, 2]), cells("aggregate", [1]), tiers(gaps=[gap]))
    assert row.verdict is Verdict.LOSS


def test_an_ambiguous_record_that_was_not_written_is_not_missed():
    stream = facts({0: [1]}, last=2, reports={0: {"ambiguous": BitMap64([2])}})
    (row,) = audit(stream, cells("source", [1]), cells("aggregate", [1]))
    assert (row.verdict, row.ambiguous) == (Verdict.PROVEN, 1)


def test_an_ambiguous_record_that_was_written_and_then_lost_is_a_loss():
    stream = facts({0: [1]}, last=2, reports={0: {"ambiguous": BitMap64([2])}})
    (row,) = audit(stream, cells("source", [1, 2]), cells("aggregate", [1]))
    assert row.missing == {BETWEEN: ((2, 2),)}


def test_ambiguous_numbers_filed_in_another_window_cover_what_was_seen():
    stream = facts({0: [1], MINUTE_MS: []}, last=2, reports={MINUTE_MS: {"ambiguous": BitMap64([2])}})
    rows = audit(stream, cells("source", [1, 2]), cells("aggregate", [1, 2]))
    assert overall_verdict(rows) is Verdict.PROVEN


def test_a_producer_that_died_before_it_could_say_leaves_unreported_records():
    stream = facts({0: [1]}, state=HEARTBEAT, at_ms=1000)
    rows = audit(stream, cells("source", [1, 2]), cells("aggregate", [1, 2]))
    assert rows[0].unreported == ((2, 2),) and rows[0].verdict is Verdict.UNKNOWN
    assert rows[1].window_start_ms is None and "silent" in rows[1].reasons[0]


def test_a_lost_tail_shows_by_the_last_number_assigned():
    rows = audit(facts({0: [1, 2]}, last=5), cells("source", [1, 2]), cells("aggregate", [1, 2]))
    assert rows[0].verdict is Verdict.PROVEN
    assert (rows[1].window_start_ms, rows[1].verdict, rows[1].unknown) == (None, Verdict.UNKNOWN, ((3, 5),))
    assert overall_verdict(rows) is Verdict.UNKNOWN


def test_a_lost_report_shows_as_a_hole_even_if_all_arrived_elsewhere():
    rows = audit(
        facts({0: [1, 2], 2 * MINUTE_MS: [6, 7]}),
        cells("source", [1, 2, 6, 7]),
        cells("aggregate", [1, 2, 6, 7]),
    )
    assert rows[-1].unknown == ((3, 5),)


def test_pending_records_of_a_living_stream_are_no_hole():
    stream = facts({0: [1, 2]}, state=HEARTBEAT, last=9, settled=2)
    rows = audit(stream, cells("source", [1, 2]), cells("aggregate", [1, 2]))
    assert [row.window_start_ms for row in rows] == [0]


def test_a_living_stream_answers_for_what_it_called_settled():
    stream = facts({0: [1, 2]}, state=HEARTBEAT, last=9, settled=4, lease_ms=10 * MINUTE_MS)
    source, aggregate = cells("source", [1, 2]), cells("aggregate", [1, 2])
    assert audit(stream, source, aggregate)[-1].unknown == ((3, 4),)
    assert audit(stream, source, aggregate, now_ms=stream.at_ms + 1000)[-1].unknown == ((3, 4),)


def test_a_stream_whose_announcement_was_lost_is_never_proven():
    rows = audit(facts({0: [1]}, state=None), cells("source", [1]), cells("aggregate", [1]))
    assert rows[0].state is WindowState.OPEN
    assert (rows[1].window_start_ms, rows[1].verdict) == (None, Verdict.UNKNOWN)
    assert overall_verdict(rows) is Verdict.UNKNOWN


def test_records_of_a_stream_without_any_event_are_unreported():
    rows = audit(StreamFacts(STREAM, topic="flights"), cells("source", [1, 2]), cells("aggregate", [1, 2]))
    assert rows[0].unreported == ((1, 2),)
    assert overall_verdict(rows) is Verdict.UNKNOWN


def test_a_producer_of_the_roster_that_never_reported_is_named():
    rows = roster_rows({"AA": 0, "UA": 0}, [facts({0: [1]})], "flights", MINUTE_MS, now_ms=0)
    assert [(row.producer, row.verdict) for row in rows] == [("UA", Verdict.UNKNOWN)]


def test_what_retention_took_from_the_source_is_unknown_unless_seen_downstream():
    unread = [UnreadRange(PLACE, 0, 2, "retention")]
    (row,) = audit(
        facts({0: [1, 2, 3]}),
        cells("source", [3], chunk=(2, None)),
        cells("aggregate", [1, 3]),
        tiers(source_unread=unread),
    )
    assert (row.verdict, row.unknown, row.missing) == (Verdict.UNKNOWN, ((2, 2),), {})


def test_a_stream_that_opened_after_the_unread_part_is_not_excused_by_it():
    unread = [UnreadRange(PLACE, 0, 2, "retention", until_ms=NOW_MS - 200_000)]
    begun_ms = (NOW_MS - 60_000) // MINUTE_MS * MINUTE_MS
    stream = facts({begun_ms: [1, 2]}, state=OPENED)
    stream.state = CLOSED
    source = cells("source", [1], chunk=(2, None), window=begun_ms)
    (row,) = audit(stream, source, cells("aggregate", [1], window=begun_ms), tiers(source_unread=unread))
    assert row.missing == {(PRODUCED, "source"): ((2, 2),)}


def test_an_unreadable_aggregate_makes_its_absences_unknown():
    unread = [UnreadRange(("agg", "flights", 0), 0, 9, "unreachable")]
    (row,) = audit(facts({0: [1]}), cells("source", [1]), [], tiers(aggregate_unread=unread))
    assert (row.verdict, row.unknown) == (Verdict.UNKNOWN, ((1, 1),))
    assert "unreachable" in row.reasons[0]


def test_records_of_a_deleted_topic_of_the_same_name_can_not_come_any_more():
    source = cells("source", [1, 2], topic_id="old")
    (row,) = audit(facts({0: [1, 2]}), source, cells("aggregate", [1]), tiers(0, topic_id="new"))
    assert row.missing == {BETWEEN: ((2, 2),)}


def test_other_content_under_the_same_number_is_a_loss():
    stream = facts({0: [1]}, reports={0: {"digest": 7}})
    same = audit(stream, cells("source", [1], digest=7), cells("aggregate", [1], digest=7))
    other = audit(stream, cells("source", [1], digest=7), cells("aggregate", [1], digest=8))
    assert same[0].verdict is Verdict.PROVEN
    assert other[0].verdict is Verdict.LOSS
    assert other[0].reasons == ("content differs between source and aggregate",)


def test_sequences_beyond_32_bits_are_kept_apart():
    high = 3 * BASE_STEP
    numbers = [high - 1, high, high + 1]
    aggregate = cells("aggregate", [high - 1, high + 1])
    (row, own) = audit(facts({0: numbers}), cells("source", numbers), aggregate)
    assert row.missing == {BETWEEN: ((high, high),)}
    assert own.unknown == ((1, high - 2),)


def test_reports_in_another_window_length_are_reconciled_in_the_longer_one():
    stream = facts({0: [1, 2]}, reports={0: {"window_ms": 10 * MINUTE_MS}})
    source = cells("source", [1], window=0) + cells("source", [2], window=MINUTE_MS, chunk=(1, None))
    aggregate = cells("aggregate", [1], window=0)
    (row,) = audit(stream, source, aggregate)
    assert (row.window_ms, row.missing) == (10 * MINUTE_MS, {BETWEEN: ((2, 2),)})


def test_conflicting_events_forbid_a_proof():
    stream = facts({0: [1]})
    stream.conflicts.append("two producers use one stream id")
    rows = audit(stream, cells("source", [1]), cells("aggregate", [1]))
    assert [row.verdict for row in rows] == [Verdict.UNKNOWN, Verdict.UNKNOWN]


def test_an_empty_window_report_is_proven_and_no_report_is_no_row():
    assert [row.verdict for row in audit(facts({0: []}), [], [])] == [Verdict.PROVEN]
    assert audit(facts({}), [], []) == []


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"no_earlier_than_ms": MINUTE_MS}, WindowState.SETTLED),
        ({"no_earlier_than_ms": MINUTE_MS - 1}, WindowState.OPEN),
        ({}, WindowState.OPEN),
        ({"at_ms": 1000}, WindowState.SETTLED),
        ({"state": CLOSED}, WindowState.SETTLED),
    ],
)
def test_a_window_settles_by_promise_lease_or_closing(changes, state):
    stream = facts({0: [1]}, **{"state": HEARTBEAT, "lease_ms": 10 * MINUTE_MS, **changes})
    rows = audit(stream, cells("source", [1]), cells("aggregate", [1]))
    assert rows[0].state is state


def test_a_window_stays_open_during_its_grace():
    stream = facts({0: [1]}, at_ms=MINUTE_MS)
    source, aggregate = cells("source", [1]), cells("aggregate", [1])
    assert audit(stream, source, aggregate, now_ms=MINUTE_MS + 29_999)[0].state is WindowState.OPEN
    assert audit(stream, source, aggregate, now_ms=MINUTE_MS + 30_000)[0].state is WindowState.SETTLED


def test_a_closed_stream_with_a_clock_far_ahead_settles_all_the_same():
    future_ms = 1000 * NOW_MS // MINUTE_MS * MINUTE_MS
    rows = audit(
        facts({future_ms: [1]}),
        cells("source", [1], window=future_ms),
        cells("aggregate", [1], window=future_ms),
    )
    assert (rows[0].state, rows[0].verdict) == (WindowState.SETTLED, Verdict.PROVEN)


def test_the_worst_verdict_wins_in_the_documented_order():
    order = [Verdict.PROVEN, Verdict.COUNT_MATCH, Verdict.UNKNOWN, Verdict.DUPLICATE, Verdict.LOSS]
    assert all(better < worse for better, worse in pairwise(order))


def test_tiers_in_a_wrong_order_are_refused():
    with pytest.raises(ValueError, match="aggregate must come once, after"):
        audit(facts({}), [], [], list(reversed(tiers())))


def test_arrivals_prove_how_far_a_mirror_without_positions_has_come():
    source = cells("source", [1, 2]) + cells("source", [3, 4], chunk=(2, None))
    assert passage_by_arrivals(source, {(STREAM, 0): BitMap64([1])}) == {PLACE: Passage(0)}
    assert passage_by_arrivals(source, {(STREAM, 0): BitMap64([1, 2])}) == {PLACE: Passage(2)}
    assert passage_by_arrivals(source, {(STREAM, 0): BitMap64([4])}) == {PLACE: Passage(2)}
    assert passage_by_arrivals(source, {}) == {}


@pytest.mark.parametrize(
    ("source", "aggregate", "position", "verdict"),
    [
        (3, 3, 1000, Verdict.COUNT_MATCH),
        (3, 2, 1000, Verdict.LOSS),
        (2, 2, 1000, Verdict.LOSS),
        (3, 4, 1000, Verdict.DUPLICATE),
        (4, 4, 1000, Verdict.DUPLICATE),
        (3, 2, 0, Verdict.UNKNOWN),
    ],
)
def test_a_count_only_producer_gets_verdicts_by_count(source, aggregate, position, verdict):
    stream = facts({0: 3}, count_only=True)
    seen = cells("aggregate", [0] * aggregate)
    (row,) = audit(stream, cells("source", [0] * source), seen, tiers(position))
    assert row.verdict is verdict


@pytest.mark.parametrize(
    ("now_ms", "state"), [(MINUTE_MS + 29_999, WindowState.OPEN), (NOW_MS, WindowState.SETTLED)]
)
def test_counts_of_a_living_count_only_producer_are_in_doubt_and_no_loss(now_ms, state):
    stream = facts({0: 3}, count_only=True, state=HEARTBEAT, lease_ms=10 * MINUTE_MS)
    (row,) = audit(stream, cells("source", [0] * 2), cells("aggregate", [0] * 2), now_ms=now_ms)
    assert (row.verdict, row.state) == (Verdict.UNKNOWN, state)


def test_an_unreadable_report_of_a_count_only_producer_forbids_a_match():
    stream = facts({0: 3}, count_only=True)
    stream.distrusted.append("not JSON")
    (row,) = audit(stream, cells("source", [0] * 3), cells("aggregate", [0] * 3))
    assert row.verdict is Verdict.UNKNOWN


def test_an_opened_stream_that_never_sent_anything_is_silent_after_its_lease():
    (row,) = audit(facts({}, state=OPENED, at_ms=1000), [], [])
    assert (row.window_start_ms, row.verdict) == (None, Verdict.UNKNOWN)


def test_a_stream_that_was_carried_twice_is_named_by_a_range_and_costs_no_number_for_each():
    everything = BitMap()
    everything.add_range(1, 100_000_001)
    size = len(everything)
    fields = {"bitmap": everything.serialize(), "again": (everything.serialize(),), "count": 2 * size}
    twice = [Cell(**{**asdict(each), **fields}) for each in (*cells("source", [1]), *cells("aggregate", [1]))]
    twice.append(replace(twice[1], again=(), count=size, first_offset=5, last_offset=5))
    about = StreamFacts(STREAM)
    about.learn_stream(
        StreamEvent(
            stream=STREAM, session="a" * 16, topic="flights", producer="AA", state=CLOSED, host="",
            application="", datacenter="", window_ms=MINUTE_MS, last_assigned=size, last_settled=size,
            no_earlier_than_ms=None, lease_ms=1000, at_ms=1000,
        )
    )  # fmt: skip
    tracemalloc.start()
    try:
        rows = reconcile_stream(
            about, merge_cells(twice), tiers(), window_ms=MINUTE_MS, grace_ms=0, now_ms=10_000_000
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (row,) = [each for each in rows if each.window_start_ms is not None]
    whole = ((1, size),)
    assert row.duplicates == {"source": whole, "aggregate": whole}
    assert row.extra_copies == {"source": size, "aggregate": size}
    assert peak < 20 << 20
