"""Logs that were shortened and gave their offsets out again: told by their leader epochs (KIP-101, KIP-320).

The rules alone, then the whole audit but Spark and sockets, over one source, one aggregate and a mirror.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace.audit.contract.events import EventLedger
from millrace.audit.keeping.state import Commit, ReadPosition, UnreadNote
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.log_history import holds_to, parts_at, until
from millrace.audit.runs.partition_pins import PartitionPin, ends_and_epochs
from millrace.audit.runs.reading_plan import read_until
from millrace.audit.runs.resuming import position_at, resume
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.client import leader_epochs
from millrace.broker.client.leader_epochs import MOST_EPOCHS, Walk
from millrace.broker.client.offsets import EARLIEST
from tests import seeds
from tests.unit.audit.trap_scene import Scene, Stream, row

LOST_AT_SOURCE, LOST_ON_THE_WAY = ("produced", "ewr"), ("ewr", "agg")


def walked(entries, end, start=0):
    """What a leader with these epochs answers, question after question."""
    walk = Walk(entries[-1][0] if entries else 0, start)
    for _ in range(MOST_EPOCHS + 2):
        if walk.asks is None:
            return walk.found
        walk.learn(*answer(entries, end, walk.asks))
    raise AssertionError("it asks for ever")


def answer(entries, end, epoch):
    """As leaders answer (KIP-279): the newest epoch that is not above, and where the next one begins."""
    if not entries or epoch > entries[-1][0] or epoch < 0:
        return -1, -1
    starts = [*entries, (None, end)]
    for number in reversed(range(len(entries))):
        if entries[number][0] <= epoch:
            return entries[number][0], starts[number + 1][1]
    return epoch, entries[0][1]


def test_a_history_is_asked_for_epoch_by_epoch():
    assert walked([(0, 0)], 10) == ((0, 0),)
    assert walked([(3, 0)], 10) == ((3, 0),)
    assert walked([(0, 0), (4, 7), (9, 8)], 10) == ((0, 0), (4, 7), (9, 8))
    assert walked([(4, 5), (9, 8)], 10, start=5) == ((4, 5), (9, 8))
    assert walked([(4, 5), (9, 8)], 10, start=9) == ((9, 8),), "what is older than the log does not matter"
    assert walked([(4, 5), (9, 8)], 10) == ((4, 5), (9, 8)), "of what is below, it knows nothing"
    assert walked([], 0) == ()
    many = [(2 * n, 10 * n) for n in range(200)]
    assert walked(many, 5000) == tuple(many[-MOST_EPOCHS:])


def test_a_leader_that_does_not_know_its_own_epoch_yet_tells_nothing():
    walk = Walk(5, 0)
    walk.learn(-1, -1)
    assert walk.asks is None and walk.found == ()
    walk = Walk(5, 0)
    walk.learn(3, 10)
    assert walk.asks is None and walk.found == ()


def test_two_logs_are_one_up_to_where_one_leaves_their_newest_common_epoch():
    ours = ((1, 0), (2, 100))
    assert parts_at(ours, 150, ((1, 0), (2, 100), (3, 150))) is None
    assert parts_at(ours, 150, ((1, 0), (2, 100), (3, 140))) == 140
    assert parts_at(ours, 150, ((1, 0), (3, 60))) == 60
    assert parts_at(ours, 150, ((1, 0), (3, 110))) == 100, "it had written on in epoch 1 without us"
    assert parts_at(ours, 150, ((3, 40),)) == 40, "what is left of the log is another one"
    assert parts_at(ours, 150, ((3, 150),)) is None
    assert parts_at((), 150, ((3, 0),)) is None and parts_at(ours, 150, ()) is None
    assert parts_at(((1, 0), (9, 60)), 150, ((1, 0), (5, 50))) == 50, "restored from a backup"
    assert parts_at(((9, 60),), 150, ((1, 0), (5, 50))) == 0, "nothing that both agree on is known"


def test_an_epoch_that_begins_later_in_a_copy_was_compacted_there():
    """A replica that was made since has no batch of what compaction had taken, and knows nothing of it."""
    whole, compacted = ((0, 0), (1, 100)), ((0, 0), (1, 137))
    assert parts_at(whole, 200, compacted) is None and parts_at(compacted, 200, whole) is None
    assert parts_at(whole, 200, (*compacted, (2, 150))) == 150
    assert parts_at(whole, 200, ((0, 0), (2, 137))) == 100


def test_random_histories_part_where_their_records_do():
    seed = seeds.given()
    rng = random.Random(seed)
    for _ in range(300):
        logs, epoch = [[], []], 0
        for _ in range(rng.randint(1, 6)):
            epoch += rng.randint(1, 3)
            which = rng.choice((0, 1))
            if rng.random() < 0.6:  # the other one follows, as far as it comes
                logs[1 - which] = logs[which][: rng.randint(0, len(logs[which]))]
            grown = [epoch] * rng.randint(1, 9)
            logs[which] += grown
            logs[1 - which] += grown if logs[1 - which] == logs[which][: -len(grown)] else []
        histories = []
        for log in logs:
            firsts = [n for n, each in enumerate(log) if n == 0 or each != log[n - 1]]
            histories.append(tuple((log[n], n) for n in firsts))
        both = min(map(len, logs))
        truth = next((n for n in range(both) if logs[0][n] != logs[1][n]), None)
        assert parts_at(histories[0], both, histories[1]) == truth, f"seed {seed}: {logs}"
        led = (*histories[1], (epoch + 1, len(logs[1])))  # who leads has begun an epoch at its end
        for n in range(1, len(logs[0]) + 1):  # somebody who stands there in log 0, seen from log 1
            held = holds_to(led, n, logs[0][n - 1])
            common = n if logs[0][:n] == logs[1][:n] else (both if truth is None else truth)
            assert held <= common, f"seed {seed}: {logs}, {n}"
            assert held == n or logs[0][:n] != logs[1][:n], f"seed {seed}: {logs}, {n}"


class Leader:
    """Of one partition, as the client asks it: its log is the epochs of its records."""

    def __init__(self, log: list[int], newest: int) -> None:
        self.log, self.newest = log, newest

    async def list_offsets(self, timestamps, read_committed=False):
        return {
            key: SimpleNamespace(offset=0 if at == EARLIEST else len(self.log), leader_epoch=self.newest)
            for key, at in timestamps.items()
        }

    def entries(self) -> list[tuple[int, int]]:
        firsts = [n for n, each in enumerate(self.log) if n == 0 or each != self.log[n - 1]]
        begun = [(self.newest, len(self.log))] if not self.log or self.log[-1] < self.newest else []
        return [*((self.log[n], n) for n in firsts), *begun]

    def elect(self, cut: int, elections: int, grown: int) -> None:
        """The log is cut, and then leaders change so often; each writes so much."""
        del self.log[cut:]
        for _ in range(elections):
            self.newest += 1
            self.log += [self.newest] * grown


PARTITION = ("flights", 0)


class Auditor:
    """Reads a log to its end, run after run. `asked`: the questions to its leaders."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.asked = 0
        self.known: ReadPosition | None = None

    async def epoch_ends(self, leader, wanted):
        self.asked += 1
        return {key: answer(leader.entries(), len(leader.log), epoch) for key, epoch in wanted.items()}

    def look_at(self, leader: Leader) -> tuple[int, list[UnreadNote]]:
        """One run: where it goes on, and what it noted."""
        kept = {} if self.known is None else {PARTITION: self.known.epochs}
        starts, marks, _, histories, older = self._runner.run(ends_and_epochs(leader, [PARTITION], kept))
        pin = PartitionPin(
            "agg", "flights", "flights", 0, "id", starts[PARTITION].offset, marks[PARTITION].offset,
            epochs=histories.get(PARTITION, ()), older_ends=older.get(PARTITION, ()),
        )  # fmt: skip
        first, notes = resume(pin, self.known, 7)
        self.known = position_at(pin.epochs, pin.end_offset, "id", self.known, first)
        return first, notes


