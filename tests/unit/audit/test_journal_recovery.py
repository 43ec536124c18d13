"""What a producer that comes back makes of the journal of the one that was killed."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.audit.clients.journal import (
    BLOCK_HEADER,
    MIN_SIZE,
    Journal,
)
from millrace.audit.clients.recovery import RESERVE_COUNT, ProducerJournal, recover
from millrace.audit.clients.session import StreamSession
from millrace.audit.contract.content_digest import DIGEST_MASK
from millrace.audit.contract.events import CLOSED, CountEvent, EventLedger
from tests.unit.audit.journal_stage import IDENTITY, Producer, reopen


def test_nothing_is_told_of_streams_whose_journal_is_damaged_in_the_middle(tmp_path, caplog):
    """What follows the damage was told to nobody, and the numbers of it would be denied."""
    producer = Producer(tmp_path / "j")
    producer.acknowledge(*producer.assign(0))
    raw = producer.journal._journal
    damaged = raw._end
    for _ in range(3):
        producer.acknowledge(*producer.assign(0))
        producer.report()
    raw._map[damaged + BLOCK_HEADER.size + 2] ^= 1
    producer.journal.close()
    heir = ProducerJournal(Journal(tmp_path / "j"), 5)
    assert heir.owed == {} and "in the middle of it is damaged" in caplog.text
    heir.close()


def test_the_journal_of_a_stream_of_months_is_read(tmp_path, monkeypatch):
    """What it has settled is more than anybody is believed to have sent in one window."""
    producer = Producer(tmp_path / "j")
    for _ in range(5):
        producer.acknowledge(*producer.assign(0))
    producer.journal.settle()
    producer.journal.close()
    monkeypatch.setattr("millrace.audit.contract.sequence_set.MAX_TRUSTED_CARDINALITY", 3)
    told = "".join(recover(reopen(tmp_path / "j"), 5).values())
    assert '"acknowledged":[[1,5]]' in told


def test_unreported_acknowledgements_survive_and_pending_ones_become_ambiguous(tmp_path):
    producer = Producer(tmp_path / "j")
    for created_ms in (0, 0, 1000):
        producer.acknowledge(*producer.assign(created_ms))
    producer.journal.settle()
    _, pending = producer.assign(1000)
    producer.kill_and_restart(tmp_path / "j")
    assert producer.said("acknowledged") == {1, 2, 3}
    assert producer.said("ambiguous") == set(range(4, RESERVE_COUNT + 1)) >= {pending}
    (facts,) = producer.ledger.streams.values()
    assert (facts.state, facts.last_assigned) == (CLOSED, RESERVE_COUNT)
    assert facts.windows[0].byte_count == 20


def test_a_recovered_report_replaces_the_last_one_and_holds_all_of_it(tmp_path):
    producer = Producer(tmp_path / "j")
    producer.acknowledge(*producer.assign(0))
    producer.report()
    producer.acknowledge(*producer.assign(0))
    producer.journal.settle()
    producer.kill_and_restart(tmp_path / "j")
    assert producer.said("acknowledged") == {1, 2}


def test_a_kill_between_a_report_and_the_end_of_the_poll_takes_nothing_back(tmp_path):
    """The report tells of deliveries that the application's poll has not written down yet."""
    producer = Producer(tmp_path / "j")
    producer.acknowledge(*producer.assign(0))
    producer.report()
    producer.kill_and_restart(tmp_path / "j")
    assert producer.said("acknowledged") == {1}


def test_a_delivered_window_is_not_reported_again_unless_it_takes_pending_numbers(tmp_path):
    producer = Producer(tmp_path / "j")
    producer.acknowledge(*producer.assign(0))
    producer.acknowledge(*producer.assign(1000))
    producer.journal.settle()
    producer.report()
    owed = producer.kill_and_restart(tmp_path / "j")
    assert [key.split("/")[0] for key in owed] == ["count", "stream"]
    assert producer.said("acknowledged") == {1, 2}


def test_late_records_of_a_window_that_was_cleared_do_not_replace_its_report_by_less(tmp_path):
    producer = Producer(tmp_path / "j")
    producer.acknowledge(*producer.assign(0))
    for _ in range(RESERVE_COUNT):
        producer.acknowledge(*producer.assign(1000))
    producer.journal.settle()
    producer.report()
    late = producer.assign(0)
    producer.acknowledge(*late)
    producer.journal.settle()
    owed = producer.kill_and_restart(tmp_path / "j")
    assert f"count/{producer.stream.stream}/0" in owed
    assert producer.said("acknowledged") == producer.truth["acknowledged"]


@pytest.mark.parametrize("room", [0, 1])
def test_a_snapshot_that_a_full_half_asks_for_holds_the_window_that_pending_numbers_fall_in(
    tmp_path, monkeypatch, room
):
    """`room`: how many blocks of a new window's first record the half still takes before the kill."""
    producer = Producer(tmp_path / "j")
    producer.acknowledge(*producer.assign(0))
    producer.journal.settle()
    producer.report()
    window, _ = producer.stream.assign(1000)
    append, appended = Journal.append, []

    def full_after_room(journal, block):
        appended.append(block)
        return len(appended) != room + 1 and append(journal, block)

    monkeypatch.setattr(Journal, "append", full_after_room)
    producer.journal.reserve(producer.stream, window, RESERVE_COUNT + 1)
    monkeypatch.undo()
    assert [block["t"] for block in appended] == ["window", "limit"]
    producer.kill_and_restart(tmp_path / "j")
    assert producer.said("acknowledged") == {1}
    assert producer.said("ambiguous") == set(range(2, 2 * RESERVE_COUNT + 1))


