"""The traps of the audit's design as small scenes, one function each; `test_traps` plays them.

A scene is of one source, one aggregate and a mirror, audited by the whole product but Spark and sockets.
"""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from millrace.audit.clients.journal import Journal
from millrace.audit.clients.recovery import ProducerJournal
from millrace.audit.contract.event_json import decode_event
from millrace.audit.contract.event_values import GapEvent
from millrace.audit.keeping.state import Commit, CommitConflict, StateFolder
from millrace.audit.reconciliation.verdicts import Verdict, WindowState
from tests.simulation.audit_logs import LEASE_MS, WINDOW_MS, Rec
from tests.unit.audit.trap_scene import Scene, Stream, all_proven, own, row
from tests.verdicts import overall_verdict

SOURCE_HOP, MIRROR_HOP = ("produced", "ewr"), ("ewr", "agg")


def dies_unreported(scene: Scene) -> None:
    stream = Stream(scene)
    stream.send(2)
    stream.report()
    stream.send(2)
    scene.carry()
    scene.later()
    rows = scene.audit()
    assert row(rows, stream).unreported == ((3, 4),) and row(rows, stream).verdict is Verdict.UNKNOWN
    assert own(rows, stream).verdict is Verdict.UNKNOWN


def tail_lost(scene: Scene) -> None:
    """The last numbers are in no report and nowhere: no gap between what was seen shows it."""
    stream = Stream(scene)
    stream.send(2)
    stream.report()
    stream.send(3, written=0)
    scene.later(WINDOW_MS)
    stream.close(lost_counts=True)
    scene.carry()
    scene.later()
    assert own(scene.audit(), stream).unknown == ((3, 5),)


def retried_batch(scene: Scene) -> None:
    stream = Stream(scene)
    stream.send(3, written=2)
    stream.close()
    scene.carry()
    scene.later()
    found = row(scene.audit(), stream)
    assert (found.verdict, found.duplicates, found.extra_copies) == (
        Verdict.DUPLICATE, {"ewr": ((1, 3),)}, {"ewr": 3},
    )  # fmt: skip


def ambiguous_and_not_written(scene: Scene) -> None:
    stream = Stream(scene)
    stream.send(2)
    stream.send(1, written=0, fate="ambiguous")
    stream.close()
    scene.carry()
    scene.later()
    assert all_proven(scene.audit())


def ambiguous_and_written(scene: Scene) -> None:
    """Its answer timed out, and it arrived all the same: nobody is surprised by it."""
    stream = Stream(scene)
    stream.send(2)
    stream.send(1, fate="ambiguous")
    stream.close()
    scene.carry()
    scene.later()
    rows = scene.audit()
    assert all_proven(rows) and row(rows, stream).unreported == ()
    assert row(rows, stream).consumed == {"ewr": 3, "agg": 3}


def ambiguous_and_written_then_lost(scene: Scene) -> None:
    stream = Stream(scene)
    stream.send(2)
    stream.send(1, fate="ambiguous")
    stream.close()
    scene.carry(without=(3,))
    scene.later()
    assert row(scene.audit(), stream).missing == {MIRROR_HOP: ((3, 3),)}


def mirror_replays(scene: Scene) -> None:
    stream = Stream(scene)
    stream.send(4)
    stream.close()
    scene.carry()
    scene.mirrors[0].lanes[scene.source().place].carried = 2
    scene.carry()
    scene.later()
    assert row(scene.audit(), stream).duplicates == {"agg": ((3, 4),)}


def mirror_lags(scene: Scene) -> None:
    stream = Stream(scene)
    stream.send(4)
    stream.close()
    scene.carry(until=2)
    scene.later()
    found = row(scene.audit(), stream)
    assert (found.missing, found.in_flight) == ({}, {MIRROR_HOP: ((3, 4),)})
    scene.carry(without=(3,))
    assert row(scene.audit(), stream).missing == {MIRROR_HOP: ((3, 3),)}