@pytest.fixture
def auditor(monkeypatch):
    with asyncio.Runner() as runner:
        auditor = Auditor(runner)
        monkeypatch.setattr(leader_epochs, "epoch_ends", auditor.epoch_ends)
        yield auditor


@pytest.mark.parametrize("elections", [1, 63, 64, 80, 200])
def test_a_log_that_was_cut_is_read_again_however_many_leaders_came_since(auditor, elections):
    leader = Leader([0] * 100, 0)
    auditor.look_at(leader)
    leader.elect(50, elections, grown=1)
    leader.log += [leader.newest] * 100
    first, (note,) = auditor.look_at(leader)
    assert (first, note.first_offset, note.end_offset, note.cause) == (50, 50, 100, "truncated")
    assert auditor.asked <= MOST_EPOCHS + 4, "one question tells where an old epoch ended"


@pytest.mark.parametrize("elections", [63, 64, 80, 200])
def test_a_log_that_was_only_written_on_is_not_read_again(auditor, elections):
    leader = Leader([0] * 100, 0)
    auditor.look_at(leader)
    leader.elect(100, elections, grown=2)
    assert auditor.look_at(leader) == (100, [])


def test_where_no_epoch_is_common_all_is_read_again(auditor):
    leader = Leader([], -1)
    leader.elect(0, 2 * MOST_EPOCHS, grown=2)
    auditor.look_at(leader)
    assert auditor.known.epochs[0] == (MOST_EPOCHS, 2 * MOST_EPOCHS)
    leader.elect(2 * MOST_EPOCHS - 10, MOST_EPOCHS, grown=4)
    first, (note,) = auditor.look_at(leader)
    assert (first, note.first_offset, note.end_offset) == (0, 0, 4 * MOST_EPOCHS)


