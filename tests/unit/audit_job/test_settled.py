"""Revisions of settled verdicts, and the one line that stays of a pruned window."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.keeping.upkeep import late_row
from millrace.audit.reconciliation import row_keys, settled
from millrace.audit.reconciliation.settled import (
    LINE_SCHEMA,
    earlier_lines,
    lines_digest,
    lines_of,
    revisions_of,
    rows_of,
    settled_now,
    without,
)
from millrace.audit.reconciliation.verdict_rows import (
    ROW_SCHEMA,
    VERDICT_SCHEMA,
    Evidence,
    evident_rows,
    verdict_rows,
)
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.runs.copied_headers import foreign_rows
from millrace.audit.runs.fact_rows import FACT_SCHEMA
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.spark import spark_cells
from millrace.audit.spark.spark_cells import numbered_verdicts
from tests.settling import Windows, settle

TOPICS = ["flights"]
LOST = {("ewr", "agg"): ((3, 3),)}


def rows(*verdicts):
    return verdict_rows(verdicts)


def row(start_ms=0, verdict=Verdict.PROVEN, state=WindowState.SETTLED, stream="01", **more):
    fields = {"topic": "flights", "producer": "AA", "window_ms": 10, "published": 5, "consumed": {"agg": 5}}
    return WindowVerdict(
        **{**fields, **more}, stream=stream, window_start_ms=start_ms, state=state, verdict=verdict
    )


def test_a_verdict_that_stays_keeps_its_number_and_the_time_it_was_made():
    first = settle(rows(row()), None, TOPICS, 100)
    second = settle(rows(row()), first.table, TOPICS, 200)
    assert second.numbers.to_pylist() == [1]
    assert second.table.to_pylist()[0]["settled_ms"] == 100
    assert lines_digest(first.table) == lines_digest(second.table)
    assert revisions_of(second.table) == ([], 0)


def test_late_data_makes_a_numbered_revision_that_names_both_verdicts():
    first = settle(rows(row()), None, TOPICS, 100)
    changed = row(verdict=Verdict.DUPLICATE, extra_copies={"agg": 1}, duplicates={"agg": ((3, 3),)})
    second = settle(rows(changed), first.table, TOPICS, 200)
    assert second.numbers.to_pylist() == [2] and lines_digest(first.table) != lines_digest(second.table)
    (told,), _ = revisions_of(second.table)
    assert (told["revision"], told["before"], told["after"]) == (2, "PROVEN", "DUPLICATE")
    assert told["window_start"] == "1970-01-01T00:00:00Z"
    third = settle(rows(changed), second.table, TOPICS, 300)
    assert third.numbers.to_pylist() == [2] and revisions_of(third.table) == ([told], 0)


def test_of_very_many_revisions_those_made_last_are_named_and_the_others_counted(monkeypatch):
    """An outage that is made good revises every window since; the driver holds as many as it names."""
    starts = range(0, 80, 10)
    table = settle(rows(*(row(start, verdict=Verdict.UNKNOWN) for start in starts)), None, TOPICS, 1).table
    for now_ms, good in ((2, 60), (3, 70)):
        told = (row(at, Verdict.PROVEN if at < good else Verdict.UNKNOWN) for at in starts)
        table = settle(rows(*told), table, TOPICS, now_ms).table
    whole, _ = revisions_of(table)
    assert len(whole) == 7
    monkeypatch.setattr(settled, "MOST_REVISED", 2)
    for parted in (table, Windows(table, 3)):
        assert revisions_of(parted) == ([whole[0], whole[6]], 5)


def test_more_of_the_same_is_a_revision_too_but_reasons_and_places_are_not():
    lost = {("ewr", "agg"): ((3, 3),)}
    first = settle(rows(row(verdict=Verdict.LOSS, missing=lost)), None, TOPICS, 1)
    same = settle(rows(row(verdict=Verdict.LOSS, missing=lost, reasons=("why",))), first.table, TOPICS, 2)
    assert same.numbers.to_pylist() == [1]
    more = row(verdict=Verdict.LOSS, missing={("ewr", "agg"): ((3, 4),)})
    assert settle(rows(more), same.table, TOPICS, 3).numbers.to_pylist() == [2]


def test_an_open_window_has_no_number_and_one_that_opens_again_keeps_its_last_verdict():
    first = settle(rows(row(state=WindowState.OPEN)), None, TOPICS, 1)
    assert first.numbers.to_pylist() == [0] and first.table.num_rows == 0
    settled = settle(rows(row()), first.table, TOPICS, 2)
    again = settle(rows(row(state=WindowState.OPEN)), settled.table, TOPICS, 3)
    assert again.numbers.to_pylist() == [1] and revisions_of(again.table) == ([], 0)
    assert again.table.to_pylist() == [{**settled.table.to_pylist()[0], "open": True}]


def test_an_unknown_that_is_proven_by_now_is_open_until_its_producer_promises_and_then_revised():
    """It counts as nothing meanwhile: not as the doubt that is gone, and not as a proof."""
    doubted = settle(rows(row(verdict=Verdict.UNKNOWN, in_flight=LOST)), None, TOPICS, 1)
    assert settled_now(doubted.table).num_rows == 1
    arrived = settle(rows(row(state=WindowState.OPEN)), doubted.table, TOPICS, 2)
    assert settled_now(arrived.table).num_rows == 0
    promised = settle(rows(row()), arrived.table, TOPICS, 3)
    assert promised.numbers.to_pylist() == [2] and settled_now(promised.table).num_rows == 1
    assert [(each["before"], each["after"]) for each in revisions_of(promised.table)[0]] == [
        ("UNKNOWN", "PROVEN")
    ]


def test_a_streams_own_row_goes_when_its_doubt_is_gone_and_a_topic_that_is_not_audited_goes_too():
    own = row(None, Verdict.UNKNOWN)
    first = settle(rows(row(), own), None, TOPICS, 1)
    assert first.table.num_rows == 2
    second = settle(rows(row()), first.table, TOPICS, 2)
    assert second.table["window_start_ms"].to_pylist() == [0]
    assert settle(rows(), second.table, ["other"], 3).table.num_rows == 0


def test_pruned_windows_become_one_line_with_the_sums_of_their_streams():
    table = settle(rows(row(), row(stream="02", published=7), row(10)), None, TOPICS, 1).table
    folded = without(table, [("flights", 0)])
    line, other = folded.to_pylist()
    assert (line["folded"], line["stream"], line["published"], line["verdict"]) == (True, "", 12, "PROVEN")
    assert (other["folded"], other["window_start_ms"]) == (False, 10)
    # It stays, whatever the rows say, and the streams' own lines do not come back.
    after = settle(rows(row(10)), folded, TOPICS, 9).table.to_pylist()
    assert [each["folded"] for each in after] == [True, False]


def test_what_a_row_says_is_told_by_the_digest_that_states_have_kept_always():
    """States of earlier programs hold these: another digest would number all their windows anew."""
    told = row(
        verdict=Verdict.LOSS, missing=LOST, duplicates={"agg": ((4, 4),)}, extra_copies={"agg": 2},
        consumed={"jfk": 4, "agg": 5}, ambiguous=1, reasons=("why",), in_flight={},
    )  # fmt: skip
    evidence = Evidence({"agg": [1, 2]}, {("ewr", "agg"): [{"partition": 1}]})
    found = evident_rows([(told, evidence), (row(), Evidence()), (row(state=WindowState.OPEN), Evidence())])
    assert found["said"].to_pylist() == ["724587032be8d20c4eee7aa6", "bb5cb6779c652af9d320c114", None]


def test_lines_are_in_order_and_each_finds_its_own_whatever_order_the_rows_have():
    keys = [(topic, stream, start) for topic in "ab" for stream in ("01", "02") for start in (0, 10, None)]
    told = [
        row(start, Verdict.UNKNOWN, topic=topic, stream=stream, published=1 + number)
        for number, (topic, stream, start) in enumerate(keys)
    ]
    first = settle(rows(*reversed(told)), None, ["a", "b"], 1)
    names = ["topic", "stream", "window_start_ms"]
    assert [tuple(each.values()) for each in first.table.select(names).to_pylist()] == keys
    told[4] = row(10, Verdict.PROVEN, topic="a", stream="02", published=5)
    second = settle(rows(*told), first.table, ["a", "b"], 2)
    assert second.numbers.to_pylist() == [2 if number == 4 else 1 for number in range(len(told))]
    assert second.made_ms.to_pylist() == [2 if number == 4 else 1 for number in range(len(told))]


def test_a_stream_is_settled_by_its_own_rows_and_lines_alone():
    """Whoever has one stream's may number them."""
    streams = [f"{number:02}" for number in range(4)]
    told = [row(start, stream=stream) for stream in streams for start in (0, 10, 20)]
    before = settle(rows(*told), None, TOPICS, 1).table
    told[1:6:2] = (row(10, Verdict.LOSS, missing=LOST, stream="00"), row(0, published=9, stream="01"),
                   row(20, state=WindowState.OPEN, stream="01"))  # fmt: skip
    whole = settle(rows(*told[:-1]), before, TOPICS, 2)
    parts = [
        settle(
            rows(*(each for each in told[:-1] if each.stream == stream)),
            before.filter(pc.equal(before["stream"], stream)), TOPICS, 2,
        )
        for stream in streams
    ]  # fmt: skip
    assert pa.concat_tables([each.table for each in parts]).combine_chunks() == whole.table
    assert pa.concat_arrays([each.numbers for each in parts]) == whole.numbers


