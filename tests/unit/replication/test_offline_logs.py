"""The replica manager and a log that fails alone."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.errors import KafkaStorageError
from millrace.broker.storage.log import Log
from tests.waiting import patience, until_async

from .replicated_stage import LAG_MS, Bench, batch, run, turns

MANY_FLUSHES = 10
"""More than there are threads of any kind."""


def test_leader_of_a_log_that_failed_alone_lets_go_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is in use; only the controller can find a leader whose log takes records."""

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario(bench: Bench) -> None:
        told = asyncio.Event()
        lost: list[tuple[str, int]] = []
        bench.manager.listeners.offline.append(told.set)
        bench.manager.listeners.lost.append(lambda topic, number: lost.append((topic, number)))
        await bench.lead()
        wait = bench.append(b"a")
        assert wait is not None
        log = bench.manager.leader_of("t", 0).log
        with monkeypatch.context() as patch, pytest.raises(KafkaStorageError):
            patch.setattr(os, "fdatasync", full)
            await bench.manager.on_disk(log.flush, 1)
        await told.wait()
        assert bench.manager.offline_partitions() == {"t": [0]}
        assert lost == [("t", 0)]
        assert bench.manager.leaders() == []
        with pytest.raises(KafkaStorageError):
            await wait
        with pytest.raises(KafkaStorageError):
            bench.append(b"b")
        assert not bench.manager.failed_folders
        told.clear()
        await bench.lead(epoch=1, version=1)  # it stays so, whatever the cluster decides meanwhile
        assert bench.manager.leaders() == []

    run(tmp_path, scenario)


def test_log_that_fails_before_its_partition_is_served_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could take it out of service then, and its leader would refuse every record for good."""

    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def scenario(bench: Bench) -> None:
        told = asyncio.Event()
        bench.manager.listeners.offline.append(told.set)
        create_all = bench.logs.create_all

        def then_fails(*words: Any, **named: Any) -> Any:
            found = create_all(*words, **named)
            log = found["t", 0]
            assert isinstance(log, Log)
            with monkeypatch.context() as patch, pytest.raises(KafkaStorageError):
                patch.setattr(os, "fdatasync", broken)
                log.append(batch(b"a"), leader_epoch=0, now_ms=0)
                log.flush(0)
            return found

        monkeypatch.setattr(bench.logs, "create_all", then_fails)
        await bench.lead()
        assert told.is_set()
        assert bench.manager.leaders() == [] and bench.manager.offline_partitions() == {"t": [0]}

    run(tmp_path, scenario)


def test_leader_of_a_log_that_failed_takes_nobody_out_of_the_in_sync_set_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have what it acknowledged; alone in sync it would lead with what the disk has lost."""

    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def scenario(bench: Bench) -> None:
        await bench.lead()
        bench.append(b"a")
        bench.now_ms = LAG_MS + 1
        bench.write_gate.clear()  # ZooKeeper is away
        await bench.manager.check_in_sync_sets()
        local = bench.manager.leader_of("t", 0)
        assert local.replica.pending is not None
        await turns()
        with monkeypatch.context() as patch, pytest.raises(KafkaStorageError):
            patch.setattr(os, "fdatasync", broken)
            await bench.manager.on_disk(local.log.flush, 1)
        await until_async(lambda: bench.manager.leaders() == [])
        bench.write_gate.set()
        await turns()
        assert bench.written == []

    run(tmp_path, scenario)


def test_flushes_of_a_slow_disk_hold_up_no_other_work_on_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        goes_on = threading.Event()
        log = bench.manager.leader_of("t", 0).log
        monkeypatch.setattr(log, "flush", lambda _now_ms: goes_on.wait(patience()))
        local = bench.manager.leader_of("t", 0)
        flushes = [
            asyncio.ensure_future(bench.manager._leading.flusher._flush(local)) for _ in range(MANY_FLUSHES)
        ]
        try:
            assert await asyncio.wait_for(bench.manager.on_disk(lambda: "done"), patience(10)) == "done"
        finally:
            goes_on.set()
            await asyncio.gather(*flushes)

    run(tmp_path, scenario)