def test_random_logs_are_read_again_from_where_they_differ(auditor, monkeypatch):
    """Two replicas that follow each other or do not, elections that are clean or not, and an auditor that
    asks for no more epochs than a few."""
    seed = seeds.given()
    rng = random.Random(seed)
    cut_count = doubt_count = 0
    for _ in range(seeds.runs(300)):
        most = rng.randint(2, 5)
        monkeypatch.setattr(leader_epochs, "MOST_EPOCHS", most)
        leading, other, newest = [], [], 0
        auditor.known, read = None, []
        for _ in range(rng.randint(2, 40)):
            what = rng.choice(("append", "append", "follow", "elect", "unclean", "look"))
            if what == "append":
                leading += [newest] * rng.randint(1, 4)
            elif what == "follow":
                other = leading[: rng.randint(_common(leading, other), len(leading))]
            elif what == "elect":
                newest += rng.randint(1, 3)
            elif what == "unclean":
                leading, other, newest = other[:], leading, newest + 1
            else:
                before = auditor.known or ReadPosition(0, "id")
                where = f"seed {seed}: of {read} {before.epochs} is kept, and now it is {leading}"
                first, notes = auditor.look_at(Leader(leading, newest))
                truth = _common(read, leading)
                assert first <= truth, f"never read again: {where}"
                knows_all = not read or before.epochs[0] == (read[0], 0)
                assert first == truth or not knows_all, f"read again for nothing: {where}"
                assert bool(notes) == (first < len(read)), where
                cut_count += first == truth < len(read)
                doubt_count += first < truth
                read = leading[:]
    assert cut_count > 50 and doubt_count > 5, "the histories are worth something"


def _common(one: list[int], other: list[int]) -> int:
    """The first offset at which two logs differ, or one has ended: a record is its epoch and its offset."""
    both = min(len(one), len(other))
    return next((n for n in range(both) if one[n] != other[n]), both)


def test_a_position_holds_to_where_its_epoch_ended():
    history = ((1, 0), (3, 60))
    assert holds_to(history, 50, 1) == 50 and holds_to(history, 100, 1) == 60
    assert holds_to(history, 100, 3) == 100 and holds_to(history, 100, 4) == 100
    assert holds_to(history, 100, 2) == 0, "where epoch 2 left this log, nothing tells"
    assert holds_to(((3, 60),), 50, 1) == 50, "the log begins behind it now"
    assert holds_to(((3, 60),), 70, 1) == 0
    partial = tuple((n + 100, n + 60) for n in range(MOST_EPOCHS))
    assert holds_to(partial, 50, 1) == 0, "where it ended was not asked for"
    assert holds_to(history, 100, -1) == 100 and holds_to((), 100, 1) == 100
    assert until(history, 60) == ((1, 0),)