def test_of_what_a_producer_of_the_roster_owes_for_two_windows_of_one_start_one_line_is_kept():
    owed = [row(0, Verdict.UNKNOWN, stream="", window_ms=length, published=0) for length in (10, 20)]
    first = settle(rows(*owed), None, TOPICS, 1)
    assert first.numbers.to_pylist() == [1, 1] and first.table["window_ms"].to_pylist() == [20]
    second = settle(rows(*owed), first.table, TOPICS, 2)
    assert second.numbers.to_pylist() == [1, 1] and second.table == first.table


def test_a_window_that_no_row_speaks_of_keeps_its_line_unless_it_was_pruned():
    table = settle(rows(row(), row(10), row(stream="02")), None, TOPICS, 1).table
    later = settle(rows(), without(table, [("flights", 0)]), TOPICS, 2).table.to_pylist()
    assert [(each["window_start_ms"], each["folded"], each["stream"]) for each in later] == [
        (0, True, ""),
        (10, False, "01"),
    ]


def test_the_report_has_the_numbers_and_nothing_of_how_they_are_known():
    numbered = settle(rows(row(), row(10, state=WindowState.OPEN)), None, TOPICS, 1).rows
    assert numbered.schema == VERDICT_SCHEMA
    assert numbered["revision"].to_pylist() == [1, 0]


