import json
import os
import shutil
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.audit.clients import journal as journal_module
from millrace.audit.clients.journal import (
    BLOCK_HEADER,
    MIN_SIZE,
    FilePlace,
    Journal,
    JournalInUse,
    JournalUnusable,
)
from millrace.audit.clients.recovery import RESERVE_COUNT, ProducerJournal, recover
from millrace.audit.clients.session import StreamSession
from millrace.audit.clients.told_stream import ProducerIdentity
from millrace.audit.contract.content_digest import DIGEST_MASK
from millrace.audit.contract.events import CLOSED, CountEvent, EventLedger
from millrace.broker.protocol.checksum import crc32c, crc32c_reference


def reopen(path):
    journal = Journal(path)
    recovered = journal.recovered
    journal.close()
    return recovered


def test_blocks_come_back_in_order(tmp_path):
    journal = Journal(tmp_path / "j")
    assert journal.recovered == [] and not journal.append({"n": 0})
    journal.rewrite([{"n": 1}])
    assert journal.append({"n": 2})
    journal.close()
    assert reopen(tmp_path / "j") == [{"n": 1}, {"n": 2}]


def test_a_full_half_asks_for_a_snapshot_which_replaces_it(tmp_path):
    journal = Journal(tmp_path / "j", MIN_SIZE)
    journal.rewrite([])
    count = 0
    while journal.append({"n": count}):
        count += 1
    assert count > 50
    journal.rewrite([{"snapshot": count}])
    assert journal.append({"after": 1})
    journal.close()
    assert reopen(tmp_path / "j") == [{"snapshot": count}, {"after": 1}]


def test_a_large_snapshot_grows_the_file_and_survives_every_growth(tmp_path):
    journal = Journal(tmp_path / "j", MIN_SIZE)
    for size in (100, 3000, 100, 9000, 20_000, 50):
        journal.rewrite([{"text": "x" * size}])
        assert journal.append({"after": size})
        journal.close()
        journal = Journal(tmp_path / "j")
        assert journal.recovered == [{"text": "x" * size}, {"after": size}]
    journal.close()


@pytest.mark.parametrize("snapshots", [1, 2])
def test_growth_before_the_snapshot_is_written_loses_nothing(tmp_path, snapshots):
    """With one snapshot the upper half is in use, with two the lower one."""
    journal = Journal(tmp_path / "j", MIN_SIZE)
    for number in range(snapshots):
        journal.rewrite([{"snapshot": number}])
    for _ in range(3):
        journal._grow()
        journal.close()
        journal = Journal(tmp_path / "j")
        assert journal.recovered == [{"snapshot": snapshots - 1}]
    journal.rewrite([{"snapshot": "after"}])
    journal.close()
    assert reopen(tmp_path / "j") == [{"snapshot": "after"}]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2000), st.integers(1, 255))
def test_a_damaged_byte_ends_the_log_there_and_never_yields_a_wrong_block(tmp_path_factory, position, flip):
    path = tmp_path_factory.mktemp("journal") / "j"
    blocks = [{"n": number, "text": "x" * 50} for number in range(20)]
    journal = Journal(path, MIN_SIZE)
    journal.rewrite(blocks[:5])
    for block in blocks[5:]:
        journal.append(block)
    start = journal._start
    journal._map[start + 24 + position] ^= flip
    end = journal._end
    journal.close()
    journal = Journal(path)
    recovered = journal.recovered
    assert recovered == blocks[: len(recovered)]
    if recovered:  # the header is whole
        last = end - len(json.dumps(blocks[-1], separators=(",", ":")))
        is_in_the_middle = len(recovered) < len(blocks) and start + 24 + position < last - BLOCK_HEADER.size
        assert bool(journal.stale_because) is is_in_the_middle, "the last one may have been cut by a kill"
    journal.close()


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


def test_what_was_wiped_says_nothing_and_is_no_damage_of_what_comes_after_it(tmp_path):
    journal = Journal(tmp_path / "j", MIN_SIZE)
    journal.rewrite([{"n": 1, "text": "x" * 300}])
    assert journal.append({"n": 2})
    journal.wipe()
    journal.close()
    journal = Journal(tmp_path / "j")
    assert (journal.recovered, journal.stale_because) == ([], "")
    journal.rewrite([{"n": 3}])
    journal.close()
    journal = Journal(tmp_path / "j")
    assert (journal.recovered, journal.stale_because) == ([{"n": 3}], "")
    journal.close()


