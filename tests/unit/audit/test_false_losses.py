"""What a partition that was cut short or made anew must not be taken for: a loss, or a duplicate.

The whole audit but Spark and sockets, over one source, one aggregate and a mirror.
"""

from __future__ import annotations

import pytest

from millrace.audit.reconciliation.verdicts import FELL_SILENT, Verdict
from tests.unit.audit.trap_scene import Scene, Stream, own, row
from tests.verdicts import overall_verdict


def cut_short(scene: Scene) -> None:
    """An unclean election: the new leader's log is empty, and the mirror has not heard of it."""
    log = scene.source()
    del log.batches[:]
    log.copies, log.end = [], 0


def mirror_comes_back(scene: Scene) -> None:
    """It sees that the log was cut short, and goes back to its end."""
    scene.mirrors[0].lanes[scene.source().place].carried = 0
    scene.carry()
    scene.later()


def carried_and_read(scene: Scene, count: int) -> Stream:
    stream = Stream(scene)
    stream.send(count)
    stream.close()
    scene.carry()
    scene.later()
    scene.audit()
    return stream


def test_a_position_from_before_a_log_was_cut_short_has_not_passed_the_records_at_its_offsets(tmp_path):
    """The audit notices by what it reads at offsets that it had read."""
    scene = Scene(tmp_path)
    carried_and_read(scene, 4)
    cut_short(scene)
    after = Stream(scene)
    after.send(3)
    after.close()
    scene.later()
    assert row(scene.audit(), after).missing == {}
    mirror_comes_back(scene)
    assert row(scene.audit(), after).missing == {}


def test_nor_the_records_that_came_after_the_audit_had_noticed(tmp_path):
    """It goes on at offset 1 then; the mirror's position still says 4."""
    scene = Scene(tmp_path)
    carried_and_read(scene, 4)
    cut_short(scene)
    first = Stream(scene)
    first.send(1)
    first.close()
    scene.later()
    scene.audit()
    after = Stream(scene)
    after.send(2)
    after.close()
    scene.later(1_000_000)
    assert row(scene.audit(), after).missing == {}
    mirror_comes_back(scene)
    found = row(scene.audit(), after)
    assert found.verdict is not Verdict.LOSS and found.missing == {}


def test_a_retry_into_a_log_that_was_cut_short_is_one_record(tmp_path):
    """Its first copy was read, and went with the old leader, as did the answer. (Before its mirror told a
    position nothing of a source is kept, but where the mirror is another's.)"""
    scene = Scene(tmp_path, foreign=True)
    stream = Stream(scene)
    records = stream.send(2, fate="pending")
    scene.later(10)
    scene.audit()
    cut_short(scene)
    other = Stream(scene)
    other.send(1)
    scene.later(10)
    scene.audit()
    scene.source().append(records)
    (window,) = stream.session.windows.values()
    for record in records:
        window.acknowledge(record.sequence, 2)
    stream.close()
    other.close()
    scene.carry()
    scene.later()
    found = row(scene.audit(), stream)
    assert (found.verdict, found.duplicates) == (Verdict.UNKNOWN, {})


def test_an_aggregate_that_was_made_anew_and_filled_again_holds_every_record_once(tmp_path):
    scene = Scene(tmp_path)
    stream = carried_and_read(scene, 4)
    assert row(scene.audit(), stream).verdict is Verdict.PROVEN
    scene.make_topic("agg", "flights", 2)
    mirror_comes_back(scene)
    found = row(scene.audit(), stream)
    assert (found.verdict, found.duplicates) == (Verdict.UNKNOWN, {})


@pytest.mark.parametrize("skew_ms", [1_500, 5_000])
def test_and_so_it_does_for_a_producer_whose_clock_is_ahead(tmp_path, skew_ms):
    """Its windows begin after the topic was made anew, by its own clock."""
    scene = Scene(tmp_path)
    stream = Stream(scene, skew_ms=skew_ms)
    stream.send(4)
    stream.close()
    scene.carry()
    scene.later(100)
    scene.audit()
    scene.make_topic("agg", "flights", 2)
    scene.mirrors[0].lanes[scene.source().place].carried = 0
    scene.carry()
    scene.later(100)
    scene.audit()
    scene.later(10_000)
    found = row(scene.audit(), stream)
    assert (found.verdict, found.duplicates) == (Verdict.UNKNOWN, {})


@pytest.mark.parametrize("written", [1, 0])
def test_a_stream_whose_only_report_never_arrived_lost_nothing_that_anybody_knows_of(tmp_path, written):
    """It opened, its first and only counts were lost, and nobody closed it: whether what is there is all
    cannot be known, nor whether what is not there was ever acknowledged."""
    scene = Scene(tmp_path)
    stream = Stream(scene)
    stream.send(3, written=written)
    stream.report(lost=True)
    scene.carry()
    scene.later()
    rows = scene.audit()
    assert overall_verdict(rows) is Verdict.UNKNOWN and not any(each.missing for each in rows)
    assert own(rows, stream).reasons == (FELL_SILENT,)
    if written:
        assert row(rows, stream).unreported == ((1, 3),)
