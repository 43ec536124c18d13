"""Contents of a window, compared by sums: when they are, when they cannot be, and what a proof is then."""

from __future__ import annotations

from typing import Any

import pytest
from pyroaring import BitMap64

from millrace.audit.contract.events import CLOSED
from millrace.audit.reconciliation.reconcile import UnreadRange, reconcile_stream
from millrace.audit.reconciliation.verdicts import Verdict, WindowVerdict
from millrace.audit.report.reasons import advice
from millrace.audit.report.tier_states import tier_state
from millrace.audit.scanning.cells import Cell, merge_cells
from tests.unit.audit.test_false_proofs import (
    MINUTE_MS,
    NOW_MS,
    PLACE,
    cell,
    count_event,
    count_only,
    stream_event,
    tiers,
    told,
)

NOT_COMPARED = "contents of tier {} were not compared with {}: {}"


def audit(event: Any, *cells: Cell, readings: Any = None, last: int = 2) -> WindowVerdict:
    """The window's row, of an audit that compares contents."""
    return reconcile_stream(
        told(event, stream_event(CLOSED, last)),
        merge_cells(cells),
        readings or tiers(),
        window_ms=MINUTE_MS,
        grace_ms=30_000,
        now_ms=NOW_MS,
        content=True,
    )[0]


def both(sequences: Any, digest: int | None, **changes: Any) -> list[Cell]:
    return [cell(tier, sequences, digest=digest, **changes) for tier in ("source", "aggregate")]


def test_what_was_compared_everywhere_is_proven():
    row = audit(count_event([1, 2], digest=12), *both([1, 2], 12))
    assert (row.verdict, row.content_checked, row.reasons) == (Verdict.PROVEN, "compared", ())


@pytest.mark.parametrize(
    ("produced", "source", "aggregate", "why"),
    [
        (None, 12, 12, NOT_COMPARED.format("source", "produced", "its producer told no digests")),
        (12, 12, None, NOT_COMPARED.format("aggregate", "source", "it was read, or told, without digests")),
        (None, None, None, NOT_COMPARED.format("source", "produced", "its producer told no digests")),
    ],
)
def test_a_digest_that_is_missing_is_named_and_proves_nothing(produced, source, aggregate, why):
    cells = (cell("source", [1, 2], digest=source), cell("aggregate", [1, 2], digest=aggregate))
    row = audit(count_event([1, 2], digest=produced), *cells)
    assert (row.verdict, row.content_checked) == (Verdict.UNKNOWN, "not compared")
    assert why in row.reasons
    assert advice(why).startswith("Every producer and consumer needs")


def test_an_ambiguous_record_that_was_written_keeps_its_window_from_a_proof():
    event = count_event([1], digest=7, ambiguous=BitMap64([2]))
    row = audit(event, *both([1, 2], 12))
    assert (row.verdict, row.content_checked) == (Verdict.UNKNOWN, "not compared")
    (reason,) = row.reasons
    assert reason.endswith("it has records of unknown fate, of which no digest was told")


def test_an_ambiguous_record_that_was_not_written_does_not():
    event = count_event([1], digest=7, ambiguous=BitMap64([2]))
    assert audit(event, *both([1], 7)).verdict is Verdict.PROVEN


def test_a_loss_is_not_told_as_a_content_that_was_not_compared():
    row = audit(
        count_event([1, 2], digest=12), cell("source", [1, 2], digest=12), cell("aggregate", [1], digest=7)
    )
    assert (row.verdict, row.reasons) == (Verdict.LOSS, ())


def test_what_retention_took_from_the_source_is_compared_with_what_was_produced():
    readings = tiers(source_unread=[UnreadRange(PLACE, 0, 2, "expired")])
    event = count_event([1, 2], digest=12)
    whole = audit(event, cell("aggregate", [1, 2], digest=12), readings=readings)
    rest = audit(
        event, cell("source", [2], digest=5, first=1), cell("aggregate", [1, 2], digest=12), readings=readings
    )
    other = audit(event, cell("aggregate", [1, 2], digest=13), readings=readings)
    assert [each.verdict for each in (whole, rest, other)] == [Verdict.PROVEN, Verdict.PROVEN, Verdict.LOSS]
    assert other.reasons == ("content differs between produced and aggregate",)