def test_stale_blocks_of_an_older_generation_are_not_read(tmp_path):
    journal = Journal(tmp_path / "j", MIN_SIZE)
    for generation in range(4):
        journal.rewrite([{"generation": generation}])
        for number in range(30 - 10 * generation):
            journal.append({"n": number})
    journal.close()
    assert reopen(tmp_path / "j") == [{"generation": 3}]


def test_a_journal_in_use_is_refused_in_one_line(tmp_path):
    journal = Journal(tmp_path / "j")
    with pytest.raises(JournalInUse, match="in use"):
        Journal(tmp_path / "j")
    journal.close()
    Journal(tmp_path / "j").close()


def test_a_path_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalUnusable, match="choose a writable path"):
        Journal(tmp_path / "file" / "j")


def test_a_copied_journal_is_set_aside_and_not_reported(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.rewrite([{"n": 1}])
    journal.close()
    shutil.copy(tmp_path / "j", tmp_path / "copy")
    copy = Journal(tmp_path / "copy")
    assert copy.recovered == [] and copy.set_aside is not None and copy.set_aside.exists()
    copy.rewrite([{"n": 2}])
    copy.close()
    assert reopen(tmp_path / "copy") == [{"n": 2}]
    assert reopen(tmp_path / "j") == [{"n": 1}]


def test_a_foreign_file_is_set_aside_and_not_overwritten(tmp_path):
    foreign = os.urandom(MIN_SIZE)
    (tmp_path / "j").write_bytes(foreign)
    journal = Journal(tmp_path / "j")
    assert journal.recovered == [] and "not a journal" in journal.set_aside_because
    assert journal.set_aside.read_bytes() == foreign
    journal.rewrite([{"n": 1}])
    journal.close()
    assert reopen(tmp_path / "j") == [{"n": 1}]


HOME = FilePlace(inode=7, birth=1, machine=0xA)


@pytest.mark.parametrize(
    ("place", "copied"),
    [
        (HOME, False),
        (FilePlace(8, 1, 0xA), True),  # a copy beside the original
        (FilePlace(7, 2, 0xA), True),  # by chance the same inode in another file system
        (FilePlace(7, 1, 0xD), True),  # a cloned machine
        (FilePlace(7, 0, 0), False),  # a system that tells nothing
    ],
)
def test_what_is_a_copy_of_a_journal(place, copied):
    assert HOME.is_copied_to(place) is copied


def written(path, *blocks):
    journal = Journal(path)
    journal.rewrite(blocks)
    journal.close()


def test_a_volume_that_is_attached_under_another_device_number_has_the_same_journal(tmp_path, monkeypatch):
    written(tmp_path / "j", {"n": 1})
    fstat = os.fstat

    def elsewhere(descriptor):
        status = fstat(descriptor)
        return os.stat_result((*status[:2], status.st_dev + 1, *status[3:10]))

    monkeypatch.setattr(os, "fstat", elsewhere)
    assert reopen(tmp_path / "j") == [{"n": 1}]
    assert [path.name for path in tmp_path.iterdir()] == ["j"]


def test_the_file_system_tells_a_file_from_one_that_has_its_inode_again(tmp_path, monkeypatch):
    """Where it tells; then a copy that by chance has the original's inode is still known as one."""
    written(tmp_path / "j", {"n": 1})
    shutil.copy(tmp_path / "j", tmp_path / "copy")
    inode = os.stat(tmp_path / "j").st_ino
    births = []

    def same_inode(descriptor):
        place = real(descriptor)
        births.append(place.birth)
        return FilePlace(inode, place.birth, place.machine)

    real = journal_module.place_of
    monkeypatch.setattr(journal_module, "place_of", same_inode)
    assert reopen(tmp_path / "j") == [{"n": 1}]
    copy = Journal(tmp_path / "copy")
    assert births[0] != births[1] or births == [0, 0]
    assert (copy.set_aside is None) is (births == [0, 0])
    copy.close()


def test_a_journal_of_the_release_before_is_read(tmp_path):
    written(tmp_path / "j", {"n": 1}, {"n": 2})
    content = bytearray((tmp_path / "j").read_bytes())
    start = content.index(b"MRJ3")
    header = struct.Struct("<4sIQQQQQ")
    _, _, generation, inode, _, machine, _ = header.unpack_from(content, start)
    fields = struct.pack("<QQQQQ", generation, inode, 0xFE01, machine, 0xB007)
    content[start : start + header.size] = b"MRJ2" + struct.pack("<I", crc32c(fields)) + fields
    (tmp_path / "j").write_bytes(content)
    assert reopen(tmp_path / "j") == [{"n": 1}, {"n": 2}]


def test_the_journal_of_a_cloned_machine_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_system_id", lambda path: 5)
    written(tmp_path / "j", {"n": 1})
    assert reopen(tmp_path / "j") == [{"n": 1}]
    real = journal_module.place_of

    def cloned(descriptor):
        place = real(descriptor)
        return FilePlace(place.inode, place.birth, place.machine + 1)

    monkeypatch.setattr(journal_module, "place_of", cloned)
    clone = Journal(tmp_path / "j")
    assert clone.recovered == [] and clone.set_aside is not None
    clone.close()


def is_free(path):
    try:
        Journal(path).close()
    except JournalInUse:
        return False
    return True


FORKS = """
import ctypes, os, sys
from millrace.audit.clients.journal import Journal
journal = Journal(sys.argv[1], 8192)
journal.rewrite([{"text": "x" * 9000}])  # it grows while it is locked
if ctypes.PyDLL(None).fork() == 0:  # as a library does, without a word to Python
    os.read(0, 1)
    os._exit(0)
print("forked", flush=True)
os.read(0, 1)
"""


def test_the_child_of_a_killed_owner_does_not_hold_its_lock(tmp_path):
    path = tmp_path / "j"
    command = [sys.executable, "-c", FORKS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout.readline() == "forked\n"
            with pytest.raises(JournalInUse, match="another process"):
                Journal(path)
            owner.kill()
            owner.wait()
            assert is_free(path) and reopen(path) == [{"text": "x" * 9000}]
        finally:
            owner.kill()
            owner.stdin.close()  # which ends the child


def test_a_journal_that_this_process_has_stays_locked_when_it_is_asked_for_again(tmp_path):
    """The lock of a file goes with any of its descriptors that the process closes."""
    path = tmp_path / "j"
    journal = Journal(path)
    journal.rewrite([{"text": "x" * (journal._size // 2)}])
    with pytest.raises(JournalInUse, match="this process"):
        Journal(path)
    program = "import sys; from millrace.audit.clients.journal import Journal; Journal(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert "another process has it" in done.stderr
    del journal  # dropped without `close`
    assert len(reopen(path)) == 1


def test_two_processes_with_one_journal(tmp_path):
    """The second one is told so in one line, whichever way it comes to the file."""
    journal = Journal(tmp_path / "j")
    (tmp_path / "link").symlink_to(tmp_path / "j")
    program = "import sys; from millrace.audit.clients.journal import Journal; Journal(sys.argv[1])"
    for path in (tmp_path / "j", tmp_path / "link"):
        done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
        assert done.returncode != 0 and "another process has it" in done.stderr.splitlines()[-1]
    journal.close()


def test_the_checksum_is_the_one_of_the_reference_implementation():
    assert crc32c(b"block", crc32c(b"generation")) == crc32c_reference(b"generationblock")


IDENTITY = ProducerIdentity("00000000000000cd", "AA@ewr")


class Producer:
    """A session that is followed by a journal, with the truth beside it."""

    def __init__(self, path, size=MIN_SIZE):
        self.journal = ProducerJournal(Journal(path, size), 0)
        self.stream = StreamSession(
            IDENTITY, "flights", "00000000000000ab", window_ms=1000, lease_ms=60_000, now_ms=0
        )
        self.journal.opened(self.stream)
        self.ledger = EventLedger()
        self.truth = {"acknowledged": set(), "ambiguous": set(), "failed": set()}

    def assign(self, created_ms):
        window, sequence = self.stream.assign(created_ms)
        if sequence > self.stream.reserved:
            self.journal.reserve(self.stream, window, sequence)
        return window, sequence

    def acknowledge(self, window, sequence):
        window.acknowledge(sequence, 10)
        self.truth["acknowledged"].add(sequence)

    def report(self, delivered=True):
        for event in self.stream.report(1):
            if isinstance(event, CountEvent):
                self.journal.reported(self.stream, event)
            if delivered:
                self.ledger.learn(event)
                window = self.stream.report_delivered(event)
                if window is not None:
                    self.journal.delivered(self.stream, window)

    def kill_and_restart(self, path):
        """The process dies, the file stays; what the next start reports is learned."""
        self.journal.close()
        journal = Journal(path)
        owed = recover(journal.recovered, 5)
        journal.close()
        for key, value in owed.items():
            self.ledger.add(key.encode(), value.encode())
        return owed

    def said(self, fate):
        (facts,) = self.ledger.streams.values()
        return {sequence for event in facts.windows.values() for sequence in getattr(event, fate)}


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
        IDENTITY, "flights", "00000000000000ab", window_ms=1000, lease_ms=60_000, now_ms=0, content=True
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
