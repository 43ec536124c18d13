"""Whose a journal is: in use, copied, of a cloned machine, of another device, held by a child."""

import os
import shutil
import struct
import subprocess
import sys

import pytest

from millrace.audit.clients import journal as journal_module
from millrace.audit.clients.journal import (
    MIN_SIZE,
    FilePlace,
    Journal,
    JournalInUse,
    JournalUnusable,
)
from millrace.broker.protocol.checksum import crc32c
from tests.unit.audit.journal_stage import reopen

HOME = FilePlace(inode=7, birth=1, machine=0xA)
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
