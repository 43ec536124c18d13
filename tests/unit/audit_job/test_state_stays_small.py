"""What a commit keeps of run after run, by whoever writes headers and of whatever cannot be read: it does not
grow with the runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from millrace.audit.config import parse_config
from millrace.audit.contract.events import EventLedger
from millrace.audit.contract.producer_names import MORE_PAIRS, MOST_PAIRS_NAMED, disagreement
from millrace.audit.keeping.state import Commit, UnreadNote
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.fact_rows import facts_table
from millrace.audit.runs.next_commit import next_commit
from millrace.audit.runs.run import Run
from millrace.audit.scanning.cell_notes import NOTE_SCHEMA, united_notes
from millrace.audit.scanning.cell_rows import NOTE_UNREAD, NOTE_UNTRUSTED

CLUSTERS = {"ewr": {"bootstrap": ["h:1"], "tier": "source"}}
CONFIG = parse_config({"clusters": CLUSTERS, "topics": ["flights", "orders"]})
DAY_MS = 86_400_000


def note(what: str, partition: int = 0, topic: str = "flights", first: int = 0, count: int = 1) -> Any:
    place = {"tier": "ewr", "cluster": "ewr", "topic": topic, "topic_id": "", "partition": partition}
    offsets = {"first_offset": first, "last_offset": first + 9}
    return place | offsets | {"stream": "", "count": count, "tail": False, "note": what}


def after_run(before: Commit, day: int, *notes: Any) -> Commit:
    captured = Capture(day * DAY_MS, EventLedger(), {})
    job = Run(
        config=CONFIG, state=None, before=before, captured=captured, now_ms=day * DAY_MS, number=day,
        name="n", ranges=[], unread=[], facts=facts_table(captured.ledger, captured.origins),
    )  # fmt: skip
    table = pa.Table.from_pylist(list(notes), NOTE_SCHEMA)
    return next_commit(job, SimpleNamespace(notes=lambda tail: table, new_files=list, facts=""))  # type: ignore[arg-type]


def test_what_cannot_be_read_is_one_note_a_topic_and_cause_however_many_runs_find_it():
    """A compacted topic has a hole in every part of every partition that a run reads."""
    kept = Commit()
    for day in range(1, 9):
        found = [note(f"{NOTE_UNREAD}compacted", each, first=100 * day) for each in range(5)]
        kept = after_run(kept, day, *found, note(f"{NOTE_UNREAD}damaged", topic="orders"))
    told = {(each.topic, each.cause): each.until_ms for each in kept.unread}
    assert told == {("flights", "compacted"): 8 * DAY_MS, ("orders", "damaged"): 8 * DAY_MS}
    assert len(kept.unread) == 2


def test_the_note_that_is_kept_is_the_one_that_reaches_furthest_in_time():
    early, late = (UnreadNote("ewr", "flights", each, 1, 2, "expired", at) for each, at in ((0, 5), (1, 9)))
    for order in ([early, late], [late, early]):
        assert united_notes(order) == [late]


def test_notes_on_logs_that_were_another_stay_in_their_places_and_their_order():
    """Where a log was shortened, a position means one or the other; made anew, neither of the two."""
    notes = [
        UnreadNote("ewr", "flights", each, each, 9, cause, at, epoch)
        for each, cause, at, epoch in (
            (0, "truncated", 5, 1), (0, "recreated", 6, -1), (0, "truncated", 6, 2), (1, "truncated", 4, 1),
        )
    ]  # fmt: skip
    expired = UnreadNote("ewr", "flights", 0, 0, 9, "expired", 1)
    assert united_notes([notes[0], expired, *notes[1:], expired]) == [notes[0], expired, *notes[1:]]


def test_producers_that_name_each_other_anew_in_every_run_are_counted_and_no_more_named():
    kept = Commit()
    for day in range(1, 9):
        pairs = [disagreement(f"a{day}-{each}", "b, in lax, topic x") for each in range(10)]
        kept = after_run(kept, day, *(note(f"{NOTE_UNTRUSTED}{pair}", count=3) for pair in pairs))
    place = ", in ewr, topic flights"
    assert len(kept.untrusted) == MOST_PAIRS_NAMED + 1 and sum(kept.untrusted.values()) == 8 * 10 * 3
    assert kept.untrusted[f"{MORE_PAIRS}{place}"] == (8 * 10 - MOST_PAIRS_NAMED) * 3
    known = disagreement("a1-0", "b, in lax, topic x")
    kept = after_run(
        kept, 9, note(f"{NOTE_UNTRUSTED}{known}"), note(f"{NOTE_UNTRUSTED}{known}", topic="orders")
    )
    assert kept.untrusted[f"{known}{place}"] == 4, "one that is named is counted under its name"
    assert kept.untrusted[f"{known}, in ewr, topic orders"] == 1, "of each topic so many"
