"""A consumer that writes what it reads into another audited topic, with all headers: the stream is judged by
the topic that its events name, and the copies are counted."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from millrace.audit.keeping.upkeep import late_counts
from millrace.audit.reconciliation.settled import rows_of
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.report.summary import summarise
from millrace.audit.runs.copied_headers import foreign_counts, foreign_notes
from millrace.audit.runs.fact_rows import facts_table
from millrace.audit.runs.reconciling import streams_of
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.spark.spark_cells import verdicts_of
from tests.unit.audit_job.test_doubtful_captures import (
    _reconciler,
    captured_of,
    cell,
    config,
    position,
    run_of,
    verdicts,
)
from tests.unit.audit_job.upkeep_stage import pruned_at
from tests.verdicts import overall_verdict

TOPICS = ["flights", "hotels"]
OWN = [cell("ewr", [1, 2]), cell("agg", [1, 2])]
COPIES = [cell("ewr", [1, 2], topic="hotels", first=4), cell("agg", [2], topic="hotels", first=4)]


def table_of(cells):
    rows = [
        {**{name: getattr(each, name, None) for name in CELL_SCHEMA.names}, "repeats": []} for each in cells
    ]
    return pa.Table.from_pylist(rows, CELL_SCHEMA)


@pytest.fixture
def captured():
    return captured_of(positions=[position(2)])


def told(captured, cells, settings):
    """As the workers tell it and the driver takes it: (rows, copies)."""
    job = run_of(captured, settings)
    table = table_of(cells)
    rows = verdicts_of(_reconciler(job, job.before), table, job.facts)
    return rows_of(rows), foreign_counts(rows)


def test_copies_in_another_topic_leave_the_stream_proven_and_are_counted(captured):
    settings = config(topics=TOPICS)
    assert overall_verdict(verdicts(captured, [*OWN, *COPIES], settings)) is Verdict.PROVEN
    rows, copies = told(captured, [*OWN, *COPIES], settings)
    assert [(row["topic"], row["verdict"]) for row in rows.to_pylist()] == [("flights", "PROVEN")]
    assert copies == {("hotels", "agg"): 1, ("hotels", "ewr"): 2}
    assert next(foreign_notes(copies)).startswith("1 record of topic hotels in agg came with the identity of")
    made = summarise(
        rows, tiers=["ewr", "agg"], at_ms=0, window_ms=1, untrusted={}, unaudited={}, foreign=copies
    )
    assert made["foreign"][0] == {"topic": "hotels", "tier": "agg", "count": 1}
    assert made["verdict"] == "PROVEN" and json.dumps(made)


def test_a_copy_is_not_the_record_that_was_lost(captured):
    """Copied before the mirror lost it; the copy arrived."""
    rows = verdicts(captured, [cell("ewr", [1, 2]), cell("agg", [1]), *COPIES], config(topics=TOPICS))
    assert rows[0].missing == {("ewr", "agg"): ((2, 2),)}


def test_records_in_two_topics_of_which_no_event_tells_are_nobodys(captured):
    captured.ledger.streams.clear()
    rows = verdicts(captured, [*OWN, *COPIES], config(topics=TOPICS))
    assert "records of this stream lie in more than one topic" in rows[0].reasons


@pytest.mark.parametrize("origins", [("ewr",), ()], ids=["told at its source", "told by a mirror"])
def test_copies_of_a_topic_that_is_not_audited_are_counted_and_never_judged(origins):
    """Its own records are nobody's concern here: a few of them that were copied are no loss of the others."""
    captured = captured_of([1, 2, 3], origins, topic="cargo", positions=[position(2)])
    rows, copies = told(captured, [cell("ewr", [1, 2]), cell("agg", [2])], config())
    assert rows.num_rows == 0 and copies == {("flights", "agg"): 1, ("flights", "ewr"): 2}


def test_a_stream_id_that_a_producer_of_another_topic_uses_too_is_doubtful_and_not_foreign():
    """A copied journal: which of the two topics the events name first is chance."""
    captured = captured_of([1, 2], topic="cargo", positions=[position(2)])
    captured.ledger.streams[OWN[0].stream].conflict("two producers use one stream id")
    rows, copies = told(captured, OWN, config())
    first = rows.to_pylist()[0]
    assert (first["topic"], first["verdict"], copies) == ("flights", "UNKNOWN", {})


def test_a_local_topic_that_is_called_as_the_audited_one_elsewhere_is_not_audited():
    """Of this cluster, `raw` is audited under the name of flights."""
    settings = config(clusters={"ewr": {"topics": {"flights": "raw"}}})
    captured = captured_of([1, 2, 3], positions=[position(2)])
    rows, copies = told(captured, [cell("ewr", [1]), cell("agg", [1])], settings)
    assert rows.num_rows == 0 and sum(copies.values()) == 2
    assert [facts.topic for facts in streams_of(settings, captured)] == [""]


def test_what_a_cluster_merges_is_no_copy(captured):
    merged = {"agg": {"topics": {"flights": "all", "hotels": "all"}}}
    cells = [*OWN, cell("agg", [1, 2], topic="hotels")]
    assert told(captured, cells, config(topics=TOPICS, clusters=merged))[1] == {}


def test_a_copy_of_a_record_whose_evidence_was_pruned_is_not_late(captured):
    settings = config(topics=TOPICS)
    job = run_of(captured, settings)
    pruned = pruned_at(captured.ledger, 0, stream=OWN[0].stream, window_ms=60_000)
    facts = facts_table(captured.ledger, captured.origins, pruned)
    table = table_of(COPIES)
    rows = verdicts_of(_reconciler(job, job.before), table, facts)
    copies = foreign_counts(rows)
    assert late_counts(rows) == {} and sum(copies.values()) == 3