def compaction(scene: Scene) -> None:
    """What compaction took is not lost; what it left, tombstones among it, is counted."""
    stream = Stream(scene)
    stream.send(2)
    stream.send(2)
    stream.send(1)
    stream.close()
    log = scene.source()
    del log.batches[1]
    log.copies = [copy for copy in log.copies if copy.offset not in (2, 3)]
    scene.carry()
    scene.later()
    found = row(scene.audit(), stream)
    assert (found.verdict, found.missing, found.unknown) == (Verdict.UNKNOWN, {}, ((3, 4),))


def tombstones(scene: Scene) -> None:
    stream = Stream(scene)
    window, sequence = stream.session.assign(scene.now_ms)
    window.acknowledge(sequence, 0)
    scene.source().append([Rec(stream.id, sequence, scene.now_ms, -1)])
    stream.close()
    scene.carry()
    scene.later()
    rows = scene.audit()
    assert all_proven(rows) and row(rows, stream).consumed == {"ewr": 1, "agg": 1}


def retention(scene: Scene) -> None:
    """Deleted before the audit looked, and not downstream: nobody can know that it was there."""
    stream = Stream(scene)
    stream.send(3)
    stream.close()
    scene.source().start = 2
    scene.carry()
    scene.later()
    found = row(scene.audit(), stream)
    assert (found.verdict, found.missing, found.unknown) == (Verdict.UNKNOWN, {}, ((1, 2),))


def aborted(scene: Scene) -> None:
    stream = Stream(scene)
    stream.send(2)
    recs = stream.send(2, written=0, fate="failed")
    scene.source().append(recs, pid=7)
    scene.source().end_transaction(False)
    stream.close()
    scene.carry()
    scene.later()
    rows = scene.audit()
    assert all_proven(rows) and row(rows, stream).consumed == {"ewr": 2, "agg": 2}


def control_records(scene: Scene) -> None:
    """A marker has an offset and is no record: neither unaudited, nor a hole that excuses a loss."""
    stream = Stream(scene)
    recs = stream.send(2, written=0)
    scene.source().append(recs, pid=7)
    scene.source().end_transaction(True)
    stream.send(1)
    stream.close()
    scene.carry(without=(3,))
    scene.later()
    assert row(scene.audit(), stream).missing == {MIRROR_HOP: ((3, 3),)}
    notes = [note for note in scene.product.counted.column("note").to_pylist() if note]
    assert not [note for note in notes if note.startswith(("unaudited", "unread", "untrusted"))]


def unclean_election(scene: Scene) -> None:
    """The new leader's log is shorter, and goes on with other records at offsets that were read."""
    stream = Stream(scene)
    stream.send(4)
    stream.report()
    scene.carry()
    scene.audit()
    log = scene.source()
    del log.batches[:]
    log.copies, log.end = [], 0
    stream.send(3)
    stream.close()
    scene.later()
    found = row(scene.audit(), stream)
    assert (found.verdict, found.missing) == (Verdict.UNKNOWN, {})


def topic_recreated(scene: Scene) -> None:
    """The mirror's position in the deleted topic has passed nothing of the new one."""
    first = Stream(scene)
    first.send(5)
    first.close()
    scene.carry()
    scene.audit()
    scene.make_topic("ewr", "flights", 2)
    second = Stream(scene)
    second.send(3)
    second.close()
    scene.later()
    found = row(scene.audit(), second)
    assert (found.missing, found.in_flight) == ({}, {MIRROR_HOP: ((1, 3),)})


def merged_topics(scene: Scene) -> None:
    """Both stand under one name downstream, where one of the two lost a record."""
    whole, short = Stream(scene), Stream(scene, "hotels")
    for stream, count in ((whole, 3), (short, 5)):
        stream.send(count)
        stream.close()
    scene.carry(without=(4,))
    scene.later()
    found = scene.audit()
    assert row(found, short).missing == {MIRROR_HOP: ((4, 4),)}
    assert all_proven([each for each in found if each.stream != short.id])