def resumed(known, epochs, start=0, end=150):
    pin = PartitionPin("ewr", "flights", "flights", 0, "id", start, end, epochs=epochs)
    first, notes = resume(pin, ReadPosition(*known), 7)
    return first, [(note.first_offset, note.end_offset, note.cause, note.epoch) for note in notes]


def test_reading_goes_on_where_the_histories_part():
    known = (100, "id", ((1, 0),))
    assert resumed(known, ((1, 0), (2, 120))) == (100, [])
    assert resumed(known, ((1, 0), (2, 60))) == (60, [(60, 100, "truncated", 1)])
    assert resumed(known, ((1, 0), (2, 60)), end=60) == (60, [(60, 100, "truncated", 1)])
    assert resumed(known, ((1, 0), (2, 60)), end=50) == (50, [(50, 100, "truncated", 1)])
    assert resumed((100, "id"), ((1, 0), (2, 60))) == (100, []), "an old state does not know"
    assert resumed((100, "id"), ((1, 0), (2, 60)), end=60) == (60, [(60, 100, "truncated", -1)])
    part, rest = (70, 100, "truncated", 1), (0, 70, "expired", -1)
    assert resumed(known, ((2, 70),), start=70) == (70, [part, rest]), "and of the new log, some is gone"


def test_what_is_known_of_a_log_is_kept_while_its_leader_does_not_tell():
    """Else a log that was shortened meanwhile would never be known."""

    def read(known, end, epochs):
        pin = PartitionPin("ewr", "flights", "flights", 0, "id", 0, end, epochs=epochs)
        first, notes = resume(pin, known, 7)
        piece = OffsetRange("ewr", "ewr", "flights", "flights", 0, first, end, topic_id="id")
        after = read_until(Capture(7, EventLedger(), pins=[pin]), [piece], {"ewr/flights/0": known})
        return after["ewr/flights/0"], [note.first_offset for note in notes]

    silent, _ = read(ReadPosition(100, "id", ((1, 0),)), 120, ())
    assert silent == ReadPosition(120, "id", ((1, 0), (-1, 100)))
    assert read(silent, 130, ()) == (ReadPosition(130, "id", silent.epochs), [])
    grown = ((1, 0), (2, 110))
    assert read(silent, 130, grown) == (ReadPosition(130, "id", grown), []), "it went on"
    shortened = ((1, 0), (2, 60))
    assert read(silent, 130, shortened) == (ReadPosition(130, "id", shortened), [60])
    assert read(ReadPosition(100, "id"), 120, ())[0] == ReadPosition(120, "id")
    assert read(ReadPosition(100, "old", ((1, 0),)), 120, ())[0] == ReadPosition(120, "id")


def test_what_is_known_of_a_log_is_kept_behind_more_elections_than_were_asked_for():
    """Where the mirror stands so far behind, what it has passed is read, and no later."""
    known = ReadPosition(100, "id", ((1, 0), (2, 80)))
    later = tuple((n + 100, n + 160) for n in range(MOST_EPOCHS))
    assert position_at(later, 100, "id", known, 100) == known
    assert position_at(later, 120, "id", known, 100).epochs == ((1, 0), (2, 80), (-1, 100))
    assert position_at(later, 120, "id", known, 60).epochs == ((1, 0), (-1, 60)), "it was cut at 60"
    assert position_at(later, 170, "id", known, 100).epochs == later[:10]


def cut_to(scene, offset):
    scene.source().shorten(offset)


def read_in_full(scene: Scene, count: int = 4) -> Stream:
    stream = Stream(scene)
    for _ in range(count):
        stream.send(1)
    stream.close()
    scene.carry()
    scene.later()
    assert row(scene.audit(), stream).verdict is Verdict.PROVEN
    return stream