def test_a_closed_and_delivered_stream_leaves_nothing(tmp_path):
    producer = Producer(tmp_path / "j")
    producer.acknowledge(*producer.assign(0))
    producer.journal.settle()
    producer.journal.gone(producer.stream)
    assert producer.kill_and_restart(tmp_path / "j") == {}


def test_events_owed_by_an_earlier_session_are_kept_until_they_are_delivered(tmp_path):
    producer = Producer(tmp_path / "j")
    producer.acknowledge(*producer.assign(0))
    producer.journal.close()
    second = ProducerJournal(Journal(tmp_path / "j"), 5)
    owed = dict(second.owed)
    assert len(owed) == 2
    first_key, last_key = owed
    second.carried(first_key)
    second.close()
    third = ProducerJournal(Journal(tmp_path / "j"), 9)
    assert third.owed == {last_key: owed[last_key]}
    third.close()


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_kill_at_any_moment_leaves_every_number_accounted_for(tmp_path_factory, rng):
    """Whatever was settled in the journal is said; nothing is said to be acknowledged that was not."""
    path = tmp_path_factory.mktemp("journal") / "j"
    producer, pending = Producer(path), []
    settled = {"acknowledged": set(), "failed": set()}
    for _ in range(rng.randint(0, 400)):
        action = rng.random()
        if action < 0.5:
            pending.append(producer.assign(rng.randint(0, 4000)))
        elif action < 0.8 and pending:
            producer.acknowledge(*pending.pop(rng.randrange(len(pending))))
        elif action < 0.85 and pending:
            window, sequence = pending.pop()
            fate = rng.choice(("ambiguous", "failed"))
            getattr(producer.stream, f"mark_{fate}")(window, sequence)
            producer.journal.not_acknowledged(producer.stream, window)
            producer.truth[fate].add(sequence)
        elif action < 0.97:
            producer.journal.settle()
            settled = {fate: set(producer.truth[fate]) for fate in settled}
        else:
            producer.report(delivered=rng.random() < 0.7)
    producer.kill_and_restart(path)
    (facts,) = producer.ledger.streams.values()
    assert facts.conflicts == []
    assert settled["acknowledged"] <= producer.said("acknowledged") <= producer.truth["acknowledged"]
    assert settled["failed"] <= producer.said("failed") <= producer.truth["failed"]
    everything = producer.said("acknowledged") | producer.said("ambiguous") | producer.said("failed")
    assert everything == set(range(1, facts.last_assigned + 1))
    assert facts.last_assigned >= producer.stream.last_assigned


def test_a_process_killed_by_signal_leaves_what_it_wrote(tmp_path):
    program = (
        "import os, sys\n"
        "from millrace.audit.clients.journal import Journal\n"
        "journal = Journal(sys.argv[1])\n"
        "journal.rewrite([])\n"
        "for number in range(500): journal.append({'n': number})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "j"
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert ended.returncode == -9
    assert reopen(path) == [{"n": number} for number in range(500)]


def test_a_recovered_stream_is_closed(tmp_path):
    producer = Producer(tmp_path / "j")
    producer.assign(0)
    producer.journal.close()
    journal = Journal(tmp_path / "j")
    ledger = EventLedger()
    for key, value in recover(journal.recovered, 5).items():
        ledger.add(key.encode(), value.encode())
    journal.close()
    assert ledger.untrusted == []
    assert ledger.streams["00000000000000ab"].state == CLOSED


def test_wherever_the_kill_cuts_the_digest_is_of_exactly_the_sequences_beside_it(tmp_path):
    """A copy of the file after every block that was written is what a kill at that moment leaves."""
    digests = {sequence: (sequence * 0x9E3779B97F4A7C15) & DIGEST_MASK for sequence in range(1, 400)}
    inner = Journal(tmp_path / "j", MIN_SIZE)
    states: list[list[dict]] = [[]]
    append, rewrite = inner.append, inner.rewrite

    def noting_append(block):
        taken = append(block)
        if taken:
            states.append([*states[-1], block])
        return taken

    def noting_rewrite(blocks):
        blocks = list(blocks)
        rewrite(blocks)
        states.append(blocks)

    inner.append, inner.rewrite = noting_append, noting_rewrite
    journal = ProducerJournal(inner, 0)
    stream = StreamSession(
        IDENTITY, "flights", "00000000000000ab", window_ms=1000, lease_ms=60_000, content=True
    )
    journal.opened(stream)
    for sequence in range(1, 400):
        window, given = stream.assign(sequence * 20)
        assert given == sequence
        if given > stream.reserved:
            journal.reserve(stream, window, given)
        if sequence % 7 == 0:
            # A report folds; what it took in is in the window's block before the fold's own block comes.
            assert stream.pending_count > 0
            stream.mark_ambiguous(window, given)
            journal.not_acknowledged(stream, window)
        else:
            window.acknowledge(given, 10, digests[given])
        if sequence % 3 == 0:
            journal.settle()
        if sequence % 50 == 0:
            for event in stream.report(1):
                if isinstance(event, CountEvent):
                    journal.reported(stream, event)
    compared = 0
    for blocks in states:
        ledger = EventLedger()
        for key, value in recover(blocks, 5).items():
            ledger.add(key.encode(), value.encode())
        assert ledger.untrusted == []
        for facts in ledger.streams.values():
            for report in facts.windows.values():
                assert report.digest == sum(digests[s] for s in report.acknowledged) & DIGEST_MASK
                assert report.byte_count == 10 * len(report.acknowledged)
                compared += bool(report.acknowledged)
    assert compared > 500
    journal.close()