def partition_added(scene: Scene) -> None:
    """Read while the mirror knew nothing of it; later it must still be told which of its records was lost."""
    stream = Stream(scene)
    stream.send(1)
    scene.carry()
    scene.logs["ewr", "flights"].append(type(scene.source())("ewr", "flights", 2, scene.source().topic_id))
    stream.send(4, partition=2)
    stream.close()
    scene.later()
    scene.audit()
    scene.carry(until=2, without=(2,))
    found = row(scene.audit(), stream)
    assert (found.missing, found.in_flight) == ({MIRROR_HOP: ((2, 2),)}, {MIRROR_HOP: ((4, 5),)})


def log_append_time(scene: Scene) -> None:
    """The aggregate stamps its own time: the window is that of the creation all the same."""
    stream = Stream(scene)
    stream.send(3)
    stream.close()
    scene.later()
    scene.carry(append_ms=scene.now_ms)
    assert all_proven(scene.audit())


def back_dated(scene: Scene) -> None:
    """Who sets creation times itself promises nothing: its old window stays open until it closes."""
    stream = Stream(scene, promises=False)
    stream.send(2, ago_ms=500_000)
    scene.later(2_000)
    stream.report()
    scene.carry()
    rows = scene.audit()
    assert row(rows, stream).state is WindowState.OPEN and scene.result.watermarks["flights"] is None


def clocks_apart(scene: Scene) -> None:
    """A producer whose clock is behind may still create records that others are past: the watermark waits."""
    behind, prompt = Stream(scene, skew_ms=-3_000), Stream(scene)
    scene.later(10_000)
    prompt.send(2)
    prompt.close()
    scene.carry()
    scene.later(1_600)
    behind.report()
    rows = scene.audit()
    assert row(rows, prompt).verdict is Verdict.PROVEN and row(rows, prompt).state is WindowState.SETTLED
    told = scene.result.watermarks["flights"]
    assert told is None or told <= behind.session.promise_ms


def clock_far_ahead(scene: Scene) -> None:
    """Its window lies a day ahead, and it lives: more may come into it, whatever it said so far."""
    stream = Stream(scene, skew_ms=86_400_000)
    stream.send(2)
    scene.later(2_000)
    stream.report()
    scene.carry()
    rows = scene.audit()
    assert row(rows, stream).state is WindowState.OPEN


def two_processes(scene: Scene) -> None:
    """A machine was copied while it ran: both go on with one stream; one closes, the other does not."""
    stream = Stream(scene)
    stream.send(2)
    stream.close()
    stream.session.state = "heartbeat"
    scene.later(2 * LEASE_MS)
    stream.report()
    scene.carry()
    scene.later()
    assert overall_verdict(scene.audit()) is Verdict.UNKNOWN