def test_two_copies_in_one_tier_with_other_content_are_named_where_each_has_its_cell():
    """Keys are hashed over partitions: a cell holds a record."""
    copies = [cell("aggregate", [1], digest=digest, first=at) for at, digest in ((0, 7), (1, 8))]
    row = audit(count_event([1], digest=7), cell("source", [1], digest=7), *copies, last=1)
    assert (row.verdict, row.content_checked) == (Verdict.LOSS, "differs")
    assert (row.differing, row.duplicates) == ({"aggregate": ((1, 1),)}, {"aggregate": ((1, 1),)})
    assert "content differs between copies of one record in aggregate" in row.reasons


def test_a_copy_is_compared_with_the_record_that_its_upstream_has_alone():
    """In the aggregate both lie in one cell: the source's record tells what their sum should be."""
    source, event = cell("source", [1], digest=7), count_event([1], digest=7)
    alike = audit(event, source, cell("aggregate", [1, 1], digest=14), last=1)
    other = audit(event, source, cell("aggregate", [1, 1], digest=15), last=1)
    assert (alike.verdict, alike.content_checked) == (Verdict.DUPLICATE, "compared")
    assert (other.verdict, other.content_checked) == (Verdict.LOSS, "differs")
    assert other.reasons == ("content differs between source and aggregate",)


def test_a_tier_that_has_the_same_copies_as_its_upstream_is_compared_with_it():
    event = count_event([1, 2], digest=12)
    alike = audit(event, *both([1, 2, 2], 17))
    other = audit(event, cell("source", [1, 2, 2], digest=17), cell("aggregate", [1, 2, 2], digest=18))
    assert alike.verdict is Verdict.DUPLICATE
    assert (other.verdict, other.content_checked) == (Verdict.LOSS, "differs")
    assert "content differs between source and aggregate" in other.reasons


def test_copies_whose_contents_cannot_be_told_apart_are_said_not_to_be_compared():
    """Of a sum of several records nobody can say what one of them holds."""
    row = audit(
        count_event([1, 2], digest=12),
        cell("source", [1, 2], digest=12),
        cell("aggregate", [1, 2, 2], digest=18),
    )
    assert (row.verdict, row.content_checked) == (Verdict.DUPLICATE, "not compared")
    (reason,) = row.reasons
    assert reason == NOT_COMPARED.format(
        "aggregate", "source", "it has copies, and a sum does not tell what each of them holds"
    )


def test_a_digest_of_one_of_two_copies_does_not_speak_for_the_other():
    """The copy has a cell of its own, the first one has not: taken for both, it would make the sums agree."""
    cells = (
        cell("source", [1, 2], digest=12),
        cell("aggregate", [1, 2], digest=12),
        cell("aggregate", [2], digest=99, first=2),
    )
    row = audit(count_event([1, 2], digest=12), *cells)
    assert (row.verdict, row.content_checked) == (Verdict.DUPLICATE, "not compared")


@pytest.mark.parametrize(
    ("produced", "aggregate", "verdict", "checked"),
    [
        (12, 12, Verdict.COUNT_MATCH, "compared"),
        (12, 13, Verdict.LOSS, "differs"),
        (None, 12, Verdict.COUNT_MATCH, "not compared"),
        (12, None, Verdict.COUNT_MATCH, "not compared"),
    ],
)
def test_contents_of_a_producer_that_only_counts_are_compared_too(produced, aggregate, verdict, checked):
    cells = (cell("source", [0, 0], digest=12), cell("aggregate", [0, 0], digest=aggregate))
    row = audit(count_only(2, digest=produced), *cells)
    assert (row.verdict, row.content_checked) == (verdict, checked)
    assert [each for each in row.reasons if "were not compared" in each] or checked != "not compared"


def test_a_tier_whose_contents_were_not_compared_is_the_doubtful_one():
    reason = NOT_COMPARED.format("aggregate", "source", "why")
    row = {"state": "SETTLED", "verdict": "UNKNOWN", "published": 1}
    row.update(consumed=[("source", 1), ("aggregate", 1)], seen=[("source", 1), ("aggregate", 1)])
    states = [tier_state(row, {"reasons": [reason]}, tier).state for tier in ("source", "aggregate")]
    assert states == ["PROVEN", "UNKNOWN"]
