"""What another thread changes in a log between two steps of one's own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.storage import checkpoints, leader_epochs
from millrace.broker.storage.checkpoints import LEADER_EPOCH_CHECKPOINT
from millrace.broker.storage.log import Log
from millrace.broker.storage.segment import LogFile
from millrace.broker.storage.transaction_index import ENTRY_SIZE, AbortedTransaction, TransactionIndex
from tests.stored_batches import batches_of
from tests.waiting import patience

from .conftest import append, make_batch

OpenLog = Callable[..., Log]


@pytest.mark.parametrize("when", ["before the bytes are read", "after the bytes are read"])
@pytest.mark.parametrize("offset", [0, 7])
def test_read_that_a_truncation_overtakes_leaves_no_wrong_position(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch, when: str, offset: int
) -> None:
    log = open_log(index_interval_bytes=1)
    for _ in range(10):
        append(log, size=100)
    new_size = len(make_batch(size=37))
    original = LogFile.read
    fired = []

    def read(file: LogFile, position: int, size: int) -> bytes:
        data = original(file, position, size)
        if not fired:
            fired.append(True)
            log.truncate_to(5, 1)
            for _ in range(20):
                append(log, size=37, leader_epoch=1)
            if when.startswith("before"):
                data = original(file, position, size)
        return data

    log.read(max(0, offset - 1), 1)  # the position of 7 is remembered: no search reads the file
    monkeypatch.setattr(LogFile, "read", read)
    found = log.read(offset, 5000, end_offset=10)
    assert found.next_offset == 10
    batches = list(batches_of(log, offset))
    assert len(batches) == 25 - offset
    for number, batch in enumerate(batches, offset):
        assert len(batch) == (new_size if number >= 5 else len(make_batch(size=100)))
    assert len(log.read(found.next_offset, 1).data) == new_size


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda log: append(log, leader_epoch=4), [(2, 1), (4, 2)]),
        (lambda log: log.forget_empty_epochs(), [(2, 1)]),
    ],
)
def test_epochs_are_changed_one_after_the_other(
    open_log: OpenLog,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Log], None],
    expected: list[tuple[int, int]],
) -> None:
    """The housekeeping's change is being written while the loop writes in an epoch, or forgets empty ones."""
    log = open_log()
    for epoch in (1, 2):
        append(log, leader_epoch=epoch)
    log.begin_epoch(3)
    original = leader_epochs.write_epochs
    is_writing, may_go_on = threading.Event(), threading.Event()

    def write_epochs(*arguments: Any, **options: Any) -> None:
        if threading.current_thread() is housekeeping:
            is_writing.set()
            assert may_go_on.wait(patience())
        original(*arguments, **options)

    def on_loop() -> None:
        change(log)
        done.set()

    monkeypatch.setattr(leader_epochs, "write_epochs", write_epochs)
    done = threading.Event()
    housekeeping = threading.Thread(target=log.advance_start_offset, args=(1,))
    housekeeping.start()
    assert is_writing.wait(patience())
    loop = threading.Thread(target=on_loop)
    loop.start()
    assert not done.wait(0.05), "it waits for the log's lock"
    may_go_on.set()
    housekeeping.join()
    loop.join()
    assert log.leader_epochs.entries == expected
    assert checkpoints.read_epochs(log.directory / LEADER_EPOCH_CHECKPOINT) == expected


@pytest.mark.safety
def test_aborted_transaction_that_is_written_beside_a_sync_is_left_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flush comes to the index while an append is about to open it; during the next, another is made."""
    index = TransactionIndex(tmp_path / "0.txnindex")
    index.append(AbortedTransaction(1, 0, 5, 6))
    original, original_sync = os.open, os.fdatasync
    synced_sizes: list[int] = []

    def open_(*given: Any) -> int:
        monkeypatch.setattr(os, "open", original)
        index.sync()
        return original(*given)

    def fdatasync(fd: int) -> None:
        synced_sizes.append(os.fstat(fd).st_size // ENTRY_SIZE)
        original_sync(fd)
        if len(synced_sizes) == 2:
            index.append(AbortedTransaction(3, 11, 12, 13))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(os, "open", open_)
    index.append(AbortedTransaction(2, 6, 9, 10))
    assert synced_sizes == [1]
    for expected in ([1, 2], [1, 2, 3], [1, 2, 3]):
        index.sync()
        assert synced_sizes == expected
