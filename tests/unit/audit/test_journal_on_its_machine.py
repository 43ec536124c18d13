"""A journal whose machine fails it: pages that went with the power, a disk that is full."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from millrace.audit.clients import journal as journal_module
from millrace.audit.clients.journal import MIN_SIZE, Journal, JournalUnusable
from millrace.audit.clients.recovery import ProducerJournal
from millrace.audit.contract.events import CLOSED, HEARTBEAT, CountEvent
from tests.unit.audit.journal_stage import Producer


def lose_the_newest_pages(path: Path, image: bytes) -> None:
    """The file as the disk had it: the same file, for it has its inode."""
    with path.open("r+b") as file:
        file.write(image)


def a_beat_then_more(path: Path) -> tuple[Producer, bytes]:
    """A producer that told 200 records and then sent 3,000; and the journal as it was after the report."""
    producer = Producer(path, 1 << 20)
    for created_ms in range(200):
        producer.acknowledge(*producer.assign(created_ms))
    producer.journal.settle()
    producer.report()
    producer.report()
    image = path.read_bytes()
    for number in range(3000):
        producer.acknowledge(*producer.assign(200 + number // 10))
    producer.journal.settle()
    producer.journal.close()
    return producer, image


@pytest.mark.parametrize("machine_started_anew", [False, True])
def test_a_stream_whose_machine_lost_its_power_is_not_closed_by_what_the_disk_still_has(
    tmp_path, monkeypatch, machine_started_anew
):
    """It would say that no number above an old limit was given out, and nobody would miss those records."""
    producer, image = a_beat_then_more(tmp_path / "j")
    if machine_started_anew:
        lose_the_newest_pages(tmp_path / "j", image)
        monkeypatch.setattr(journal_module, "boot_id", lambda: 0xB007)
    journal = Journal(tmp_path / "j")
    assert bool(journal.stale_because) is machine_started_anew
    heir = ProducerJournal(journal, 5)
    told = dict(heir.owed)
    heir.close()
    for key, value in told.items():
        producer.ledger.add(key.encode(), value.encode())
    (facts,) = producer.ledger.streams.values()
    if machine_started_anew:
        assert told == {}
        assert (facts.state, set(facts.windows[0].acknowledged)) == (HEARTBEAT, set(range(1, 201)))
    else:
        assert facts.last_assigned >= producer.stream.last_assigned == 3200


def test_what_an_earlier_session_owes_is_told_after_a_start_of_the_machine_too(tmp_path, monkeypatch, caplog):
    """It was fixed before: nothing that was sent since can say more."""
    producer = Producer(tmp_path / "j")
    producer.acknowledge(*producer.assign(0))
    producer.journal.close()
    second = ProducerJournal(Journal(tmp_path / "j"), 5)
    owed = dict(second.owed)
    assert {json.loads(value)["type"] for value in owed.values()} == {"count", "stream"}
    second.close()
    monkeypatch.setattr(journal_module, "boot_id", lambda: 0xB007)
    third = ProducerJournal(Journal(tmp_path / "j"), 9)
    assert third.owed == owed and caplog.messages == []
    third.close()


def test_a_system_that_tells_no_start_of_the_machine_makes_no_journal_stale(tmp_path, monkeypatch):
    for boots in ((0, 7), (7, 0)):
        for boot in boots:
            monkeypatch.setattr(journal_module, "boot_id", lambda boot=boot: boot)
            journal = Journal(tmp_path / "j")
            assert not journal.stale_because
            journal.rewrite([])
            journal.close()
        (tmp_path / "j").unlink()


def on_the_disk(path: Path) -> int:
    return os.stat(path).st_blocks * 512


def test_a_journal_has_its_room_on_the_disk_before_it_is_written_to(tmp_path):
    """A page that finds none kills the process with SIGBUS."""
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 20)
    for name in ("new", "sparse"):
        journal = Journal(tmp_path / name, MIN_SIZE)
        assert on_the_disk(tmp_path / name) >= journal._size
        journal.rewrite([{"text": "x" * (journal._size // 2)}])
        assert on_the_disk(tmp_path / name) >= journal._size > MIN_SIZE
        journal.close()


def full(monkeypatch: pytest.MonkeyPatch, error: int = errno.ENOSPC) -> None:
    def refuse(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def test_a_full_disk_is_told_at_the_start_in_one_line(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        full(patch)
        with pytest.raises(JournalUnusable, match="No space left on device for its 8 KiB; make room, or"):
            Journal(tmp_path / "j", MIN_SIZE)
    Journal(tmp_path / "j", MIN_SIZE).close()  # nothing is left locked


def test_a_file_system_that_gives_no_room_beforehand_is_not_refused(tmp_path, monkeypatch):
    full(monkeypatch, errno.EOPNOTSUPP)
    journal = Journal(tmp_path / "j", MIN_SIZE)
    journal.rewrite([{"n": 1}])
    journal.close()


def test_a_disk_that_is_full_when_the_journal_must_grow_ends_the_journal_and_not_the_producer(
    tmp_path, monkeypatch, caplog
):
    """What it says then is no more how far the stream came: the next start says nothing."""
    producer = Producer(tmp_path / "j")
    size = producer.journal._journal._size
    full(monkeypatch)
    for number in range(100):
        placed = producer.assign(number * 1000)
        if number % 2:
            producer.acknowledge(*placed)
            producer.journal.settle()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "until the next start nothing is kept" in caplog.text
    producer.report()
    assert producer.said("acknowledged") == producer.truth["acknowledged"]
    producer.journal.close()
    assert (tmp_path / "j").stat().st_size == size
    monkeypatch.undo()
    journal = Journal(tmp_path / "j")
    assert (journal.recovered, journal.set_aside) == ([], None)
    journal.close()


def test_what_was_not_acknowledged_is_written_down_once_for_all_of_it(tmp_path, monkeypatch):
    """After an outage it comes by the thousand, and each window's block tells all of the window."""
    producer = Producer(tmp_path / "j", 1 << 20)
    placed = [producer.assign(number) for number in range(2000)]  # two windows
    written: list[str] = []
    append = Journal.append

    def noting(journal, block):
        written.append(block["t"])
        return append(journal, block)

    monkeypatch.setattr(Journal, "append", noting)
    for window, sequence in placed:
        producer.stream.mark_failed(window, sequence)
        producer.journal.not_acknowledged(producer.stream, window)
    assert written == []
    producer.journal.settle()
    producer.journal.settle()
    assert written == ["window", "window"]
    producer.kill_and_restart(tmp_path / "j")
    assert producer.said("failed") == set(range(1, 2001))


def test_a_report_does_not_tell_what_the_journal_has_not_written_down(tmp_path):
    producer = Producer(tmp_path / "j")
    window, sequence = producer.assign(0)
    producer.stream.mark_failed(window, sequence)
    producer.journal.not_acknowledged(producer.stream, window)
    producer.report()
    producer.kill_and_restart(tmp_path / "j")
    assert producer.said("failed") == {sequence}
    (facts,) = producer.ledger.streams.values()
    assert facts.conflicts == []


@pytest.mark.parametrize("snapshots", [0, 1])
def test_a_stream_does_not_end_before_its_last_sign_of_life_where_the_clock_was_set_back(tmp_path, snapshots):
    producer = Producer(tmp_path / "j")
    producer.acknowledge(*producer.assign(0))
    for event in producer.stream.report(10_000_000):
        if isinstance(event, CountEvent):
            producer.journal.reported(producer.stream, event)
        producer.ledger.learn(event)
    for _ in range(snapshots):
        producer.journal._journal.rewrite(producer.journal._snapshot())
    producer.kill_and_restart(tmp_path / "j")
    (facts,) = producer.ledger.streams.values()
    assert (facts.state, facts.conflicts) == (CLOSED, [])