def mirror_goes_back(scene: Scene, to: int) -> None:
    scene.mirrors[0].lanes[scene.source().place].carried = to
    scene.carry()
    scene.later()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, tells_epochs=True)


def test_what_was_written_at_offsets_that_had_been_read_is_read(scene):
    first = read_in_full(scene)
    cut_to(scene, 1)
    second = Stream(scene)
    second.send(7)
    second.close()
    scene.later()
    found = row(scene.audit(), second)
    assert (found.missing, found.in_flight) == ({}, {LOST_ON_THE_WAY: ((1, 7),)}), "its mirror stands before"
    mirror_goes_back(scene, 1)
    rows = scene.audit()
    assert row(rows, second).verdict is Verdict.PROVEN
    assert row(rows, first).verdict is Verdict.PROVEN, "they were carried before the disk was lost"


def test_in_an_aggregate_too(scene):
    read_in_full(scene)
    scene.aggregate().shorten(0)
    second = Stream(scene)
    second.send(7)
    second.close()
    scene.carry()
    scene.later()
    assert row(scene.audit(), second).verdict is Verdict.PROVEN


def test_what_the_mirror_lost_of_them_is_named(scene):
    read_in_full(scene)
    cut_to(scene, 1)
    second = Stream(scene)
    for _ in range(4):
        second.send(1)
    second.close()
    scene.later()
    scene.audit()
    scene.mirrors[0].lanes[scene.source().place].carried = 1
    scene.carry(without=(2,))
    scene.later()
    assert row(scene.audit(), second).missing == {LOST_ON_THE_WAY: ((2, 2),)}


def lost_with_a_disk(scene: Scene) -> Stream:
    """Numbers 3 and 4 were never carried, and the audit had looked before they were there."""
    stream = Stream(scene)
    stream.send(2)
    stream.report()
    scene.carry()
    scene.audit()
    stream.send(2)
    stream.close()
    cut_to(scene, 0)
    scene.later()
    return stream


def written_since(scene: Scene) -> None:
    other = Stream(scene)
    other.send(1)
    other.close()
    mirror_goes_back(scene, 0)


def test_what_a_lost_disk_took_is_lost_when_no_mirror_can_bring_it_any_more(scene):
    stream = lost_with_a_disk(scene)
    found = row(scene.audit(), stream)
    assert (found.missing, found.unknown) == ({}, ((3, 4),)), "the mirror may hold it"
    written_since(scene)
    found = row(scene.audit(), stream)
    assert (found.missing, found.unknown) == ({LOST_AT_SOURCE: ((3, 4),)}, ())


def test_what_the_mirror_still_held_of_a_lost_disk_is_no_loss(scene):
    """It had fetched them and not told a position yet: to name them at once would have been a false alarm."""
    stream = lost_with_a_disk(scene)
    found = row(scene.audit(), stream)
    assert (found.missing, found.unknown) == ({}, ((3, 4),))
    scene.aggregate().append(stream.sent[2:])
    for _ in range(2):
        found = row(scene.audit(), stream)
        assert (found.verdict, found.consumed) == (Verdict.PROVEN, {"ewr": 2, "agg": 4})
        written_since(scene)


def test_but_not_where_a_part_of_the_aggregate_was_never_read(scene):
    stream = lost_with_a_disk(scene)
    written_since(scene)
    log = scene.aggregate()
    log.append([c.rec for c in scene.source().copies])  # something, that expires before the audit looks
    log.start = log.end
    found = row(scene.audit(), stream)
    assert (found.missing, found.unknown) == ({}, ((3, 4),))


def test_nor_where_retention_took_a_part_of_the_source(scene):
    stream = lost_with_a_disk(scene)
    written_since(scene)
    scene.source().start = scene.source().end
    found = row(scene.audit(), stream)
    assert (found.missing, found.unknown) == ({}, ((3, 4),))


def test_the_state_keeps_the_epochs_of_what_was_read(scene):
    read_in_full(scene)
    kept: Commit = scene.product.commit
    assert kept.offsets["ewr/flights/0"] == ReadPosition(4, str(scene.source().topic_id), ((0, 0),))
    assert kept.offsets["ewr/flights/1"].epochs == (), "nothing was read of it"