def test_equal_tables_have_one_digest_however_they_lie_in_memory():
    table = settle(rows(*(row(start) for start in range(0, 300, 10)), row(None)), None, TOPICS, 1).table
    digest = lines_digest(table)
    for cut in range(1, 20):
        assert lines_digest(pa.concat_tables([table.slice(0, cut), table.slice(cut)])) == digest
        copied = pa.Table.from_pylist(table.slice(cut).to_pylist(), table.schema)
        assert lines_digest(table.slice(cut)) == lines_digest(copied) != digest
    other = table.set_column(0, "topic", pa.array([*["flights"] * 30, None]))
    assert lines_digest(other) != digest


def test_a_line_beside_that_of_its_whole_window_stays_while_a_row_speaks_of_it():
    """What a stream's late record says of a pruned window is revised as any other; the topic's line has its
    sums once nothing is left of it."""
    table = without(settle(rows(row(), row(10)), None, TOPICS, 1).table, [("flights", 0)])
    late = settle(rows(row(stream="02"), row(10)), table, TOPICS, 2)
    assert late.numbers.to_pylist() == [1, 1]
    told = late.table.select(["window_start_ms", "stream", "folded"]).to_pylist()
    assert [tuple(each.values()) for each in told] == [(0, "", True), (10, "01", False), (0, "02", False)]
    again = settle(rows(row(stream="02", verdict=Verdict.LOSS, missing=LOST), row(10)), late.table, TOPICS, 3)
    assert again.numbers.to_pylist() == [2, 1]
    gone = settle(rows(row(10)), again.table, TOPICS, 4)
    assert gone.table["stream"].to_pylist() == ["", "01"]


