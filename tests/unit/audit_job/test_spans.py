"""Lines of pruned windows, summed up day by day: what stays told of each, and what must stay a line."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from millrace.audit.contract.event_values import HEARTBEAT
from millrace.audit.contract.events import StreamFacts
from millrace.audit.reconciliation.row_digest import rows_digest
from millrace.audit.reconciliation.settled import LINE_SCHEMA, SETTLED_SCHEMA, earlier_lines
from millrace.audit.reconciliation.spans import (
    DAY_MS,
    LOOKED_AT_MS,
    NO_SPANS,
    SPAN_SCHEMA,
    are_in,
    sum_up,
    window_counts,
)
from millrace.audit.reconciliation.verdict_rows import ROW_SCHEMA
from millrace.audit.runs.watermarks import watermarks_of
from tests import seeds

MINUTE_MS = 60_000
LATER_MS = 10**15


def line(start_ms: int, verdict: str = "PROVEN", **more: object) -> dict[str, object]:
    told = {name: 0 for name in SETTLED_SCHEMA.names if SETTLED_SCHEMA.field(name).type == pa.int64()}
    told |= {"topic": "flights", "producer": "", "stream": "", "revision": 1, "before": "", "content": ""}
    told |= {"window_start_ms": start_ms, "window_ms": MINUTE_MS, "verdict": verdict, "folded": True}
    return {**told, "open": False, **more}


def lines(*rows: dict[str, object]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), SETTLED_SCHEMA)


def minutes(first: int, end: int, **more: object) -> list[dict[str, object]]:
    return [
        line(minute * MINUTE_MS, published=minute, settled_ms=minute, **more) for minute in range(first, end)
    ]


def spans_of(table: pa.Table) -> list[tuple[int, int]]:
    return [(row["start_ms"] // MINUTE_MS, row["end_ms"] // MINUTE_MS) for row in table.to_pylist()]


def test_the_windows_of_a_day_that_is_long_over_become_one_line_with_their_sums():
    day = DAY_MS // MINUTE_MS
    told = lines(*minutes(0, 2 * day + 5))
    left, spans = sum_up(told, NO_SPANS, 2 * DAY_MS + LOOKED_AT_MS)
    assert spans_of(spans) == [(0, day), (day, 2 * day)] and spans.schema == SPAN_SCHEMA
    assert window_counts(spans).to_pylist() == [day, day]
    assert spans["published"].to_pylist() == [sum(range(day)), sum(range(day, 2 * day))]
    assert spans["settled_ms"].to_pylist() == [day - 1, 2 * day - 1]
    assert [row["window_start_ms"] // MINUTE_MS for row in left.to_pylist()] == [*range(2 * day, 2 * day + 5)]
    assert left.schema == SETTLED_SCHEMA
    again = sum_up(left, spans, 2 * DAY_MS + LOOKED_AT_MS)
    assert again[0].equals(left) and again[1].equals(spans)
    early, none = sum_up(told, NO_SPANS, DAY_MS + LOOKED_AT_MS - 1)
    assert early.num_rows == told.num_rows and none.num_rows == 0


def test_a_gap_another_verdict_length_or_topic_ends_a_span_and_what_was_waived_stays_a_line():
    told = lines(
        *minutes(0, 3), *minutes(4, 6),
        line(6 * MINUTE_MS, "LOSS", missing=1), line(7 * MINUTE_MS, "LOSS"),
        *minutes(8, 10, verdict="COUNT_MATCH"), *minutes(10, 12),
        *(line(start * 3 * MINUTE_MS, window_ms=3 * MINUTE_MS) for start in (4, 5)),
        *minutes(0, 2, topic="hotels"),
        line(30 * MINUTE_MS), line(32 * MINUTE_MS, open=True), line(33 * MINUTE_MS, folded=False),
        line(34 * MINUTE_MS),
    )  # fmt: skip
    left, spans = sum_up(told, NO_SPANS, LATER_MS)
    found = {
        (row["topic"], row["verdict"], row["start_ms"] // MINUTE_MS, row["end_ms"] // MINUTE_MS)
        for row in spans.to_pylist()
    }
    assert found == {
        ("flights", "PROVEN", 0, 3), ("flights", "PROVEN", 4, 6), ("flights", "COUNT_MATCH", 8, 10),
        ("flights", "PROVEN", 10, 12), ("flights", "PROVEN", 12, 18), ("hotels", "PROVEN", 0, 2),
    }  # fmt: skip
    assert [row["window_start_ms"] // MINUTE_MS for row in left.to_pylist()] == [6, 7, 30, 32, 33, 34]


def test_what_comes_later_goes_on_with_a_span_and_never_into_it():
    _, spans = sum_up(lines(*minutes(0, 3)), NO_SPANS, LATER_MS)
    left, spans = sum_up(lines(*minutes(3, 5), line(MINUTE_MS, published=7)), spans, LATER_MS)
    assert spans_of(spans) == [(0, 5)]
    assert [(row["window_start_ms"], row["published"]) for row in left.to_pylist()] == [(MINUTE_MS, 7)]
    assert spans["published"].to_pylist() == [sum(range(5))]


def test_random_windows_are_in_the_spans_exactly_when_they_were_summed_up():
    rng = random.Random(seeds.given())
    for _ in range(50):
        told, spans, gone = [], NO_SPANS, set()
        for _ in range(rng.randint(1, 3)):
            for topic in ("a", "b"):
                starts = rng.sample(range(60), rng.randint(0, 50))
                long = rng.choice((1, 1, 5))
                there = {(row["topic"], row["window_start_ms"]) for row in told}
                told += [
                    line(start * long * MINUTE_MS, topic=topic, window_ms=long * MINUTE_MS, published=1)
                    for start in starts
                    if (topic, start * long * MINUTE_MS) not in there
                ]
            count = len(told)
            left, spans = sum_up(lines(*told), spans, LATER_MS, 20 * MINUTE_MS)
            told = left.to_pylist()
            assert left.num_rows + sum(window_counts(spans).to_pylist()) == count + len(gone)
            assert sum(left["published"].to_pylist()) + sum(spans["published"].to_pylist()) == count + len(
                gone
            )
            gone = set(range(sum(window_counts(spans).to_pylist())))
        windows = pa.table(
            {
                "topic": [topic for topic in ("a", "b", "c") for _ in range(320)],
                "window_start_ms": [minute * MINUTE_MS for _ in range(3) for minute in range(320)],
            }
        )
        inside = {
            (row["topic"], start)
            for row in spans.to_pylist()
            for start in range(row["start_ms"], row["end_ms"], row["window_ms"])
        }
        assert are_in(windows, spans).to_pylist() == [
            (row["topic"], row["window_start_ms"]) in inside for row in windows.to_pylist()
        ]


def test_a_line_of_a_window_in_a_span_is_that_of_a_pruned_one():
    _, spans = sum_up(lines(*minutes(0, 3)), NO_SPANS, LATER_MS)
    own = lines(
        line(2 * MINUTE_MS, folded=False, stream="aa"), line(3 * MINUTE_MS, folded=False, stream="aa")
    )
    found, folded = earlier_lines(own, ["flights"], spans)
    assert found.schema == LINE_SCHEMA and folded.num_rows == 0
    assert found["pruned"].to_pylist() == [True, False]


@pytest.mark.parametrize(
    ("doubt", "promise", "until"),
    [(None, None, 10), (None, 7.5, 7), (4, None, 4), (4.9, 7, 4), (0.5, None, None), (None, 12, 10)],
)
def test_a_watermark_stops_within_a_span_where_it_would_among_its_windows(doubt, promise, until):
    told = lines(*minutes(0, 10))
    _, spans = sum_up(told, NO_SPANS, LATER_MS)
    rows, streams = ROW_SCHEMA.empty_table(), []
    if doubt is not None:
        row = dict.fromkeys(ROW_SCHEMA.names) | {"topic": "flights", "producer": "AA", "stream": "aa"}
        row |= {"window_ms": MINUTE_MS, "state": "SETTLED", "verdict": "UNKNOWN"}
        row |= {"detail": f'{{"not_before_ms": {int(doubt * MINUTE_MS)}}}'}
        rows = pa.Table.from_pylist([row], ROW_SCHEMA)
    if promise is not None:
        facts = StreamFacts("aa", topic="flights", state=HEARTBEAT)
        facts.no_earlier_than_ms = int(promise * MINUTE_MS)
        streams.append(facts)
    for table, summed in ((told, NO_SPANS), (told.slice(0, 0), spans), (told.slice(3, 2), spans)):
        found = watermarks_of(rows, table, streams, [], ["flights"], over_ms=LATER_MS, spans=summed)
        assert found == {"flights": None if until is None else until * MINUTE_MS}, summed.num_rows


def test_a_loss_that_came_late_in_a_span_takes_the_watermark_back_to_its_window():
    _, spans = sum_up(lines(*minutes(0, 10)), NO_SPANS, LATER_MS)
    row = dict.fromkeys(ROW_SCHEMA.names, 0) | {"topic": "flights", "producer": "AA", "stream": "aa"}
    row |= {"window_start_ms": 6 * MINUTE_MS, "window_ms": MINUTE_MS, "state": "SETTLED", "missing": 1}
    row |= {"window_start": "", "consumed": [], "seen": [], "content": "", "detail": "{}", "said": ""}
    for verdict, until in (("LOSS", 6), ("PROVEN", 10)):
        rows = pa.Table.from_pylist([{**row, "verdict": verdict}], ROW_SCHEMA)
        nothing = lines()
        found = watermarks_of(rows, nothing, [], [], ["flights"], over_ms=LATER_MS, spans=spans)
        assert found == {"flights": until * MINUTE_MS}


def test_other_spans_have_another_digest():
    _, spans = sum_up(lines(*minutes(0, 10)), NO_SPANS, LATER_MS)
    _, others = sum_up(lines(*minutes(0, 9)), NO_SPANS, LATER_MS)
    digests = [rows_digest([each], SPAN_SCHEMA.names) for each in (spans, others, spans.slice(0, 1))]
    assert digests[0] == digests[2] != digests[1]
