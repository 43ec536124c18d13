"""A mirror that began at its source's end has passed nothing of what was there before, nor has a successor
passed what its predecessor still owes."""

from __future__ import annotations

import pytest

from millrace.audit.keeping.state import Commit
from millrace.audit.reconciliation.reconcile import Passage
from millrace.audit.reconciliation.tier_reading import NOT_BEGUN
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.report.reasons import BEFORE, advice, reasons_of
from millrace.audit.runs.capture import _parse_position
from millrace.audit.runs.reading_plan import passages, plan_ranges
from millrace.broker.errors import UnreadableRecord
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position, encode_key, encode_value
from tests.unit.audit_job.test_doubtful_captures import (
    PLACE,
    captured_of,
    cell,
    config,
    pin,
    position,
    verdicts,
)

HOP = ("ewr", "agg")


def test_what_was_there_before_a_mirror_that_began_at_the_end_is_not_lost():
    captured = captured_of([1, 2, 3], positions=[position(150, "new", began=100)])
    (row,) = verdicts(captured, [cell("ewr", [1, 2]), cell("ewr", [3], first=120)])
    assert row.missing == {HOP: ((3, 3),)}, "it has passed this one"
    assert row.explained == {NOT_BEGUN: ((1, 2),)} and not row.in_flight


def test_nobody_proves_what_no_mirror_carries():
    captured = captured_of(positions=[position(150, "new", began=100)])
    (row,) = verdicts(captured, [cell("ewr", [1, 2])])
    assert row.verdict is Verdict.UNKNOWN
    (reason,) = reasons_of({"explained": row.explained})
    assert reason == BEFORE and "start: latest" in advice(reason)


def test_a_successor_that_began_at_the_end_has_not_passed_what_the_first_mirror_still_owes():
    both = [position(50, "new"), position(150, "new", mirror="m2", began=100)]
    captured = captured_of([1, 2, 3], positions=both)
    assert passages(captured) == {"agg": {PLACE: Passage(150, "new", ((50, 100),))}}
    cells = [cell("ewr", [1], first=10), cell("ewr", [2], first=60), cell("ewr", [3], first=120)]
    (row,) = verdicts(captured, cells)
    assert row.missing == {HOP: ((1, 1), (3, 3))} and row.in_flight == {HOP: ((2, 2),)}


@pytest.mark.parametrize("began", [30, 50])
def test_where_they_meet_nothing_is_left_out(began):
    both = [position(50, "new"), position(150, "new", mirror="m2", began=began)]
    assert passages(captured_of(positions=both)) == {"agg": {PLACE: Passage(150, "new")}}


def test_the_place_in_a_new_topic_explains_nothing_of_the_deleted_one():
    captured = captured_of(positions=[position(150, "new", began=100)])
    (row,) = verdicts(captured, [cell("ewr", [1, 2], topic_id="old")])
    assert row.missing == {HOP: ((1, 2),)} and not row.explained


def test_no_cell_lies_across_a_place_where_a_mirror_began():
    both = [position(50, "new"), position(150, "new", mirror="m2", began=100)]
    captured = captured_of(positions=both, pins=[pin(end=200)])
    ranges, _ = plan_ranges(captured, config(), Commit())
    assert [each.first_offset for each in ranges] == [0, 50, 100, 150]


def told(began=b"-1"):
    value = encode_value(Position(150, "A", NO_TOPIC_ID, -1, 0, began=7)).replace(b":7}", b":" + began + b"}")
    return _parse_position(encode_key("ewr", "flights", 0), value, "agg", "m", {"A": "ewr"})


def test_a_position_tells_where_its_mirror_began():
    assert told(b"100").began == 100
    assert told(b"-1").began == 0, "an older mirror does not say"
    with pytest.raises(UnreadableRecord, match="began is no whole number"):
        told(b'"100"')