def told_of(lines=None):
    """What a worker is told of a stream beside its cells."""
    facts = FACT_SCHEMA.empty_table()
    kind = pa.struct(LINE_SCHEMA)
    told = pa.array([], kind) if lines is None else lines.to_struct_array().cast(kind)
    empty = {name: pa.nulls(len(told), FACT_SCHEMA.field(name).type) for name in FACT_SCHEMA.names}
    beside = pa.table({**empty, "line": told})
    return pa.concat_tables([facts.append_column("line", pa.nulls(0, kind)), beside])


def test_a_stream_of_which_only_lines_are_left_keeps_them():
    table = settle(rows(row(), row(10)), None, TOPICS, 1).table
    lines, _ = earlier_lines(table, TOPICS)
    numbered = numbered_verdicts(SimpleNamespace(now_ms=5), CELL_SCHEMA.empty_table(), told_of(lines))
    assert rows_of(numbered).num_rows == 0 and lines_of(numbered) == table
    nothing = numbered_verdicts(SimpleNamespace(now_ms=5), CELL_SCHEMA.empty_table(), told_of(lines), False)
    assert nothing.num_rows == 0, "a backfill has no lines"


def test_rows_that_only_count_open_nothing_and_have_no_number(monkeypatch):
    """They have no window, as a stream's own row has none."""
    own = row(None, Verdict.UNKNOWN, producer="")
    lines, _ = earlier_lines(settle(rows(own), None, TOPICS, 1).table, TOPICS)
    cells = pa.table({"topic": ["flights"], "tier": ["agg"], "count": [2], "tail": [False]})
    counting = [late_row("flights", "01", cells), *foreign_rows("01", {("flights", "agg"): 3})]
    told = pa.concat_tables([rows(own), pa.Table.from_pylist(counting, ROW_SCHEMA)])
    monkeypatch.setattr(spark_cells, "verdicts_of", lambda *_: told)
    numbered = numbered_verdicts(SimpleNamespace(now_ms=5), CELL_SCHEMA.empty_table(), told_of(lines))
    assert numbered["state"].to_pylist() == ["SETTLED", "PRUNED", "FOREIGN"]
    assert numbered["revision"].to_pylist() == [1, 0, 0]


def test_few_keys_are_found_as_many_are(monkeypatch):
    """The last of equal lines counts, either way."""
    names = ["topic", "start_ms"]
    lines = pa.table([["a", "a", "b", "a"], [0, 10, 0, 0]], names)
    keys = pa.table([["a", "b", "c", "a"], [0, 0, 0, 10]], names)
    for most in (0, 500):
        monkeypatch.setattr(row_keys, "FEW_ROWS", most)
        assert row_keys.found(keys, lines).to_pylist() == [3, 2, None, 1]
        assert row_keys.found(keys.slice(0, 0), lines).to_pylist() == []
        assert row_keys.found(keys, lines.slice(0, 0)).to_pylist() == [None] * 4
