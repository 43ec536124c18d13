"""A journal whose machine fails it: pages that went with the power, a disk that is full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.audit.clients import journal as journal_module
from millrace.audit.clients.journal import Journal
from millrace.audit.clients.recovery import ProducerJournal
from millrace.audit.contract.events import HEARTBEAT
from tests.unit.audit.test_journal import Producer


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
    assert journal.stale is machine_started_anew
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
            assert not journal.stale
            journal.rewrite([])
            journal.close()
        (tmp_path / "j").unlink()
