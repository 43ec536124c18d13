"""A log in a temporary folder, and batches to put in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.storage.log import AppendResult, Log
from millrace.broker.storage.log_config import LogConfig

from .compaction import NOW_MS, compacted_config


def make_batch(count: int = 1, *, timestamp_ms: int = 1000, size: int = 10, **header: Any) -> bytearray:
    """A batch of `count` records of `size` bytes, all of one time."""
    return build_batch([Record(b"k%d" % n, b"v" * size, (), timestamp_ms) for n in range(count)], **header)


def append(
    log: Log, count: int = 1, *, now_ms: int = 1000, leader_epoch: int = 0, **batch: Any
) -> AppendResult:
    """Appends a batch of `make_batch`."""
    return log.append(memoryview(make_batch(count, **batch)), leader_epoch=leader_epoch, now_ms=now_ms)


@pytest.fixture
def open_log(tmp_path: Path) -> Callable[..., Log]:
    """Opens the log `t-0`; keywords that are settings make its configuration."""

    def open_(
        *, recovery_point: int | None = None, start_offset: int = 0, now_ms: int = 1000, **settings: Any
    ) -> Log:
        return Log.open(
            tmp_path / "t-0",
            LogConfig(**settings),
            recovery_point=recovery_point,
            start_offset=start_offset,
            now_ms=now_ms,
        )

    return open_


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """An empty log of a compacted topic."""
    config = compacted_config(index_interval_bytes=1)
    return Log.open(tmp_path / "t-0", config, recovery_point=None, now_ms=NOW_MS)
