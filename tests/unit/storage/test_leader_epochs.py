"""An epoch that a leader begins: known at once, in the file with its first batch, gone with the process if
it never had one."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from millrace.broker.storage import checkpoints, leader_epochs
from millrace.broker.storage.checkpoints import LEADER_EPOCH_CHECKPOINT
from millrace.broker.storage.log import Log

from .conftest import append

OpenLog = Callable[..., Log]


def written(log: Log) -> list[tuple[int, int]]:
    return checkpoints.read_epochs(log.directory / LEADER_EPOCH_CHECKPOINT)


def test_begun_epoch_is_known_at_once_and_written_with_its_first_batch(open_log: OpenLog) -> None:
    log = open_log()
    append(log, leader_epoch=1)
    for epoch in (2, 3):
        log.begin_epoch(epoch)
    assert log.leader_epochs.entries == [(1, 0), (3, 1)], "nothing was written in epoch 2"
    assert log.leader_epochs.end_offset_for(3, log.end_offset) == (3, 1)
    assert log.leader_epochs.end_offset_for(1, log.end_offset) == (1, 1)
    assert written(log) == [(1, 0)], "a start with many partitions would wait for every one of these files"
    append(log, leader_epoch=3)
    append(log, leader_epoch=3)
    assert log.leader_epochs.entries == written(log) == [(1, 0), (3, 1)]
    log.begin_epoch(3)
    log.begin_epoch(2)
    assert log.leader_epochs.entries == [(1, 0), (3, 1)], "an epoch that is not newer changes nothing"


def test_who_leads_no_more_forgets_what_it_began_in_vain(open_log: OpenLog) -> None:
    log = open_log()
    append(log, leader_epoch=1)
    file = (log.directory / LEADER_EPOCH_CHECKPOINT).stat().st_ino
    log.begin_epoch(2)
    log.forget_empty_epochs()
    assert log.leader_epochs.entries == written(log) == [(1, 0)]
    assert log.leader_epochs.latest_epoch == 1
    assert (log.directory / LEADER_EPOCH_CHECKPOINT).stat().st_ino == file, "there was nothing to write"


def test_empty_epoch_of_the_file_is_out_of_it_before_others_write_there(open_log: OpenLog) -> None:
    """An older epoch's batches may come to stand where it began: after a crash they would be its."""
    log = open_log()
    append(log, leader_epoch=1)
    append(log, leader_epoch=2)
    log.truncate_to(1, 1)
    log.leader_epochs.assign(3, 1)
    assert written(log) == [(1, 0), (3, 1)]
    log.begin_epoch(4)
    log.forget_empty_epochs()
    assert log.leader_epochs.entries == written(log) == [(1, 0)]


def test_log_start_that_moves_past_everything_keeps_the_begun_epoch(open_log: OpenLog) -> None:
    log = open_log()
    append(log, leader_epoch=1)
    log.begin_epoch(2)
    log.advance_start_offset(1)
    assert log.leader_epochs.entries == written(log) == [(2, 1)]
    append(log, leader_epoch=2)
    assert log.leader_epochs.entries == [(2, 1)]


def test_epochs_after_a_crash_are_those_of_the_batches(open_log: OpenLog) -> None:
    """The file may name an epoch that had no batch; another one's batches stand there by now."""
    log = open_log()
    append(log, leader_epoch=1)
    log.flush(0)
    log.begin_epoch(2)
    log.advance_start_offset(0)
    checkpoints.write_epochs(log.directory / LEADER_EPOCH_CHECKPOINT, [(1, 0), (2, 1)], sync=False)
    log.begin_epoch(3)
    append(log, leader_epoch=3)
    checkpoints.write_epochs(log.directory / LEADER_EPOCH_CHECKPOINT, [(1, 0), (2, 1)], sync=False)
    again = Log.open(log.directory, log.config, recovery_point=1, now_ms=0)
    assert again.leader_epochs.entries == written(again) == [(1, 0), (3, 1)]


def test_flush_that_catches_up_after_a_full_disk_leaves_begun_epochs_out(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the file, the one that was begun in vain would outlive its leader: after a crash an older epoch's
    batches, which came to stand where it began, would be its."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    log = open_log()
    append(log, leader_epoch=1)
    with monkeypatch.context() as disk:
        disk.setattr(leader_epochs, "write_epochs", full)
        append(log, leader_epoch=2)
    log.begin_epoch(3)
    log.flush(0)
    assert written(log) == [(1, 0), (2, 1)]
    log.forget_empty_epochs()
    append(log, leader_epoch=2)
    again = Log.open(log.directory, log.config, recovery_point=2, now_ms=0)
    assert again.leader_epochs.entries == [(1, 0), (2, 1)]
    assert again.leader_epochs.end_offset_for(2, again.end_offset) == (2, 3)