def journal_copied(scene: Scene) -> None:
    """A producer's files are copied to another place, and one starts from the copy: it must not report what
    the original, which goes on, has in its own journal."""
    stream = Stream(scene)
    original = ProducerJournal(Journal(scene.folder / "journal"), scene.now_ms)
    original.opened(stream.session)
    (rec, *_) = stream.send(2)
    original.reserve(stream.session, stream.session.windows[rec.created_ms // WINDOW_MS * WINDOW_MS], 2)
    original.settle()
    shutil.copy(scene.folder / "journal", scene.folder / "copied")
    copy = ProducerJournal(Journal(scene.folder / "copied"), scene.now_ms)
    for value in copy.owed.values():
        event = decode_event(value.encode())
        assert event is not None
        scene.publish(event, "ewr", surely=True)
    stream.send(2)
    stream.close()
    for journal in (original, copy):
        journal.close()
    scene.carry()
    scene.later()
    rows = scene.audit()
    assert all_proven(rows) and row(rows, stream).consumed == {"ewr": 4, "agg": 4}


def other_producer_in_the_headers(scene: Scene) -> None:
    """A record was lost; one of another producer, known by its header alone, has its stream and number."""
    stream = Stream(scene)
    stream.send(2)
    (lost,) = stream.send(1, written=0)
    scene.source().append([dataclasses.replace(lost, producer="producer-elsewhere", content=99)])
    stream.close()
    scene.carry()
    scene.later()
    rows = scene.audit()
    assert row(rows, stream).verdict is Verdict.UNKNOWN
    assert "record headers name producer-elsewhere" in " ".join(row(rows, stream).reasons)


def one_number_two_windows(scene: Scene) -> None:
    """Two copies of a producer gave one number to two records; one was lost, the other has its number."""
    stream = Stream(scene)
    (rec,) = stream.send(1, written=0)
    scene.source().append([dataclasses.replace(rec, created_ms=rec.created_ms + 2 * WINDOW_MS)])
    stream.close()
    scene.carry()
    scene.later()
    assert not all_proven(scene.audit())


def other_content(scene: Scene) -> None:
    stream = Stream(scene)
    recs = stream.send(3)
    stream.close()
    scene.carry(without=(1, 2, 3))
    scene.aggregate().append([recs[0], dataclasses.replace(recs[1], content=99), recs[2]])
    scene.later()
    found = row(scene.audit(), stream)
    assert (found.verdict, found.content_checked) == (Verdict.LOSS, "differs")


def copy_with_other_content(scene: Scene) -> None:
    """A second record under one number, which lies in another partition; and one that lies among others."""
    alone, among = Stream(scene), Stream(scene)
    (rec,), recs = alone.send(1), among.send(3)
    alone.close()
    among.close()
    scene.carry()
    scene.aggregate(1).append([dataclasses.replace(rec, content=99)])
    scene.aggregate(1).append([dataclasses.replace(recs[1], content=99)])
    scene.later()
    rows = scene.audit()
    found, unsure = row(rows, alone), row(rows, among)
    assert (found.verdict, found.differing) == (Verdict.LOSS, {"agg": ((1, 1),)})
    assert (unsure.verdict, unsure.content_checked) == (Verdict.DUPLICATE, "not compared")
    assert any("a sum does not tell what each of them holds" in reason for reason in unsure.reasons)


def ambiguous_with_unknown_content(scene: Scene) -> None:
    stream = Stream(scene)
    stream.send(2)
    stream.send(1, fate="ambiguous")
    stream.close()
    scene.carry()
    scene.later()
    found = row(scene.audit(), stream)
    assert (found.verdict, found.content_checked) == (Verdict.UNKNOWN, "not compared")


def out_of_order(scene: Scene) -> None:
    """Partition 1 is ahead of partition 0: a later number that arrived has passed nothing of the other."""
    stream = Stream(scene)
    stream.send(2, partition=0)
    recs = stream.send(2, partition=1)
    stream.close()
    scene.aggregate(1).append(recs)
    scene.later()
    found = row(scene.audit(), stream)
    assert (found.missing, found.in_flight) == ({}, {MIRROR_HOP: ((1, 2),)})


def empty_window(scene: Scene) -> None:
    """A window whose only record failed is told and proven; one without a report is a hole."""
    told, untold = Stream(scene), Stream(scene)
    told.send(1, written=0, fate="failed")
    told.close()
    untold.send(1, written=0, fate="failed")
    untold.close(lost_counts=True)
    scene.carry()
    scene.later()
    rows = scene.audit()
    assert row(rows, told).verdict is Verdict.PROVEN
    assert own(rows, untold).unknown == ((1, 1),)


def never_reported(scene: Scene) -> None:
    """Of two producers that the config names one has never said a word: all that is known is proven."""
    stream = Stream(scene)
    stream.send(1)
    stream.close()
    scene.carry()
    scene.later()
    assert all_proven(scene.audit())
    scene.roster = [stream.name, "silent"]
    rows = scene.audit()
    assert row(rows, stream).verdict is Verdict.PROVEN
    assert [(each.producer, each.verdict) for each in rows if not each.stream] == [
        ("silent", Verdict.UNKNOWN)
    ]
    assert overall_verdict(rows) is Verdict.UNKNOWN


def closed_and_never_back(scene: Scene) -> None:
    """A producer of the roster closed its streams, and windows that others began since are without it."""
    closed, living = Stream(scene), Stream(scene)
    closed.send(1)
    closed.close()
    scene.later()
    living.send(1)
    living.close()
    scene.carry()
    scene.later()
    scene.roster = [closed.name, living.name]
    rows = scene.audit()
    assert [(each.producer, each.verdict) for each in rows if not each.stream] == [
        (closed.name, Verdict.UNKNOWN)
    ]


def stream_of_months(scene: Scene) -> None:
    stream = Stream(scene)
    stream.session._leave_window()
    stream.session._run_end = stream.session._counted = (1 << 32) - 3
    stream.session.settled.add_range(1, (1 << 32) - 2)
    stream.send(6)
    stream.report()
    stream.close()
    scene.carry(without=((1 << 32) + 1,))
    scene.later()
    assert row(scene.audit(), stream).missing == {MIRROR_HOP: (((1 << 32) + 1, (1 << 32) + 1),)}


def rerun_after_failure(scene: Scene) -> None:
    """Killed before the commit, then run twice: nothing is counted twice."""
    stream = Stream(scene)
    stream.send(3)
    stream.report()
    scene.carry()
    scene.product.run(dies=True)
    scene.audit()
    stream.send(2)
    stream.close()
    scene.carry()
    scene.later()
    scene.product.run(dies=True)
    rows = scene.audit()
    assert all_proven(rows) and row(rows, stream).consumed == {"ewr": 5, "agg": 5}
    assert scene.audit() == rows


def two_jobs(scene: Scene) -> None:
    state = StateFolder.open(scene.folder / "state")
    state.commit(Commit(number=1, window_ms=WINDOW_MS))
    with pytest.raises(CommitConflict):
        state.commit(Commit(number=1, window_ms=2 * WINDOW_MS))
    assert state.latest().window_ms == WINDOW_MS


def events_lost(scene: Scene) -> None:
    """The topic of the events lost a report: its records arrived, and two more did not."""
    stream = Stream(scene)
    stream.send(2)
    stream.report()
    scene.later(WINDOW_MS)
    stream.send(2, written=0)
    stream.report(lost=True)
    scene.later(WINDOW_MS)
    stream.send(1)
    stream.close()
    scene.carry()
    scene.later()
    rows = scene.audit()
    assert own(rows, stream).unknown == ((3, 4),) and overall_verdict(rows) is Verdict.UNKNOWN


def gap_within_a_range(scene: Scene) -> None:
    """A mirror's gap begins and ends within what one run reads: it explains its own records, no others."""
    stream = Stream(scene)
    stream.send(5)
    stream.close()
    scene.publish(GapEvent("m-agg", "ewr", "flights", 0, 1, 3, "too_large", scene.now_ms), "ewr", surely=True)
    scene.carry(without=(2, 3, 5))
    scene.later()
    found = row(scene.audit(), stream)
    assert (found.explained, found.missing) == ({"too_large": ((2, 3),)}, {MIRROR_HOP: ((5, 5),)})


def total_loss(scene: Scene) -> None:
    stream = Stream(scene)
    stream.send(3, written=0)
    stream.close()
    scene.later()
    rows = scene.audit()
    assert row(rows, stream).missing == {SOURCE_HOP: ((1, 3),)} and overall_verdict(rows) is Verdict.LOSS


def nothing_at_all(scene: Scene) -> None:
    rows = scene.audit()
    assert rows == [] and overall_verdict(rows) is Verdict.UNKNOWN
